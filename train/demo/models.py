"""Trains the embedded models one after the other, with the configs of their programs.

python -m train.demo.models DIR [--rows N] [--corpora NAME ...] [--scale F]

These are the target, its draft model in two stages, demo-sdsat and demo-head. The last three also
train on text that the target writes. DIR keeps everything. Finished stages are kept and stopped
ones are resumed, so repeat the same command until all models are there. A signal saves and stops.
"""

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax._util.errors import InputError
from specjax._util.program import Parser, run, say, start

NAME = "train.demo.models"
ROOT = Path(__file__).parents[2]
STEP_ROWS = 16  # rows of 512 tokens in a step; the head has its own number
FUNCTIONS = 5000  # that the target continues


class Stage(NamedTuple):
    """A run of a program.

    Attributes:
      command: what follows ``python -m``.
      product: a file that exists once the run has finished.
      begun: a file that exists once the run has begun, and then needs ``--resume``.
    """

    command: list[str]
    product: Path
    begun: Path | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the models are made, from which corpora, and the share of the full steps.

    Attributes:
      rows: of a micro-batch; they divide STEP_ROWS, the rows of a step.
      scale: the share of every stage's steps, above 0 and up to 1.

    Raises:
      InputError: ``rows`` or ``scale`` is out of range.
    """

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
    def heads(self) -> Path:
        """The heads of functions that the target continues."""
        return self.home / "heads.jsonl"

    @property
    def written(self) -> Path:
        """The text that the target writes."""
        return self.home / "continuations.jsonl"

    def export(self, name: str) -> str:
        """The directory of the model that a stage exports."""
        return str(self.home / name / "export")

    def stages(self) -> list[Stage]:
        """The stages that make the models, in order."""
        step = {"optim.batch_size": self.rows, "optim.accumulate": STEP_ROWS // self.rows}
        lm = step | {"tokenizer.path": str(ROOT / "specjax" / "demo" / "tokenizer.json")}
        distilled = lm | {"distill.teacher": self.export("target")}
        corpora = {"data.corpora": self.corpora, "data.shards": str(self.home / "tokens")}
        # Separate shards, because the two programs have different document layouts.
        draft_2_mix = self._mixed_corpus("draft_2_tokens")
        sdsat_mix = self._mixed_corpus("sdsat_tokens")
        written = {"data.files": [str(self.written)]}
        from_target = {"model.init_from": self.export("target")}
        from_draft_1 = {"model.init_from": self.export("draft_1")}
        draft_2 = distilled | draft_2_mix | from_draft_1
        sdsat = step | sdsat_mix | from_target
        return [
            self._training("target", "train.lm", "demo_target", 3200, lm | corpora),
            self._training("draft_1", "train.lm", "demo_draft_1", 1000, distilled | corpora),
            self._heads(),
            self._continuations(),
            self._training("draft_2", "train.lm", "demo_draft_2", 2000, draft_2),
            self._training("sdsat", "train.sdsat", "sdsat_demo", 370, sdsat),
            self._training("head", "train.head", "head_demo", 1600, written | from_target),
        ]

    def _mixed_corpus(self, shards: str) -> dict[str, Any]:
        """A corpus of which half of the rows are the target's own text."""
        return {
            "data.corpora": self.corpora,
            "data.files": [str(self.written)],
            "data.weights": [*[1] * len(self.corpora), len(self.corpora)],
            "data.shards": str(self.home / shards),
        }

    def _training(
        self, name: str, program: str, config: str, steps: int, settings: dict[str, Any]
    ) -> Stage:
        """A stage that trains a model, with its config's settings replaced."""
        run_dir = self.home / name
        steps = max(2, round(steps * self.scale))
        settings = settings | {"optim.total_steps": steps, "run.dir": str(run_dir)}
        command = [program, str(ROOT / "configs" / f"{config}.toml")]
        for key, value in settings.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        return Stage(command, run_dir / "export" / "card.json", run_dir / "metrics.jsonl")

    def _heads(self) -> Stage:
        count = max(32, round(FUNCTIONS * self.scale))
        return Stage(["train.demo.heads", str(self.heads), "--num", str(count)], self.heads)

    def _continuations(self) -> Stage:
        template = str(ROOT / "configs" / "plain.jinja")
        options = ["--target", self.export("target"), "--chat-template", template]
        drawn = ["--max-new-tokens", "96", "--temperature", "0=3,1=1"]
        command = ["train.answers", str(self.heads), str(self.written), *options, *drawn]
        return Stage(command, self.written)


def work(args: argparse.Namespace) -> int:
    plan = Plan(Path(args.dir), args.rows, tuple(args.corpora), args.scale)
    for stage in plan.stages():
        if stage.product.exists():
            continue
        resume = ["--resume"] if stage.begun and stage.begun.exists() else []
        say(NAME, " ".join(["python -m", *stage.command[:2], *resume]))
        code = call([sys.executable, "-m", *stage.command, *resume])
        if code > 0:  # the program has printed the reason
            return code
        if code < 0:  # ended by a signal: 128 + its number, as a shell reports it
            say(NAME, "stopped; the same command goes on")
            return 128 - code
        if not stage.product.exists():  # saved and stopped
            say(NAME, "stopped; the same command goes on")
            return 0
    print(f"all models are in {plan.home}")
    return 0


def call(command: list[str]) -> int:
    """Runs a command and returns its exit code; the command handles signals."""
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to both
        return process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(NAME, __doc__)
    parser.add_argument("dir", metavar="DIR")
    parser.add_argument(
        "--rows",
        type=int,
        default=2,
        metavar="N",
        help="rows of 512 tokens in a micro-batch: 2 for a CPU, 16 for a GPU (default 2)",
    )
    parser.add_argument(
        "--corpora",
        nargs="+",
        default=["stdlib", "installed"],
        metavar="NAME",
        help="corpora to train on, as data.corpora (default: stdlib installed)",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="F",
        help="share of every stage's steps (default 1); a small one for a trial",
    )
    return run(NAME, f"{__name__}:work", parser.parse_args(argv))


if __name__ == "__main__":
    start(main)
