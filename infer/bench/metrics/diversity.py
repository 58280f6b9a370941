"""``diversity``: distinct n-grams, as SimCTG counts them (Su et al. 2022).

Axis legend: P prompts, N resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer.bench.metrics.protocol import Completion, Completions
from infer.bench.metrics.settings import Settings
from infer.uncertainty import Estimate, bootstrap

SIZES = (2, 3, 4)  # the n of the n-grams


class Diversity:
    """``Π_{n=2..4} Σ distinct n-grams / Σ n-grams``, of words, sums over all completions.

    As in SimCTG's code: words are separated by white space, n-grams are distinct within their own
    completion, and the last n-gram of a text is left out. (The report's own diversity is of tokens,
    the mean over completions.)
    """

    columns = {"diversity_words": "diversity, SimCTG"}  # noqa: RUF012

    def check(self, prompts: Sequence[Completion]) -> None:
        """Accepts any prompt."""

    def measure(self, by_prompt: Sequence[Completions]) -> dict[str, Estimate]:
        # [P, size, distinct or all]
        counts = np.array([sum(counts_of(one.text) for one in prompt) for prompt in by_prompt])

        def figure(draws: np.ndarray) -> np.ndarray:
            sums = np.tensordot(draws, counts, 1)  # [N, size, distinct or all]
            return np.prod(sums[..., 0] / sums[..., 1], axis=1)

        return {"diversity_words": bootstrap(len(by_prompt), figure)}


def counts_of(text: str) -> np.ndarray:
    """Distinct and all n-grams of each size, ``[3, 2]``."""
    words = text.split()
    counts = []
    for n in SIZES:
        # One less than there are: SimCTG leaves out the last n-gram.
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n)]
        counts.append((len(set(grams)), len(grams)))
    return np.array(counts)


def make(argument: str, settings: Settings) -> Diversity:
    """The metric."""
    return Diversity()
