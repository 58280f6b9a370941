"""The prefix cache: prefilled states, kept for prompts that begin with the same tokens.

The KV cache at a position depends only on the tokens up to it. So two prompts that begin with the
same tokens have the same cache for them, and it is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.core.types import DecodeState
from specjax.models.cache import ring_keeps_prefix

MIN_PREFIX = 16  # common tokens that are worth the copy of a KV cache
Prompts = Sequence[np.ndarray]  # int32 token ids; one prompt per device of the mesh's data axis


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two prompts have in common at their beginning; 0 if fewer than MIN_PREFIX.

    The last token of a prompt does not count: it is the root of the first round, and is not
    prefilled before.
    """
    size = min(len(a), len(b)) - 1
    different = np.flatnonzero(a[:size] != b[:size])
    common = max(size, 0)
    if different.size:
        common = int(different[0])
    if common < MIN_PREFIX:
        return 0
    return common


class PrefixCache:
    """At most ``capacity`` prefilled states; the least recently used one is dropped first.

    ``ring``: cache positions of the shortest sliding-window layer, after which it writes over
    its oldest ones; None without such a layer.
    """

    def __init__(self, capacity: int, ring: int | None = None):
        self._capacity = capacity
        self._ring = ring
        # Prompts and the state after them, the least recently used first.
        self._entries: list[tuple[Prompts, DecodeState]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def saves_a_third(self, prompts: Prompts) -> bool:
        """Whether prefilling these prompts one by one saves a third of their tokens.

        Prefilled all at once, they cannot share what they have in common.
        """
        if self._capacity == 0:
            return False

        cached = [prompt for entry_prompts, _ in self._entries for prompt in entry_prompts]
        saved = 0
        previous: list[np.ndarray] = []
        # Sorted, each prompt follows the one that it has most in common with.
        for prompt in sorted(prompts, key=lambda prompt: prompt.tolist()):
            common = [common_prefix(other, prompt) for other in [*cached, *previous]]
            saved += max(common, default=0)
            previous = [prompt]

        total = sum(map(len, prompts)) - len(prompts)  # last tokens are not prefilled
        return 3 * saved >= total > 0

    def lookup(self, prompts: Prompts) -> tuple[DecodeState | None, np.ndarray]:
        """The state with the most tokens in common, and how many of each prompt it has (int32).

        The state is None, and the numbers are 0, if no state has MIN_PREFIX tokens in common.
        """
        best = None
        best_counts = np.zeros(len(prompts), np.int32)
        for entry in self._entries:
            pairs = zip(entry[0], prompts, strict=False)
            counts = np.array([self._usable_prefix(*pair) for pair in pairs], np.int32)
            if counts.sum() > best_counts.sum():
                best = entry
                best_counts = counts
        if best is None:
            return None, best_counts

        # It is the most recently used one now.
        self._entries = [entry for entry in self._entries if entry is not best]
        self._entries.append(best)
        return best[1], best_counts

    def _usable_prefix(self, cached: np.ndarray, prompt: np.ndarray) -> int:
        """:func:`common_prefix`, or 0 if a sliding window has written over a part of it."""
        common = common_prefix(cached, prompt)
        if not ring_keeps_prefix(self._ring, len(cached), common):
            return 0
        return common

    def insert(self, prompts: Prompts, num_cached: np.ndarray, state: DecodeState) -> None:
        """Keeps the state after ``prompts``, of which :meth:`lookup` had ``num_cached`` tokens.

        Nothing is kept if MIN_PREFIX or fewer tokens per prompt are new.
        """
        new_tokens = sum(map(len, prompts)) - num_cached.sum()
        if self._capacity > 0 and new_tokens > MIN_PREFIX * len(prompts):
            self._entries.append((list(prompts), state))
            self._entries = self._entries[-self._capacity :]
