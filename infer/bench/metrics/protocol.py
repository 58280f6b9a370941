"""What a metric is given and returns.

Axis legend: P prompts, R runs (completions of a prompt, one per seed).
"""

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
    """What a model wrote after a prompt; ``task`` is the prompt's object in its file.

    ``ended``: whether it ends with an end of sequence.
    """

    prompt: str
    text: str
    tokens: Sequence[int] = ()
    references: Sequence[str] = ()
    task: Task = dataclasses.field(default_factory=dict)
    ended: bool = False

    @property
    def reference(self) -> str:
        """The first reference."""
        return self.references[0]


# A prompt's completions, one per seed; greedy decoding has one.
Completions = Sequence[Completion]


class Metric(Protocol):
    """A metric; ``columns`` maps the keys that it adds to a row to the heads in the report."""

    columns: Mapping[str, str]

    def check(self, prompts: Sequence[Completion]) -> None:
        """Refuses what it cannot measure, before anything is decoded; the texts are empty.

        Raises:
          OptionError: names the metric, what is missing and the way out.
        """

    def measure(self, by_prompt: Sequence[Completions]) -> Mapping[str, Estimate]:
        """The figure of each column with its ±, from the completions of every prompt."""


class PerCompletion:
    """A metric that is the mean of the completions' scores; its ± is over the prompts."""

    columns: Mapping[str, str]

    def check(self, prompts: Sequence[Completion]) -> None:
        """Accepts any prompt."""

    def scores(self, completions: Sequence[Completion]) -> Sequence[Sequence[float | None]]:
        """Each completion's score in each column; None if it has none."""
        raise NotImplementedError

    def measure(self, by_prompt: Sequence[Completions]) -> dict[str, Estimate]:
        flat = [completion for prompt in by_prompt for completion in prompt]
        scores = iter(self.scores(flat))
        sums = []
        counts = []
        for prompt in by_prompt:
            # [R, columns], NaN for a completion without a score.
            values = np.array([next(scores) for _ in prompt], np.float64)
            sums.append(np.nansum(values, axis=0))
            counts.append(np.isfinite(values).sum(axis=0))
        figures = zip(self.columns, np.array(sums).T, np.array(counts).T, strict=True)
        return {key: ratio(total, count) for key, total, count in figures}


def library(module: str, metric: str, extra: str = "eval") -> ModuleType:
    """Imports a module that a metric needs.

    Raises:
      OptionError: it is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise OptionError(
            f'--metric {metric} needs {package}: pip install "specjax[{extra}]"'
        ) from None


def need_references(metric: str, prompts: Sequence[Completion], what: str = "references") -> None:
    """Refuses prompts without references.

    Raises:
      OptionError: names the first such prompt.
    """
    for number, prompt in enumerate(prompts, 1):
        if not prompt.references:
            raise OptionError(
                f'--metric {metric}: prompt {number} has no {what}: give it "references"'
            )
