"""Attention over the whole key axis, for short sequences and short caches; and what masks are.

What a token may see is a function of the metadata of two tokens. Packed documents, token trees,
sliding windows and SDSAT's windows differ only in that function. Here the whole mask is built;
:mod:`specjax.models.attention.long_sequences` evaluates it block by block.

Axis legend: B rows, N queries, S keys, T tokens of a tree, H query heads, K key heads, G = H/K,
R = G·N, E head size.
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

from specjax.models.attention.path_order import PathOrder
from specjax.models.quantized_cache import KVBuffer, key_scores, weighted_values
from specjax.models.sharding import own_part

Meta = Mapping[str, Array]  # per-token arrays, each [B, tokens, ...]
MaskFn = Callable[[Meta, Meta], Bool[Array, "B N S"]]

PADDING_SEGMENT = 0
# Large and finite: a row that sees nothing gets a uniform softmax instead of NaN.
MASKED_SCORE = -1e30


class ScoreTransform(NamedTuple):
    """What a model family does to ``q·k`` before the softmax.

    ``scale``: the factor on it; None: ``E ** -0.5``. ``softcap`` c: ``c · tanh(score / c)``.
    ``alibi``: each head subtracts its slope times the distance from key to query. ``shards``:
    devices that the heads are split over. ``sinks``: each head's softmax has one more score, whose
    value is zero (arXiv 2309.17453, §3; gpt-oss).
    """

    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    shards: int = 1
    sinks: bool = False

    def query_scale(self, head_size: int) -> float:
        """The factor on ``q·k``."""
        if self.scale is None:
            return head_size**-0.5
        return self.scale

    def subtract_alibi(
        self, scores: Float[Array, "B K G N S"], distance: Int[Array, "B N S"]
    ) -> Float[Array, "B K G N S"]:
        """``scores`` less each head's slope times ``distance``."""
        slopes = self.slopes(*scores.shape[1:3])[:, :, None, None]
        return scores - slopes * distance[:, None, None].astype(jnp.float32)

    def apply_softcap(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """``scores``, smoothly limited to ± ``softcap`` if there is one."""
        if self.softcap is None:
            return scores
        return self.softcap * jnp.tanh(scores / self.softcap)

    def slopes(self, heads: int, groups: int) -> Float[Array, "K G"]:
        """ALiBi's slopes of this device's heads."""
        all_slopes = alibi_slopes(heads * groups * self.shards)
        return own_part(all_slopes, self.shards).reshape(heads, groups)


SCALE_ONLY = ScoreTransform()


def alibi_slopes(heads: int) -> np.ndarray:
    """float32 ``[heads]``: a geometric series if ``heads`` is a power of two.

    Else it is the series of the power below, and every second member of the series of the power
    above (arXiv 2108.12409, §3, and its reference code).
    """

    def series(count: int) -> np.ndarray:
        return 2.0 ** (-8.0 / count * np.arange(1, count + 1))

    power = 2 ** math.floor(math.log2(heads))
    slopes = np.concatenate([series(power), series(2 * power)[::2][: heads - power]])
    return slopes.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Causal:
    """A query sees the keys of its segment at or before its position; nothing sees padding.

    Metadata: ``segment`` int32 (0: padding) and ``position`` int32. ``window``: how many positions
    a query sees, its own included. ``chunked``: a query sees its own chunk of so many positions.
    """

    window: int | None = None
    chunked: bool = False

    def __call__(self, query: Meta, key: Meta) -> Bool[Array, "B N S"]:
        same_segment = query["segment"][:, :, None] == key["segment"][:, None, :]
        allowed = same_segment & (key["segment"] != PADDING_SEGMENT)[:, None, :]
        if self.window is None:
            return allowed & in_window(distances(query, key), None)
        limit = window_limit(query["position"], self.window, self.chunked)
        return allowed & in_window(distances(query, key), limit)


@dataclasses.dataclass(frozen=True)
class Isolated(Causal):
    """SDSAT's mask: ``clean`` causal tokens, followed by windows that only see and are not seen.

    A token of a window sees its own window, and the clean tokens before the window's start. No
    other token sees it.

    Metadata beside :class:`Causal`'s: ``windows`` int32, 0 for clean tokens, else the window's
    number; ``starts`` int32, the position at which a window token's window starts. ``longest``: the
    most tokens of a window; 0: not known.
    """

    clean: int = 0
    longest: int = 0

    def __call__(self, query: Meta, key: Meta) -> Bool[Array, "B N S"]:
        same_window = query["windows"][:, :, None] == key["windows"][:, None, :]
        before_start = key["position"][:, None, :] < query["starts"][:, :, None]
        clean_key = (key["windows"] == 0)[:, None, :]
        clean = clean_key & (query["windows"] > 0)[:, :, None]
        return super().__call__(query, key) & (same_window | (clean & before_start))


causal_mask = Causal()


def windowed(mask_fn: MaskFn, window: int | None, chunked: bool = False) -> MaskFn:
    """Any ``mask_fn``, limited to ``window`` positions, the query's own included.

    ``chunked``: to the query's chunk of so many positions.
    """
    if window is None:
        return mask_fn
    if isinstance(mask_fn, Causal) and mask_fn.window is None:
        return dataclasses.replace(mask_fn, window=window, chunked=chunked)

    def limited(query: Meta, key: Meta) -> Bool[Array, "B N S"]:
        limit = window_limit(query["position"], window, chunked)
        return mask_fn(query, key) & (distances(query, key) < limit)

    return limited


def window_limit(
    positions: Int[Array, "B N"], window: int, chunked: bool
) -> Int[Array, "B N 1"] | int:
    """How many positions a token sees, its own included."""
    if not chunked:
        return window
    return (positions % window + 1)[:, :, None]


def distances(query: Meta, key: Meta) -> Int[Array, "B N S"]:
    """How many positions each key is before each query."""
    return query["position"][:, :, None] - key["position"][:, None, :]


def chain_distances(positions: Int[Array, "B N"], capacity: int) -> Int[Array, "B N S"]:
    """:func:`cache_distances` where every token is in the cache position of its position."""
    return positions[:, :, None] - jnp.arange(capacity, dtype=jnp.int32)


def in_window(
    distance: Int[Array, "..."], window: Int[Array, "..."] | int | None
) -> Bool[Array, "..."]:
    """Whether a token sees keys so many positions before it, causally within a window."""
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window)


