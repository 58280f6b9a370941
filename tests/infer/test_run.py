"""infer.run: the command line's contract."""

import dataclasses
import gzip
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from rich.console import Console
from rich.text import Text
from safetensors.numpy import load_file, save_file

import specjax as sj
from infer.loading import use_compilation_cache
from infer.prompts import PromptEncoder, read_prompts
from infer.run import beside_plain, demo, job
from infer.run import commands as program
from infer.run.beside_plain import Comparison
from infer.run.output import Output
from infer.run.screen import DRAFTED, WRITTEN, Screen, printable
from specjax import lm
from specjax._util.errors import OptionError, SpecjaxError
from specjax._util.files import locked
from specjax._util.program import Place
from specjax.core.types import FROM_DRAFT, FROM_TARGET
from support.pace import slowdown
from support.running import run_main

PROMPTS = ["def fib(n):", "class Tree:\n", "import os", "for i in range(", "x = [", "return"]
# The random models have peaked distributions: at a lower temperature two samples may be equal.
SAMPLES = ["--json", "--logprobs", "--temperature", "3", "--num-samples", "2", "--set", "gamma=2"]


def run(capsys, *argv):
    return run_main(program.main, capsys, *argv)


@pytest.fixture(scope="module")
def pair(tiny_pair_dirs):
    target, draft = tiny_pair_dirs
    return ["--target", target, "--draft", draft, "--max-new-tokens", "12", "--batch-size", "2"]


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": p, "id": f"p{i}"}) + "\n" for i, p in enumerate(PROMPTS))
    )
    return path


def lines(path):
    # Bytes: text would also be split at U+2028 and the like.
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def answers(path):
    """The fields of a row that must not depend on the batch, kills or resumption."""
    return {
        (r["id"], r["sample"]): (r["text"], r["token_ids"], r["finish_reason"]) for r in lines(path)
    }


