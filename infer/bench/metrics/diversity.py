"""``diversity``: distinct n-grams, as SimCTG counts them (Su et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer.bench.metrics.protocol import Completion, Drawn
from infer.bench.metrics.settings import Settings
from infer.uncertainty import Estimate, bootstrap

SIZES = (2, 3, 4)


class Diversity:
    """``Π_{n=2..4} Σ distinct n-grams / Σ n-grams``, of words, sums over all completions.

    As the code of SimCTG does it: words are what white space parts, an n-gram is told apart within
    its own completion, and the last n-gram of a text is left out. (The report's own diversity is of
    tokens, the mean over completions.)
    """

    columns = {"diversity_words": "diversity, SimCTG"}  # noqa: RUF012

    def check(self, prompts: Sequence[Completion]) -> None:
        """Takes any prompt."""

    def measure(self, drawn: Sequence[Drawn]) -> dict[str, Estimate]:
        # [P, size, distinct or all]
        counts = np.array([sum(counts_of(one.text) for one in prompt) for prompt in drawn])

        def figure(draws: np.ndarray) -> np.ndarray:
            distinct, total = np.moveaxis(np.tensordot(draws, counts, 1), 2, 0)
            return np.prod(distinct / total, axis=1)

        return {"diversity_words": bootstrap(len(drawn), figure)}


def counts_of(text: str) -> np.ndarray:
    """Distinct and all n-grams of each size, ``[3, 2]``."""
    words = text.split()
    grams = [[tuple(words[i : i + n]) for i in range(len(words) - n)] for n in SIZES]
    return np.array([(len(set(each)), len(each)) for each in grams])


def make(argument: str, settings: Settings) -> Diversity:
    """The metric."""
    return Diversity()
