"""Hostile command lines for every program, and a run of a program inside the test's process.

A program must end with a documented exit code. If it refuses, it says so in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from specjax._util.program import Parser

ROOT = Path(__file__).parents[2]
# What no path, name, number or list of numbers may be. Programs may accept some as a text.
VALUES = {
    "empty": "",
    "NUL": "a\0b",
    "a surrogate": "\udcc3x",
    "two lines": "a\nb",
    "an unknown user": "~nosuchuser",
    "below an unknown user": "~nosuchuser/x",
    "a long name": "n" * 5000,
    "a long path": "d/" * 3000,
    "below a file": "{home}/prompts.jsonl/x",
    "a loop": "{home}/loop",
    "a FIFO": "{home}/fifo",
    "a device": "/dev/full",
    "a directory": "{home}/directory",
    "a huge number": "9" * 5000,
    "below zero": "-1",
    "not a number": "nan",
    "infinite": "inf",
    "a huge range": "gamma=1..999999999",
    "a long list": "1," * 2000 + "1",
    "other letters": "é",
}
EXIT_CODES = {0, 1, 2, 3}
# Options whose empty value has a meaning.
MAY_BE_EMPTY = {"--prefix", "--suffix"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and arguments with which it does little; ``{home}`` is replaced in them."""

    module: str
    arguments: tuple[str, ...]
    places: tuple[str, ...] = ()  # arguments without an option, which come last
    progress: str = ""  # a line on stderr that says what has begun

    def main(self) -> Callable[[Sequence[str]], int]:
        return importlib.import_module(self.module).main


MODELS = ("--target={home}/0", "--draft={home}/1")
SHORT = (*MODELS, "--max-new-tokens=1")
TRAINING = (
    *("--set=data.corpora=[]", "--set=data.files=['{home}/text.jsonl']", "--set=data.seq_len=32"),
    *("--set=optim.total_steps=1", "--set=optim.batch_size=1", "--set=run.dir='made'"),
    "--set=run.eval_batches=1",
)
TUNED = (*TRAINING, "--set=model.init_from='{home}/0'")
# infer.bench and infer.tune measure for seconds, so their prompts are missing: that is found last.
PROGRAMS = {
    "infer.run": Program("infer.run.commands", (*SHORT, "--prompt=a", "--json")),
    "infer.bench": Program(
        "infer.bench.commands",
        (
            *(*SHORT, "--prompts={home}/none.jsonl", "--methods=autoregressive"),
            *("--greedy-only", "--repeats=1", "--num-prompts=1", "--batch-size=1"),
        ),
    ),
    "infer.tune": Program(
        "infer.tune.commands",
        (*SHORT, "--method=mtad", "--grid=tau=0.5", "--out=made"),
        ("{home}/none.jsonl",),
    ),
    "infer.serve": Program("infer.serve.commands", (*MODELS, "--port=0")),
    "infer.convert": Program("infer.convert", ("--quantize=int8", "--out=made"), ("{home}/0",)),
    "infer.code_task": Program("infer.code_task", ("--test=2", "--validation=2"), ("made",)),
    "train.lm": Program("train.lm.__main__", TRAINING, ("configs/tiny.toml",)),
    "train.sdsat": Program("train.sdsat.__main__", TUNED, ("configs/sdsat_tiny.toml",)),
    "train.head": Program(
        "train.head.__main__",
        (*TUNED, "--set=head.draft_vocab=0", "--set=head.layers=[0, 1, 1]"),
        ("configs/head_demo.toml",),
    ),
    "train.tokens": Program(
        "train.tokens",
        (
            *(*TRAINING, "--set=data.shards='made'", "--processes=1"),
            "--set=tokenizer.path='{home}/0/tokenizer.json'",
        ),
        ("configs/tiny.toml",),
    ),
    "train.states": Program(
        "train.states",
        (
            *(*TUNED, "--set=head.draft_vocab=0", "--set=head.layers=[0, 1, 1]"),
            "--set=head.states='made'",
        ),
        ("configs/head_demo.toml",),
    ),
    "train.answers": Program(
        "train.answers.__main__",
        (
            "--target={home}/0",
            "--max-new-tokens=1",
            "--own=1",
            f"--chat-template={ROOT}/configs/plain.jinja",
        ),
        ("made",),
    ),
    "train.ablation": Program(
        "train.ablation",
        (*TUNED, "--only=none"),
        ("configs/sdsat_tiny.toml",),
        progress="train.ablation: none\n",
    ),
}
# They make the embedded models. Their tests replace the corpus, and the programs that train.
DEMO_PROGRAMS = {
    "train.demo.signatures": Program("train.demo.signatures", ("--num=1",), ("made",)),
    "train.demo.heldout": Program("train.demo.heldout", (), ("made",)),
}
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class End:
    """How a program ended: its exit code, or what it raised, and what it wrote."""

    code: int | None
    raised: str
    err: str
    made: tuple[str, ...]

    def fault(self) -> str | None:
        """What is wrong with the end; None if nothing is."""
        if self.raised or self.code not in EXIT_CODES:
            return f"ended with {self.code} {self.raised}"
        if "Traceback" in self.err or "panicked" in self.err:
            return "printed a traceback"
        if self.code == 2 and len(self.err.splitlines()) != 1:
            return f"{len(self.err.splitlines())} lines on stderr"
        return None


class _Parser(BaseException):
    """Carries a program's parser out of its ``main``."""


def options(program: Program) -> list[str]:
    """The options of a program that take a value, from its own parser."""

    def caught(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Parser(self)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(_Parser) as found:
        patched.setattr(Parser, "parse_args", caught)
        program.main()([])
    actions = found.value.args[0]._actions
    return [
        action.option_strings[0]
        for action in actions
        if action.option_strings and action.nargs != 0
    ]


def furnish(home: Path) -> None:
    """Adds what command lines name to a directory that has the models ``0`` and ``1``."""
    lines = [{"prompt": text, "constraints": ["x"]} for text in ("def f(x):", "import ")]
    (home / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [{"text": f"def f{number}(x):\n    return x + {number}\n" * 9} for number in range(99)]
    (home / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    (home / "loop").symlink_to("loop")
    os.mkfifo(home / "fifo")
    (home / "directory").mkdir()


def run(
    program: Program,
    home: Path,
    read_err: Callable[[], str],
    changed: Sequence[str] = (),
    places: Sequence[str] = (),
) -> End:
    """Runs a program in a fresh working directory.

    Args:
      home: what :func:`furnish` has filled.
      read_err: gives what was written to stderr since its last call.
      changed: arguments after the program's own.
      places: arguments instead of the program's own without an option.
    """
    read_err()
    places = places or program.places
    given = [*program.arguments, *changed, *(("--", *places) if places else ())]
    argv = [argument.replace("{home}", str(home)) for argument in given]
    argv = [str(ROOT / word) if word.startswith("configs/") else word for word in argv]
    code: int | None = None
    raised = ""
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        try:
            code = program.main()(argv)
        except SystemExit as stop:
            code = stop.code
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"[:200]
        made = tuple(sorted(set(os.listdir(".")) - {"made", "cache"}))
    return End(code, raised, read_err().removeprefix(program.progress), made)
