"""Files of infer.run: what a result file depends on, files of others, and forms of prompts."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import infer.run.output as output
from infer.digests import reward_digests
from infer.formats import json_objects
from infer.run import commands as program
from infer.run.job import make_job
from specjax._util import appending
from specjax._util.errors import OptionError
from specjax._util.program import Place
from specjax.models import load_pretrained, save_pretrained
from specjax.rewards import combine
from specjax.rewards.classifier import Classifier
from support.running import run_main
from support.training import ROOT

PROMPTS = ["def f(x):", "class A:", "import json"]


def run(capsys, *argv):
    return run_main(program.main, capsys, *argv)


@pytest.fixture(scope="module")
def pair(tiny_pair_dirs):
    target, draft = tiny_pair_dirs
    return ["--target", target, "--draft", draft, "--max-new-tokens", "8", "--batch-size", "2"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def one_line(err):
    (line,) = err.splitlines()
    return line


# --- what rows depend on ---------------------------------------------------------------------


def test_a_file_of_other_prompts_is_not_resumed(pair, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run(capsys, *pair, "--prompts", prompts, "--out", out)[0] == 0
    before = out.read_bytes()
    prompts.write_text(prompts.read_text().replace("class A", "class B"))
    code, shown, err = run(capsys, *pair, "--prompts", prompts, "--out", out)
    assert (code, shown, out.read_bytes()) == (2, "", before)
    assert "its row of prompt 1 was written for another prompt: 'class A:'" in one_line(err)
    prompts.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")
    code, _, err = run(capsys, *pair, "--prompts", prompts, "--out", out)
    assert code == 2 and "has a row of prompt" in one_line(err) and out.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--dtype", "bfloat16"], "was written with dtype='float32', this job has 'bfloat16'"),
        (["--logprobs"], "was written with logprobs=False, this job has True"),
        (["--stop", "x"], "was written with stop=[], this job has ['x']"),
    ],
)
def test_a_file_of_another_dtype_or_form_is_not_resumed(
    pair, prompts, tmp_path, capsys, more, says
):
    out = tmp_path / "out.jsonl"
    assert run(capsys, *pair, "--prompts", prompts, "--out", out)[0] == 0
    code, _, err = run(capsys, *pair, "--prompts", prompts, "--out", out, *more)
    assert code == 2 and says in one_line(err)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--quantize", "int8"], "was written with quantize='int8', this job has none"),
        (["--cache-dtype", "int8"], "was written with cache_dtype='int8', this job has none"),
        (["--reward", "python"], "was written with reward=['python'], this job has none"),
    ],
)
def test_a_file_of_settings_that_are_left_out_now_is_not_resumed(
    pair, prompts, tmp_path, capsys, more, says
):
    out = tmp_path / "out.jsonl"
    assert run(capsys, *pair, "--prompts", prompts, "--out", out, *more)[0] == 0
    code, _, err = run(capsys, *pair, "--prompts", prompts, "--out", out)
    assert code == 2 and says in one_line(err)


def test_rows_of_bfloat16_are_resumed_on_as_many_devices_of_a_model(
    pair, prompts, tmp_path, capsys
):
    """Partial sums are rounded on each device; in float32 the tokens are the same."""
    for dtype, expected in (("bfloat16", 2), ("float32", 0)):
        out = tmp_path / f"{dtype}.jsonl"
        job = [*pair, "--prompts", prompts, "--dtype", dtype, "--out", out]
        assert run(capsys, *job)[0] == 0
        rows = out.read_text()
        assert rows.count('"model_devices": 1') == (len(PROMPTS) if expected else 0)
        out.write_text(rows.replace('"model_devices": 1', '"model_devices": 2'))
        code, _, err = run(capsys, *job)
        assert code == expected
        if expected:
            assert "was written with model_devices=2, this job has 1" in one_line(err)


def test_a_file_of_other_weights_at_the_same_path_is_not_resumed(
    tiny_pair_dirs, prompts, tmp_path, capsys
):
    home, out = tmp_path / "model", tmp_path / "out.jsonl"
    cfg, params = load_pretrained(tiny_pair_dirs[0])
    tokenizer = Path(tiny_pair_dirs[0], "tokenizer.json").read_text()
    save_pretrained(home, cfg, params, tokenizer)
    job = ["--target", home, "--max-new-tokens", "4", "--prompts", prompts, "--out", out]
    assert run(capsys, *job)[0] == 0
    assert run(capsys, *job)[0] == 0, "the same files"
    other = params | {"norm": {"weight": params["norm"]["weight"] * 1.01}}
    save_pretrained(home, cfg, other, tokenizer)
    code, _, err = run(capsys, *job)
    assert code == 2 and "was written with another target than the files have now" in one_line(err)


def test_rows_of_other_code_of_a_reward_are_not_resumed(
    pair, prompts, tmp_path, capsys, monkeypatch
):
    """A function goes by its name, and its module may have changed."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_reward", raising=False)
    module = tmp_path / "own_reward.py"
    module.write_text("def one(text):\n    return 1.0\n")
    out = tmp_path / "out.jsonl"
    job = [*pair, "--prompts", prompts, "--reward", "own_reward:one", "--out", out]
    assert run(capsys, *job)[0] == 0
    assert run(capsys, *job)[0] == 0, "the same code"
    before = out.read_bytes()
    module.write_text("def one(text):\n    return 0.0\n")
    code, _, err = run(capsys, *job)
    assert code == 2 and out.read_bytes() == before
    assert "was written with another reward than the files have now" in one_line(err)


