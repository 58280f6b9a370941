"""Attention over a long cache, at a cost that follows what its rows hold, not its capacity.

The capacity is static, a bucket; what the rows hold is not. So attention visits the cache in
blocks of positions and stops after the last block that any query sees. The blocks are joined by
an online softmax, which carries the largest score, the sum of weights and the weighted values.

Rows share a loop as long as at least half of them need a block. After that each row that reaches
further goes on alone. Blocks that every query sees in full come first and need no mask.

Axis legend: B rows, N queries, S cache positions, H query heads, K key heads, G = H/K, R = G·N,
E head size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention import splash_chunk
from specjax.models.attention.dense import (
    MASKED_SCORE,
    SCALE_ONLY,
    ScoreTransform,
    chain_distances,
    group_queries,
    grouped_sinks,
    in_window,
    masked_scores,
    ungroup_queries,
)
from specjax.models.cache import power_of_two_upto
from specjax.models.quantized_cache import KVBuffer, QuantizedKV, weighted_values

# A cache is read whole up to this capacity, if the pass has no more scores than that.
DENSE_CAPACITY = 4096
DENSE_SCORES = 1 << 26
# Otherwise a block has at most `BLOCK_SCORES` scores, which fit a TPU's vector memory. With fewer
# than `MIN_BLOCK` positions an iteration of the loop costs more than it computes.
BLOCK_SCORES = 1 << 22
MIN_BLOCK = 512
MAX_BLOCK = 4096
# Row-major. Left alone, a TPU's compiler chooses the layout that the cache's writes or one of its
# two products prefer, and transposes the whole cache for the others.
ROW_MAJOR = Layout((0, 1, 2, 3))
# From this many queries of a key head on, the sum of weights is one more column of the product with
# the values. Otherwise the weights would be computed twice: for the sum and for the product. A TPU
# multiplies by a tile of 8 columns faster than by one.
SUM_IN_PRODUCT = 512
SUM_COLUMNS = 8
# The names of the loops in a compiled program.
UNMASKED_SHARED = "all rows without a mask"
MASKED_SHARED = "all rows with a mask"
ROW_BY_ROW = "row by row"
UNMASKED_SINGLE = "single rows without a mask"
MASKED_SINGLE = "single rows with a mask"

# The online softmax, float32: the largest score so far [B, K, R]; the weighted sum of values, and
# in every further column the sum of weights [B, K, R, E + columns].
SoftmaxState = tuple[Float[Array, "B K R"], Float[Array, "B K R _"]]


def reads_whole(queries: int, capacity: int) -> bool:
    """Whether a pass reads its cache whole; ``queries`` counts rows · tokens · heads."""
    return capacity <= DENSE_CAPACITY and queries * capacity <= DENSE_SCORES


def choose_blocks(rows: int, queries: int, capacity: int) -> tuple[bool, int]:
    """Whether rows share the loop over blocks, and the positions of a block.

    ``queries`` counts tokens · heads of one row. The block divides ``capacity``, so no slice
    crosses its end.
    """
    shared = rows * queries * MIN_BLOCK <= BLOCK_SCORES
    if shared:
        queries *= rows
    fits_memory = BLOCK_SCORES // queries
    largest = min(MAX_BLOCK, max(MIN_BLOCK, fits_memory))
    return shared, math.gcd(capacity, power_of_two_upto(largest))


def shared_blocks(end: Int[Array, "B"]) -> Int[Array, ""]:
    """How many blocks all rows visit in the shared loop, given where each row's blocks end.

    As many as half of the rows need: the lower median. A row alone costs about twice its share of
    the loop, so beyond that the longer rows are cheaper one by one.
    """
    return jnp.sort(end)[(end.shape[0] - 1) // 2]


def cached_attention(
    q: Float[Array, "B N H E"],
    k: KVBuffer,
    v: KVBuffer,
    positions: Int[Array, "B N"],
    last_visible: Int[Array, "B"],
    mask: Bool[Array, "B N S"] | None = None,
    distance: Int[Array, "B N S"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    *,
    window: int | None = None,
    transform: ScoreTransform = SCALE_ONLY,
) -> Float[Array, "B N H E"]:
    """:func:`specjax.models.attention.dense.dense_attention` by blocks of cache positions.

    If passes are padded to the same number of tokens, a token's result has the same bits whatever
    the other tokens are: the blocks have the same positions for any queries.

    Args:
      positions: int32, of the queries. In a chain they are also their cache positions.
      last_visible: int32, the highest cache position that any query of a row sees.
      mask: of a tree, over the whole cache; None: the queries are a chain.
      distance: from each cache position to each query; read only under ALiBi and with a ``mask``.
      window: positions that a query sees, its own included. A ``mask`` already contains it.
    """
    rows, n, h, size = q.shape
    positions = jnp.asarray(positions)  # loops index what is made of it with traced numbers
    # A mask or a quantized cache rules the kernel out; what is left are plain arrays.
    if mask is None and splash_chunk.supports_chunk(n, transform, k):
        assert not isinstance(k, QuantizedKV) and not isinstance(v, QuantizedKV)
        return splash_chunk.chunk_attention(q, k, v, positions, window=window, transform=transform)

    shared, block = choose_blocks(rows, h * n, k.shape[2])
    begin, end = _block_range(positions, last_visible, k.shape[2], window, block)
    reader = _make_reader(q, k, v, positions, mask, distance, sinks, window, transform, block)
    if rows == 1 or shared:
        state = _visit_shared(reader, begin, end)
        return ungroup_queries(_mean(state, size).astype(q.dtype), n)

    def visit_row(row: Int[Array, ""]) -> Float[Array, "K R E"]:
        state = _visit_range(reader, row, 1, begin[row], end[row])
        return _mean(state, size)[0].astype(q.dtype)

    with jax.named_scope(ROW_BY_ROW):
        return ungroup_queries(jax.lax.map(visit_row, jnp.arange(rows, dtype=jnp.int32)), n)


def _block_range(
    positions: Int[Array, "B N"],
    last_visible: Int[Array, "B"],
    capacity: int,
    window: int | None,
    block: int,
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """The first block that any query of each row sees, and the one after the last."""
    # In a ring the position may be beyond the capacity: then all blocks are visited.
    end = jnp.minimum(last_visible, capacity - 1) // block + 1
    begin = jnp.zeros_like(end)
    if window is not None:
        begin = jnp.maximum(positions.min(axis=1) - window + 1, 0) // block
    return begin, end


@dataclasses.dataclass(frozen=True)
class _BlockReader:
    """Grouped queries and a cache that they read one block at a time.

    ``positions`` are those of the R grouped queries. ``whole``: how many blocks, from the first on,
    every query of a row sees whole if the queries are a chain. ``tokens`` is N.
    """

    q: Float[Array, "B K R E"]
    k: KVBuffer
    v: KVBuffer
    positions: Int[Array, "B R"]
    whole: Int[Array, "B"]
    mask: Bool[Array, "B N S"] | None
    distance: Int[Array, "B N S"] | None
    sinks: Float[Array, "K R"] | None
    window: int | None
    transform: ScoreTransform
    tokens: int
    block: int
    sum_columns: int

    @property
    def has_whole_blocks(self) -> bool:
        """Whether the first blocks need no mask: in a chain without a window."""
        return self.mask is None and self.window is None

    def visit(self, row, count: int, j, state: SoftmaxState, masked: bool = True) -> SoftmaxState:
        """``state`` after ``count`` rows from ``row`` on have seen block ``j`` of their cache.

        ``masked`` False: every query sees all of the block.
        """
        first = j * self.block

        def take(x: Array, axis: int | None = None) -> Array:
            """These rows of ``x``, and this block's positions along ``axis``."""
            starts = [row] + [0] * (x.ndim - 1)
            sizes = [count, *x.shape[1:]]
            if axis is not None:
                starts[axis] = first
                sizes[axis] = self.block
            return jax.lax.dynamic_slice(x, starts, sizes)

        mask, distance = self._visibility(take, first, masked)
        k, v = _row_major(jax.tree.map(lambda x: take(x, 2), (self.k, self.v)))
        scores = masked_scores(take(self.q), k, mask, distance, self.transform)
        return _softmax_step(state, scores, v, self.q.dtype)

    def _visibility(
        self, take: Callable[..., Array], first: Int[Array, ""], masked: bool
    ) -> tuple[Array | None, Array | None]:
        """The mask of a block that begins at position ``first``, and the distances for ALiBi."""
        alibi = self.transform.alibi
        if self.mask is not None:
            mask = take(self.mask, 2)
            if not alibi:
                return mask, None
            assert self.distance is not None, "ALiBi under a mask needs distances"
            return mask, take(self.distance, 2)

        distance = chain_distances(take(self.positions), self.block) - first
        mask = in_window(distance, self.window) if masked else None
        # The N positions are repeated for the G heads of a key head; ALiBi reads them once.
        return mask, distance[:, : self.tokens] if alibi else None


