"""Attention of many queries on a GPU, forward and backward, by Pallas kernels of our own.

Each query sees two ranges of keys (:mod:`~specjax.models.attention.key_ranges`). So packed
documents, sliding windows, SDSAT's isolated windows and prefill chunks against a cache are the same
to the kernels. They visit only blocks of keys that a block of queries may see, by FlashAttention-2
(arXiv 2307.08691): the scores of one block exist at a time, in registers. Products take the inputs'
dtype and sum in float32; the softmax is float32, too.

Axis legend: B rows, N queries, S keys, H query heads, K key heads, G = H/K, E head size, I blocks
of queries, J blocks of keys.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from specjax._util.platform import platform
from specjax.models.attention.decode_kernel import HEAD_SIZES, add_to_softmax, float_product
from specjax.models.attention.dense import MASKED_SCORE, SCALE_ONLY, Causal, MaskFn, ScoreTransform
from specjax.models.attention.flash import RESULT, pad_tokens
from specjax.models.attention.key_ranges import (
    NOWHERE,
    RANGES,
    KeyRanges,
    Visits,
    chain_ranges,
    mask_ranges,
    supports_ranges,
    visits_of,
)
from specjax.models.quantized_cache import KVBuffer, QuantizedKV


class RangeBlocks(NamedTuple):
    """Tokens of a block of queries and of a block of keys."""

    queries: int
    keys: int


class KernelBlocks(NamedTuple):
    """The blocks of :class:`RangeTables`, and those of a program: each divides the tables'."""

    tables: RangeBlocks
    forward: RangeBlocks
    backward: RangeBlocks


class RangeTables(NamedTuple):
    """What the kernels need to know of a batch; made once for all layers.

    ``by_query``: the blocks of keys that each block of queries visits. ``by_key``: the blocks of
    queries that each block of keys visits. ``ranges`` are those of all queries, padded to whole
    blocks.
    """

    ranges: KeyRanges
    by_query: Visits
    by_key: Visits


class _Choices(NamedTuple):
    """Arguments that are not traced."""

    transform: ScoreTransform
    blocks: KernelBlocks
    interpret: bool


# Tables are made before the size and dtype of heads are known. A cache is not padded: its capacity
# is a multiple of a block's keys.
TABLES = RangeBlocks(queries=128, keys=64)
HEAD_BYTES = 256  # of the largest heads whose programs take the largest blocks


def supports_sequences(mask: MaskFn, transform: ScoreTransform) -> bool:
    """Whether the kernels can run self-attention with this mask and transform."""
    return _supports_transform(transform) and supports_ranges(mask)


def supports_prefill(tokens: int, transform: ScoreTransform, cache: KVBuffer) -> bool:
    """Whether :func:`prefill_attention` should run a chain of ``tokens`` tokens per row."""
    if not _supports_transform(transform) or isinstance(cache, QuantizedKV):
        return False
    capacity, size = cache.shape[2:]
    return supports_head(size) and capacity % TABLES.keys == 0 and tokens >= TABLES.queries


def supports_head(size: int) -> bool:
    """Whether the kernels can run heads of this size."""
    return size in HEAD_SIZES


def _supports_transform(transform: ScoreTransform) -> bool:
    return platform().range_kernel and not transform.alibi and not transform.sinks