def cache_mask(
    positions: Int[Array, "B N"],
    base: Int[Array, "B"],
    visible: Bool[Array | np.ndarray, "B N T"] | None,
    count: int,
    capacity: int,
    window: int | None = None,
    tree_positions: Int[Array, "B T"] | None = None,
    chunked: bool = False,
) -> Bool[Array, "B N S"]:
    """Which cache positions each new token sees.

    The cache holds ``base`` committed tokens, each at the cache position of its position. Above
    them it holds T = ``count`` further tokens, token j at ``base + j``. All this is modulo
    ``capacity``.

    Args:
      positions: int32, of the new tokens.
      visible: ``visible[b, i, j]``: new token i sees token j of the T; in a tree, its ancestors
        and itself. None, a chain: j ≤ i.
      window: how many token positions a token sees. In a tree these are not cache positions.
      tree_positions: int32, of the T tokens; ``positions`` by default.
      chunked: a token sees its own chunk of ``window`` positions.
    """
    offset = _offset_from_base(base, capacity)
    # At the other cache positions the index is out of range: it is clipped, and `where` below
    # ignores the result.
    if visible is None:
        new_mask = offset[:, None, :] <= jnp.arange(positions.shape[1], dtype=jnp.int32)[:, None]
    else:
        new_mask = jnp.take_along_axis(visible, jnp.minimum(offset, count - 1)[:, None, :], axis=2)
    # Committed are the last `base` cache positions before `base`, counted around the end.
    committed = offset >= capacity - base[:, None]
    mask = jnp.where((offset < count)[:, None, :], new_mask, committed[:, None, :])
    if window is None:
        return mask
    limit = window_limit(positions, window, chunked)
    return mask & (cache_distances(positions, base, count, capacity, tree_positions) < limit)


def _offset_from_base(base: Int[Array, "B"], capacity: int) -> Int[Array, "B S"]:
    """How many cache positions each one is after that of position ``base``, modulo capacity."""
    offset = jnp.arange(capacity, dtype=jnp.int32) - (base % capacity)[:, None]
    return jnp.where(offset < 0, offset + capacity, offset)


