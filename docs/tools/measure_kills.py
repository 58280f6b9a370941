"""Kills training programs at random moments, and compares their weights with undisturbed runs'.

python docs/tools/measure_kills.py [--kills 20] [--programs train.lm,train.answers] [--out FILE]

Each program trains a tiny model. It is killed with SIGKILL ``--kills`` times in all: anywhere, in
an evaluation, while it saves, and while it exports, in turn. After each kill it is resumed. A run
that ends before its kill does not count, and starts over. At last it may finish. Its weights and
its metrics, without times, must equal those of a run that was never killed.

``train.answers`` is killed at random moments while the demo's target continues texts. Its file must
have the same bytes. So must those of ``train.states``, which is killed amid one of its shards.
``train.tokens`` has its own measurement: ``measure_tokens.py --kills``.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PHASES = ("anywhere", "evaluation", "saving", "export")
# The function whose call begins a phase, and the seconds within which the kill comes then.
PLACES = {
    "anywhere": ("train.engine.loop:fit", 3.0),
    "evaluation": ("train.engine.loop:weighted_mean", 0.2),
    "saving": ("train.engine.checkpoints:Checkpoints.save", 0.1),
    "export": ("specjax.models.hf.write:save_tensors", 0.05),
    "shard": ("train.head.storing:save_tensors", 0.02),
}
ROOT = Path(__file__).parents[2]
COMMON = {
    "data.corpora": "[]",
    "data.files": '["specjax"]',
    "data.seq_len": "48",
    "optim.batch_size": "4",
    "optim.total_steps": "60",
    "run.log_every": "7",
    "run.eval_every": "10",
    "run.eval_batches": "2",
    "run.checkpoint_every": "4",
    "run.keep_best": '"loss"',
}
TUNED = {"model.init_from": "demo-draft"}
ANSWERS = "train.answers"
STATES = "train.states"
SHARD_BYTES = 1 << 18  # of states, so that there are many shards
NEVER = 1 << 30  # a call that never comes
ANSWERS_WRITTEN = 48  # by a run that is not killed
PROGRAMS = {
    "train.lm": ("configs/tiny.toml", {"tokenizer.path": "specjax/demo/tokenizer.json"}),
    "train.sdsat": (
        "configs/sdsat_tiny.toml",
        TUNED | {"sdsat.decode_prompts": "0", "model.train": '"gated-lora"'},
    ),
    "train.head": (
        "configs/head_demo.toml",
        TUNED
        | {
            "head.layers": "[0]",
            "head.draft_vocab": "128",
            "head.num_kv_heads": "1",
            "head.intermediate_size": "16",
            "head.steps": "2",
            "head.decode_prompts": "0",
            "optim.accumulate": "1",
        },
    ),
}


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        phase, call, seed, *words = sys.argv[2:]
        return run_until_killed(phase, call, seed, words)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--programs", default=",".join([*PROGRAMS, ANSWERS, STATES]))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = {}
    others = {ANSWERS: measure_answers, STATES: measure_states}
    for name in args.programs.split(","):
        with tempfile.TemporaryDirectory() as home:
            run = others.get(name, measure)
            report[name] = run(name, Path(home), args.kills)
        print(name, json.dumps(report[name]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    same = [value for row in report.values() for key, value in row.items() if "equal" in key]
    return int(not all(same))


def measure_answers(name: str, home: Path, kills: int) -> dict[str, Any]:
    """Kills of ``train.answers``, and whether its file equals that of an undisturbed run."""
    prompts = [{"prompt": f"def f{i}(x, y):\n    "} for i in range(ANSWERS_WRITTEN)]
    (home / "in.jsonl").write_text("\n".join(map(json.dumps, prompts)))

    def words(out: str) -> list[str]:
        options = ["--target", "demo", "--chat-template", "configs/plain.jinja"]
        options += ["--max-new-tokens", "24", "--batch-size", "4", "--temperature", "0=1,1=1"]
        return [sys.executable, "-m", name, str(home / "in.jsonl"), str(home / out), *options]

    subprocess.run(words("whole"), check=True, cwd=ROOT, capture_output=True)
    rng = random.Random(0)
    killed = 0
    runs = 0
    while killed < kills:
        runs += 1
        process = subprocess.Popen(words("broken"), cwd=ROOT, stderr=subprocess.DEVNULL)
        _wait_for_answers(home, process, rng.randint(0, 3), rng.random())
        process.kill()
        if process.wait() == -signal.SIGKILL:
            killed += 1
        else:  # it was done before
            (home / "broken").unlink(missing_ok=True)
    subprocess.run(words("broken"), check=True, cwd=ROOT, capture_output=True)
    same = (home / "whole").read_bytes() == (home / "broken").read_bytes()
    return {"kills": killed, "runs": runs, "bytes_equal": same}


def measure_states(name: str, home: Path, kills: int) -> dict[str, Any]:
    """Kills of ``train.states`` while it writes, and whether its files equal a whole run's."""

    def run(directory: str, call: int, seed: float) -> int:
        config, own = PROGRAMS["train.head"]
        stored = {"head.states": str(home / directory), "run.dir": str(home / "run")}
        words = [sys.executable, __file__, "--child", "shard", str(call), str(seed), name, config]
        for key, value in (COMMON | own | stored).items():
            words += ["--set", f"{key}={value}"]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, check=False)
        if ended.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(ended.stderr.decode())
        return ended.returncode

    def files(directory: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (home / directory).iterdir()}

    run("whole", NEVER, 0)
    rng = random.Random(0)
    killed = 0
    runs = 0
    while killed < kills:
        runs += 1
        if run("broken", 1, rng.random()):
            killed += 1
        else:
            shutil.rmtree(home / "broken")
    run("broken", NEVER, 0)
    return {"kills": killed, "runs": runs, "files": len(files("whole"))} | {
        "bytes_equal": files("whole") == files("broken")
    }


