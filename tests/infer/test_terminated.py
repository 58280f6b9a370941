"""SIGTERM ends infer.bench and infer.tune at once, and what is measured so far stays."""

import json
import signal
import subprocess
import sys
import time

import pytest

SECONDS = 900  # until something is measured: programs compile first


@pytest.mark.slow
@pytest.mark.parametrize("program", ["infer.bench", "infer.tune"])
def test_sigterm_leaves_whole_lines(program, tiny_pair_dirs, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def walk(tree):"}) + "\n")
    home = tmp_path / "out"
    pair = ["--target", tiny_pair_dirs[0], "--draft", tiny_pair_dirs[1], "--out", home]
    if program == "infer.bench":
        given = ["--prompts", prompts, "--methods", "speculative", "--repeats", "5000"]
        written = home / "runs.jsonl"
    else:
        values = ",".join(f"{i / 100}" for i in range(1, 100))
        given = [prompts, "--method", "mtad", "--grid", f"tau={values}"]
        written = home / "grid.jsonl"
    command = [sys.executable, "-m", program, *pair, *given, "--max-new-tokens", "6"]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    begin = time.monotonic()
    while not (written.exists() and written.read_text().count("\n") > 1):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < begin + SECONDS
        time.sleep(0.05)

    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == -signal.SIGTERM
    assert "Traceback" not in process.stderr.read()
    *lines, _ = written.read_text().split("\n")  # the last one may be half written
    assert len(lines) > 1 and all(json.loads(line) for line in lines)