def test_the_digest_of_rewards_is_of_code_and_of_weights(tmp_path, monkeypatch):
    """A reward of words, lengths or patterns is what its name says."""
    assert reward_digests(None) == reward_digests(combine(["python", "length:3"])) == {}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    monkeypatch.setattr(Classifier, "__init__", lambda self, directory: None)
    classifier = Classifier("")
    classifier.directory = tmp_path
    before = reward_digests(combine([classifier]))
    assert before.keys() == {"reward_digest"}
    assert before != reward_digests(combine([classifier, max]))
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert before != reward_digests(combine([classifier]))


def test_rows_below_float32_are_resumed_with_the_same_width_of_passes(pair, prompts, tmp_path):
    """Whether it was given or is the device's own. In float32 the tokens do not depend on it."""
    out = tmp_path / "out.jsonl"

    def settings(*more):
        argv = [*pair, "--prompts", str(prompts), "--out", str(out), *more]
        return make_job(program.arguments(argv)).settings

    narrow = settings("--dtype", "bfloat16", "--pass-width", "8")
    out.write_text(json.dumps({"index": 0, "sample": 0, output.PROMPT_DIGEST: "a"} | narrow) + "\n")
    assert output.Output(str(out), narrow, {0: "a"}).done == {(0, 0)}
    for more, says in (([], "this job has 1"), (["--pass-width", "4"], "this job has 4")):
        with pytest.raises(OptionError, match=f"was written with pass_width=8, {says}"):
            output.Output(str(out), settings("--dtype", "bfloat16", *more), {0: "a"})
    assert settings("--dtype", "bfloat16", "--pass-width", "1") == settings("--dtype", "bfloat16")
    assert settings("--pass-width", "8") == settings()


def test_rows_that_do_not_say_what_they_depend_on_are_refused(pair, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run(capsys, *pair, "--prompts", prompts, "--out", out)[0] == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        del row["target_digest"]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, *pair, "--prompts", prompts, "--out", out)
    assert code == 2 and "its rows do not say their target_digest" in one_line(err)


# --- files of others -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "def f(x):"}',
        '{"id": "a", "prompt": "def f(x):"}',
        '{"id": "a", "promp',
        "[model]\nhidden_size = 32",
        "no line end",
        "[1, 2]",
    ],
)
def test_a_file_without_a_final_line_end_is_left_alone(pair, prompts, tmp_path, capsys, content):
    out = tmp_path / "mine.txt"
    out.write_text(content)
    code, shown, err = run(capsys, *pair, "--prompts", prompts, "--out", out)
    assert (code, shown, out.read_text()) == (2, "", content)
    assert "is no result of this program; choose another file" in one_line(err)