def _wait_for_answers(home: Path, process: subprocess.Popen, more: int, share: float) -> None:
    """Waits until ``more`` further lines are in the job's part, and for a share of 0.2 seconds."""

    def count() -> int:
        return sum(path.read_bytes().count(b"\n") for path in home.glob("broken.part-*"))

    wanted = count() + more
    while process.poll() is None and count() < wanted:
        time.sleep(0.01)
    time.sleep(0.2 * share)


def measure(name: str, home: Path, kills: int, **changes: str) -> dict[str, Any]:
    """Kills of each phase, and whether weights and metrics equal those of an undisturbed run.

    Args:
      name: the program.
      changes: settings by name, with ``__`` for the dot.
    """
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    whole = home / "whole" / "run"
    broken = home / "broken" / "run"
    subprocess.run(command(name, whole, settings), check=True, cwd=ROOT, capture_output=True)

    rng = random.Random(0)
    counts = dict.fromkeys(PHASES, 0)
    runs = 0
    while sum(counts.values()) < kills:
        phase = PHASES[sum(counts.values()) % len(PHASES)]
        call = rng.randint(1, 4) if phase in ("evaluation", "saving") else 1
        words = command(name, broken, settings)[2:]
        child = [sys.executable, __file__, "--child", phase, str(call), str(rng.random())]
        ended = subprocess.run([*child, *words], cwd=ROOT, capture_output=True, check=False)
        runs += 1
        if ended.returncode == -signal.SIGKILL:
            counts[phase] += 1
        elif ended.returncode:
            raise RuntimeError(ended.stderr.decode())
        else:
            shutil.rmtree(broken)
    subprocess.run(command(name, broken, settings), check=True, cwd=ROOT, capture_output=True)
    return {
        "kills": counts,
        "runs": runs,
        "weights_equal": weights(whole) == weights(broken),
        "metrics_equal": metrics(whole) == metrics(broken),
    }


def command(name: str, directory: Path, changes: dict[str, str]) -> list[str]:
    """The program's command; it resumes the run if there is one."""
    config, own = PROGRAMS[name]
    settings = COMMON | own | changes | {"run.dir": str(directory)}
    words = [sys.executable, "-m", name, config]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    if (directory / "metrics.jsonl").exists():
        words.append("--resume")
    return words


def weights(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("export/*.safetensors")}


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The run's records without times."""
    times = ("tokens_per_second", "seconds", "valid_seconds")
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in r.items() if not k.startswith(times)} for r in records]


def run_until_killed(phase: str, call: str, seed: str, words: Sequence[str]) -> int:
    """Runs a program in this process, which kills itself in a phase, at a random moment.

    Args:
      call: the number of the call of the phase's function that the kill comes after.
      words: the program's name, and its arguments.
    """
    place, seconds = PLACES[phase]
    delay = float(seed) * seconds
    module, _, name = place.partition(":")
    owner = pkgutil.resolve_name(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, killing(getattr(owner, last), int(call), delay))
    main_module = f"{words[0]}.__main__"
    if words[0] == STATES:
        pkgutil.resolve_name(module).SHARD_BYTES = SHARD_BYTES
        main_module = STATES
    program = pkgutil.resolve_name(f"{main_module}:main")
    return program(words[1:])


def killing(function: Callable, call: int, delay: float) -> Callable:
    """The function; ``delay`` seconds after call number ``call`` begins, the process dies."""
    calls = []

    def called(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return function(*args, **options)

    return called


if __name__ == "__main__":
    raise SystemExit(main())
