"""The best evaluation of a run so far: what ``run.keep_best`` keeps and ``run.patience`` counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax._util import processes
from specjax._util.errors import InputError
from train.config import Run

ACCEPTED = "decode_tokens_per_round"  # the figure of ``run.keep_best = "accepted"``
# Keys of any section that the figure depends on, besides those that a resumed run may not change.
DECODING = ("decode_prompts", "decode_tokens", "decode_length", "probe_length")


@dataclasses.dataclass
class Best:
    """The best evaluation so far.

    Attributes:
      by: what it is the best by, as ``run.keep_best`` names it; empty: nothing is kept.
      batches: held-out batches of an evaluation. Figures of other samples are not compared.
      decoding: the settings of evaluations that decode, if what is compared depends on them.
      step: of the best evaluation; None before the first one.
      value: what is compared; the lowest is the best.
      valid_loss, valid_extras: figures of the best evaluation.
      worse: evaluations since then.
    """

    by: str
    batches: int
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: int | None = None
    value: float = 0.0
    valid_loss: float | None = None
    valid_extras: dict[str, Any] = dataclasses.field(default_factory=dict)
    worse: int = 0

    @classmethod
    def first(cls, by: str, batches: int, recipe: dict[str, Any] | None) -> Best:
        """That of a run without an evaluation so far.

        Args:
          recipe: the run's config, section by section; None: it has no settings of decoding.
        """
        if by != "accepted" or recipe is None:
            return cls(by, batches)
        decoding = {
            f"{section}.{key}": value
            for section, values in recipe.items()
            for key, value in values.items()
            if key in DECODING
        }
        return cls(by, batches, decoding)

    def resumed(self, note: dict[str, Any] | None) -> Best:
        """As a checkpoint's note stores it; this one if the note compares something else."""
        if note is None:
            return self
        # Notes of older checkpoints lack settings; they are not compared.
        kept = Best(**{"decoding": self.decoding} | note)
        same = (kept.by, kept.batches, kept.decoding) == (self.by, self.batches, self.decoding)
        return kept if same else self

    def update(self, step: int, loss: float, extras: dict[str, Any]) -> bool:
        """Counts an evaluation; returns whether it is the best one, so that it must be saved.

        All processes call this, and get the same answer.
        """
        if not self.by:
            return False
        value = -extras[ACCEPTED] if self.by == "accepted" else loss
        # Each process has decoded by itself. They must agree, because all of them save.
        value = float(processes.broadcast_from_main(np.asarray(value)))
        if self.step is not None and value >= self.value:
            self.worse += 1
            return False
        self.step = step
        self.value = value
        self.valid_loss = loss
        self.valid_extras = extras
        self.worse = 0
        return True

    def is_out_of_patience(self, run: Run) -> bool:
        """Whether ``run.patience`` evaluations have passed without a better one."""
        return 0 < run.patience <= self.worse


def require_measured(run: Run, held_out: bool, decodes: bool) -> None:
    """Checks that a run evaluates what ``run.keep_best`` and ``run.patience`` need.

    Args:
      held_out: whether there are held-out rows to evaluate on.
      decodes: whether evaluations measure accepted lengths.

    Raises:
      InputError: they do not.
    """
    if run.patience and not run.keep_best:
        raise InputError(
            f"run.patience={run.patience} has no effect without run.keep_best: set it to "
            '"loss" or "accepted"'
        )
    if run.keep_best and not held_out:
        raise InputError(
            f'run.keep_best="{run.keep_best}" needs evaluations: set run.eval_batches, and see '
            "that the corpus has held-out documents"
        )
    if run.keep_best == "accepted" and not decodes:
        raise InputError(
            'run.keep_best="accepted" needs evaluations that decode: set decode_prompts above 0, '
            "and see that held-out documents are long enough for prompts"
        )
