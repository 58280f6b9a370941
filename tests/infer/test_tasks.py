"""Constrained decoding through the programs: tasks, rewards in the output, tuning, bad input."""

import json
import re
import sys

import numpy as np
import pytest

import specjax as sj
from infer import code_task
from infer import formats as tasks
from infer.prompts import Prompt
from infer.run import commands as run
from infer.satisfaction import count_constraints
from infer.tune import commands as tune
from infer.tune.candidates import (
    Candidate,
    TuneSetting,
    measure_candidate,
    with_speedups,
)
from infer.tune.cdsl import choose
from infer.tune.tasks import read_task
from specjax import rewards
from specjax._util.files import locked
from specjax.text.tokenizer import Tokenizer

TASK = [
    {"prompt": "def walk(tree):", "constraints": ["=yield", "=tree"]},
    {"concepts": ["import", "return"], "references": ["x"]},
    {
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}],
        "constraints": {"lexical": ["self"], "forbidden": ["none"]},
    },
]


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TASK))
    return str(path)


@pytest.fixture(scope="module")
def pair(tiny_pair_dirs):
    return ["--target", tiny_pair_dirs[0], "--draft", tiny_pair_dirs[1]]


def call(capsys, program, *argv):
    try:
        code = program.main([str(a) for a in argv])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_the_formats_of_a_task():
    assert tasks.read_case(TASK[0]) == ("def walk(tree):", {"lexical": ["=yield", "=tree"]})
    prompt, constraints = tasks.read_case({"concept_set": "ski#mountain"})
    assert constraints == {"lexical": ["ski", "mountain"]}
    assert prompt.endswith("Words: ski, mountain\nSentence:") and prompt.count("Sentence:") == 3
    messages, _ = tasks.read_case(TASK[2])
    assert messages == [{"role": "user", "content": "hello"}]
    assert tasks.plain(messages) == "\n\nHuman: hello\n\nAssistant:"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "x"}]
    assert tasks.read_case({"conversations": turns})[0] == messages
    chosen = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"
    assert tasks.read_case({"chosen": chosen})[0] == chosen[: -len(" d")]


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"constraints": ["a"]},
        {"concepts": []},
        {"prompt": "x", "constraints": []},
        {"prompt": "x", "constraints": 3},
        {"prompt": "x", "constraints": [1]},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"chosen": "no turns"},
    ],
)
def test_lines_of_no_format(line):
    with pytest.raises(ValueError, match=r"\w"):
        tasks.read_case(line)


def test_a_task_gives_rewards_and_reports_bad_lines(pair, task, capsys):
    with open(task, "a") as file:
        file.write('{"prompt": "x"}\n')
    code, out, err = call(
        capsys,
        run,
        *pair,
        "--method",
        "cdlh-appx",
        "--set",
        "k=2",
        "--set",
        "d=2",
        "--task",
        task,
        "--max-new-tokens",
        6,
        "--json",
    )
    assert code == 3 and err.count("line 4: reward lexical") == 1
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["id"] for row in rows] == [0, 1, 2]
    for row in rows:
        (reward,) = row["rewards"]
        assert reward["name"] == "lexical" and 0 <= reward["score"] <= 1
        assert row["satisfied"] == (reward["score"] == 1)
        assert row["stats"]["draft_calls"] > 0


def test_rewards_score_every_method_and_a_failing_one_is_said_once(
    pair, task, capsys, tmp_path, monkeypatch
):
    (tmp_path / "my_rewards.py").write_text(
        "def fussy(text, prompt):\n    return 1 / (len(text) * 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    code, out, err = call(
        capsys,
        run,
        *pair,
        "--method",
        "autoregressive",
        "--reward",
        "lexical",
        "--reward",
        "my_rewards:fussy",
        "--task",
        task,
        "--max-new-tokens",
        4,
        "--json",
        "--batch-size",
        1,
    )
    assert code == 0
    assert err.count("ZeroDivisionError") == 1 and "Traceback" not in err
    for row in map(json.loads, out.splitlines()):
        assert [r["name"] for r in row["rewards"]] == ["lexical", "my_rewards:fussy"]
        assert row["rewards"][1]["score"] is None and not row["satisfied"]


