"""Whether a function that a model wrote passes its test, run in processes with little to break.

Two processes share a fresh folder. The worker runs what the model wrote; the checker runs the
task's test, asks the worker for each value, and alone can write the verdict
(``infer.bench.sandboxed``). What is guarded, in both:

- Files. A guard, Landlock or else bubblewrap, leaves write access to the folder alone, and of what
  we may read Python and the system's libraries. The folder is kept small, and removed afterwards.
- Rights (``infer.bench.confinement``). No environment of ours, no capabilities, nobody where we are
  root; no process or thread more and, on x86-64 and ARM64, no network, signal, change of a file's
  mode or object that outlives the process. Without such a machine Landlock is no guard.
- Size. CPU time, memory, files, answers and wall clock are limited.

What is not: names, sizes and dates of any file can be asked for; the folder can pass its bound for
as long as it takes to look; the kernel may have holes; where we are killed the folder stays; and
the task's own test is trusted. Only what is told by plain data can be judged: not objects of the
function's own classes, functions, or what is printed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.bench.confinement import NOBODY, READABLE
from infer.bench.folder import Folder
from infer.datasets.readers import HUMANEVAL_STOPS
from specjax._util.errors import OptionError
from specjax._util.program import say

CHILD = Path(__file__).with_name("sandboxed.py")
LANDLOCK, BUBBLEWRAP = "landlock", "bubblewrap"
POLL_MS, LONGEST = 20, 4096


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one process, or of the folder and the wall clock of both; seconds and bytes."""

    wall_s: float = 15.0
    cpu_s: int = 10
    memory: int = 1 << 30
    file_size: int = 1 << 20
    files: int = 32
    folder_size: int = 16 << 20
    folder_entries: int = 100


@dataclasses.dataclass(frozen=True)
class SandboxResult:
    """``passed``: the test came to its end. ``unjudged``: why it could not be run to it."""

    passed: bool = False
    unjudged: str = ""


def run_task(
    task: Mapping[str, Any], program: str, guard: str | None, limits: Limits | None = None
) -> SandboxResult:
    """Runs the test of a task of HumanEval's format on the function that ``program`` defines."""
    limits, name = limits or Limits(), task["entry_point"]
    # Helpers before the function are the prompt's, so the test may call them itself.
    helpers = re.split(rf"^(?:async )?def {name}\b", task["prompt"], flags=re.M)[0]
    given = {"program": program, "helpers": helpers, "test": task["test"], "entry_point": name}
    with Folder() as home:
        if os.geteuid() == 0 and guard != BUBBLEWRAP:
            os.chown(home.path, NOBODY, NOBODY)
        return _judge(json.dumps(given).encode(), home, guard, limits)


def _judge(given: bytes, home: Folder, guard: str | None, limits: Limits) -> SandboxResult:
    """Starts worker and checker, and ends both whatever happens."""
    started = []
    try:
        started.append(worker := _start(home.path, guard, limits, subprocess.PIPE))
        with worker.stdin, worker.stdout, tempfile.TemporaryFile() as task:
            task.write(given)
            task.seek(0)
            ends = {"calls": worker.stdin.fileno(), "answers": worker.stdout.fileno()}
            started.append(checker := _start(home.path, guard, limits, task, ends))
        with checker.stdout:
            verdict = _verdict(checker.stdout.fileno(), home, limits)
        return SandboxResult(**json.loads(verdict)) if verdict else SandboxResult()
    finally:
        for process in started:
            process.kill()
            process.wait()


def _start(home, guard, limits, stdin, ends: Mapping[str, int] | None = None) -> subprocess.Popen:
    """A worker, or with its two ``ends`` a checker."""
    told = {"limits": dataclasses.asdict(limits), "landlock": guard == LANDLOCK} | (ends or {})
    command = [sys.executable, "-I", "-B", str(CHILD), json.dumps(told)]
    return subprocess.Popen(
        bubblewrapped(command, home) if guard == BUBBLEWRAP else command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd=home,
        env={"OPENBLAS_NUM_THREADS": "1", "TMPDIR": home},
        pass_fds=tuple(ends.values()) if ends else (),
        start_new_session=True,
    )


