"""Kills and stops processes that share a model in infer.run, in every phase of a job.

python docs/tools/measure_host_kills.py [--times 20] [--phases loading,decoding] [--signals KILL]

Two processes decode one file of prompts with the demo's target, split over both. In each run one
of them or both get a signal at a random moment of a phase: process 0, process 1 and both in turn.
Then all must end within 30 seconds, with a documented exit code, and every line of the file but the
last must be a row, each of another prompt. The next run goes on with that file. A run that ends
before its signal does not count, and starts over. At last the job may finish. Its rows must be
those of a job without signals.

The table has exit codes with how often each came, by the process with a signal and the other one. A
negative one is the signal that ended the process.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULE = "infer.run"
PROMPTS = 24
NEVER = "never"
# The function whose call begins a phase, the most calls before the signal, and the seconds within
# which it comes then. Of an ending, the call's end begins it.
PLACES = {
    "meeting": ("specjax._util.meeting:Meeting.wait", 1, 0.5),
    "loading": ("infer.run.job:load_models", 1, 0.5),
    "compiling": ("infer.run.job:Job._decode", 1, 1.0),
    "decoding": ("specjax.runtime.runner:BatchRunner.run_rounds", 8, 0.1),
    "writing": ("infer.run.job:row_object", 6, 0.01),
    "ending": ("infer.run.job:_decode_file", 1, 0.3),
}
WHO = ((0,), (1,), (0, 1))  # which processes get the signal
MEETING_SECONDS = 15  # that a process waits for one that was killed before it came
LONGEST = 30.0  # seconds between a signal and the end of the last process
# Exit codes: ended, failed (another one has died), not all came, terminated; and JAX's abort.
DOCUMENTED = {0, 1, 2, 143, -signal.SIGABRT}


@dataclasses.dataclass
class SignalCounts:
    """What the runs of one phase and signal ended with."""

    times: int = 0
    signaled: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    others: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    longest: float = 0.0


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return run_until_signal(*sys.argv[2:6], sys.argv[6:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="runs of each phase and signal")
    parser.add_argument("--phases", default=",".join(PLACES))
    parser.add_argument("--signals", default="KILL,TERM")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    print("| phase | signal | runs | signaled | other | longest s |")
    print("| --- | --- | ---: | --- | --- | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as home:
        job = SharedJob(Path(home))
        for phase in args.phases.split(","):
            for name in args.signals.split(","):
                counts = measure(job, phase, name, args.times, rng)
                cells = [phase, f"SIG{name}", str(counts.times), codes(counts.signaled)]
                cells += [codes(counts.others), f"{counts.longest:.1f}"]
                print(f"| {' | '.join(cells)} |", flush=True)
        same = job.finish()
    print(f"rows equal to those of a job without signals: {same}")
    return int(not same)


def codes(counter: collections.Counter[int]) -> str:
    return ", ".join(f"{code}: {count}" for code, count in sorted(counter.items())) or "none"


def measure(job: SharedJob, phase: str, name: str, times: int, rng: random.Random) -> SignalCounts:
    """Runs with signals of one phase.

    Raises:
      RuntimeError: a process hung or ended with another code, or the file is not whole.
    """
    counts = SignalCounts()
    while counts.times < times:
        chosen = WHO[counts.times % len(WHO)]
        signals = {index: (phase, name, rng.random()) for index in chosen}
        ended = job.run(signals)
        if not ended.signaled:  # it was done before
            job.out.unlink(missing_ok=True)
            continue
        job.check_file()
        number = getattr(signal, f"SIG{name}")
        for index, code in enumerate(ended.codes):
            if code not in DOCUMENTED | ({-number} if index in ended.signaled else set()):
                raise RuntimeError(f"{phase}, SIG{name} to {chosen}: {code}\n{ended.said[index]}")
            (counts.signaled if index in ended.signaled else counts.others)[code] += 1
        counts.times += 1
        counts.longest = max(counts.longest, ended.seconds)
    return counts


@dataclasses.dataclass
class JobEnd:
    """How both processes ended.

    Attributes:
      signaled: those that got their signal.
      seconds: from the first signal to the end of the last process.
    """

    codes: list[int]
    said: list[str]
    signaled: set[int]
    seconds: float


class SharedJob:
    """A job of two processes; files are in ``home``."""

    def __init__(self, home: Path):
        self._home = home
        self.out = home / "out.jsonl"
        prompts = [{"prompt": f"def f{i}(x, y):\n    "} for i in range(PROMPTS)]
        (home / "in.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        self._words = ["--target", str(home / "demo-8"), "--prompts", str(home / "in.jsonl")]
        self._words += ["--max-new-tokens", "24", "--batch-size", "2", "--dtype", "float32"]
        model = ["demo", "--heads", "8", "--out", str(home / "demo-8")]
        self._plain("infer.convert", *model)
        self._plain(MODULE, *self._words, "--out", str(home / "whole.jsonl"))

    def _plain(self, module: str, *words: str) -> None:
        command = [sys.executable, "-m", module, *words]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)

    def run(self, signals: dict[int, tuple[str, str, float]]) -> JobEnd:
        """Runs both processes; those in ``signals`` get one: phase, name, and a moment in 0 to 1.

        Raises:
          RuntimeError: a process goes on for too long after a signal.
        """
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        both = []
        for index in range(2):
            told = self._home / f"signal-{index}"
            told.unlink(missing_ok=True)
            phase, name, moment = signals.get(index, (NEVER, "KILL", 0.0))
            place = ["--distributed", f"localhost:{port},2,{index}", "--mesh", "model=2"]
            place += ["--meeting-timeout", str(MEETING_SECONDS), "--out", str(self.out)]
            child = [sys.executable, __file__, "--child", phase, name, str(moment), str(told)]
            both.append(
                subprocess.Popen(
                    [*child, *self._words, *place],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return self._wait(both)

    def _wait(self, both: Sequence[subprocess.Popen]) -> JobEnd:
        said = ["", ""]

        def read(index: int) -> None:
            said[index] = both[index].stderr.read()

        readers = [threading.Thread(target=read, args=(index,)) for index in range(2)]
        for reader in readers:
            reader.start()
        while any(process.poll() is None for process in both):
            moments = self._moments()
            if moments and time.time() - min(moments.values()) > LONGEST:
                for process in both:
                    process.kill()
                raise RuntimeError(f"{moments}: a process hangs")
            time.sleep(0.02)
        ended = time.time()
        for reader in readers:
            reader.join()
        moments = self._moments()
        seconds = ended - min(moments.values(), default=ended)
        return JobEnd([process.returncode for process in both], said, set(moments), seconds)

    def _moments(self) -> dict[int, float]:
        """When each process got its signal."""
        found = {}
        for index in range(2):
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[index] = float((self._home / f"signal-{index}").read_text())
        return found

    def check_file(self) -> None:
        """Every line but an unfinished last one is a row, and no row is there twice.

        Raises:
          ValueError: a line is no row.
          RuntimeError: a row is there twice.
        """
        if not self.out.exists():
            return
        *whole, _ = self.out.read_bytes().split(b"\n")
        rows = [json.loads(line)["index"] for line in whole]
        if len(set(rows)) < len(rows):
            raise RuntimeError(f"rows twice: {sorted(rows)}")

    def finish(self) -> bool:
        """Ends the job without signals; returns whether its rows are a plain job's."""
        ended = self.run({})
        if ended.codes != [0, 0]:
            raise RuntimeError(ended.said)
        return answers(self.out) == answers(self._home / "whole.jsonl")


