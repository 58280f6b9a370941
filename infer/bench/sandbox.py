"""Whether a function that a model wrote passes its test, run in confined processes.

Two processes share a fresh folder. The worker runs what the model wrote. The checker runs the
task's test, and asks the worker for each value that the function returns. Only the checker can
write the verdict (``infer.bench.sandboxed``). Both are confined:

- Files. A guard, Landlock or else bubblewrap, allows writes only in the folder. It allows reads
  only of Python and the system's libraries. The folder is kept small, and removed afterwards.
- Rights (``infer.bench.confinement``). The processes have none of our environment and no
  capabilities, and run as nobody if we are root. They cannot start a process or thread. On x86-64
  and ARM64 they have no network and no signals, cannot change a file's mode, and create no object
  that outlives them. On other machines Landlock does not count as a guard.
- Size. CPU time, memory, files, answers and wall-clock time are limited.

What is not confined: names, sizes and dates of any file can be read. The folder can exceed its
bound until the next check. The kernel may have bugs. If we are killed, the folder stays. The task's
own test is trusted.

Only plain data can be judged: no objects of the function's own classes, no functions, no output.
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
LANDLOCK = "landlock"
BUBBLEWRAP = "bubblewrap"
POLL_MS = 20  # between two checks of the folder's size
MAX_VERDICT = 4096  # bytes


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one process, and of the folder and the wall clock of both; seconds and bytes."""

    wall_s: float = 15.0
    cpu_s: int = 10
    memory: int = 1 << 30
    file_size: int = 1 << 20
    files: int = 32
    folder_size: int = 16 << 20
    folder_entries: int = 100


@dataclasses.dataclass(frozen=True)
class SandboxResult:
    """``passed``: the test ran to its end. ``unjudged``: why it could not be run to its end."""

    passed: bool = False
    unjudged: str = ""


def run_task(
    task: Mapping[str, Any], program: str, guard: str | None, limits: Limits | None = None
) -> SandboxResult:
    """Runs the test of a task in HumanEval's format on the function that ``program`` defines."""
    limits = limits or Limits()
    name = task["entry_point"]
    # Helpers before the function are the prompt's, not the model's: the test may call them itself.
    helpers = re.split(rf"^(?:async )?def {name}\b", task["prompt"], flags=re.M)[0]
    job = {"program": program, "helpers": helpers, "test": task["test"], "entry_point": name}
    with Folder() as folder:
        if os.geteuid() == 0 and guard != BUBBLEWRAP:
            os.chown(folder.path, NOBODY, NOBODY)
        return _judge(json.dumps(job).encode(), folder, guard, limits)


def _judge(job: bytes, folder: Folder, guard: str | None, limits: Limits) -> SandboxResult:
    """Starts worker and checker, and kills both at the end, whatever happens."""
    started = []
    try:
        worker = _start(folder.path, guard, limits, subprocess.PIPE)
        started.append(worker)
        # The end of the block closes our ends of the worker's pipes: only the checker keeps them.
        with worker.stdin, worker.stdout, tempfile.TemporaryFile() as checker_input:
            checker_input.write(job)
            checker_input.seek(0)
            pipes = {"calls": worker.stdin.fileno(), "answers": worker.stdout.fileno()}
            checker = _start(folder.path, guard, limits, checker_input, pipes)
            started.append(checker)
        with checker.stdout:
            verdict = _verdict(checker.stdout.fileno(), folder, limits)
        return SandboxResult(**json.loads(verdict)) if verdict else SandboxResult()
    finally:
        for process in started:
            process.kill()
            process.wait()


def _start(
    directory: str,
    guard: str | None,
    limits: Limits,
    stdin: Any,
    pipes: Mapping[str, int] | None = None,
) -> subprocess.Popen:
    """Starts a worker, or with ``pipes`` to the worker a checker."""
    pipes = pipes or {}
    config = {"limits": dataclasses.asdict(limits), "landlock": guard == LANDLOCK, **pipes}
    command = [sys.executable, "-I", "-B", str(CHILD), json.dumps(config)]
    if guard == BUBBLEWRAP:
        command = bubblewrapped(command, directory)
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd=directory,
        env={"OPENBLAS_NUM_THREADS": "1", "TMPDIR": directory},
        pass_fds=tuple(pipes.values()),
        start_new_session=True,
    )


def bubblewrapped(command: Sequence[str], directory: str) -> list[str]:
    """The command in its own namespaces, which can write only in ``directory``."""
    out = [str(shutil.which("bwrap")), "--unshare-all", "--unshare-user", "--die-with-parent"]
    out += ["--new-session", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    for path in dict.fromkeys((*READABLE, str(CHILD.parent))):
        bind = "--dev-bind" if path.startswith("/dev/") else "--ro-bind-try"
        out += [bind, path, path]
    out += ["--dev-bind", os.devnull, os.devnull]
    # The bind comes before the remount, which makes only the root read-only.
    out += ["--bind", directory, directory, "--remount-ro", "/"]
    return [*out, "--chdir", directory, *command]


def _verdict(fd: int, folder: Folder, limits: Limits) -> bytes:
    """What the checker writes in time, while the folder stays small; else nothing."""
    deadline = time.monotonic() + limits.wall_s
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while time.monotonic() < deadline:
        ready = poll.poll(POLL_MS)
        if not folder.is_within(limits.folder_entries, limits.folder_size):
            break
        if ready:
            return os.read(fd, MAX_VERDICT)  # the checker writes it at one go
    return b""


# --- guards ----------------------------------------------------------------------------------

# A program that passes its test only if it cannot write to a path.
TRIAL = """
def is_refused(path):
    try:
        open(path, "a")
    except OSError:
        return True
"""


@functools.cache
def find_guard() -> str | None:
    """The first guard that works here: a function runs under it, and cannot write outside."""
    for guard in (LANDLOCK, BUBBLEWRAP):
        with tempfile.NamedTemporaryFile() as outside:
            os.chmod(outside.name, 0o666)  # so that only the guard can refuse
            test = f"def check(f):\n    assert f({outside.name!r})"
            task = {"prompt": "", "test": test, "entry_point": "is_refused"}
            if run_task(task, TRIAL, guard).passed:
                return guard
    return None


def choose_guard(unsafe: bool) -> str | None:
    """A guard that works here; with ``unsafe``, None and a warning if there is none.

    Raises:
      OptionError: there is no guard, and no ``unsafe``.
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
    """The prompt with its completion, which is cut at the first of the task's stops."""
    stops = HUMANEVAL_STOPS
    if isinstance(task.get("stop"), list):
        stops = map(str, task["stop"])
    end = len(completion)
    for stop in stops:
        position = completion.find(stop)
        if position >= 0:
            end = min(end, position)
    return f"{task['prompt']}{completion[:end]}\n"


def passing(
    tasks: Sequence[Mapping[str, Any]], programs: Sequence[str], guard: str | None
) -> list[bool]:
    """Which of the tasks pass their test with their program."""
    results = []
    for task, program in zip(tasks, programs, strict=True):
        results.append(run_task(task, program, guard))
    reasons = [result.unjudged for result in results if result.unjudged]
    if reasons:
        say(
            "infer.bench",
            f"pass@k counts {len(reasons)} of {len(results)} as failed that it cannot judge: "
            f"{', '.join(sorted(set(reasons)))}",
        )
    return [result.passed for result in results]


def check_tasks(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Refuses prompts that are not tasks in HumanEval's format.

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
