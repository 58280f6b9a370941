"""Attention of a narrow pass to its cache on a GPU, by two Pallas kernels.

A narrow pass has few tokens per row and reads a long cache, so memory decides. The kernel reads
each key and value once, and only up to what the row holds. Chains and trees, short and long caches
are the same to it: a chain's mask follows from positions, and any other mask is an array.

The blocks of a row's cache are dealt out to ``splits`` programs, or a row's few key heads would
leave most multiprocessors idle (flash decoding, Dao et al. 2023). Each has an online softmax of its
own. A second kernel joins them, weighed by their largest scores.

The kernel also writes the new keys and values to the cache. A program writes those that belong into
its own blocks, which no other program reads, and waits for its threads before it reads them. It
takes queries and new entries as one array, which XLA makes in one kernel.

A query's result depends on the keys that it sees, and on nothing else: neither on the capacity of
the cache nor on the other queries of the pass. So block j always belongs to split j mod P, P
depends on rows and heads alone, and whatever a query does not see adds an exact zero. Greedy
bfloat16 tokens of methods whose caches have other capacities are equal because of that.

There are no gradients. Axis legend: B rows, N queries, S cache positions, H query heads, K key
heads, G = H/K, R = G·N, E head size, P splits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from specjax._util.platform import platform
from specjax.models.attention.dense import (
    MASKED_SCORE,
    SCALE_ONLY,
    ScoreTransform,
    in_window,
)
from specjax.models.cache import power_of_two_from
from specjax.models.quantized_cache import KVBuffer, QuantizedKV

BLOCK = 64  # cache positions that a program reads at a time; a bucket is a multiple of it
LEAST_QUERIES = 16  # a product on the tensor cores has at least so many rows
MOST_QUERIES = 128  # more do not fit the registers beside a block's scores
HEAD_SIZES = (16, 32, 64, 128, 256)  # powers of two
PROGRAMS = 256  # about two for each of an H100's multiprocessors
LEAST_SPLITS = 4
MOST_SPLITS = 64


def supports_decode(queries: int, heads: int, cache: KVBuffer, transform: ScoreTransform) -> bool:
    """Whether :func:`decode_attention` can run a pass.

    Args:
      queries: tokens per row, its padding included.
      heads: query heads.
      cache: keys of a layer.
    """
    if not platform().decode_kernel or isinstance(cache, QuantizedKV):
        return False
    if transform.alibi or transform.sinks:
        return False
    key_heads, capacity, size = cache.shape[1:]
    fits = heads // key_heads * queries <= MOST_QUERIES
    return fits and size in HEAD_SIZES and capacity % BLOCK == 0


def decode_attention(
    q: Float[Array, "B N H E"],
    new_k: Float[Array, "B N K E"],
    new_v: Float[Array, "B N K E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    start: Int[Array, "B"],
    new_tokens: int,
    positions: Int[Array, "B N"],
    last_visible: Int[Array, "B"],
    mask: Bool[Array, "B N S"] | None = None,
    *,
    window: int | None = None,
    transform: ScoreTransform = SCALE_ONLY,
    interpret: bool = False,
) -> tuple[Float[Array, "B N H E"], Float[Array, "B K S E"], Float[Array, "B K S E"]]:
    """:func:`specjax.models.attention.dense.dense_attention` of a narrow pass, after its writes.

    Returns the result in q's dtype, and keys and values with the new ones, in place under donation.
    A pass that :func:`supports_decode` refuses is undefined here.

    Args:
      start: where the new entries go, modulo S as in a ring.
      new_tokens: of how many tokens they are written; the others pad the pass.
      positions: of the queries; they make the mask of a chain.
      last_visible: the last cache position that any query of a row sees; no new token is after it.
      mask: which cache positions each query sees; None for a chain.
      window: positions that a query of a chain sees, its own included; None: all.
      interpret: run in Python, on any device.
    """
    rows = q.shape[0]
    key_heads, capacity = k.shape[1:3]
    groups = q.shape[2] // key_heads
    end = jnp.minimum(last_visible // BLOCK + 1, capacity // BLOCK)
    begin = jnp.zeros_like(end)
    if window is not None and mask is None:
        begin = jnp.maximum(positions.min(axis=1) - window + 1, 0) // BLOCK
    splits = _num_splits(rows * key_heads)
    choices = _KernelChoices(groups, new_tokens, splits, window, transform, interpret)
    joined = jnp.concatenate([q, new_k, new_v], axis=2)
    seen = _seen(groups, positions if mask is None else mask.astype(jnp.int8))
    k, v, *partial = _attend(choices, [joined, start, begin, end, seen, k, v])
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return _join([*partial, begin, end], result, interpret), k, v


class _KernelChoices(NamedTuple):
    """What the kernel is compiled for."""

    groups: int
    new_tokens: int
    splits: int
    window: int | None
    transform: ScoreTransform
    interpret: bool


def _seen(groups: int, of_token: Int[Array, "B N *S"]) -> Int[Array, "B R *S"]:
    """Each query's position or mask, from its token's, for a power of two of queries.

    Padding repeats the last query; its results are left out.
    """
    of_query = jnp.tile(of_token, (1, groups, *(1,) * (of_token.ndim - 2)))
    queries = of_query.shape[1]
    padding = [(0, 0)] * of_query.ndim
    padding[1] = (0, max(LEAST_QUERIES, power_of_two_from(queries)) - queries)
    return jnp.pad(of_query, padding, mode="edge")


def _num_splits(programs: int) -> int:
    """P: how many programs share the cache of a row and key head, a power of two.

    It does not depend on the cache's capacity: splits without a block cost next to nothing.
    """
    splits = LEAST_SPLITS
    while splits * programs < PROGRAMS and splits < MOST_SPLITS:
        splits *= 2
    return splits


def _first_block(begin: Int[Array, ""], split: Int[Array, "..."], splits: int) -> Int[Array, "..."]:
    """A split's first block from ``begin`` on; the others follow at distances of ``splits``."""
    # lax.rem has the sign of what is divided, so that must not be negative.
    return begin + jax.lax.rem(split - jax.lax.rem(begin, splits) + splits, splits)