def test_json_has_the_contract_fields_and_nothing_else_is_printed(pair, capsys):
    code, out, _ = run(capsys, *pair, "--prompt", "def f(x):", *SAMPLES)
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["sample"] for row in rows] == [0, 1]
    assert rows[0]["token_ids"] != rows[1]["token_ids"]
    for row in rows:
        assert {
            "id",
            "method",
            "prompt",
            "text",
            "token_ids",
            "prompt_tokens",
            "new_tokens",
            "finish_reason",
            "stats",
            "logprobs",
            "perplexity",
        } <= set(row)
        assert row["method"] == "speculative" and row["options"]["gamma"] == 2
        assert row["stats"]["drafted"] == 2 * row["stats"]["rounds"]
        nats = -sum(row["logprobs"]) / len(row["logprobs"])
        assert row["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
        assert len(row["logprobs"]) == len(row["token_ids"]) == row["new_tokens"] == 12
        assert {
            "target_calls",
            "draft_calls",
            "rounds",
            "drafted",
            "tested",
            "accepted",
            "emitted",
            "acceptance_rate",
            "block_efficiency",
            "tokens_per_second",
            "time_to_first_token_s",
            "time_per_output_token_s",
        } <= set(row["stats"])


def test_rates_without_a_draft_are_null(pair, capsys):
    _, out, _ = run(capsys, *pair, "--prompt", "x", "--json", "--method", "autoregressive")
    stats = json.loads(out)["stats"]
    assert stats["acceptance_rate"] is stats["accept_rate_per_draft"] is None
    assert stats["block_efficiency"] == 1.0


def test_the_seed_fixes_what_is_drawn(pair, capsys):
    def tokens(seed):
        _, out, _ = run(capsys, *pair, "--prompt", "x", *SAMPLES, "--seed", seed)
        return [json.loads(line)["token_ids"] for line in out.splitlines()]

    assert tokens(4) == tokens(4)
    assert tokens(4) != tokens(5)


def test_plain_output_is_the_text_alone(pair, capsys):
    _, out, _ = run(capsys, *pair, "--prompt", "def f(x):", "--json")
    _, plain, _ = run(capsys, *pair, "--prompt", "def f(x):")
    assert plain == printable(json.loads(out)["text"]) + "\n"


def test_methods_and_composition_agree_greedily(pair, capsys):
    def tokens(*more):
        code, out, err = run(capsys, *pair, "--prompt", "def f(x):", "--json", *more)
        assert code == 0, err
        return json.loads(out)["token_ids"]

    plain = tokens("--method", "autoregressive")
    assert tokens("--method", "speculative") == plain
    assert tokens("--drafter", "chain", "--rule", "speculative") == plain


def test_stop_string_ends_the_text_before_it(pair, capsys):
    _, out, _ = run(capsys, *pair, "--prompt", "def f(x):", "--json")
    text = json.loads(out)["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    _, out, _ = run(capsys, *pair, "--prompt", "def f(x):", "--json", "--stop", stop)
    row = json.loads(out)
    assert row["text"] == text[: text.index(stop)]
    assert row["finish_reason"] == "stop"
    assert row["new_tokens"] == row["stats"]["emitted"] == len(row["token_ids"]) <= 12


def test_batch_job_does_every_prompt_once(pair, job_file, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    code, _, _ = run(
        capsys,
        *pair,
        "--prompts",
        job_file,
        "--out",
        out,
        "--num-samples",
        "2",
        "--temperature",
        "0.7",
    )
    assert code == 0
    assert sorted(answers(out)) == [(f"p{i}", s) for i in range(len(PROMPTS)) for s in (0, 1)]
    before = out.read_bytes()
    run(
        capsys,
        *pair,
        "--prompts",
        job_file,
        "--out",
        out,
        "--num-samples",
        "2",
        "--temperature",
        "0.7",
    )
    assert out.read_bytes() == before, "a finished job has nothing left to do"


@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.77, 0.999])
def test_a_torn_result_file_is_completed(pair, job_file, tmp_path, capsys, share):
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    command = [*pair, "--prompts", job_file, "--temperature", "0.7", "--out"]
    run(capsys, *command, whole)
    data = whole.read_bytes()
    torn.write_bytes(data[: int(len(data) * share)])
    assert run(capsys, *command, torn)[0] == 0
    assert len(lines(torn)) == len(PROMPTS)
    assert answers(torn) == answers(whole)


def test_rows_are_out_when_they_end_and_a_job_goes_on_row_by_row(
    pair, job_file, tmp_path, capsys, monkeypatch
):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    command = [*pair, "--prompts", job_file, "--temperature", "0.7", "--num-samples", "2"]
    assert run(capsys, *command, "--out", whole)[0] == 0
    append = Output.append

    def failing(self, entry):
        if len(lines(out)) == 3:
            raise SpecjaxError("no more room")
        append(self, entry)

    monkeypatch.setattr(Output, "append", failing)
    assert run(capsys, *command, "--out", out)[0] != 0
    before = out.read_bytes()
    assert len(lines(out)) == 3
    monkeypatch.setattr(Output, "append", append)
    assert run(capsys, *command, "--out", out)[0] == 0
    assert out.read_bytes().startswith(before)
    assert len(lines(out)) == len(lines(whole)) and answers(out) == answers(whole)
    _, shown, _ = run(capsys, *command, "--json")
    order = [(row["index"], row["sample"]) for row in map(json.loads, shown.splitlines())]
    places = sorted((row["index"], row["sample"]) for row in lines(whole))
    assert order == places, "standard output keeps the prompts' order"


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(pair, job_file, tmp_path, capsys):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    command = [*pair, "--batch-size", "3", "--prompts", str(job_file), "--temperature", "0.7"]
    assert run(capsys, *command, "--out", whole)[0] == 0
    seen = 0
    while seen < 3:  # killed when a new row is on disk, wherever the program is then
        process = subprocess.Popen(
            [sys.executable, "-m", "infer.run", *command, "--out", str(out)],
            env=os.environ,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and (
            not out.exists() or out.read_bytes().count(b"\n") <= seen
        ):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen = out.read_bytes().count(b"\n") if out.exists() else 0
    assert run(capsys, *command, "--out", out)[0] == 0
    assert len(lines(out)) == len(PROMPTS)
    assert answers(out) == answers(whole)


def test_a_file_that_another_job_writes_is_left_alone(pair, job_file, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "to')
    with locked(out, "--out"):
        code, shown, err = run(capsys, *pair, "--prompts", job_file, "--out", out)
        (line,) = err.splitlines()
        assert (code, shown, out.read_text()) == (2, "", '{"id": "to')
        assert f"--out {out} is being written by process {os.getpid()} on host" in line
        assert "wait, or give another --out" in line
    assert run(capsys, *pair, "--prompts", job_file, "--out", out)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


@pytest.mark.slow
def test_of_two_jobs_on_one_file_one_writes(pair, job_file, tmp_path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "infer.run", *pair, "--prompts", job_file, "--out", out]
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in jobs]
    codes = [process.returncode for process in jobs]
    assert sorted(codes) == [0, 2], said
    assert "is being written by process" in said[codes.index(2)]
    assert len(lines(out)) == len(PROMPTS)


def place(index, count=2):
    return ["--distributed", f"localhost:1,{count},{index}"]


def test_processes_split_a_job_and_the_last_one_joins(pair, job_file, tmp_path, capsys):
    whole, out, part = (tmp_path / name for name in ("whole", "out", "out.part-1-of-2"))
    job = [*pair, "--prompts", job_file, "--temperature", "0.7", "--num-samples", "2", "--out"]
    run(capsys, *job, whole)
    code, shown, err = run(capsys, *job, out, *place(1))
    (line,) = err.splitlines()
    assert (code, shown) == (0, "") and "6 rows are still to come" in line
    assert not out.exists() and {row["index"] for row in lines(part)} == {1, 3, 5}
    kept = part.read_bytes()
    assert run(capsys, *job, out, *place(0)) == (0, "", "")
    assert [(row["index"], row["sample"]) for row in lines(out)] == sorted(
        (row["index"], row["sample"]) for row in lines(whole)
    ), "in the order of the prompts"
    assert answers(out) == answers(whole)
    before, there = out.read_bytes(), {path.name for path in tmp_path.iterdir()}
    assert there == {"in.jsonl", "whole", "out"}, "no part and no lock is left"
    part.write_bytes(kept)  # as if the joining process had been killed before it removed this file
    for index in (1, 0):
        assert run(capsys, *job, out, *place(index)) == (0, "", "")
    assert out.read_bytes() == before and there == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("then", [[[]], [place(1, 3), place(0, 3), place(2, 3)]])
def test_a_split_job_goes_on_in_another_number(pair, job_file, tmp_path, capsys, then):
    whole, out, part = (tmp_path / name for name in ("whole", "out", "out.part-0-of-2"))
    job = [*pair, "--prompts", job_file, "--temperature", "0.7", "--out"]
    run(capsys, *job, whole)
    first, second, *_ = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(first)
    part.write_bytes(second + b'{"id": "to')
    for more in then:
        assert run(capsys, *job, out, *more)[0] == 0
    assert len(lines(out)) == len(PROMPTS) and answers(out) == answers(whole)
    assert first in out.read_bytes() and second in out.read_bytes(), "what was done is kept"
    assert not list(tmp_path.glob("out.part*"))


def test_processes_that_would_write_the_same_rows_are_refused(pair, job_file, tmp_path, capsys):
    out, part = tmp_path / "out", tmp_path / "out.part-0-of-2"
    part.touch()
    with locked(part, "INDEX"):
        for more, says in (
            (place(0), f"INDEX {part} is being written by process {os.getpid()}"),
            (place(0, 3), f"--out {part} is being written"),
            ([], f"--out {part} is being written"),
        ):
            code, shown, err = run(capsys, *pair, "--prompts", job_file, "--out", out, *more)
            (line,) = err.splitlines()
            assert (code, shown) == (2, "") and says in line
        assert run(capsys, *pair, "--prompts", job_file, "--out", out, *place(1))[0] == 0
    assert not out.exists()


def test_a_part_of_another_job_is_refused(pair, job_file, tmp_path, capsys):
    out = tmp_path / "out"
    run(capsys, *pair, "--prompts", job_file, "--out", out, *place(1))
    code, _, err = run(capsys, *pair, "--prompts", job_file, "--out", out, "--seed", "1")
    assert code == 2 and "out.part-1-of-2: was written with seed=0" in err


def begin(job, index, port=1, devices=4):
    """One of two processes, with simulated devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "infer.run", *job, "--distributed", f"localhost:{port},2,{index}"],
        env=os.environ | {"XLA_FLAGS": flags},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(started):
    """The exit code and stderr of each process."""
    said = [process.communicate(timeout=300)[1] for process in started]
    return [(process.returncode, err) for process, err in zip(started, said, strict=True)]


def kill_when_written(process, path):
    while process.poll() is None and not (path.exists() and path.read_bytes()):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL and path.read_bytes(), process.stderr.read()


@pytest.mark.slow
def test_two_processes_of_four_devices_killed_and_started_again(pair, job_file, tmp_path, capsys):
    """Each process is killed once: 1 while it starts, 0 after its first row is on disk."""
    whole, out, part = (tmp_path / name for name in ("whole", "out", "out.part-0-of-2"))
    job = [*pair, "--batch-size", "4", "--prompts", job_file, "--temperature", "0.7"]
    job += ["--num-samples", "3", "--out"]
    assert run(capsys, *job, whole)[0] == 0
    job += [out, "--mesh", "data=4,model=2"]
    first, second = begin(job, 0), begin(job, 1)
    time.sleep(1)
    second.kill()
    assert second.wait() == -signal.SIGKILL
    kill_when_written(first, part)
    assert not out.exists()
    assert [code for code, _ in ended([begin(job, 0), begin(job, 1)])] == [0, 0]
    assert len(lines(out)) == 3 * len(PROMPTS) and answers(out) == answers(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "whole", "out"}


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_sigterm_to_one_process_of_a_model_ends_both(pair, job_file, tmp_path, stopped):
    """Both end with 143 and whole files, and the same command writes the missing rows."""
    out = tmp_path / "out"
    job = [*pair, "--prompts", job_file, "--mesh", "model=4", "--batch-size", "1", "--out", out]
    job += ["--max-new-tokens", "40"]
    port = free_port()
    both = [begin(job, index, port) for index in range(2)]
    while not (out.exists() and out.read_bytes()):
        assert all(process.poll() is None for process in both)
        time.sleep(0.002)
    both[stopped].terminate()
    asked = time.monotonic()
    for code, err in ended(both):
        assert code == 143 and "the rows so far are written" in err
        assert "Traceback" not in err
    assert time.monotonic() - asked < 30 * slowdown()
    assert 0 < len(lines(out)) < len(PROMPTS)
    port = free_port()
    assert [code for code, _ in ended([begin(job, index, port) for index in range(2)])] == [0, 0]
    assert len(lines(out)) == len(PROMPTS)


@pytest.mark.slow
def test_processes_with_unequal_devices_are_one_line(pair, job_file, tmp_path):
    job = [*pair, "--prompts", job_file, "--mesh", "model=4", "--out", tmp_path / "out"]
    port = free_port()
    for code, err in ended([begin(job, 0, port, devices=4), begin(job, 1, port, devices=2)]):
        assert code == 2 and "the processes have 4, 2 devices" in err
        assert "Traceback" not in err


@pytest.mark.slow
def test_a_process_that_meets_nobody_says_so_and_ends(pair, job_file, tmp_path):
    port = free_port()
    job = [*pair, "--prompts", job_file, "--mesh", "model=4", "--out", tmp_path / "out"]
    job += ["--meeting-timeout", "5"]
    for index in range(2):
        ((code, err),) = ended([begin(job, index, port)])
        waits, gives_up = err.splitlines()
        assert code == 2 and not (tmp_path / "out").exists()
        whom = "process 1" if index == 0 else "the other processes"
        assert f"waiting for {whom} of --distributed localhost:{port}" in waits
        assert "not all processes came within 5 seconds" in gives_up


def test_an_address_that_cannot_be_used_is_one_line(pair, job_file, tmp_path, capsys):
    job = [*pair, "--prompts", job_file, "--mesh", "model=2", "--out", tmp_path / "out"]
    code, _, err = run(capsys, *job, "--distributed", "no-such-host.invalid:1234,2,1")
    assert code == 2 and "no host no-such-host.invalid is known" in err
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run(capsys, *job, "--distributed", f"localhost:{port},2,0")
    assert code == 2 and f"port {port} is in use" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_spans_two_processes(pair, job_file, tmp_path, capsys):
    """One process is killed after a row is written. The other says so and ends."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    job = [*pair, "--prompts", job_file, "--temperature", "0.7", "--out"]
    assert run(capsys, *job, whole)[0] == 0
    job += [out, "--mesh", "model=4"]

    def start(*own):
        port = free_port()
        return [begin([*job, *more], index, port) for index, more in enumerate(own)]

    for killed in (1, 0):
        out.unlink(missing_ok=True)
        both = start([], [])
        kill_when_written(both[killed], out)
        died = time.monotonic()
        ((code, err),) = ended([both[1 - killed]])
        assert code != 0 and time.monotonic() - died < 30 * slowdown()
        if killed == 1:  # if it is 0, JAX's runtime may abort this process first
            assert code == 1 and "process 1 of 2 has died; start all of them again" in err
            assert "stack trace" not in err
    assert len(lines(out)) < len(PROMPTS)
    for code, err in ended(start([], ["--batch-size", "3"])):
        assert code == 2 and "processes disagree on arguments: 1 against process 0" in err
        assert "Traceback" not in err
    assert [code for code, _ in ended(start([], []))] == [0, 0]
    assert len(lines(out)) == len(PROMPTS) and answers(out) == answers(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "whole", "out"}


def agreed_on(argv, monkeypatch):
    """What the processes of a model compare before the first round, for one command line."""
    facts = {}
    args = program.arguments([str(word) for word in argv])
    args.span = place(0)[1]
    monkeypatch.setattr(job.processes, "check_agreement", lambda **given: facts.update(given))
    own = job.make_job(args)
    prompts, _ = read_prompts(args.prompts, own.encoder, None, None, option="--prompts")
    own._check_agreement(prompts)
    return json.loads(json.dumps(facts))


def test_processes_of_a_model_compare_whatever_changes_its_rows(
    pair, tiny_pair_dirs, job_file, tmp_path, monkeypatch
):
    """Two processes with different arguments differ in what they compare, and so do not start."""
    target, _ = tiny_pair_dirs
    other_text, longer = tmp_path / "other.jsonl", tmp_path / "longer.jsonl"
    other_text.write_text(job_file.read_text().replace("import os", "import io"))
    longer.write_text(job_file.read_text() + '{"prompt": "pass"}\n')
    other_weights = tmp_path / "weights"
    shutil.copytree(target, other_weights)
    weights = load_file(other_weights / "model.safetensors")
    name = min(weights)
    save_file(weights | {name: weights[name] + 1}, other_weights / "model.safetensors")
    job_line = [*pair, "--out", tmp_path / "out"]
    ours = agreed_on([*job_line, "--prompts", job_file], monkeypatch)
    for changed, fact in (
        (["--prompts", other_text], "prompts"),
        (["--prompts", longer], "prompts"),
        (["--prompts", job_file, "--dtype", "bfloat16"], "settings"),
        (["--prompts", job_file, "--seed", "1"], "settings"),
        (["--prompts", job_file, "--target", other_weights], "settings"),
        (["--prompts", job_file, "--batch-size", "3"], "arguments"),
    ):
        theirs = agreed_on([*job_line, *changed], monkeypatch)
        assert theirs[fact] != ours[fact], changed
        if other_weights in changed:  # not only the name differs
            key = "target_digest"
            assert theirs[fact][key] != ours[fact][key]


@pytest.mark.slow
@pytest.mark.sweep
def test_a_second_job_on_the_port_is_refused_and_the_first_goes_on(
    pair, job_file, tmp_path, capsys
):
    """The second one's processes come while the first job's still wait, and while it decodes."""
    job = [*pair, "--prompts", job_file, "--batch-size", "1", "--max-new-tokens", "40", "--out"]
    whole, out, other = tmp_path / "whole", tmp_path / "out", tmp_path / "other"
    assert run(capsys, *job, whole)[0] == 0
    port = free_port()
    second_job = [*job, other, "--mesh", "model=4", "--seed", "5", "--meeting-timeout", "20"]
    job += [out, "--mesh", "model=4"]
    first = begin(job, 0, port)
    assert "waiting for process 1" in first.stderr.readline()
    ((code, err),) = ended([begin(second_job, 1, port)])
    assert code == 2 and "another job meets there" in err.splitlines()[-1]
    second = begin(job, 1, port)
    while not (out.exists() and out.read_bytes()):
        assert first.poll() is None and second.poll() is None
        time.sleep(0.01)
    for code, err in ended([begin(second_job, index, port) for index in range(2)]):
        assert code == 2 and len(err.splitlines()[-1]) < 300 and "Traceback" not in err
    assert [code for code, _ in ended([first, second])] == [0, 0]
    assert answers(out) == answers(whole) and not other.exists()


@pytest.mark.parametrize(
    ("mesh", "role", "own"),
    [
        (None, "split", None),
        ("data=2,model=4", "split", {"data": 1, "model": 4}),
        ("data=8", "split", {"data": 4, "model": 1}),
        ("model=8", "span", {"data": 1, "model": 8}),
    ],
)
def test_a_mesh_counts_the_devices_of_all_processes(mesh, role, own):
    commands = program.parser()
    argv = ["--prompts", "x", "--out", "y", *place(1), *(["--mesh", mesh] if mesh else [])]
    args = commands.parse_args(argv)
    program.check(args, commands)
    assert args.mesh == own
    assert vars(args)[role] == Place("localhost:1", 2, 1)
    assert vars(args)[{"split": "span", "span": "split"}[role]] is None


def test_a_cluster_manager_names_the_processes_of_one_model():
    commands = program.parser()
    argv = ["--prompts", "x", "--out", "y", "--distributed", "cluster", "--mesh", "model=8"]
    args = commands.parse_args(argv)
    program.check(args, commands)
    assert (args.split, args.span, args.mesh) == (None, "cluster", {"data": 1, "model": 8})


@pytest.mark.slow
@pytest.mark.sweep
def test_a_model_spans_the_processes_of_a_cluster(pair, job_file, tmp_path, capsys):
    """The variables are those that SLURM gives each task."""
    job = [*pair, "--prompts", job_file, "--temperature", "0.7", "--out"]
    assert run(capsys, *job, tmp_path / "whole")[0] == 0
    job += [tmp_path / "out", "--mesh", "model=4", "--distributed", "cluster"]
    of_job = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    of_job["JAX_COORDINATOR_PORT"] = str(free_port())
    of_job["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "infer.run", *job],
            env=os.environ | of_job | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for code, err in ended(both):
        assert code == 0, err
    assert answers(tmp_path / "out") == answers(tmp_path / "whole")


@pytest.mark.parametrize(
    ("of_jax", "of_specjax", "used"),
    [("jax", None, "jax"), ("jax", "own", "own"), (None, "own", "own")],
)
def test_compiled_programs_go_where_the_environment_says(
    tmp_path, monkeypatch, of_jax, of_specjax, used
):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("SPECJAX_CACHE_DIR", raising=False)
    if of_specjax:
        monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path / of_specjax))
    try:
        jax.config.update("jax_compilation_cache_dir", of_jax and str(tmp_path / of_jax))
        use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / used)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, 2, 2.5, 3, 3.5, 4, 5, 6])