def _make_reader(
    q: Float[Array, "B N H E"],
    k: KVBuffer,
    v: KVBuffer,
    positions: Int[Array, "B N"],
    mask: Bool[Array, "B N S"] | None,
    distance: Int[Array, "B N S"] | None,
    sinks: Float[Array, "H"] | None,
    window: int | None,
    transform: ScoreTransform,
    block: int,
) -> _BlockReader:
    n, h = q.shape[1:3]
    heads = k.shape[1]
    q = group_queries(q, heads, transform)
    k, v = _row_major((k, v))
    # int8 codes cannot hold a column of ones for the sum of weights.
    sum_in_product = q.shape[2] >= SUM_IN_PRODUCT and not isinstance(v, QuantizedKV)
    return _BlockReader(
        q=q,
        k=k,
        v=v,
        positions=jnp.tile(positions, (1, h // heads)),
        # In a chain every query of a row sees all positions up to the row's first one.
        whole=(positions.min(axis=1) + 1) // block,
        mask=mask,
        distance=distance,
        sinks=None if sinks is None else grouped_sinks(sinks, heads, n),
        window=window,
        transform=transform,
        tokens=n,
        block=block,
        sum_columns=SUM_COLUMNS if sum_in_product else 1,
    )


def _visit_range(reader: _BlockReader, row, count: int, begin, end) -> SoftmaxState:
    """The state after ``count`` rows from ``row`` on have seen the blocks ``begin`` to ``end``."""
    queries = jax.lax.dynamic_slice_in_dim(reader.q, row, count)
    state = _softmax_start(queries, reader.sum_columns, reader.sinks)
    visit = functools.partial(reader.visit, row, count)
    if reader.has_whole_blocks:
        whole = jax.lax.dynamic_slice_in_dim(reader.whole, row, count).min()
        with jax.named_scope(UNMASKED_SHARED):
            unmasked = functools.partial(visit, masked=False)
            state = jax.lax.fori_loop(begin, whole, unmasked, state)
        begin = jnp.maximum(begin, whole)
    with jax.named_scope(MASKED_SHARED):
        return jax.lax.fori_loop(begin, end, visit, state)


def _visit_shared(
    reader: _BlockReader, begin: Int[Array, "B"], end: Int[Array, "B"]
) -> SoftmaxState:
    """The state after all rows have seen their blocks: the shared ones first, the rest alone."""
    rows = reader.q.shape[0]
    shared = shared_blocks(end)
    state = _visit_range(reader, 0, rows, begin.min(), shared)
    if rows == 1:
        return state
    begin = jnp.maximum(begin, shared)
    if reader.has_whole_blocks:
        with jax.named_scope(UNMASKED_SINGLE):
            unmasked = functools.partial(reader.visit, masked=False)
            state = _visit_single_rows(unmasked, state, begin, reader.whole)
        begin = jnp.maximum(begin, reader.whole)
    with jax.named_scope(MASKED_SINGLE):
        return _visit_single_rows(reader.visit, state, begin, end)


def _visit_single_rows(
    visit: Callable, state: SoftmaxState, begin: Int[Array, "B"], end: Int[Array, "B"]
) -> SoftmaxState:
    """The state after each row has seen its own blocks ``begin`` to ``end``.

    One loop over all (row, block) pairs, a pair per iteration: rows without such blocks cost
    nothing.
    """
    # The iteration before which each row's blocks are done. A row's last block, `end - 1`, is
    # visited in iteration `done_at - 1`, so a block is counted back from the row's end.
    done_at = jnp.cumsum(jnp.maximum(end - begin, 0))

    def step(iteration, state: SoftmaxState) -> SoftmaxState:
        row = jnp.sum(done_at <= iteration, dtype=jnp.int32)
        row_state = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), state)
        new = visit(row, 1, end[row] - (done_at[row] - iteration), row_state)
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row, 0), state, new
        )

    return jax.lax.fori_loop(0, done_at[-1], step, state)