def answers(path: Path) -> dict[int, Any]:
    rows = map(json.loads, path.read_bytes().splitlines())
    return {row["index"]: (row["text"], row["token_ids"]) for row in rows}


def run_until_signal(phase: str, name: str, moment: str, told: str, words: Sequence[str]) -> int:
    """Runs the program in this process, which sends itself a signal in a phase.

    Args:
      told: a file that gets the time before the signal.
    """
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if phase != NEVER:
        place, most_calls, seconds = PLACES[phase]
        rng = random.Random(moment)
        call = rng.randint(1, most_calls)
        module, _, path = place.partition(":")
        *owners, last = path.split(".")
        owner = pkgutil.resolve_name(module)
        for part in owners:
            owner = getattr(owner, part)

        def send() -> None:
            Path(told).write_text(repr(time.time()))
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

        timer = threading.Timer(rng.random() * seconds, send)
        timer.daemon = True
        after = phase == "ending"
        setattr(owner, last, beginning(getattr(owner, last), call, timer.start, after))
    program = pkgutil.resolve_name("infer.run.commands:main")
    start = pkgutil.resolve_name("specjax._util.program:start")
    return start(lambda: program(list(words)))


def beginning(function: Callable, call: int, begin: Callable[[], None], after: bool) -> Callable:
    """The function, which calls ``begin`` at call number ``call``: before it, or after it."""
    calls = []

    def called(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call and not after:
            begin()
        result = function(*args, **options)
        if len(calls) == call and after:
            begin()
        return result

    return called


if __name__ == "__main__":
    raise SystemExit(main())