def test_an_interrupt_is_130_whenever_it_comes(tmp_path, seconds):
    """Most interrupts come during compilation: the cache is empty, and all LLVM passes run."""
    env = os.environ | {"SPECJAX_CACHE_DIR": str(tmp_path)}
    del env["JAX_DISABLE_MOST_OPTIMIZATIONS"], env["XLA_FLAGS"]
    out = tmp_path / "out.jsonl"
    heeding = (  # a shell's background jobs, maybe these tests too, ignore interrupts
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('infer.run', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", heeding, "--prompt", "def f(", "--out", out]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds * slowdown())
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    assert (process.returncode, err) == (130, "")
    assert not list(tmp_path.glob(".*lock"))


def test_bad_lines_are_numbered_and_the_rest_is_done(pair, tmp_path, capsys):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = json.dumps({"prompt": "word " * 4000})
    path.write_text(
        f'{{"prompt": "a"}}\n[1]\nnot json\n{{"text": "b"}}\n{{"prompt": ""}}\n{long}\n'
        '{"prompt": "c"}\n'
    )
    code, _, err = run(capsys, *pair, "--prompts", path, "--out", out)
    assert code == 3
    assert [row["prompt"] for row in lines(out)] == ["a", "c"]
    for number in (2, 3, 4, 5, 6):
        assert f"line {number}:" in err
    # Row keys follow the line, so the bad ones do not shift the good.
    assert [row["index"] for row in lines(out)] == [0, 6]


def test_truncation_keeps_the_end_and_says_so(pair, tmp_path, capsys):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("word " * 4000, "a")))
    job = [*pair, "--prompts", path, "--out", out]
    code, _, err = run(capsys, *job, "--truncate", "left")
    assert code == 0 and "1 of 2 prompts lost their first tokens" in err
    first, second = lines(out)
    target = sj.load(pair[1])
    bound = target.config.max_position
    assert first["prompt_tokens"] == bound - 12 and first["new_tokens"] == 12
    assert (first["truncate"], second["prompt"]) == ("left", "a")
    code, out, err = run(capsys, *job, "--truncate", "left", "--max-new-tokens", bound)
    assert (code, out, err.count("\n")) == (2, "", 1) and "--max-new-tokens" in err


def test_an_encoder_keeps_bos_and_cuts_no_middle(loaded):
    ids = list(range(5, 25))

    class Words:
        def encode(self, text, add_special_tokens=True):
            return [1, *ids]

    config = dataclasses.replace(loaded[0].config, max_position=16, bos_id=1)
    target = dataclasses.replace(loaded[0], config=config, tokenizer=Words())
    assert PromptEncoder(target, new_tokens=6, truncate=True).text("x") == ([1, *ids[-9:]], 11)
    small = dataclasses.replace(target, config=dataclasses.replace(config, max_position=12))
    assert PromptEncoder(target, small, 6, truncate=True).text("x") == ([1, *ids[-5:]], 15)
    with pytest.raises(OptionError, match=r"6 new tokens leave no room .* of 7"):
        tiny = dataclasses.replace(config, max_position=7)
        PromptEncoder(target, dataclasses.replace(target, config=tiny), 6, truncate=True)


def test_a_prompt_past_the_drafts_context_is_a_bad_line(pair, tmp_path, capsys):
    """The row fits the target's context, so the same job works without the draft."""
    short = tmp_path / "short"
    shutil.copytree(pair[3], short)
    shutil.copy(Path(pair[3]).parent / "tokenizer.json", short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 24}
    (short / "config.json").write_text(json.dumps(config))
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("a " * 20, "a")))
    job = ["--target", pair[1], "--draft", short, "--max-new-tokens", 12, "--prompts", path]
    code, _, err = run(capsys, *job)
    assert code == 3 and "line 1: a prompt has " in err and f"draft {short} holds 24" in err
    assert run(capsys, *job, "--method", "autoregressive")[0] == 0
    code, out, _ = run(capsys, *job, "--plan", "--memory", 1)
    assert code == 0 and " rows of 24 tokens" in out