def _row_major(buffers: tuple[KVBuffer, KVBuffer]) -> tuple[KVBuffer, KVBuffer]:
    return jax.tree.map(lambda x: with_layout_constraint(x, ROW_MAJOR), buffers)


def _softmax_start(
    q: Float[Array, "B K R E"], sum_columns: int, sinks: Float[Array, "K R"] | None
) -> SoftmaxState:
    """The online softmax before the first block."""
    if sinks is not None:  # scores of weight 1, relative to themselves, and of value zero
        top = jnp.broadcast_to(sinks, q.shape[:-1])
        out = jnp.zeros((*q.shape[:-1], q.shape[-1] + sum_columns), jnp.float32)
        return top, out.at[..., q.shape[-1] :].set(1.0)
    # It starts above every masked score, so that those weigh nothing even where a query has seen
    # no key yet.
    top = jnp.full(q.shape[:-1], MASKED_SCORE / 2, jnp.float32)
    return top, jnp.zeros((*q.shape[:-1], q.shape[-1] + sum_columns), jnp.float32)


def _softmax_step(
    state: SoftmaxState, scores: Float[Array, "B K R S"], v: KVBuffer, dtype: DTypeLike
) -> SoftmaxState:
    """The online softmax after one more block (arXiv 1805.02867, algorithm 3)."""
    top, out = state
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.exp(scores - new_top[..., None])
    sum_columns = out.shape[-1] - v.shape[-1]
    if sum_columns == 1:
        gain = weighted_values(weights, v, dtype, result_dtype=jnp.float32)
        gain = jnp.concatenate([gain, weights.sum(-1, keepdims=True)], axis=-1)
    else:
        assert not isinstance(v, QuantizedKV), "codes have no columns of ones"
        padding = ((0, 0), (0, 0), (0, 0), (0, sum_columns))
        with_ones = jnp.pad(v, padding, constant_values=1)
        gain = weighted_values(weights, with_ones, dtype, result_dtype=jnp.float32)
    # What was summed so far is relative to the former largest score.
    return new_top, out * jnp.exp(top - new_top)[..., None] + gain


def _mean(state: SoftmaxState, size: int) -> Float[Array, "B K R E"]:
    """The result of the online softmax for heads of ``size``; 0 where a query saw nothing."""
    out = state[1][..., :size]
    total = state[1][..., size : size + 1]
    return out / jnp.where(total > 0, total, 1.0)
