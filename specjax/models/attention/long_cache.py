"""Attention over a long cache at the price of what its rows hold, whatever the bucket.

Axis legend: B rows, N queries, S cache positions, H query heads, K key heads, G = H/K, R = G·N, E
head size.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention import splash
from specjax.models.attention.dense import (
    MASKED_SCORE,
    PLAIN,
    ScoreTransform,
    chain_distances,
    grouped,
    masked_scores,
    ungrouped,
    within,
)
from specjax.models.coded import Coded, value_sums

# Caches of up to so many positions are read whole, where a pass has no more scores than that.
DENSE_CAPACITY, DENSE_SCORES = 4096, 1 << 26
# Otherwise a pass meets so many scores at a time, in blocks of so many positions: enough to be
# worth a loop's turn, few enough for a TPU's vector memory.
BLOCK_SCORES, MIN_BLOCK, MAX_BLOCK = 1 << 22, 512, 4096
# Left alone, a TPU's compiler lays a cache out as its writes come, or as one product wants it, and
# turns all of it around for the others.
POSITION_BY_POSITION = Layout((0, 1, 2, 3))
# From so many queries of a key head on, the sum of weights is cheapest as one more column of the
# product, for which they are computed once; a TPU takes a tile's worth of columns sooner than one.
WIDE, COLUMNS = 512, 8
# The names of its loops in a compiled program.
SEEN, TOGETHER, EACH = "seen by all", "rows together", "row by row"
OWN, ALONE = "seen by the row", "rows alone"


def reads_whole(queries: int, capacity: int) -> bool:
    """Whether a pass of so many queries (rows · tokens · heads) reads its cache whole."""
    return capacity <= DENSE_CAPACITY and queries * capacity <= DENSE_SCORES


def cached_attention(
    q: Float[Array, "B N H E"],
    k: Coded | Float[Array, "B K S E"],
    v: Coded | Float[Array, "B K S E"],
    positions: Int[Array, "B N"],
    top: Int[Array, "B"],
    mask: Bool[Array, "B N S"] | None = None,
    distance: Int[Array, "B N S"] | None = None,
    *,
    window: int | None = None,
    finish: ScoreTransform = PLAIN,
) -> Float[Array, "B N H E"]:
    """:func:`specjax.models.attention.dense_attention` by an online softmax over blocks of
    positions.

    Rows go together as far as half of them reach, and each for itself from there on: one costs
    what it holds, whatever its neighbors. Blocks are of positions, so that a token's result has
    the same bits however many tokens are with it.

    Args:
      positions: those of the queries; of a chain they are positions, too.
      top: the highest cache position that a row's queries see.
      mask, distance: those of a tree in the whole cache; None: the queries are a chain.
      window: positions that a query sees, its own included, which ``mask`` holds already.
    """
    rows, n, h, size = q.shape
    if mask is None and splash.supports_chain(n, finish, k):
        return splash.chain_attention(q, k, v, positions, window=window, finish=finish)
    heads, capacity = k.shape[1], k.shape[2]
    together, block = block_of(rows, h * n, capacity)
    end = jnp.minimum(top, capacity - 1) // block + 1
    begin = jnp.zeros_like(end)
    if window is not None:
        begin = jnp.maximum(positions.min(axis=1) - window + 1, 0) // block
    q = grouped(q, heads, finish)
    k, v = _position_by_position((k, v))
    columns = COLUMNS if q.shape[2] >= WIDE and not isinstance(v, Coded) else 1
    tiled = jnp.tile(positions, (1, h // heads))
    # Of a chain: the blocks that all of a row's queries see whole.
    unmasked, whole = mask is None and window is None, (positions.min(axis=1) + 1) // block

    def meet(row, count, j, state, masked=True):
        """``count`` rows from ``row`` on see their block ``j``, of a chain all of it unless
        ``masked``."""
        first = j * block

        def part(x, axis=None):
            """Of these rows, and of this block's positions along ``axis``."""
            starts, sizes = [row, *[0] * (x.ndim - 1)], [count, *x.shape[1:]]
            if axis is not None:
                starts[axis], sizes[axis] = first, block
            return jax.lax.dynamic_slice(x, starts, sizes)

        if mask is None:
            apart = chain_distances(part(tiled), block) - first
            seen = within(apart, window) if masked else None
        else:
            seen, apart = part(mask, 2), part(distance, 2) if finish.alibi else None
        apart = apart[:, :n] if finish.alibi else None
        keys, values = _position_by_position(jax.tree.map(lambda x: part(x, 2), (k, v)))
        scores = masked_scores(part(q), keys, seen, apart, finish)
        return _weigh(state, scores, values, q.dtype)

    def through(row, count, begin, end):
        """``count`` rows from ``row`` on see their blocks before ``end``."""
        state = _nothing(jax.lax.dynamic_slice_in_dim(q, row, count), columns)
        if unmasked:
            seen = jax.lax.dynamic_slice_in_dim(whole, row, count).min()
            with jax.named_scope(SEEN):
                every = functools.partial(meet, row, count, masked=False)
                state = jax.lax.fori_loop(begin, seen, every, state)
            begin = jnp.maximum(begin, seen)
        with jax.named_scope(TOGETHER):
            return jax.lax.fori_loop(begin, end, functools.partial(meet, row, count), state)

    if not together and rows > 1:

        def one(row):
            return _mean(through(row, 1, begin[row], end[row]), size)[0].astype(q.dtype)

        with jax.named_scope(EACH):
            return ungrouped(jax.lax.map(one, jnp.arange(rows, dtype=jnp.int32)), n)
    shared = shared_blocks(end)
    state = through(0, rows, begin.min(), shared)
    if rows > 1:
        begin = jnp.maximum(begin, shared)
        if unmasked:
            with jax.named_scope(OWN):
                state = _alone(functools.partial(meet, masked=False), state, begin, whole)
            begin = jnp.maximum(begin, whole)
        with jax.named_scope(ALONE):
            state = _alone(meet, state, begin, end)
    return ungrouped(_mean(state, size).astype(q.dtype), n)