def test_a_profile_is_a_trace_of_the_second_run(pair, job_file, tmp_path, capsys):
    """It has the run's program and none that compiles; each run adds a trace of its own."""
    where = tmp_path / "profile"
    job = [*pair, "--prompts", job_file, "--profile", where]
    for count in (1, 2):
        code, out, _ = run(capsys, *job)
        traces = sorted(where.rglob("perfetto_trace.json.gz"))
        assert code == 0 and len(traces) == count and f"24 tokens in 2 rows: {traces[-1]}" in out
        events = json.loads(gzip.decompress(traces[-1].read_bytes()))
        names = {event.get("name", "") for event in events["traceEvents"]}
        assert any("PjitFunction(run)" in name for name in names)
        assert not any("backend_compile" in name for name in names)
        time.sleep(1.1)  # a trace's directory is named by the second
    for other in (["--json"], ["--out", tmp_path / "out"], ["--plan"]):
        code, _, err = run(capsys, *job, *other)
        assert code == 2 and f"--profile and {other[0]} exclude each other" in err
    code, _, err = run(capsys, *job[:-1], job_file)
    assert code == 2 and f"--profile {job_file}: cannot be written" in err


def test_other_formats_and_a_tree_job_resumes(pair, tmp_path, capsys):
    """Spec-Bench's and HumanEval's names of ids are read, and options with a tuple resume."""
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    first = {"question_id": 81, "category": "writing", "turns": ["def a(x):", "and then?"]}
    second = {"task_id": "HumanEval/0", "prompt": "def b(x):", "test": "…"}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    job = [
        *pair,
        "--method",
        "specinfer",
        "--set",
        "branching=2,2",
        "--prompts",
        path,
        "--out",
        out,
    ]
    assert run(capsys, *job)[0] == 0
    names = [(row["id"], row["prompt"]) for row in lines(out)]
    assert names == [(81, "def a(x):"), ("HumanEval/0", "def b(x):")]
    out.write_bytes(out.read_bytes()[:-9])
    assert run(capsys, *job)[0] == 0
    assert len(lines(out)) == 2


