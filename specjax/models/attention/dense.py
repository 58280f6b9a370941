"""Attention with its mask as a function of per-token metadata, for short sequences and decoding.

What a token may see is a property of the two tokens: packed documents, token trees,
sliding windows and draft windows differ only in the mask function. Here the mask is built
once; :mod:`specjax.models.attention.long_sequences` is the same for long sequences, in blocks.

Axis legend: B rows, N queries, S keys, H query heads, K key heads, G = H/K, R = G·N, E head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.models.coded import Coded, key_scores, value_sums
from specjax.models.sharding import own_part

Meta = Mapping[str, Array]  # per-token arrays, each [B, tokens, ...]
MaskFn = Callable[[Meta, Meta], Bool[Array, "B N S"]]

PADDING_SEGMENT = 0
# Large and finite: a row that sees nothing gets a uniform softmax instead of NaN.
MASKED_SCORE = -1e30


class ScoreTransform(NamedTuple):
    """What a family does to ``q·k`` before the softmax.

    ``scale``: the factor on it, None for ``E ** -0.5``. ``softcap``: ``c · tanh(score / c)``.
    ``alibi``: each head adds its slope times the key's position less the query's. ``shards``:
    devices that the heads are split over.
    """

    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    shards: int = 1

    def biased(
        self, scores: Float[Array, "B K G N S"], distance: Int[Array, "B N S"]
    ) -> Float[Array, "B K G N S"]:
        """``scores`` with ALiBi's share."""
        slopes = self.slopes(*scores.shape[1:3])[:, :, None, None]
        return scores - slopes * distance[:, None, None].astype(jnp.float32)

    def capped(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """``scores`` within ``softcap`` of zero, if there is one."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def slopes(self, heads: int, groups: int) -> Float[Array, "K G"]:
        """Of ALiBi, for this device's heads."""
        return own_part(alibi_slopes(heads * groups * self.shards), self.shards).reshape(
            heads, groups
        )


PLAIN = ScoreTransform()


def alibi_slopes(heads: int) -> np.ndarray:
    """float32 ``[heads]``: a geometric series for powers of two, else with the next one's
    odd members (arXiv 2108.12409, §3, and its reference code)."""

    def series(count: int) -> np.ndarray:
        return 2.0 ** (-8.0 / count * np.arange(1, count + 1))

    whole = 2 ** math.floor(math.log2(heads))
    slopes = np.concatenate([series(whole), series(2 * whole)[::2][: heads - whole]])
    return slopes.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Causal:
    """Keys of the same segment at or before the query's position; padding sees nothing.

    Metadata: ``segment`` int32 (0 = padding) and ``position`` int32. ``window``: positions that a
    query sees, its own included.
    """

    window: int | None = None

    def __call__(self, query: Meta, key: Meta) -> Bool[Array, "B N S"]:
        same = query["segment"][:, :, None] == key["segment"][:, None, :]
        seen = same & (key["segment"] != PADDING_SEGMENT)[:, None, :]
        return seen & within(distances(query, key), self.window)


@dataclasses.dataclass(frozen=True)
class Isolated(Causal):
    """Causal; behind ``clean`` tokens stand windows: a window's token sees the clean tokens before
    its window, and its window, and nothing else sees it.

    Metadata beside :class:`Causal`'s: ``windows`` int32, 0 for clean tokens, else the window's
    number; ``starts`` int32, the position at which a window token's window starts. ``longest``:
    no window has more tokens; 0 where that is not known.
    """

    clean: int = 0
    longest: int = 0

    def __call__(self, query: Meta, key: Meta) -> Bool[Array, "B N S"]:
        own = query["windows"][:, :, None] == key["windows"][:, None, :]
        before = key["position"][:, None, :] < query["starts"][:, :, None]
        clean = (key["windows"] == 0)[:, None, :] & (query["windows"] > 0)[:, :, None]
        return super().__call__(query, key) & (own | (clean & before))


causal_mask = Causal()


def windowed(mask_fn: MaskFn, window: int | None) -> MaskFn:
    """``mask_fn``, whatever it is, within ``window`` positions, the token's own included."""
    if window is None:
        return mask_fn
    if isinstance(mask_fn, Causal) and mask_fn.window is None:
        return dataclasses.replace(mask_fn, window=window)
    return lambda query, key: mask_fn(query, key) & (distances(query, key) < window)


def distances(query: Meta, key: Meta) -> Int[Array, "B N S"]:
    """How many positions each key lies before each query."""
    return query["position"][:, :, None] - key["position"][:, None, :]


def chain_distances(positions: Int[Array, "B N"], capacity: int) -> Int[Array, "B N S"]:
    """:func:`cache_distances` of a chain, each of whose tokens lies in the cache position of its
    position."""
    return positions[:, :, None] - jnp.arange(capacity, dtype=jnp.int32)


def within(apart: Int[Array, "..."], window: int | None) -> Bool[Array, "..."]:
    """What a token sees of keys that lie so many positions before it, but for trees."""
    return apart >= 0 if window is None else (apart >= 0) & (apart < window)


def cache_mask(
    positions: Int[Array, "B N"],
    base: Int[Array, "B"],
    visible: Bool[Array, "B N T"] | None,
    count: int,
    capacity: int,
    window: int | None = None,
    tree_positions: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B N S"]:
    """Which cache positions each new token sees.

    Positions below ``base`` hold the committed tokens, cache position = position, and cache
    position ``base + j`` token j of the T = ``count`` above them, all modulo ``capacity``. New
    token i sees those of the T where ``visible[b, i, j]``, of a tree its ancestors and itself;
    None, a chain: j ≤ i. ``window`` counts positions, not positions: ``tree_positions`` are those
    of the T tokens where they are not just the new ones.
    """
    new = _behind(base, capacity)
    if visible is None:
        above = new[:, None, :] <= jnp.arange(positions.shape[1], dtype=jnp.int32)[:, None]
    else:
        above = jnp.take_along_axis(visible, jnp.minimum(new, count - 1)[:, None, :], axis=2)
    committed = new >= capacity - base[:, None]
    mask = jnp.where((new < count)[:, None, :], above, committed[:, None, :])
    if window is None:
        return mask
    return mask & (cache_distances(positions, base, count, capacity, tree_positions) < window)


def _behind(base: Int[Array, "B"], capacity: int) -> Int[Array, "B S"]:
    """How far each cache position lies behind that of position ``base``, going round at the end."""
    behind = jnp.arange(capacity, dtype=jnp.int32) - (base % capacity)[:, None]
    return jnp.where(behind < 0, behind + capacity, behind)


def cache_distances(
    positions: Int[Array, "B N"],
    base: Int[Array, "B"],
    count: int,
    capacity: int,
    tree_positions: Int[Array, "B T"] | None = None,
) -> Int[Array, "B N S"]:
    """How many positions the token in each cache position lies before each new token.

    Arguments as in :func:`cache_mask`. In positions that nothing sees the number means nothing.
    """
    new = _behind(base, capacity)
    above = positions if tree_positions is None else tree_positions
    new_positions = jnp.take_along_axis(above, jnp.minimum(new, count - 1), axis=1)
    key_position = jnp.where(new < count, new_positions, base[:, None] + new - capacity)
    return positions[:, :, None] - key_position[:, None, :]


def dense_attention(
    q: Float[Array, "B N H E"],
    k: Coded | Float[Array, "B K S E"],
    v: Coded | Float[Array, "B K S E"],
    mask: Bool[Array, "B N S"],
    finish: ScoreTransform = PLAIN,
    distance: Int[Array, "B N S"] | None = None,
) -> Float[Array, "B N H E"]:
    """Softmax attention over the whole key axis; scores and softmax in float32."""
    n = q.shape[1]
    q = grouped(q, k.shape[1], finish)
    weights = jax.nn.softmax(masked_scores(q, k, mask, distance, finish), axis=-1)
    return ungrouped(value_sums(weights, v, q.dtype), n)


def grouped(
    q: Float[Array, "B N H E"], heads: int, finish: ScoreTransform
) -> Float[Array, "B K R E"]:
    """Scaled queries, those of one key head as R = G · N rows: GQA without repeating k and v."""
    b, n, h, e = q.shape
    scale = e**-0.5 if finish.scale is None else finish.scale
    q = q.reshape(b, n, heads, h // heads, e).transpose(0, 2, 3, 1, 4)
    return q.reshape(b, heads, h // heads * n, e) * jnp.asarray(scale, q.dtype)


def ungrouped(x: Float[Array, "B K R E"], n: int) -> Float[Array, "B N H E"]:
    """What :func:`grouped` does, undone."""
    b, heads, rows, e = x.shape
    x = x.reshape(b, heads, rows // n, n, e).transpose(0, 3, 1, 2, 4)
    return x.reshape(b, n, -1, e)


def masked_scores(
    q: Float[Array, "B K R E"],
    k: Coded | Float[Array, "B K S E"],
    mask: Bool[Array, "B N S"] | None,
    distance: Int[Array, "B N S"] | None,
    finish: ScoreTransform,
) -> Float[Array, "B K R S"]:
    """float32 scores of grouped queries, those of what they do not see masked; None: they see
    all."""
    scores = finish.capped(key_scores(q, k))
    if finish.alibi:
        each = scores.reshape(*q.shape[:2], -1, distance.shape[1], k.shape[2])
        scores = finish.biased(each, distance).reshape(scores.shape)
    if mask is None:
        return scores
    mask = jnp.tile(mask, (1, q.shape[2] // mask.shape[1], 1))[:, None]
    return jnp.where(mask, scores, MASKED_SCORE)