def bubblewrapped(command: Sequence[str], home: str) -> list[str]:
    """The command in namespaces of its own, where ``home`` is all that can be written."""
    out = [str(shutil.which("bwrap")), "--unshare-all", "--unshare-user", "--die-with-parent"]
    out += ["--new-session", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    for path in dict.fromkeys((*READABLE, str(CHILD.parent))):
        out += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind-try", path, path]
    out += ["--dev-bind", os.devnull, os.devnull, "--bind", home, home, "--remount-ro", "/"]
    return [*out, "--chdir", home, *command]


def _verdict(end: int, home: Folder, limits: Limits) -> bytes:
    """What the checker says in time, while the folder stays small; else nothing."""
    deadline, poll = time.monotonic() + limits.wall_s, select.poll()
    poll.register(end, select.POLLIN)
    bounds = limits.folder_entries, limits.folder_size
    while time.monotonic() < deadline:
        ready = poll.poll(POLL_MS)
        if not home.is_within(*bounds):
            break
        if ready:
            return os.read(end, LONGEST)  # one write of a short line
    return b""


# --- guards ----------------------------------------------------------------------------------

TRIAL = """
def is_refused(path):
    try:
        open(path, "a")
    except OSError:
        return True
"""


@functools.cache
def find_guard() -> str | None:
    """The first guard that works here: under it a function runs, and cannot write outside."""
    for guard in (LANDLOCK, BUBBLEWRAP):
        with tempfile.NamedTemporaryFile() as outside:
            os.chmod(outside.name, 0o666)
            test = f"def check(f):\n    assert f({outside.name!r})"
            task = {"prompt": "", "test": test, "entry_point": "is_refused"}
            if run_task(task, TRIAL, guard).passed:
                return guard
    return None


def choose_guard(unsafe: bool) -> str | None:
    """A guard that works here, or with ``unsafe`` and a warning none.

    Raises:
      OptionError: there is none, and none was not asked for.
    """
    guard = find_guard()
    if guard is None and not unsafe:
        raise OptionError(
            "pass@k runs what the models write, and neither Landlock (Linux 5.13 or later) "
            "nor bubblewrap confines it here: install bubblewrap, or add --unsafe on a machine "
            "you can lose"
        )
    if guard is None:
        say("infer.bench", "--unsafe: what the models write can read and change your files")
    return guard


# --- tasks -----------------------------------------------------------------------------------


def humaneval_program(task: Mapping[str, Any], completion: str) -> str:
    """The function that a completion of a HumanEval prompt makes, up to the task's own stops."""
    own = task.get("stop")
    stops = map(str, own) if isinstance(own, list) else HUMANEVAL_STOPS
    ends = [at for at in (completion.find(stop) for stop in stops) if at >= 0]
    return f"{task['prompt']}{completion[: min(ends)] if ends else completion}\n"


def passing(
    tasks: Sequence[Mapping[str, Any]], programs: Sequence[str], guard: str | None
) -> list[bool]:
    """Which of the tasks pass their test with their program."""
    outcomes = [
        run_task(task, program, guard) for task, program in zip(tasks, programs, strict=True)
    ]
    if unjudged := [outcome.unjudged for outcome in outcomes if outcome.unjudged]:
        counted = f"pass@k counts {len(unjudged)} of {len(outcomes)} as failed that it cannot"
        say("infer.bench", f"{counted} judge: {', '.join(sorted(set(unjudged)))}")
    return [outcome.passed for outcome in outcomes]


def check_tasks(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Refuses prompts that are no tasks of HumanEval's format.

    Raises:
      OptionError: names the prompt and the field it lacks.
    """
    for number, task in enumerate(tasks, 1):
        for field in ("prompt", "test", "entry_point"):
            if not isinstance(task.get(field), str):
                raise OptionError(
                    f"pass@k: prompt {number} has no text under {field!r}; "
                    "HumanEval's format has prompt, test, entry_point"
                )
        if not task["entry_point"].isidentifier():
            raise OptionError(
                f"pass@k: prompt {number}: entry_point {task['entry_point']!r} is no name"
            )