def test_a_line_ends_at_its_line_break_alone(pair, tmp_path, capsys):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    odd = "a\u2028b\x85c"  # line ends for str.splitlines, text for JSON
    path.write_bytes(
        json.dumps({"prompt": odd}, ensure_ascii=False).encode() + b"\n"
        b'{"prompt": "\xff"}\n{"prompt": "\\ud800"}\n' + b"[" * 100_000 + b"\n"
    )
    code, _, err = run(capsys, *pair, "--prompts", path, "--out", out)
    assert code == 3
    assert [row["prompt"] for row in lines(out)] == [odd]
    for number, says in ((2, "UTF-8"), (3, "surrogate"), (4, "depth")):
        assert f"line {number}: " in err and says in err
    assert len(err.strip().splitlines()) == 3


def test_result_file_of_another_job_is_refused(pair, job_file, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    run(capsys, *pair, "--prompts", job_file, "--out", out)
    code, _, err = run(capsys, *pair, "--prompts", job_file, "--out", out, "--seed", "1")
    assert code == 2 and "seed" in err


BAD = {
    "unknown method": (["--method", "speculatve"], "speculative"),
    "unknown option": (["--set", "gama=3"], "gamma"),
    "option without value": (["--set", "gamma"], "OPTION=VALUE"),
    "gamma zero": (["--set", "gamma=0"], "gamma=0"),
    "gamma no number": (["--set", "gamma=many"], "whole number"),
    "branching with zeros": (["--method", "specinfer", "--set", "branching=4,0"], "4,2,2"),
    "more beams than tokens": (["--drafter", "beam", "--rule", "joint", "--set", "width=65"], "64"),
    "tau of one": (["--method", "mtad", "--set", "tau=1"], "< 1"),
    "negative bound": (["--method", "mentored", "--set", "max_kl=-1"], "≥ 0"),
    "alpha of zero": (["--method", "scd", "--set", "alpha=0"], "> 0"),
    "unknown preset": (["--method", "scd", "--set", "preset=code"], "gsm8k, humaneval"),
    "unknown choice": (["--method", "bild", "--set", "stop=maybe"], "before"),
    "a law the rule cannot take": (["--drafter", "beam", "--rule", "block"], "drafter beam"),
    "no adaptive tokens": (["--method", "sdsat"], "train.sdsat"),
    "unknown rule": (["--rule", "speculativ"], "speculative"),
    "unknown drafter": (["--drafter", "chan"], "chain"),
    "method and parts": (["--method", "speculative", "--rule", "speculative"], "exclude"),
    "temperature": (["--temperature", "-0.5"], "-0.5"),
    "top-p": (["--top-p", "1.5"], "1.5"),
    "top-k": (["--top-k", "-1"], "--top-k"),
    "temperature not a number": (["--temperature", "nan"], "--temperature"),
    "top-k over int32": (["--top-k", "4294967296"], "4294967296"),
    "seed": (["--seed", "99999999999999999999"], "--seed"),
    "samples": (["--num-samples", "0"], "--num-samples"),
    "not UTF-8": (["--prompt", "a\udcff"], "UTF-8"),
    "out in no folder": (["--out", "/nowhere/out.jsonl"], "/nowhere/out.jsonl"),
    "prompts is a folder": (["--prompts", "/"], "cannot be read"),
    "no number": (["--max-new-tokens", "lots"], "lots"),
    "no tokens": (["--max-new-tokens", "0"], "--max-new-tokens"),
    "batch size": (["--batch-size", "0"], "--batch-size"),
    "unknown flag": (["--gamma", "3"], "--gamma"),
    "dtype": (["--dtype", "int8"], "bfloat16"),
    "no model": (["--target", "/nowhere/at/all"], "/nowhere/at/all"),
    "no prompt file": (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
    "empty stop": (["--stop", ""], "--stop"),
    "chat without template": (["--chat"], "chat template"),
    "long prompt": (["--prompt", "word " * 4000], "context"),
    "empty prompt": (["--prompt", ""], "--prompt"),
    "no meeting point": (["--distributed", "localhost,2,0"], "HOST:PORT,COUNT,INDEX"),
    "no such process": (["--distributed", "localhost:1,2,2"], "INDEX from 0 to COUNT - 1"),
    "no process at all": (["--distributed", "localhost:1,0,0"], "localhost:1,0,0"),
    "a cluster's prompts": (
        ["--prompts", "x", "--out", "x", "--distributed", "cluster"],
        "HOST:1,$SLURM_NTASKS,$SLURM_PROCID",
    ),
    "processes without a file": (["--prompts", "x", "--distributed", "h:1,2,0"], "needs --out"),
    "processes of one prompt": (["--out", "x", "--distributed", "h:1,2,0"], "--prompts"),
    "rows that processes cannot share": (
        ["--prompts", "x", "--out", "x", "--distributed", "h:1,2,0", "--mesh", "data=3"],
        "data must be a multiple of 2",
    ),
    "a model that processes cannot share": (
        ["--prompts", "x", "--out", "x", "--distributed", "h:1,2,0", "--mesh", "model=3"],
        "data must be a multiple of 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_and_exit_2(pair, capsys, name):
    argv, says = BAD[name]
    if "--prompts" not in argv and "--prompt" not in argv:
        argv = [*argv, "--prompt", "x"]
    code, out, err = run(capsys, *pair, *argv)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1, err
    assert says in err


def test_prompt_and_prompts_exclude_each_other(pair, job_file, capsys):
    code, _, err = run(capsys, *pair, "--prompt", "x", "--prompts", job_file)
    assert code == 2 and "exclude" in err


def test_empty_prompt_file(pair, tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text("\n")
    code, _, err = run(capsys, *pair, "--prompts", path)
    assert code == 2 and "empty" in err


def test_mismatched_tokenizers(pair, tiny_pair_dirs, tmp_path, capsys):
    import shutil

    from train.data.corpus import Document
    from train.data.tokenizer import train_tokenizer

    other = tmp_path / "other"
    shutil.copytree(tiny_pair_dirs[1], other)
    text = "".join(chr(97 + i % 26) * (i % 7) + " " for i in range(3000))
    train_tokenizer([Document("a", text)], 500, other / "tokenizer.json")
    code, _, err = run(capsys, *pair, "--draft", other, "--prompt", "x")
    assert code == 2 and "tokenizers" in err and len(err.strip().splitlines()) == 1


def test_truncated_weights(pair, tiny_pair_dirs, tmp_path, capsys):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_pair_dirs[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, err = run(capsys, *pair, "--target", broken, "--prompt", "x")
    assert code == 2 and "model.safetensors" in err and len(err.strip().splitlines()) == 1


def test_list_methods_names_every_method_and_part(capsys):
    from specjax.registry import DRAFTERS, METHODS, RULES

    code, out, _ = run(capsys, "--list-methods")
    assert code == 0
    for name in (*METHODS, *DRAFTERS, *RULES, "preset=humaneval"):
        assert name in out


@pytest.mark.parametrize(
    ("module", "argv", "says"),
    [
        ("infer.run.commands", ["--help"], "--max-new-tokens"),
        ("infer.run.commands", ["--version"], sj.__version__),
        ("infer.run.commands", ["--batch-size", "0"], ""),
        ("infer.run.commands", ["--prompt", "x", "--prompts", "y"], ""),
        ("infer.bench.commands", ["--help"], "--repeats"),
        ("infer.bench.commands", ["--sweep", "gamma"], ""),
        ("infer.bench.commands", ["--peer", "vllm"], ""),
        ("infer.tune.commands", ["--help"], "--a-t"),
        ("infer.tune.commands", ["x", "--out", "y", "--b", "z"], ""),
        ("infer.convert", ["--help"], "--out"),
        ("infer.code_task", ["--help"], "--validation"),
    ],
)
def test_what_needs_no_model_imports_no_jax(module, argv, says):
    code = f"import sys\nfrom {module} import main\ntry: main({argv})\nexcept SystemExit: pass\n"
    out = subprocess.run(
        [sys.executable, "-c", code + "print('jax' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert says in out.stdout
    assert out.stdout.splitlines()[-1] == "False"


def test_control_characters_and_markup_stay_text():
    assert printable("a\x1b[31mb\tc\n[red]é") == "a\\x1b[31mb\tc\n[red]é"


@pytest.fixture(scope="module")
def loaded(tiny_pair_dirs):
    return tuple(map(sj.load, tiny_pair_dirs))


def terminal():
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        soft_wrap=True,
        highlight=False,
        color_system="standard",
        width=10_000,
    )


@pytest.mark.parametrize("stop", [(), ("e",)])
def test_the_screen_loses_no_text(loaded, stop):
    """A high temperature gives invalid and incomplete characters; none of the text is lost."""
    target, draft = loaded
    for seed in range(4):
        console = terminal()
        screen = Screen(target, target.tokenizer.encode("x"), console)
        for piece in sj.stream(
            target,
            "x",
            method="speculative",
            draft=draft,
            stop=stop,
            sampling=sj.Sampling(3.0),
            seed=seed,
            max_new_tokens=24,
        ):
            if piece.generation is None:
                screen.piece(piece)
        text = printable(piece.generation.text[0])
        assert Text.from_ansi(console.file.getvalue()).plain == Text.from_ansi(text).plain


def test_each_token_has_its_writers_colour(loaded):
    tokenizer, console = loaded[0].tokenizer, terminal()
    tokens = np.array(tokenizer.encode("def [red](self):"))
    origins = np.where(np.arange(len(tokens)) % 3 == 2, FROM_TARGET, FROM_DRAFT)
    screen = Screen(loaded[0], [], console)
    # The first piece shows nothing yet: its text could be the start of a stop string.
    screen.piece(sj.Piece(0, "", tokens[:4], origins[:4]))
    screen.piece(sj.Piece(0, tokenizer.decode(tokens), tokens[4:], origins[4:], "length"))
    expected = Text()
    for token, origin in zip(tokens, origins, strict=True):
        style = DRAFTED if origin == FROM_DRAFT else WRITTEN
        expected.append(tokenizer.decode([token]), style)
    wanted = terminal()
    wanted.print(expected, end="")
    assert painted(console) == painted(wanted)


def painted(console):
    """The character and style of everything printed."""
    text = Text.from_ansi(console.file.getvalue())
    return [(c, str(text.get_style_at_offset(console, i))) for i, c in enumerate(text.plain)]


def shown_beside_plain(args):
    """What the terminal shows after the completion, as lines."""
    made, console = job.make_job(args), terminal()
    made.show(job.only_prompt(made.args, made.encoder), False, console)
    return Text.from_ansi(console.file.getvalue()).plain.splitlines()[-3:]


@pytest.mark.parametrize("method, tokens", [("tree-match", "the same"), ("speculative", "other")])
def test_the_demo_stands_beside_plain_decoding(pair, monkeypatch, method, tokens):
    """The rule of tree-match samples the tokens of plain decoding; speculative only follows the
    same distribution."""
    given = (*pair, "--prompt", "def f(", "--method", method, "--temperature", "3")
    given = (*given, "--max-new-tokens", "12")
    monkeypatch.setattr(demo, "ARGUMENTS", given)
    wanted = rf"\d+\.\d\d times as fast as plain decoding, {tokens} tokens"
    assert re.fullmatch(wanted, shown_beside_plain(program.arguments([]))[-1])
    assert not program.arguments(given).demo


def test_compare_shows_two_bars_as_long_as_the_speeds(pair, monkeypatch):
    compared = Comparison(speed=60.0, plain_speed=40.0, ratio=1.5, same=True)
    monkeypatch.setattr(job, "compare_with_plain", lambda *_: compared)
    args = program.arguments([*pair, "--prompt", "def f(", "--compare", "--max-new-tokens", "4"])
    method, plain, ratio = (line.strip() for line in shown_beside_plain(args))
    assert re.fullmatch(rf"speculative +60 tokens/s +{'━' * 40}", method)
    assert re.fullmatch(rf"plain decoding +40 tokens/s +{'━' * 27}", plain)
    assert ratio == "1.50 times as fast as plain decoding, the same tokens"


def test_parts_that_are_named_stand_beside_plain_decoding(pair):
    """And not beside themselves: plain decoding has one token a pass."""
    parts = ["--drafter", "lookup", "--rule", "match", "--set", "gamma=3"]
    args = program.arguments([*pair, "--prompt", "def f(", *parts])
    made = job.make_job(args)
    runs = []

    def generate(*given, **named):
        runs.append(sj.generate(*given, **named))
        return runs[-1]

    with mock.patch.object(beside_plain, "sj", SimpleNamespace(generate=generate)):
        beside_plain.compare_with_plain(made.target, [5, 6, 7] * 4, made.arguments)
    by_parts, plain = runs[:2]
    assert by_parts.stats["drafted"].sum() > 0 == plain.stats["drafted"].sum()


def test_rows_are_shown_one_after_the_other():
    """On a mesh several run at a time, and end in any order."""
    order = [(0, ""), (1, ""), (2, ""), (1, "end"), (0, ""), (0, "end"), (2, ""), (2, "end")]
    pieces = [SimpleNamespace(index=i, row=row or None, generation=None) for i, row in order]
    last = SimpleNamespace(index=2, row=None, generation="all")
    shown = list(job._row_after_row([*pieces, last]))
    assert [piece.index for piece in shown] == [0, 0, 0, 1, 1, 2, 2, 2, 2] and shown[-1] is last
    assert sorted(map(id, shown)) == sorted(map(id, [*pieces, last]))


def test_compare_is_of_one_prompt_on_the_screen(pair, capsys):
    for other in ("--json", "--out=rows.jsonl", "--prompts=prompts.jsonl", "--plan"):
        source = () if "prompts" in other else ("--prompt", "x")
        code, out, err = run(capsys, *pair, "--compare", *source, other)
        option = other.partition("=")[0]
        assert (code, out) == (2, "")
        assert f"--compare and {option} exclude each other" in err.splitlines()[-1]


def test_a_prompt_is_no_markup(loaded):
    console = terminal()
    Screen(loaded[0], [], console).prompt("[red]a[/red]\x1b[2J")
    assert "[red]a[/red]\\x1b[2J" in console.file.getvalue()
    assert "\x1b[2J" not in console.file.getvalue()


def test_a_closed_pipe_ends_quietly(pair, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        code = program.main([*pair, "--prompt", "x"])
        monkeypatch.undo()
    assert code == 0
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_is_130(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "run_job", interrupted)
    assert run(capsys, "--prompt", "x") == (130, "", "")


def test_missing_demo_weights_are_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(lm.EMBEDDED, "demo", tmp_path / "none")
    code, out, err = run(capsys, "--prompt", "x")
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)


def test_processes_that_share_a_model_compare_its_files(pair):
    """Settings are compared before the first round; the files' digests are among them."""
    args = program.arguments([*pair, "--prompt", "x"])
    assert "target_digest" not in job.make_job(args).settings
    args.span = Place("localhost:1", 2, 1)
    settings = job.make_job(args).settings
    assert {"target_digest", "draft_digest", "tokenizer_digest"} <= set(settings)
