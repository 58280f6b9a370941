"""train.answers: what a model writes for conversations, whatever interrupts it."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import specjax as sj
from infer.run.commands import main as infer_run
from specjax._util.errors import InputError
from specjax._util.program import Place
from specjax.models import ModelConfig, init_params, save_pretrained
from support import chats
from support.training import ROOT
from train.answers import job
from train.answers.__main__ import main, mixture
from train.answers.dialogue import Written, repeats_itself
from train.answers.questions import TemperatureChoice, split_turns
from train.data.corpus import load_corpus
from train.data.reading import Intake

OFTEN = 310  # an id that the model writes often, and so becomes its end of a turn


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random model that ends a turn now and then, with a chat template."""
    home = tmp_path_factory.mktemp("target")
    tokenizer = chats.chat_tokenizer(home / "tokenizer.json")
    end = tokenizer.token_to_id("<|im_end|>")
    cfg = ModelConfig.llama(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_heads=2,
        num_layers=2,
        intermediate_size=24,
        max_position=512,
        tie_embeddings=False,
        eos_ids=(end,),
    )
    # Large weights: what it writes depends on more than the last token.
    params = init_params(cfg, jax.random.key(0))
    params = jax.tree.map(lambda x: 6 * x if x.ndim == 2 else x, params)
    swapped = jnp.array([OFTEN, end])
    params["head"] = params["head"].at[swapped].set(params["head"][swapped[::-1]])
    save_pretrained(home, cfg, params, tokenizer.to_str())
    settings = {"eos_token": "<|im_end|>", "chat_template": chats.CHATML}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    return home


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "in.jsonl"
    records = [chats.conversation(i) for i in range(9)]
    records[3] = {"prompt": "only a question"}
    records[4] = {"nothing": 1}
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def command(target, *words):
    sizes = ["--max-new-tokens", "12", "--batch-size", "4"]
    return [*map(str, words), "--target", str(target), *sizes]


def answered(target, questions, out, *words):
    assert main(command(target, questions, out, *words)) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def greedy(target, questions, tmp_path_factory):
    out = tmp_path_factory.mktemp("greedy") / "out.jsonl"
    return answered(target, questions, out), out.read_bytes()


def test_the_answers_are_those_of_infer_run(target, questions, greedy, tmp_path):
    lines, _ = greedy
    model = sj.load(target)
    prompts = []
    for line in lines:
        ids = line["input_ids"]
        first = line["loss_mask"].index(1)
        assert ids[:first] == model.tokenizer.encode_chat(line["messages"][:1])
        prompts.append({"messages": line["messages"][:1]})
        run = line["loss_mask"][first:]
        length = run.index(0) if 0 in run else len(run)
        line["first answer"] = ids[first : first + length]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    out = tmp_path / "run.jsonl"
    words = ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(out), "--chat"]
    assert infer_run([*words, "--target", str(target), "--max-new-tokens", "12"]) == 0
    theirs = {row["index"]: row["token_ids"] for row in map(json.loads, out.open())}
    for index, line in enumerate(lines):
        assert line["first answer"] == theirs[index]


def test_rows_are_what_the_model_read_and_wrote(target, greedy):
    lines, _ = greedy
    model = sj.load(target)
    finishes = [reason for line in lines for reason in line["finish_reason"]]
    assert set(finishes) <= {"eos", "length"} and "length" in finishes
    for line in lines:
        assert len(line["input_ids"]) == len(line["loss_mask"])
        # The last answer is what the model writes after the ids before it.
        mask = line["loss_mask"]
        begin = max(i for i in range(len(mask)) if mask[i] and not mask[i - 1])
        made = sj.generate(model, [line["input_ids"][:begin]], max_new_tokens=12)
        assert made.tokens[0].tolist() == line["input_ids"][begin:]
        if line["finish_reason"][-1] == "length":
            assert line["input_ids"][-1] not in model.eos_ids
        else:
            assert line["input_ids"][-1] in model.eos_ids