def cache_distances(
    positions: Int[Array, "B N"],
    base: Int[Array, "B"],
    count: int,
    capacity: int,
    tree_positions: Int[Array, "B T"] | None = None,
) -> Int[Array, "B N S"]:
    """How many positions the token in each cache position is before each new token.

    Arguments as in :func:`cache_mask`. The result is meaningless at cache positions that are empty.
    """
    offset = _offset_from_base(base, capacity)
    if tree_positions is None:
        tree_positions = positions
    new_positions = jnp.take_along_axis(tree_positions, jnp.minimum(offset, count - 1), axis=1)
    key_positions = jnp.where(offset < count, new_positions, base[:, None] + offset - capacity)
    return positions[:, :, None] - key_positions[:, None, :]


def dense_attention(
    q: Float[Array, "B N H E"],
    k: KVBuffer,
    v: KVBuffer,
    mask: Bool[Array, "B N S"],
    transform: ScoreTransform = SCALE_ONLY,
    distance: Int[Array, "B N S"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    order: PathOrder | None = None,
    one_by_one: bool = False,
) -> Float[Array, "B N H E"]:
    """Softmax attention over the whole key axis; scores and softmax in float32.

    A query that sees nothing gets the mean of all values, which means nothing.
    ``distance``, which only ALiBi reads, is :func:`distances` or :func:`cache_distances`.
    ``order`` of a tree: ``mask`` and ``distance`` are those of a chain then. ``one_by_one``: values
    are added up in the order of the keys, so that gaps between the keys of a tree's node change no
    bit; a chain that is to have the same bits does so, too.
    """
    n = q.shape[1]
    q = group_queries(q, k.shape[1], transform)
    scores = masked_scores(q, k, mask, distance, transform, order)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        column = grouped_sinks(sinks, k.shape[1], n)[..., None]
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    if order is not None:
        weights = order.tree(weights)
    return ungroup_queries(weighted_values(weights, v, q.dtype, one_by_one=one_by_one), n)


def group_queries(
    q: Float[Array, "B N H E"], heads: int, transform: ScoreTransform
) -> Float[Array, "B K R E"]:
    """Scaled queries, those of a key head as R = G · N rows: GQA without repeating k and v."""
    b, n, h, e = q.shape
    scale = transform.query_scale(e)
    q = q.reshape(b, n, heads, h // heads, e).transpose(0, 2, 3, 1, 4)
    return q.reshape(b, heads, h // heads * n, e) * jnp.asarray(scale, q.dtype)


def grouped_sinks(sinks: Float[Array, "H"], heads: int, n: int) -> Float[Array, "K R"]:
    """float32 sinks of the rows of :func:`group_queries`, for N queries of each head."""
    return jnp.repeat(sinks.astype(jnp.float32), n).reshape(heads, -1)


def ungroup_queries(x: Float[Array, "B K R E"], n: int) -> Float[Array, "B N H E"]:
    """The inverse of :func:`group_queries`, but for the scale."""
    b, heads, rows, e = x.shape
    x = x.reshape(b, heads, rows // n, n, e).transpose(0, 3, 1, 2, 4)
    return x.reshape(b, n, -1, e)


def masked_scores(
    q: Float[Array, "B K R E"],
    k: KVBuffer,
    mask: Bool[Array, "B N S"] | None,
    distance: Int[Array, "B N S"] | None,
    transform: ScoreTransform,
    order: PathOrder | None = None,
) -> Float[Array, "B K R S"]:
    """float32 scores of grouped queries, :data:`MASKED_SCORE` where ``mask`` is false.

    ``mask`` None: every query sees every key. ``order``: they are put where a chain's are.
    """
    scores = transform.apply_softcap(key_scores(q, k))
    if order is not None:
        scores = order.chain(scores)
    if transform.alibi:
        assert distance is not None, "ALiBi needs the distance of each key"
        per_query = scores.reshape(*q.shape[:2], -1, distance.shape[1], k.shape[2])
        scores = transform.subtract_alibi(per_query, distance).reshape(scores.shape)
    if mask is None:
        return scores
    # Rows of grouped queries repeat the N queries for each of the G heads.
    mask = jnp.tile(mask, (1, q.shape[2] // mask.shape[1], 1))[:, None]
    return jnp.where(mask, scores, MASKED_SCORE)
