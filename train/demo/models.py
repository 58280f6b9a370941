"""Trains the embedded models, one after the other, by the configs of their programs.

python -m train.demo.models DIR [--rows N] [--corpora NAME ...] [--scale F]

The target, its draft in two stages, demo-sdsat and demo-head, the last three on what the target
writes itself, too. DIR keeps everything. What is finished is not made again and what was stopped
goes on, so the same command runs until all of them are there; a signal saves and stops.
"""

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from specjax._util.errors import InputError
from specjax._util.program import Parser, run, say, start

NAME = "train.demo.models"
ROOT = Path(__file__).parents[2]
STEP_ROWS = 16  # of 512 tokens, in a step of every stage but the head's
FUNCTIONS = 5000  # that the target continues


class Stage(NamedTuple):
    """A run of a program; ``product`` is there once it has finished."""

    command: list[str]  # what follows ``python -m``
    product: Path
    begun: Path | None = None  # where it is there, the run can only be gone on with


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the models are made, of what, and in how many steps against the full ones."""

    home: Path
    rows: int
    corpora: tuple[str, ...]
    scale: float

    def __post_init__(self):
        if self.rows < 1 or STEP_ROWS % self.rows:
            raise InputError(f"--rows {self.rows}: expected 1, 2, 4, 8 or 16")
        if not 0 < self.scale <= 1:
            raise InputError(f"--scale {self.scale}: expected more than 0, at most 1")

    @property
    def written(self) -> Path:
        """What the target writes itself."""
        return self.home / "continuations.jsonl"

    def export(self, name: str) -> str:
        """The directory of a model that a stage has made."""
        return str(self.home / name / "export")

    def stages(self) -> list[Stage]:
        """What makes the models, in order."""
        step = {"optim.batch_size": self.rows, "optim.accumulate": STEP_ROWS // self.rows}
        own = step | {"tokenizer.path": str(ROOT / "specjax" / "demo" / "tokenizer.json")}
        people = {"data.corpora": self.corpora, "data.shards": str(self.home / "tokens")}
        # Shards of each, for the programs lay documents out differently.
        mixed = [self._mixed(f"{name}_tokens") for name in ("draft_2", "sdsat")]
        alone = {"data.files": [str(self.written)]}
        taught = own | {"distill.teacher": self.export("target")}
        tuned = {"model.init_from": self.export("target")}
        onward = {"model.init_from": self.export("draft_1")}
        return [
            self._trained("target", "train.lm", "demo_target", 3200, own | people),
            self._trained("draft_1", "train.lm", "demo_draft_1", 1000, taught | people),
            self._continuations(),
            self._trained("draft_2", "train.lm", "demo_draft_2", 2000, taught | mixed[0] | onward),
            self._trained("sdsat", "train.sdsat", "sdsat_demo", 370, step | mixed[1] | tuned),
            self._trained("head", "train.head", "head_demo", 1600, alone | tuned),
        ]

    def _mixed(self, shards: str) -> dict[str, Any]:
        """A corpus half of whose rows are the target's own text."""
        return {
            "data.corpora": self.corpora,
            "data.files": [str(self.written)],
            "data.weights": [*[1] * len(self.corpora), len(self.corpora)],
            "data.shards": str(self.home / shards),
        }

    def _trained(
        self, name: str, program: str, config: str, steps: int, settings: dict[str, Any]
    ) -> Stage:
        made = self.home / name
        steps = max(2, round(steps * self.scale))
        settings = settings | {"optim.total_steps": steps, "run.dir": str(made)}
        sets = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        words = [word for one in sets for word in ("--set", one)]
        command = [program, str(ROOT / "configs" / f"{config}.toml"), *words]
        return Stage(command, made / "export" / "card.json", made / "metrics.jsonl")

    def _continuations(self) -> Stage:
        count = max(32, round(FUNCTIONS * self.scale))
        options = ["--target", self.export("target"), "--num", str(count)]
        return Stage(["train.demo.continuations", str(self.written), *options], self.written)


def work(args: argparse.Namespace) -> int:
    plan = Plan(args.dir, args.rows, tuple(args.corpora), args.scale)
    for stage in plan.stages():
        if stage.product.exists():
            continue
        again = ["--resume"] * bool(stage.begun and stage.begun.exists())
        say(NAME, " ".join(["python -m", *stage.command[:2], *again]))
        code = call([sys.executable, "-m", *stage.command, *again])
        if code > 0:  # it has said why
            return code
        if code or not stage.product.exists():
            say(NAME, "stopped; the same command goes on")
            return 128 - code if code else 0  # as a shell says that a signal ended it
    print(f"all models are in {plan.home}")
    return 0


def call(command: list[str]) -> int:
    """Runs it and returns its exit code; signals are its own to answer."""
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to both
        return process.wait()


def main() -> int:
    parser = Parser(NAME, __doc__)
    parser.add_argument("dir", type=Path, metavar="DIR")
    said = "of 512 tokens at once: 2 for a processor, 16 for a GPU (default 2)"
    parser.add_argument("--rows", type=int, default=2, metavar="N", help=said)
    said = "to learn from, as data.corpora (default: stdlib installed)"
    names = ["stdlib", "installed"]
    parser.add_argument("--corpora", nargs="+", default=names, metavar="NAME", help=said)
    said = "share of every stage's steps (default 1), to try the way"
    parser.add_argument("--scale", type=float, default=1.0, metavar="F", help=said)
    return run(NAME, f"{__name__}:work", parser.parse_args())


if __name__ == "__main__":
    start(main)