def test_training_reads_what_was_written(target, greedy, tmp_path):
    lines, content = greedy
    (tmp_path / "out.jsonl").write_bytes(content)
    tokenizer = sj.load(target).tokenizer
    chat = chats.chat_format(Tokenizer.from_str(tokenizer.to_json()), chats.CHATML)
    documents = load_corpus([], [str(tmp_path / "out.jsonl")], Intake(chats=chat))
    read = {(tuple(d.ids.tolist()), tuple(d.mask.tolist())) for d in documents}
    wrote = {(tuple(x["input_ids"]), tuple(map(bool, x["loss_mask"]))) for x in lines}
    assert read == wrote


def test_two_processes_write_the_file_of_one(target, questions, greedy, tmp_path, capsys):
    for index in (1, 0):
        words = ("--distributed", f"localhost:1,2,{index}")
        assert main(command(target, questions, tmp_path / "out.jsonl", *words)) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == greedy[1]
    out = capsys.readouterr()
    assert "this process has done its part" in out.err
    assert "left out, no conversation: 1 (such as in.jsonl#5)" in out.err
    assert "next: python -m train.head configs/chat_head.toml" in out.out


def test_a_drafter_changes_nothing(target, questions, greedy, tmp_path):
    words = ("--method", "lookup", "--set", "gamma=3")
    answered(target, questions, tmp_path / "out.jsonl", *words)
    assert (tmp_path / "out.jsonl").read_bytes() == greedy[1]


def test_an_interrupted_job_goes_on(target, questions, tmp_path, monkeypatch):
    """It ends after each answer, by an exception in place of a kill, and is started again."""
    words = ("--temperature", "0=1,1=1")
    whole = tmp_path / "whole.jsonl"
    answered(target, questions, whole, *words)
    original = job.AnswerJournal.add
    calls = [0]

    def interrupted(self, *arguments):
        original(self, *arguments)
        calls[0] += 1
        if calls[0] % 4 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(job.AnswerJournal, "add", interrupted)
    broken = tmp_path / "broken.jsonl"
    runs = 0
    while main(command(target, questions, broken, *words)):
        runs += 1
        part = next(tmp_path.glob("broken.jsonl.part*"))
        part.write_bytes(part.read_bytes() + b'{"index": 3, "tok')  # a line that was cut off
    assert runs >= 2
    assert broken.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.part*"))
    temperatures = {json.loads(line)["temperature"] for line in whole.open()}
    assert temperatures == {0.0, 1.0}


def test_other_settings_do_not_go_on(target, questions, tmp_path, monkeypatch, capsys):
    def run(self):
        """One answer of a conversation that goes on."""
        self.journal.add(0, Written([3], "stop"))
        return 1

    monkeypatch.setattr(job.AnswerJob, "run", run)
    out = tmp_path / "out.jsonl"
    assert main(command(target, questions, out)) == 0
    assert main(command(target, questions, out, "--seed", "1")) == 2
    assert "was written with seed=0, now it is 1" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["questions", "target", "openings"])
def test_other_content_of_a_file_does_not_go_on(
    target, questions, tmp_path, monkeypatch, capsys, changed
):
    """The names of the files are the same."""

    def run(self):
        """One answer of a conversation that goes on."""
        self.journal.add(0, Written([3], "stop"))
        return 1

    monkeypatch.setattr(job.AnswerJob, "run", run)
    model, asked, openings = tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "openings.txt"
    shutil.copytree(target, model)
    shutil.copy(questions, asked)
    openings.write_text("why\n")
    words = [asked, tmp_path / "out.jsonl"]
    if changed == "openings":
        words = ["--own", "3", "--openings", openings, tmp_path / "out.jsonl"]
    assert main(command(model, *words)) == 0
    assert main(command(model, *words)) == 0, "the same files"
    before = part_of(tmp_path / "out.jsonl").read_bytes()
    if changed == "target":
        weights = load_file(model / "model.safetensors")
        name = min(weights)
        save_file(weights | {name: weights[name] + 1}, model / "model.safetensors")
    else:
        file = asked if changed == "questions" else openings
        file.write_text(file.read_text().replace("w", "W"))
    assert main(command(model, *words)) == 2
    name = "target" if changed == "target" else "questions"
    assert f"was written with {name}='" in capsys.readouterr().err
    assert part_of(tmp_path / "out.jsonl").read_bytes() == before


