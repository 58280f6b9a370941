"""How many constraints completions meet: what tuning and the bench report as satisfaction.

Axis legend: P completions, C rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specjax.rewards import Lexical, Reward


def count_constraints(
    parts: Sequence[Reward], scores: np.ndarray, constraints: Sequence[Mapping[str, list[str]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Constraints met and all constraints of each completion, ``[P]`` int both.

    Each word of a word reward is a constraint. Any other reward is one, met by a full score.

    Args:
      parts: the rewards.
      scores: their scores of each completion, ``[P, C]`` from 0 to 1.
      constraints: those of each completion's prompt, by reward name.
    """
    met = np.zeros(len(constraints), int)
    asked = np.zeros(len(constraints), int)
    for i, (own, row) in enumerate(zip(constraints, scores, strict=True)):
        for part, score in zip(parts, row.tolist(), strict=True):
            if isinstance(part, Lexical):
                count = len(part.words_of(own))
                met[i] += round(score * count)  # the score is the share of the words
                asked[i] += count
            else:
                met[i] += int(score >= part.full)
                asked[i] += 1
    return met, asked