def test_a_part_of_a_split_job_leaves_a_foreign_file_alone(tmp_path):
    """The processes write parts beside the file, and the last one would replace it."""
    out = tmp_path / "mine.txt"
    out.write_text("no line end")
    with pytest.raises(OptionError, match="is no result of this program"):
        output.Output(str(out), {}, {}, Place("localhost:1", count=2, index=1))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert out.read_text() == "no line end"


def test_a_foreign_part_of_a_split_job_is_left_alone(tmp_path):
    """Parts are removed when they are joined."""
    part = tmp_path / "out.jsonl.part-0-of-2"
    part.write_text("no line end")
    with pytest.raises(OptionError, match="is no result of this program"):
        output.Output(str(tmp_path / "out.jsonl"), {}, {}, Place("localhost:1", 2, 1))
    assert part.read_text() == "no line end"


ROW = {"id": "a", "index": 0, "sample": 0, output.PROMPT_DIGEST: "a", "token_ids": []}


@pytest.fixture
def split_job(tmp_path):
    """A process of a split job that has written its only row, and the file of the job."""
    out = tmp_path / "out.jsonl"
    own = output.Output(str(out), {}, {0: "a"}, Place("localhost:1", 2, 1))
    own.append(ROW)
    return own, out


def test_a_file_that_is_made_meanwhile_is_not_replaced(split_job):
    own, out = split_job
    out.write_text("no line end")
    with pytest.raises(OptionError, match="is no result of this program"):
        own.join({(0, 0)})
    assert out.read_text() == "no line end"


def test_a_part_that_another_process_has_joined_is_not_missed(split_job):
    own, out = split_job
    other = output.Output(str(out), {}, {0: "a"}, Place("localhost:1", 2, 0))
    assert other.join({(0, 0)}) == 0 and not list(out.parent.glob("*.part*"))
    assert own.join({(0, 0)}) == 0


def test_a_part_that_somebody_deletes_is_missed(split_job):
    own, out = split_job
    out.with_name("out.jsonl.part-1-of-2").unlink()
    with pytest.raises(OptionError, match="was changed while this job wrote it"):
        own.join({(0, 0)})