def _position_by_position(buffers):
    return jax.tree.map(lambda x: with_layout_constraint(x, POSITION_BY_POSITION), buffers)


def block_of(rows: int, queries: int, size: int) -> tuple[bool, int]:
    """Whether rows of so many queries (tokens · heads) go together, and the positions of a
    block."""
    together = rows * queries * MIN_BLOCK <= BLOCK_SCORES
    fitting = BLOCK_SCORES // (queries * (rows if together else 1))
    widest = min(MAX_BLOCK, max(MIN_BLOCK, fitting))
    return together, math.gcd(size, 1 << widest.bit_length() >> 1)


def shared_blocks(end: Int[Array, "B"]) -> Int[Array, ""]:
    """How many blocks rows that end there see together: so many that half of them need them all,
    for by itself a row costs about twice its share."""
    return jnp.sort(end)[(end.shape[0] - 1) // 2]


def _alone(meet, state, begin: Int[Array, "B"], end: Int[Array, "B"]):
    """Each row's own blocks from ``begin`` to ``end``, one a turn."""
    last = jnp.cumsum(jnp.maximum(end - begin, 0))

    def step(turn, state):
        row = jnp.sum(last <= turn, dtype=jnp.int32)
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), state)
        new = meet(row, 1, end[row] - (last[row] - turn), own)
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row, 0), state, new
        )

    return jax.lax.fori_loop(0, last[-1], step, state)


def _nothing(q: Float[Array, "B K R E"], columns: int) -> tuple[Array, Array]:
    """The online softmax before the first block: see :func:`_weigh`."""
    # Above every masked score: what is masked weighs nothing, also where nothing was seen yet.
    top = jnp.full(q.shape[:-1], MASKED_SCORE / 2, jnp.float32)
    return top, jnp.zeros((*q.shape[:-1], q.shape[-1] + columns), jnp.float32)


def _weigh(
    carry,
    scores: Float[Array, "B K R S"],
    v: Coded | Float[Array, "B K S E"],
    dtype: jnp.dtype,
):
    """The online softmax's step (arXiv 1805.02867).

    ``carry``, float32: the largest score so far ``[B, K, R]``, and the weighted values, with the
    sum of weights in every further column, ``[B, K, R, E+columns]``.
    """
    top, out = carry
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.exp(scores - new_top[..., None])
    product = functools.partial(value_sums, dtype=dtype, preferred_element_type=jnp.float32)
    columns = out.shape[-1] - v.shape[-1]
    if columns == 1:
        gain = product(weights, v)
        gain = jnp.concatenate([gain, weights.sum(-1, keepdims=True)], axis=-1)
    else:
        ones = ((0, 0), (0, 0), (0, 0), (0, columns))
        gain = product(weights, jnp.pad(v, ones, constant_values=1))
    return new_top, out * jnp.exp(top - new_top)[..., None] + gain


def _mean(carry: tuple[Array, Array], size: int) -> Float[Array, "B K R E"]:
    """What the online softmax comes to, for heads of ``size``; 0 where a query saw nothing."""
    out, total = carry[1][..., :size], carry[1][..., size : size + 1]
    return out / jnp.where(total > 0, total, 1.0)
