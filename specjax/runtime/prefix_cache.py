"""Prompts whose caches are kept, for others that begin with the same tokens.

A cache position of a cache depends on the tokens up to it alone, so what another prompt wrote is
what this one would write, for as long as their tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.core.types import DecodeState
from specjax.models.cache import ring_keeps_prefix

LEAST = 16  # tokens in common that are worth the copy of a cache
Prompts = Sequence[np.ndarray]  # one per device of the mesh's data axis


def in_common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two prompts begin with alike; 0 where too few are worth a copy.

    The last token of either does not count: no prompt's is prefilled before its first round.
    """
    size = min(len(a), len(b)) - 1
    differs = np.flatnonzero(a[:size] != b[:size])
    same = int(differs[0]) if differs.size else max(size, 0)
    return same if same >= LEAST else 0


class Prefixes:
    """A store of at most ``most`` prefilled states, the least recently used one out first.

    ``ring``: the positions in which positions go round soonest, None where they never do.
    """

    def __init__(self, most: int, ring: int | None = None):
        self._most, self._ring, self._kept = most, ring, []

    def __len__(self) -> int:
        return len(self._kept)

    def helps(self, prompts: Prompts) -> bool:
        """Whether feeding the prompts one after the other saves a third of their tokens."""
        if not self._most:
            return False
        ordered = sorted(prompts, key=lambda prompt: prompt.tolist())
        kept = [prompt for entry in self._kept for prompt in entry[0]]
        before = [ordered[:0], *([prompt] for prompt in ordered)]
        pairs = zip(before, ordered, strict=False)
        saved = (max((in_common(a, b) for a in [*kept, *one]), default=0) for one, b in pairs)
        return 3 * sum(saved) >= sum(map(len, prompts)) - len(prompts) > 0

    def find(self, prompts: Prompts) -> tuple[DecodeState | None, np.ndarray]:
        """The state that holds most of what the prompts begin with, and how much of each."""
        none = np.zeros(len(prompts), np.int32)
        best, counts = None, none
        for entry in self._kept:
            same = np.array(list(map(self._shared, entry[0], prompts)), np.int32)
            if same.sum() > counts.sum():
                best, counts = entry, same
        if best is None:
            return None, none
        self._kept = [entry for entry in self._kept if entry is not best] + [best]
        return best[1], counts

    def _shared(self, kept: np.ndarray, prompt: np.ndarray) -> int:
        """:func:`in_common`, unless what the next token sees of it has lost its positions since."""
        same = in_common(kept, prompt)
        return same if ring_keeps_prefix(self._ring, len(kept), same) else 0

    def keep(self, prompts: Prompts, found: np.ndarray, state: DecodeState) -> None:
        """Keeps a prefilled state, unless hardly any of it is new beside what was ``found``."""
        if self._most and sum(map(len, prompts)) - found.sum() > LEAST * len(prompts):
            self._kept = [*self._kept, (list(prompts), state)][-self._most :]