def _attend(choices: _KernelChoices, arguments: list[Array]) -> list[Array]:
    """Runs the kernel for every row, key head and split.

    Returns keys and values with the new ones; weighted values float32 ``[B, K, P, R, E]``; and the
    largest score and the sum of weights of each, ``[B, K, P, R]``. A split without a block writes
    none of the last three.
    """
    joined, _, _, _, seen, k, v = arguments
    rows, key_heads, capacity, size = k.shape
    of_row = pl.BlockSpec((None,), lambda b, h, p: (b,))
    of_joined = pl.BlockSpec((None, *joined.shape[1:]), lambda b, h, p: (b, 0, 0, 0))
    of_seen = pl.BlockSpec((None, *seen.shape[1:]), lambda b, h, p: (b, *(0,) * (seen.ndim - 1)))
    of_cache = pl.BlockSpec((None, None, capacity, size), lambda b, h, p: (b, h, 0, 0))

    queries = seen.shape[1]
    partial = rows, key_heads, choices.splits, queries
    scalars = pl.BlockSpec((None, None, None, queries), lambda b, h, p: (b, h, p, 0))
    values = pl.BlockSpec((None, None, None, queries, size), lambda b, h, p: (b, h, p, 0, 0))
    return pl.pallas_call(
        functools.partial(_attend_kernel, choices),
        grid=(rows, key_heads, choices.splits),
        in_specs=[of_joined, of_row, of_row, of_row, of_seen, of_cache, of_cache],
        out_specs=[of_cache, of_cache, values, scalars, scalars],
        out_shape=[
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct((*partial, size), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ],
        input_output_aliases={5: 0, 6: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=choices.interpret,
        name="decode_attention",
    )(*arguments)


def _attend_kernel(
    choices, joined_ref, start_ref, begin_ref, end_ref, seen_ref, *cache_and_results
):
    """One program: the blocks j of a row's key head with j mod P = the split.

    ``seen_ref`` has positions ``[R]``, or a mask ``[R, S]``. The caches before and after the write
    are the same memory, and are read where they are written.
    """
    _, _, k_ref, v_ref, out_ref, highest_ref, total_ref = cache_and_results
    window = choices.window
    transform = choices.transform
    splits = choices.splits
    key_head = pl.program_id(1)
    split = pl.program_id(2)
    _write_own(choices, start_ref[...], joined_ref, (k_ref, v_ref))
    if not choices.interpret:
        plgpu.debug_barrier()

    first = _first_block(begin_ref[...], split, splits)
    count = (end_ref[...] - first + splits - 1) // splits

    @pl.when(count > 0)
    def attend():
        q = _scaled_queries(choices, joined_ref, key_head, seen_ref.shape[0])

        def add_block(index, carry):
            block = pl.ds((first + index * splits) * BLOCK, BLOCK)
            scores = transform.apply_softcap(float_product(q, k_ref[block, :].T))
            scores = jnp.where(_visible(seen_ref, block, window), scores, MASKED_SCORE)
            return add_to_softmax(carry, scores, v_ref[block, :])

        queries = q.shape[0]
        start = (
            jnp.zeros(q.shape, jnp.float32),
            jnp.full((queries,), MASKED_SCORE, jnp.float32),
            jnp.zeros((queries,), jnp.float32),
        )
        out, highest, total = jax.lax.fori_loop(0, count, add_block, start)
        out_ref[...] = out
        highest_ref[...] = highest
        total_ref[...] = total


def _write_own(choices: _KernelChoices, start, joined_ref, cache_refs) -> None:
    """Writes the new entries whose positions are in blocks of this program's split."""
    capacity, size = cache_refs[0].shape
    # A kernel's arrays have powers of two as sizes. What pads them repeats the last entry.
    index = jnp.arange(power_of_two_from(choices.new_tokens))
    token = jnp.minimum(index, choices.new_tokens - 1)
    place = jax.lax.rem(start + index + capacity, capacity)  # an address: never negative
    is_own = jax.lax.rem(place // BLOCK, choices.splits) == pl.program_id(2)
    is_own &= index < choices.new_tokens

    key_heads = pl.num_programs(1)
    head = key_heads * choices.groups + pl.program_id(1)
    for number, ref in enumerate(cache_refs):
        new = _entries(joined_ref, token, jnp.full_like(token, head + number * key_heads))
        own = ref.at[_spread(place, size, 0), _spread(jnp.arange(size), place.size, 1)]
        plgpu.store(own, new.astype(ref.dtype), mask=_spread(is_own, size, 0))


def _scaled_queries(
    choices: _KernelChoices, joined_ref, key_head, count: int
) -> Float[Array, "R E"]:
    """The queries of a key head, in the order of ``group_queries``."""
    tokens, _, size = joined_ref.shape
    index = jnp.minimum(jnp.arange(count), choices.groups * tokens - 1)
    head = key_head * choices.groups + index // tokens
    q = _entries(joined_ref, jax.lax.rem(index, tokens), head)
    return q * jnp.asarray(choices.transform.query_scale(size), q.dtype)


def _entries(joined_ref, token: Int[Array, "n"], head: Int[Array, "n"]) -> Float[Array, "n E"]:
    """The entries of n pairs of a token and a head."""
    size = joined_ref.shape[2]
    column = _spread(jnp.arange(size), token.size, 1)
    return plgpu.load(joined_ref.at[_spread(token, size, 0), _spread(head, size, 0), column])


def _spread(x: Array, count: int, axis: int) -> Array:
    """A vector as a matrix: along ``axis``, and ``count`` times along the other one."""
    shape = (x.size, count) if axis == 0 else (count, x.size)
    return jax.lax.broadcast_in_dim(x, shape, (axis,))


def _visible(seen_ref, block, window: int | None) -> Bool[Array, "R S"]:
    """Which positions of a block each query sees."""
    if len(seen_ref.shape) == 2:
        return seen_ref[:, block] != 0
    distance = seen_ref[...][:, None] - (block.start + jnp.arange(BLOCK))[None]
    return in_window(distance, window)


def add_to_softmax(
    carry: tuple[Float[Array, "R E"], Float[Array, "R"], Float[Array, "R"]],
    scores: Float[Array, "R S"],
    v: Float[Array, "S E"],
) -> tuple[Float[Array, "R E"], Float[Array, "R"], Float[Array, "R"]]:
    """One step of the online softmax, float32: adds a block of masked scores and its values.

    Carried are the weighted values so far, the largest score and the sum of weights.
    """
    out, highest, total = carry
    new_highest = jnp.maximum(highest, scores.max(axis=-1))
    shrink = jnp.exp(highest - new_highest)
    weights = jnp.exp(scores - new_highest[:, None])
    out = out * shrink[:, None] + float_product(weights.astype(v.dtype), v)
    return out, new_highest, total * shrink + weights.sum(axis=-1)


def float_product(x: Float[Array, "m k"], y: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """The product in float32; numbers of float32 are not rounded before it."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=precision)


def _join(
    partial: list[Array], result: jax.ShapeDtypeStruct, interpret: bool
) -> Float[Array, "B N H E"]:
    """The splits' weighted values as one softmax, for each query. Padding is left out."""
    out = partial[0]
    rows, count, heads, size = result.shape
    key_heads, splits = out.shape[1:3]
    groups = heads // key_heads

    def query_of(b, h, r):
        """Grouped query r of key head h is the token ``r % N`` of the head's group ``r // N``."""
        return b, r % count, h * groups + r // count, 0

    scalars = pl.BlockSpec((None, None, splits, None), lambda b, h, r: (b, h, 0, r))
    values = pl.BlockSpec((None, None, splits, None, size), lambda b, h, r: (b, h, 0, r, 0))
    of_row = pl.BlockSpec((None,), lambda b, h, r: (b,))
    return pl.pallas_call(
        functools.partial(_join_kernel, splits),
        grid=(rows, key_heads, groups * count),
        in_specs=[values, scalars, scalars, of_row, of_row],
        out_specs=pl.BlockSpec((None, None, None, size), query_of),
        out_shape=result,
        compiler_params=plgpu.CompilerParams(num_warps=max(1, splits // 16), num_stages=1),
        interpret=interpret,
        name="decode_attention_join",
    )(*partial)


def _join_kernel(splits, out_ref, highest_ref, total_ref, begin_ref, end_ref, joined_ref):
    """One query. What a split without a block has not written is not read."""
    begin = begin_ref[...]
    used = _first_block(begin, jnp.arange(splits), splits) < end_ref[...]
    highest = plgpu.load(highest_ref, mask=used, other=MASKED_SCORE)
    total = plgpu.load(total_ref, mask=used, other=0.0)
    every = jnp.broadcast_to(used[:, None], out_ref.shape)
    out = plgpu.load(out_ref, mask=every, other=0.0)

    factor = jnp.exp(highest - highest.max())
    weight = (total * factor).sum()
    joined = (out * factor[:, None]).sum(axis=0) / weight
    joined_ref[...] = joined.astype(joined_ref.dtype)