def test_the_model_writes_the_questions_itself(target, tmp_path, capsys):
    openings = tmp_path / "openings.txt"
    openings.write_text("why\n\nhow does\n")
    out = tmp_path / "runs" / "own.jsonl"  # the folder is made
    words = ("--own", "12", "--openings", openings, "--seed", "3")
    assert main(command(target, out, *words)) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines and len(lines) <= 12
    for line in lines:
        asked, given = line["messages"]
        assert asked["role"] == "user" and asked["content"].startswith(("why", "how does"))
        assert given["role"] == "assistant"
    assert len({line["messages"][0]["content"] for line in lines}) > len(lines) // 2


@pytest.mark.slow
def test_killed_jobs_write_the_same_bytes(target, questions, greedy, tmp_path):
    out = tmp_path / "out.jsonl"
    child = [sys.executable, "-m", "train.answers", *command(target, questions, out)]
    kills = 0
    for wanted in (1, 2, 4):  # lines of the part, after which it is killed
        process = subprocess.Popen(child, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            parts = list(tmp_path.glob("out.jsonl.part*"))
            if parts and parts[0].read_bytes().count(b"\n") > wanted:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
    assert kills
    if not out.exists():
        assert subprocess.run(child, cwd=ROOT, env=os.environ).returncode == 0
    assert out.read_bytes() == greedy[1]


def test_repeats():
    assert repeats_itself([7] * 40)
    assert repeats_itself([1, 2, 3, *[4, 5, 6] * 12])
    assert not repeats_itself(list(range(40)))
    assert not repeats_itself([1, 2] * 4)


def test_mixtures():
    assert mixture("0.7") == {0.7: 1.0}
    shares = TemperatureChoice(mixture("0=3,1=1"), seed=0)
    drawn = [shares.temperature(i) for i in range(2000)]
    assert abs(drawn.count(0.0) / 2000 - 0.75) < 0.04


def test_given_answers_are_dropped_and_tool_calls_stay():
    turns = split_turns(chats.conversation(2)["messages"])
    assert [len(turn) for turn in turns] == [1, 1, 1]
    (turn,) = split_turns(chats_with_tools())
    assert [message["role"] for message in turn] == ["user", "assistant", "tool"]


def chats_with_tools():
    call = {"function": {"name": "warm", "arguments": {}}}
    return [
        {"role": "user", "content": "how warm is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "21 degrees"},
    ]


# --- files of others -------------------------------------------------------------------------

ALONE = Place("", 1, 0)
LINE = {"messages": [], "input_ids": [1]}


def part_of(out):
    return out.with_name(f"{out.name}.part-0-of-1")


@pytest.fixture
def journal(tmp_path):
    """The journal of a job that has written one of its two conversations."""
    made = job.AnswerJournal(tmp_path / "out.jsonl", {}, ALONE)
    made.add(0, Written([1], "eos"))
    made.finish(0, [LINE], {"answers": 1})
    return made


@pytest.mark.parametrize(
    "content",
    [
        "no line end",
        '{"prompt": "a"}',
        '{"settings": {}}\nno line end',
        '{"settings": {}}\n[1, 2]\n',
        '{"index": 1, "tokens": []}\n{"prompt": "a"}',
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_file_that_is_no_part_is_left_alone(tmp_path, content, count):
    """Of this process, whose part loses a last line without its end, and of another."""
    out = tmp_path / "out.jsonl"
    part_of(out).write_text(content)
    with pytest.raises(InputError, match="is no part of this program"):
        job.AnswerJournal(out, {}, Place("localhost:1", count, 0))
    assert part_of(out).read_text() == content


def test_any_beginning_of_a_line_is_cut_off(journal, tmp_path):
    part = part_of(tmp_path / "out.jsonl")
    whole = part.read_bytes()
    for size in range(len(whole)):
        part.write_bytes(whole[:size])
        job.AnswerJournal(tmp_path / "out.jsonl", {}, ALONE)
        assert part.read_bytes() == whole[: whole.rfind(b"\n", 0, size) + 1]


@pytest.mark.parametrize("content", ["", "mine\n", "no line end"])
def test_an_output_beside_answers_of_another_is_left_alone(journal, tmp_path, content):
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    kept = part_of(out).read_bytes()
    with pytest.raises(InputError, match=r"out\.jsonl is there, .* move it and start again"):
        job.AnswerJournal(out, {}, ALONE)
    with pytest.raises(InputError, match=r"out\.jsonl is there, .* move it and start again"):
        journal.join(1)  # it was made during the run
    assert (out.read_text(), part_of(out).read_bytes()) == (content, kept)


@pytest.mark.parametrize("others", [0, 1])
def test_an_output_whose_parts_were_not_removed_is_complete(journal, tmp_path, others):
    """A process was killed after it had joined the parts, or had removed another's as well."""
    out = tmp_path / "out.jsonl"
    lines = [{"messages": [str(i)]} for i in range(others)]
    out.write_text("".join(json.dumps(line) + "\n" for line in [*lines, LINE, *lines]))
    before = out.read_bytes()
    with pytest.raises(InputError, match="exists already and is complete"):
        job.AnswerJournal(out, {}, ALONE)
    assert not part_of(out).exists() and out.read_bytes() == before


@pytest.mark.parametrize("moment", ["before another answer", "at the end"])
@pytest.mark.parametrize("change", ["deleted", "cut", "appended", "replaced"])
def test_a_part_that_somebody_changes_meanwhile_ends_the_job(journal, tmp_path, moment, change):
    out = tmp_path / "out.jsonl"
    part = part_of(out)
    content = {
        "cut": b"",
        "appended": part.read_bytes() + b"a note\n",
        "replaced": part.read_bytes(),
    }
    part.rename(tmp_path / "moved") if change != "cut" else None
    if change != "deleted":
        part.write_bytes(content[change])
    goes_on = {
        "before another answer": lambda: journal.add(1, Written([2], "eos")),
        "at the end": lambda: journal.join(2),
    }
    with pytest.raises(InputError, match="was changed while this job wrote it"):
        goes_on[moment]()
    assert not out.exists() and part.exists() == (change != "deleted")


def test_a_part_that_another_process_has_joined_is_not_missed(tmp_path):
    out = tmp_path / "out.jsonl"
    first, second = (job.AnswerJournal(out, {}, Place("localhost:1", 2, i)) for i in range(2))
    for index, one in enumerate((first, second)):
        one.finish(index, [LINE], {"answers": 1})
    assert first.join(2) == {"answers": 2}
    assert second.join(2) is None
    assert len(out.read_text().splitlines()) == 2


def test_turns_of_a_conversation_keep_their_order_over_parts(tmp_path):
    """Two processes wrote the first turn, and one alone, whose part comes first, the second."""
    out = tmp_path / "out.jsonl"
    first, second = Written([1], "eos"), Written([2], "eos")
    job.AnswerJournal(out, {}, Place("localhost:1", 2, 1)).add(5, first)
    later = job.AnswerJournal(out, {}, Place("localhost:1", 1, 0))
    assert later.answers == {5: [first]}
    later.add(5, second)
    assert job.AnswerJournal(out, {}, Place("localhost:1", 1, 0)).answers == {5: [first, second]}