def test_any_beginning_of_a_row_is_cut_off(pair, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run(capsys, *pair, "--prompts", prompts, "--out", out)[0] == 0
    row = out.read_bytes().splitlines()[-1]
    assert all(output._may_be_row(row[:size]) for size in range(1, len(row) + 1))
    named = b'{"id": "a\\"b", "index": 1'
    assert all(output._may_be_row(named[:size]) for size in range(1, len(named) + 1))


def deleted(out):
    out.unlink()


def replaced(out):
    out.rename(out.with_name("moved"))
    out.write_text("")


def cut(out):
    out.write_bytes(b"")


def appended(out):
    with out.open("a") as file:
        file.write("a note\n")


def directory(out):
    out.unlink()
    out.mkdir()


@pytest.mark.parametrize("change", [deleted, replaced, cut, appended, directory])
def test_a_file_that_somebody_changes_meanwhile_ends_the_job(
    pair, prompts, tmp_path, capsys, monkeypatch, change
):
    out = tmp_path / "out.jsonl"
    append = output.Output.append

    def append_and_change(self, entry):
        append(self, entry)
        if entry["index"] == last:
            change(out)

    monkeypatch.setattr(output.Output, "append", append_and_change)
    for last in (0, 2):  # before other rows, and after the last one
        out = tmp_path / f"{last}.jsonl"
        job = [*pair, "--batch-size", "1", "--prompts", prompts, "--out", out]
        code, _, err = run(capsys, *job)
        assert code == 2 and f"--out {out}: " in one_line(err), last


def test_a_full_disk_keeps_whole_rows_and_says_so(pair, prompts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.jsonl"
    write = appending.append_line

    def fails_after_one(path, line):
        if out.stat().st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, line)

    monkeypatch.setattr(appending, "append_line", fails_after_one)
    code, _, err = run(capsys, *pair, "--prompts", prompts, "--out", out)
    assert code == 2 and "cannot be written (No space left on device); its rows stay" in err
    monkeypatch.undo()
    assert run(capsys, *pair, "--prompts", prompts, "--out", out)[0] == 0
    assert len(out.read_bytes().splitlines()) == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirect", "code", "says"),
    [
        (">/dev/full", 1, "No space left on device"),
        (">&-", 2, "standard output is closed"),
    ],
)
def test_standard_output_that_takes_nothing_is_one_line(pair, prompts, redirect, code, says):
    words = [sys.executable, "-m", "infer.run", *map(str, pair), "--prompts", str(prompts)]
    command = 'exec "$@" --json ' + redirect
    done = subprocess.run(
        ["bash", "-c", command, "bash", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == code and says in one_line(done.stderr)


# --- forms of prompts ------------------------------------------------------------------------


def texts(capsys, pair, path, *more):
    code, shown, err = run(capsys, *pair, "--prompts", path, "--json", *more)
    return code, [json.loads(line) for line in shown.splitlines()], err


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_an_array_and_a_mark_of_order_are_read(pair, tmp_path, capsys, indent, start):
    path = tmp_path / "in.json"
    entries = [{"prompt": text} for text in PROMPTS]
    path.write_text(start + json.dumps(entries, indent=indent))
    code, rows, _ = texts(capsys, pair, path)
    assert code == 0 and [row["prompt"] for row in rows] == PROMPTS
    assert [row["index"] for row in rows] == [0, 1, 2]


def test_batches_of_openai_conversations_and_parts_are_read(pair, tmp_path, capsys):
    parts = [{"type": "text", "text": "class "}, {"type": "text", "text": "A:"}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 9}
    batch = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    plain = {"custom_id": "r2", "url": "/v1/completions", "body": {"prompt": "x = "}}
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, [batch, plain, {"conversations": turns}])))
    code, rows, _ = texts(capsys, pair, path)
    assert code == 0 and [row["id"] for row in rows] == ["r1", "r2", 2]
    assert "class A:" in rows[0]["prompt"] and rows[1]["prompt"] == "x = "
    assert "Hello" in rows[2]["prompt"] and "Hi" not in rows[2]["prompt"]


def test_conversations_without_the_template_are_said(pair, tmp_path, capsys, tiny_pair_dirs):
    home = tmp_path / "model"
    cfg, params = load_pretrained(tiny_pair_dirs[0])
    save_pretrained(home, cfg, params, Path(tiny_pair_dirs[0], "tokenizer.json").read_text())
    (home / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "def f"}]}))
    job = ["--target", home, "--max-new-tokens", "2"]
    _, rows, err = texts(capsys, job, path)
    assert "1 conversations are plain text: --chat uses the model's template" in err
    _, chat_rows, err = texts(capsys, job, path, "--chat")
    assert "plain text" not in err and chat_rows[0]["prompt_tokens"] < rows[0]["prompt_tokens"]


def test_a_file_of_bad_lines_ends_with_their_code(pair, tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": 5}\nnot json\n')
    code, rows, err = texts(capsys, pair, path)
    assert code == 3 and rows == []
    *bad, last = err.splitlines()
    assert len(bad) == 2 and "has no prompt that can be decoded" in last


def test_lines_are_numbered_as_they_stand():
    assert [index for index, _ in json_objects(b'{"a": 1}\n\n[2]\n{"b": 3}\n')] == [0, 2, 3]


# --- counters --------------------------------------------------------------------------------


def test_accepted_tokens_that_are_cut_off_are_not_output(tiny_pair_dirs, capsys):
    """The target drafts for itself: of ten accepted tokens a budget of five keeps five."""
    target = tiny_pair_dirs[0]
    job = ["--target", target, "--draft", target, "--set", "gamma=10", "--max-new-tokens", "5"]
    _, shown, _ = run(capsys, *job, "--prompt", "def f(x):", "--json")
    stats = json.loads(shown)["stats"]
    assert (stats["accepted"], stats["accepted_emitted"], stats["emitted"]) == (10, 5, 5)