def blocks_of(q: Float[Array, "B N H E"]) -> KernelBlocks:
    """Blocks that fit the shared memory of any GPU since Ampere, for queries of this size."""
    largest = max(1, q.shape[-1] * q.dtype.itemsize // HEAD_BYTES)
    forward = RangeBlocks(TABLES.queries // largest, TABLES.keys // largest)
    return KernelBlocks(TABLES, forward, RangeBlocks(64 // largest, 64 // largest))


def make_tables(mask: MaskFn, meta: dict[str, Array], blocks: RangeBlocks = TABLES) -> RangeTables:
    """The tables of self-attention in packed rows with ``mask``, which :func:`supports_ranges`."""
    assert isinstance(mask, Causal), "supports_ranges knows only causal masks"
    return _tables_of(mask_ranges(mask, meta), meta["position"].shape[1], blocks)


def _tables_of(ranges: KeyRanges, keys: int, blocks: RangeBlocks) -> RangeTables:
    """The tables of ``ranges`` over ``keys`` keys; both are padded to whole blocks."""
    begin, end = (
        pad_tokens(x, 2, blocks.queries, fill) for x, fill in zip(ranges, NOWHERE, strict=True)
    )
    padded = KeyRanges(begin, end)
    return RangeTables(padded, *visits_of(padded, keys + -keys % blocks.keys, *blocks))


def sequence_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K N E"],
    v: Float[Array, "B K N E"],
    tables: RangeTables,
    *,
    transform: ScoreTransform = SCALE_ONLY,
    blocks: KernelBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H E"]:
    """Self-attention of packed rows, with gradients.

    A query that sees nothing gets 0.

    Args:
      tables: :func:`make_tables` with ``blocks.tables``.
      blocks: by default :func:`blocks_of` the queries.
      interpret: run in Python, on any device.
    """
    blocks = blocks or blocks_of(q)
    count = q.shape[1]
    q = pad_tokens(q, 1, blocks.tables.queries)
    k, v = (pad_tokens(x, 2, blocks.tables.keys) for x in (k, v))
    return _attend(_Choices(transform, blocks, interpret), q, k, v, tables)[:, :count]


def prefill_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    positions: Int[Array, "B N"],
    *,
    window: int | None = None,
    transform: ScoreTransform = SCALE_ONLY,
    blocks: KernelBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H E"]:
    """Causal attention of a prefill chunk to the cache that holds it and all before it.

    Each token is in the cache position of its position. There are no gradients.

    Args:
      window: positions that a query sees, its own included.
      blocks: by default :func:`blocks_of` the queries.
      interpret: run in Python, on any device.
    """
    blocks = blocks or blocks_of(q)
    count = q.shape[1]
    tables = _tables_of(chain_ranges(positions, window), k.shape[2], blocks.tables)
    q = pad_tokens(q, 1, blocks.tables.queries)
    return _forward(_Choices(transform, blocks, interpret), q, k, v, tables)[0][:, :count]


def _without_lse(
    static: _Choices,
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    tables: RangeTables,
) -> Float[Array, "B N H E"]:
    """The result of :func:`_forward` alone: the function that gets a custom gradient."""
    return _forward(static, q, k, v, tables)[0]


_attend = jax.custom_vjp(_without_lse, nondiff_argnums=(0,))


def _forward_for_grad(static: _Choices, q, k, v, tables: RangeTables):
    """The result, and what :func:`_backward` reads."""
    out, lse = (checkpoint_name(x, RESULT) for x in _forward(static, q, k, v, tables))
    return out, (q, k, v, tables, out, lse)


def _forward(
    static: _Choices, q, k, v, tables: RangeTables
) -> tuple[Float[Array, "B N H E"], Float[Array, "B H N"]]:
    """The result, and each query's logsumexp, 0 where it sees nothing."""
    rows, count, heads, _ = q.shape
    block, wide = static.blocks.forward
    unit = static.blocks.tables
    specs = _Specs(q.shape, k.shape, block)
    return pl.pallas_call(
        functools.partial(_forward_kernel, static.transform, unit.keys, wide),
        grid=(count // block, heads, rows),
        in_specs=[
            specs.queries(),
            specs.all_keys(),
            specs.all_keys(),
            *specs.ranges(),
            *specs.visits(tables.by_query, unit.queries // block),
        ],
        out_specs=[specs.queries(), specs.scalars()],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((rows, heads, count), jnp.float32),
        ],
        compiler_params=_compiler_params(q),
        interpret=static.interpret,
        name="range_attention",
    )(q, k, v, *tables.ranges, *tables.by_query)


def _backward(static: _Choices, kept, d_out):
    """The gradients of q, k and v: one kernel for the queries, one for keys and values."""
    q, k, v, tables, out, lse = kept
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta.transpose(0, 2, 1)
    arguments = q, k, v, d_out.astype(v.dtype), lse, delta
    d_q = _query_grads(static, arguments, tables)
    d_k, d_v = _key_grads(static, arguments, tables)
    return d_q, d_k, d_v, None


_attend.defvjp(_forward_for_grad, _backward)


def _query_grads(static: _Choices, arguments: tuple, tables: RangeTables):
    """The gradient of the queries: a program for each block of queries and query head."""
    q, k = arguments[:2]
    rows, count, heads, _ = q.shape
    block, wide = static.blocks.backward
    unit = static.blocks.tables
    specs = _Specs(q.shape, k.shape, block)
    return pl.pallas_call(
        functools.partial(_query_grads_kernel, static.transform, unit.keys, wide),
        grid=(count // block, heads, rows),
        in_specs=[
            specs.queries(),
            specs.all_keys(),
            specs.all_keys(),
            specs.queries(),
            specs.scalars(),
            specs.scalars(),
            *specs.ranges(),
            *specs.visits(tables.by_query, unit.queries // block),
        ],
        out_specs=specs.queries(),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=_compiler_params(q),
        interpret=static.interpret,
        name="range_attention_query_grads",
    )(*arguments, *tables.ranges, *tables.by_query)


def _key_grads(static: _Choices, arguments: tuple, tables: RangeTables):
    """The gradients of keys and values: a program for each block of keys and key head."""
    q, k, v = arguments[:3]
    rows, key_heads, keys, _ = k.shape
    block, wide = static.blocks.backward
    unit = static.blocks.tables
    specs = _Specs(q.shape, k.shape, wide)
    return pl.pallas_call(
        functools.partial(_key_grads_kernel, static.transform, unit.queries, block),
        grid=(keys // wide, key_heads, rows),
        in_specs=[
            specs.all_queries(),
            specs.keys(),
            specs.keys(),
            specs.all_queries(),
            specs.all_scalars(),
            specs.all_scalars(),
            *specs.all_ranges(),
            *specs.visits(tables.by_key, unit.keys // wide),
        ],
        out_specs=[specs.keys(), specs.keys()],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        compiler_params=_compiler_params(q),
        interpret=static.interpret,
        name="range_attention_key_grads",
    )(*arguments, *tables.ranges, *tables.by_key)


def _compiler_params(q: Float[Array, "B N H E"]) -> Any:
    warps = 4 if q.shape[-1] <= 64 else 8
    return plgpu.CompilerParams(num_warps=warps, num_stages=2)


class _Specs:
    """Block specs for a grid of (block, head, row). ``all_…`` is a whole row's, of one key head.

    Head and block are those of queries for programs of queries, of keys for programs of keys.
    """

    def __init__(self, q: tuple[int, ...], k: tuple[int, ...], block: int):
        self._count, heads, self._size = q[1:]
        self._key_heads, self._keys = k[1:3]
        self._groups = heads // self._key_heads
        self._block = block

    def queries(self) -> pl.BlockSpec:
        shape = None, self._block, None, self._size
        return pl.BlockSpec(shape, lambda i, h, b: (b, i, h, 0))

    def all_queries(self) -> pl.BlockSpec:
        shape = None, self._count, self._groups, self._size
        return pl.BlockSpec(shape, lambda j, h, b: (b, 0, h, 0))

    def keys(self) -> pl.BlockSpec:
        shape = None, None, self._block, self._size
        return pl.BlockSpec(shape, lambda j, h, b: (b, h, j, 0))

    def all_keys(self) -> pl.BlockSpec:
        groups = self._groups
        shape = None, None, self._keys, self._size
        return pl.BlockSpec(shape, lambda i, h, b: (b, h // groups, 0, 0))

    def scalars(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self._block), lambda i, h, b: (b, h, i))

    def all_scalars(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self._groups, self._count), lambda j, h, b: (b, h, 0))

    def ranges(self) -> list[pl.BlockSpec]:
        shape = None, RANGES, self._block
        return [pl.BlockSpec(shape, lambda i, h, b: (b, 0, i))] * 2

    def all_ranges(self) -> list[pl.BlockSpec]:
        shape = None, RANGES, self._count
        return [pl.BlockSpec(shape, lambda j, h, b: (b, 0, 0))] * 2

    def visits(self, visits: Visits, parts: int) -> list[pl.BlockSpec]:
        """``parts`` programs share a block of the tables."""
        shape = None, None, visits.order.shape[2]
        order = pl.BlockSpec(shape, lambda i, h, b: (b, i // parts, 0))
        return [order, pl.BlockSpec((None, None), lambda i, h, b: (b, i // parts))]


def _forward_kernel(
    transform,
    unit,
    wide,
    q_ref,
    k_ref,
    v_ref,
    begin_ref,
    end_ref,
    order_ref,
    count_ref,
    out_ref,
    lse_ref,
):
    """One block of queries of one head, by the online softmax."""
    q = q_ref[...]
    here = pl.ds(0, q.shape[0])

    def visit(step, carry):
        start = _start(order_ref, step, unit, wide)
        k = k_ref[pl.ds(start, wide), :]
        scores = _scores(transform, q, k, _visible(begin_ref, end_ref, here, start, wide))
        return add_to_softmax(carry, scores, v_ref[pl.ds(start, wide), :])

    # It starts above every masked score, so that those weigh nothing even where a query has seen
    # no key yet.
    start = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(q.shape[:1], MASKED_SCORE / 2, jnp.float32),
        jnp.zeros(q.shape[:1], jnp.float32),
    )
    out, highest, total = jax.lax.fori_loop(0, count_ref[...] * (unit // wide), visit, start)
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1.0)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(sees_any, highest + jnp.log(total), 0.0)


def _query_grads_kernel(
    transform,
    unit,
    wide,
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    lse_ref,
    delta_ref,
    begin_ref,
    end_ref,
    order_ref,
    count_ref,
    d_q_ref,
):
    """One block of queries of one head."""
    q = q_ref[...]
    d_out = d_out_ref[...]
    lse = lse_ref[...]
    delta = delta_ref[...]
    here = pl.ds(0, q.shape[0])

    def visit(step, d_q):
        start = _start(order_ref, step, unit, wide)
        k = k_ref[pl.ds(start, wide), :]
        v = v_ref[pl.ds(start, wide), :]
        visible = _visible(begin_ref, end_ref, here, start, wide)
        _, d_products = _score_grads(transform, q, k, v, d_out, lse, delta, visible)
        return d_q + float_product(d_products.astype(k.dtype), k)

    count = count_ref[...] * (unit // wide)
    d_q = jax.lax.fori_loop(0, count, visit, jnp.zeros(q.shape, jnp.float32))
    d_q_ref[...] = (d_q * transform.query_scale(q.shape[-1])).astype(d_q_ref.dtype)


def _key_grads_kernel(
    transform,
    unit,
    block,
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    lse_ref,
    delta_ref,
    begin_ref,
    end_ref,
    order_ref,
    count_ref,
    d_k_ref,
    d_v_ref,
):
    """One block of keys of one key head: the queries of all its query heads add to it."""
    k = k_ref[...]
    v = v_ref[...]
    wide = k.shape[0]
    start = pl.program_id(0) * wide
    count = count_ref[...] * (unit // block)

    def visit(group, step, carry):
        d_k, d_v = carry
        here = pl.ds(_start(order_ref, step, unit, block), block)
        q = q_ref[here, group, :]
        d_out = d_out_ref[here, group, :]
        lse = lse_ref[group, here]
        delta = delta_ref[group, here]
        visible = _visible(begin_ref, end_ref, here, start, wide)
        weights, d_products = _score_grads(transform, q, k, v, d_out, lse, delta, visible)
        d_v += float_product(weights.astype(d_out.dtype).T, d_out)
        d_k += float_product(d_products.astype(q.dtype).T, q)
        return d_k, d_v

    def visit_group(group, carry):
        return jax.lax.fori_loop(0, count, functools.partial(visit, group), carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, q_ref.shape[1], visit_group, (zeros, zeros))
    d_k_ref[...] = (d_k * transform.query_scale(k.shape[-1])).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


def _start(order_ref, step, unit: int, block: int):
    """Where the block of a step begins; visits list units of one or more blocks."""
    parts = unit // block
    # `%` lowers to more than Triton takes; no number here is negative.
    return order_ref[jax.lax.div(step, parts)] * unit + jax.lax.rem(step, parts) * block


def _visible(begin_ref, end_ref, here, start, wide: int):
    """Which of ``wide`` keys from ``start`` on the queries ``here`` see."""
    key = (start + jnp.arange(wide))[None]
    seen = [
        (key >= begin_ref[part, here][:, None]) & (key < end_ref[part, here][:, None])
        for part in range(RANGES)
    ]
    return seen[0] | seen[1]


def _scores(transform: ScoreTransform, q, k, visible) -> Float[Array, "n s"]:
    """The scores that the softmax takes: scaled, capped and masked."""
    scores = transform.apply_softcap(float_product(q, k.T) * transform.query_scale(q.shape[-1]))
    return jnp.where(visible, scores, MASKED_SCORE)


def _score_grads(transform: ScoreTransform, q, k, v, d_out, lse, delta, visible):
    """The weights of a block, and the gradients of its scaled products."""
    scores = _scores(transform, q, k, visible)
    weights = jnp.exp(scores - lse[:, None])
    d_products = weights * (float_product(d_out, v.T) - delta[:, None])
    if transform.softcap is not None:
        capped = jnp.where(visible, scores / transform.softcap, 0.0)
        d_products *= 1 - capped * capped
    return weights, d_products