BAD = {
    "no-reward": (["--method", "cdsl"], "needs a reward"),
    "unknown": (["--method", "cdlh", "--reward", "nope"], "unknown reward"),
    "d": (
        ["--method", "cdlh", "--reward", "json", "--set", "d=0"],
        "d=0: expected a whole number from 1",
    ),
    "k": (
        ["--method", "cdsl", "--reward", "json", "--set", "k=0"],
        "k=0: expected a whole number from 1",
    ),
    "a_t": (["--method", "cdsl", "--reward", "json", "--set", "a_t=1.2"], "a_t=1.2"),
    "r_t": (["--method", "cdsl", "--reward", "json", "--set", "r_t=1.2"], "between 0 and 1"),
    "accept": (["--method", "cdsl", "--reward", "json", "--set", "accept=soft"], "accept=soft"),
    "combine": (["--method", "cdlh", "--reward", "json", "--set", "combine=max"], "combine=max"),
    "words": (["--method", "cdlh", "--reward", "lexical"], "no words"),
    "empty": (["--method", "cdlh", "--reward", "lexical:a,,b"], "is empty"),
    "classifier": (["--method", "cdlh", "--reward", "classifier:/none"], "no model directory"),
    "sampled": (["--method", "cdlh", "--reward", "json", "--temperature", "1"], "is greedy"),
    "two-sources": (["--task", "a.jsonl", "--prompts", "b.jsonl"], "exclude each other"),
    "no-file": (["--task", "/none.jsonl"], "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_and_exit_2(pair, capsys, name):
    argv, says = BAD[name]
    prompt = [] if "--task" in argv else ["--prompt", "x"]
    code, out, err = call(capsys, run, *pair, *argv, *prompt)
    assert code == 2 and out == ""
    assert says in err and len(err.strip().splitlines()) == 1


def test_the_code_task_names_what_prompt_and_body_share(tmp_path, capsys):
    assert call(capsys, code_task, tmp_path, "--test", 20, "--validation", 5)[0] == 0
    modules = {}
    for name, count in (("test", 20), ("validation", 5)):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        assert len(lines) == count
        modules[name] = {line["id"].partition(":")[0] for line in lines}
        for line in lines:
            assert len(line["constraints"]) == 3
            assert all(word[1:] in line["prompt"] for word in line["constraints"])
    assert not modules["test"] & modules["validation"], "no module may be in both"
    code, _, err = call(capsys, code_task, tmp_path, "--test", 10**6)
    assert code == 2 and "ask for fewer" in err


def test_the_best_of_the_ten_fastest_is_chosen():
    rows = [{"soft_of_constraints": i / 20, "hard": 0.0, "cost": float(i)} for i in range(20)]
    assert choose(rows)["cost"] == 9
    rows[3]["soft_of_constraints"] = rows[9]["soft_of_constraints"]
    assert choose(rows)["cost"] == 3, "the faster one on ties"


def test_soft_satisfaction_is_counted_over_rows_and_over_constraints():
    """The first row satisfies both of its constraints, the second none of its four: 2 of 6."""
    parts = rewards.combine(["lexical", "regex:x"]).parts
    asked = [{"lexical": ["a"]}, {"lexical": ["a", "b", "c"]}]
    scores = np.array([[1.0, 1.0], [0.0, 0.0]])
    assert np.array_equal(count_constraints(parts, scores, asked), [[2, 0], [2, 4]])
    thirds = np.array([[0.0, 1.0], [np.float32(2) / np.float32(3), 0.0]])
    assert np.array_equal(count_constraints(parts, thirds, asked), [[1, 2], [2, 4]])


def test_speedups_are_ratios_of_sums_with_their_spread():
    """Twice as fast on every prompt gives ± 0; on half of the prompts, ± is positive."""
    plain = {"each": {"tokens": [4, 4], "seconds": [1.0, 3.0], "cost": [4, 4]}}
    even = {"each": {"tokens": [8, 8], "seconds": [1.0, 3.0], "cost": [4, 4]}}
    uneven = {"each": {"tokens": [4, 4], "seconds": [0.5, 3.0], "cost": [4, 4]}}
    plain, even, uneven = with_speedups([plain, even, uneven], plain)
    assert (plain["speedup"], plain["pm"]["speedup"]) == (1, None)
    assert (even["speedup"], even["pm"]["speedup"]) == (2, 0)
    assert uneven["speedup"] == pytest.approx(8 / 7) and uneven["pm"]["speedup"] == 0.5
    assert uneven["modelled_speedup"] == 1


def test_a_tuned_text_ends_before_a_stop_string_and_is_judged_so(pair):
    """Text after the stop string satisfies no constraint."""
    target = sj.load(pair[1])
    prompt = Prompt(0, 0, "x", [5, 6, 7], {})

    def row(stop, pattern):
        reward = rewards.combine([f"regex:{re.escape(pattern)}"])
        setting = TuneSetting(target, None, reward, [prompt], 16, 1, 0, stop, None)
        return measure_candidate(setting, Candidate("greedy", "autoregressive"), warm=False)

    (text,) = row((), "x")["texts"]
    stop = text[4:6]
    cut = row((stop,), stop)
    assert cut["texts"] == [text[: text.index(stop)]]
    whole = row((), stop)
    for key in ("soft_of_rows", "soft_of_constraints", "hard"):
        assert (cut[key], whole[key]) == (0, 1)


def test_a_tuned_task_may_use_the_chat_template(pair, task, monkeypatch):
    monkeypatch.setattr(Tokenizer, "apply_chat", lambda self, message, _=None: f"<{message}>")
    args = tune.parser().parse_args([task, "--out", "x", "--chat"])
    target = sj.load(pair[1])
    parts = rewards.combine(["lexical", "forbidden:x"]).parts
    first = read_task(task, "FILE", target, args.chat, parts)[0]
    assert target.tokenizer.decode(first.tokens) == "<def walk(tree):>"


def test_conversations_that_are_tuned_as_plain_text_are_said(pair, task, monkeypatch, capsys):
    monkeypatch.setattr(Tokenizer, "chats", property(lambda self: True))
    monkeypatch.setattr(Tokenizer, "encode_chat", lambda self, text: [5, 6])
    target = sj.load(pair[1])
    parts = rewards.combine(["lexical", "forbidden:x"]).parts
    read_task(task, "FILE", target, False, parts)
    said = "infer.tune: 1 conversations are plain text: --chat uses the model's template\n"
    assert capsys.readouterr().err == said
    read_task(task, "FILE", target, True, parts)
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_tuning_writes_its_report_and_resumes(pair, task, tmp_path, capsys):
    argv = [
        *pair,
        task,
        "--test",
        task,
        "--out",
        tmp_path / "out",
        "--a-t",
        "0.3,0.9",
        "--r-t",
        "0.3",
        "--b",
        "0",
        "--top-p",
        "0.5",
        "--stop",
        "zz",
        "--max-new-tokens",
        4,
        "--set",
        "k=2",
        "--set",
        "d=2",
    ]
    code, out, err = call(capsys, tune, *argv)
    assert code == 0, err
    assert "CDSL" in out and "wall-clock speedup" in out and "±" in out
    assert "soft, mean of rows" in out and "soft, of all constraints" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["name"] for row in report["test"]] == [
        "greedy",
        "beam",
        "nucleus, 0.5",
        "CDLH",
        "CDLH-appx",
        "CDSL",
    ]
    assert (tmp_path / "out" / "methods.png").stat().st_size > 0
    assert len(report["grid"]) == 2 and report["cdlh"]["modelled_speedup"] == 1
    grid = tmp_path / "out" / "grid.jsonl"
    grid.write_bytes(grid.read_bytes()[:-40])  # torn: one row is measured again
    before = grid.read_bytes().count(b"\n")
    code, _, err = call(capsys, tune, *argv)
    assert code == 0 and err.count("tokens/s") == 1
    assert grid.read_bytes().count(b"\n") == before + 2
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    assert again["grid"] == report["grid"]


def test_a_directory_that_another_tuning_writes_is_left_alone(pair, task, tmp_path, capsys):
    with locked(tmp_path, "--out"):
        code, _, err = call(capsys, tune, *pair, task, "--out", tmp_path)
    (line,) = err.splitlines()
    assert code == 2 and f"--out {tmp_path} is being written by process" in line
    assert not (tmp_path / "grid.jsonl").exists()


def test_a_bad_task_is_one_line(pair, tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "x"}\n')
    code, _, err = call(capsys, tune, *pair, file, "--out", tmp_path / "out")
    assert code == 2 and "line 1: reward lexical" in err and len(err.strip().splitlines()) == 1
