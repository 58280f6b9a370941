"""Whether a program that a model wrote passes its test, run in a process with little to break.

The process is isolated Python (`-I`) without our environment, in an empty directory that is
deleted, under limits of CPU time, memory, file size, open files and wall clock. It may start no
process or thread, runs as nobody where we are root, and has no network where the kernel lets us
take it away. It can still read files: this contains accidents, not attacks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.errors import OptionError

CHILD = Path(__file__).with_name("sandboxed.py")
# Where a completion of a function is over: the next top-level statement (Chen et al. 2021, §2.1).
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one program; seconds and bytes."""

    wall_s: float = 15.0
    cpu_s: int = 10
    memory: int = 1 << 30
    file_size: int = 1 << 20
    files: int = 32


@dataclasses.dataclass(frozen=True)
class Outcome:
    """``passed``: the program came to its end. ``offline``: it had no network."""

    passed: bool
    offline: bool


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Runs Python source under the limits."""
    limits, token = limits or Limits(), secrets.token_hex(16)
    told = json.dumps(dataclasses.asdict(limits) | {"token": token})
    # What it may leave behind belongs to nobody, who must be able to enter.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        if os.geteuid() == 0:
            os.chmod(home, 0o777)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env={"OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(source.encode(errors="replace"), limits.wall_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
    said = out.decode(errors="replace").partition("\n")
    return Outcome(passed=said[2] == token, offline=said[0] == "offline=1")


def humaneval_program(task: Mapping[str, Any], completion: str) -> str:
    """A task of HumanEval's format with a completion of its prompt: the function, then its test."""
    ends = [at for at in (completion.find(stop) for stop in STOPS) if at >= 0]
    body = completion[: min(ends)] if ends else completion
    return f"{task['prompt']}{body}\n\n{task['test']}\n\ncheck({task['entry_point']})\n"


def pass_at_1(tasks: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> float:
    """The share of tasks whose one completion passes its test."""
    passed = [
        run_program(humaneval_program(task, text)).passed
        for task, text in zip(tasks, completions, strict=True)
    ]
    return sum(passed) / len(passed)


def check_tasks(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Refuses prompts that are no tasks of HumanEval's format.

    Raises:
      OptionError: names the prompt and the field it lacks.
    """
    for number, task in enumerate(tasks, 1):
        for field in ("prompt", "test", "entry_point"):
            if not isinstance(task.get(field), str):
                raise OptionError(
                    f"--run-tests: prompt {number} has no text under {field!r}; "
                    "HumanEval's format has prompt, test, entry_point"
                )
        if not task["entry_point"].isidentifier():
            raise OptionError(
                f"--run-tests: prompt {number}: entry_point {task['entry_point']!r} is no name"
            )
