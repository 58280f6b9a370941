"""What a metric gets and gives."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from infer.uncertainty import Estimate, ratio
from specjax._util.errors import OptionError

Task = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt; ``task`` is the prompt's object in its file."""

    prompt: str
    text: str
    tokens: Sequence[int] = ()
    references: Sequence[str] = ()
    task: Task = dataclasses.field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The first one."""
        return self.references[0]


# A prompt's completions, one per seed: greedy decoding has one.
Drawn = Sequence[Completion]


class Metric(Protocol):
    """``columns`` are what it adds to the report: heads by the keys of a row."""

    columns: Mapping[str, str]

    def check(self, prompts: Sequence[Completion]) -> None:
        """Refuses what it cannot measure, before anything is decoded; the texts are empty.

        Raises:
          OptionError: names the metric, what is missing and the way out.
        """

    def measure(self, drawn: Sequence[Drawn]) -> Mapping[str, Estimate]:
        """The figure of each column, with its ±, of every prompt's completions."""


class PerCompletion:
    """A metric that is the mean of the completions' scores; ± as everywhere, over the prompts."""

    columns: Mapping[str, str]

    def check(self, prompts: Sequence[Completion]) -> None:
        """Takes any prompt."""

    def scores(self, done: Sequence[Completion]) -> Sequence[Sequence[float | None]]:
        """Each completion's score in each column; None where it has none."""
        raise NotImplementedError

    def measure(self, drawn: Sequence[Drawn]) -> dict[str, Estimate]:
        scores = iter(self.scores([one for prompt in drawn for one in prompt]))
        # A row per completion, NaN where it has no score: P arrays ``[seeds, columns]``.
        rows = [np.array([next(scores) for _ in prompt], np.float64) for prompt in drawn]
        sums = np.array([np.nansum(row, axis=0) for row in rows])
        counts = np.array([np.isfinite(row).sum(axis=0) for row in rows])
        keys = enumerate(self.columns)
        return {key: ratio(sums[:, i], counts[:, i]) for i, key in keys}


def library(module: str, metric: str, extra: str = "eval") -> ModuleType:
    """A module that a metric needs.

    Raises:
      OptionError: it is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise OptionError(
            f"--metric {metric} needs {package}: pip install 'specjax[{extra}]'"
        ) from None


def need_references(metric: str, prompts: Sequence[Completion], what: str = "references") -> None:
    """Refuses prompts that have none.

    Raises:
      OptionError: names the first one.
    """
    for number, prompt in enumerate(prompts, 1):
        if not prompt.references:
            raise OptionError(
                f'--metric {metric}: prompt {number} has no {what}: give it "references"'
            )
