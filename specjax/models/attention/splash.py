"""Attention over long sequences by JAX's own TPU kernel, splash attention.

Its masks are of places in a row: causal and sliding ones are known before it runs, and it skips
what they hide; packed documents are masked, but skipped no block for. What the windows of
:class:`~specjax.models.attention.dense.Isolated` see depends on the row. So does what a piece of a
prompt sees of its cache. There the kernel takes a number for each query, which says it all, and a
table of the blocks that are met.

Axis legend: B rows, N tokens, A tokens of windows, H query heads, K key heads, E head size,
P parts of the heads, I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention.dense import PLAIN, Causal, Isolated, Meta, ScoreTransform, within
from specjax.models.attention.flash import RESULT
from specjax.models.coded import Coded

CHAIN = 256  # tokens of a row that are worth the kernel, where it reads a cache
WINDOWS = "windows"  # the name of their attention in a compiled program


class SplashBlocks(NamedTuple):
    """Tokens of the kernel's blocks, all multiples of 128.

    ``backward`` are the keys of a block in the backward pass, which keeps one partial gradient of
    the queries per block of keys; ``product`` are those of one product.
    """

    queries: int
    keys: int
    backward: int
    product: int

    def wide(self, count: int) -> int:
        """Keys of a block in the backward pass over ``count`` of them, which it must divide."""
        return self.backward if count % self.backward == 0 else self.keys


# Chosen by the bundles that the TPU compiler schedules. Windows are few: their small blocks of
# queries see less of the keys.
BLOCKS = SplashBlocks(1024, 1024, 2048, 512)
WINDOW_BLOCKS = BLOCKS._replace(queries=512)


def supports(mask, finish: ScoreTransform) -> bool:
    """Whether the kernel knows such attention."""
    return isinstance(mask, Causal) and not finish.alibi and finish.shards == 1


def splash_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K N E"],
    v: Float[Array, "B K N E"],
    segments: Int[Array, "B N"],
    *,
    window: int | None = None,
    finish: ScoreTransform = PLAIN,
    blocks: SplashBlocks = BLOCKS,
    interpret: bool = False,
) -> Float[Array, "B N H E"]:
    """Causal attention within segments, whose positions rise by one from token to token.

    Args:
      blocks: with ``queries`` and ``keys`` that divide one another.
      interpret: run without a TPU, slowly.
    """
    # Only where it runs: every program would start a tenth of a second later.
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    (_, count, heads, _), parts = q.shape, _parts(k)
    padded = count + -count % max(blocks.queries, blocks.keys)
    shape = (padded, padded)
    if window is None:
        mask = jax_splash.CausalMask(shape)
    else:
        mask = jax_splash.LocalMask(shape, (window - 1, 0), 0)
    kernel = jax_splash.make_splash_mha(
        jax_splash.MultiHeadMask([mask] * (heads // parts)),
        block_sizes=_block_sizes(blocks, padded),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=finish.softcap,
        residual_checkpoint_name=RESULT,
        interpret=interpret,
    )
    q, k, v = (_padded(x, padded, parts) for x in (_scaled(q, finish), k, v))
    segments = _fill(segments, padded)

    def row(q, k, v, segments):
        ids = jax_splash.SegmentIds(segments, segments)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(q, k, v)

    return _result(jax.vmap(row)(q, k, v, segments), count)


class Windows(NamedTuple):
    """What :func:`window_attention` needs to know of a batch, once for all layers.

    ``code`` says what a token of a window sees, as :class:`_Seen` reads it; ``forward`` and
    ``backward`` are the blocks of keys that a block of queries meets.
    """

    code: Int[Array, "B A"]
    forward: Bool[Array, "B I J"]
    backward: Bool[Array, "B I J"]


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Whether a key is seen: it lies before the window's start or in the window, up to the token.

    A code is the place where the window starts, the query's number behind the ``clean`` tokens and
    its place in the window, in so many bits each. Documents are the kernel's own business.
    """

    clean: int
    queries: int
    longest: int

    @property
    def bits(self) -> tuple[int, int, int]:
        return tuple((n - 1).bit_length() for n in (self.clean, self.queries, self.longest))

    def code(self, start: Array, query: Array, place: Array) -> Array:
        _, queries, places = self.bits
        return (((start << queries) | query) << places) | place

    def __call__(self, code: Array, key: Array) -> Array:
        _, queries, places = self.bits
        start, query = code >> (queries + places), (code >> places) & ((1 << queries) - 1)
        before = (self.clean + query) - key  # places of the key before the token itself
        return (key < start) | ((before >= 0) & (before <= (code & ((1 << places) - 1))))


def supports_windows(mask, finish: ScoreTransform, count: int) -> bool:
    """Whether the kernel can be told what the windows among ``count`` tokens see."""
    if not (supports(mask, finish) and isinstance(mask, Isolated) and mask.longest):
        return False
    bits = _Seen(mask.clean, count - mask.clean, mask.longest).bits
    return mask.window is None and sum(bits) < 32


def windows_of(mask: Isolated, meta: Meta, blocks: SplashBlocks = WINDOW_BLOCKS) -> Windows:
    """Of rows ``[B, clean + A]``, in which positions rise by one within a segment."""
    clean, count = mask.clean, meta["position"].shape[1]
    queries, keys = count - clean, count + -count % blocks.keys
    tail = {name: x[:, clean:] for name, x in meta.items()}
    real = (tail["windows"] > 0) & (tail["segment"] > 0)
    first = _document_starts(meta, clean)
    start = jnp.where(real, tail["starts"] + first, 0)
    place = jnp.where(real, tail["position"] - tail["starts"], 0)
    query = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32), start.shape)
    code = _Seen(clean, queries, mask.longest).code(start, query, place)
    # Every query meets itself, lest there be nothing to divide by.
    own = clean + query - place, clean + query + 1
    before = jnp.where(real, jnp.maximum(first, 0), keys), start

    def met(wide: int) -> Bool[Array, "B I J"]:
        sizes = keys, blocks.queries, wide
        return _meets(*own, *sizes) | _meets(*before, *sizes)

    code = _fill(code, queries + -queries % blocks.queries)
    return Windows(code, met(blocks.keys), met(blocks.wide(keys)))


def _document_starts(meta: Meta, clean: int) -> Int[Array, "B A"]:
    """The place of position 0 of each window's document."""
    segments, places = meta["segment"], jnp.arange(clean, dtype=jnp.int32)
    starts = jnp.zeros((len(segments), clean + 1), jnp.int32)  # there are no more than places
    each = jnp.arange(len(segments))[:, None]
    starts = starts.at[each, segments[:, :clean]].set(
        places - meta["position"][:, :clean], mode="drop"
    )
    return jnp.take_along_axis(starts, segments[:, clean:], axis=1)


def _meets(
    begins: Int[Array, "B A"], ends: Int[Array, "B A"], keys: int, block: int, wide: int
) -> Bool[Array, "B I J"]:
    """Whether a block of so ``wide`` keys holds any from the first ``begins`` of a block of queries
    to before the last of their ``ends``."""
    (rows, queries), low = begins.shape, jnp.arange(keys // wide, dtype=jnp.int32) * wide
    begins = _fill(begins, queries + -queries % block, keys).reshape(rows, -1, block)
    ends = _fill(ends, queries + -queries % block).reshape(rows, -1, block)
    begins, ends = begins.min(2)[..., None], ends.max(2)[..., None]
    return (begins < low + wide) & (ends > low)


@jax.named_scope(WINDOWS)
def window_attention(
    q: Float[Array, "B A H E"],
    k: Float[Array, "B K N E"],
    v: Float[Array, "B K N E"],
    segments: Int[Array, "B N"],
    windows: Windows,
    *,
    mask: Isolated,
    finish: ScoreTransform = PLAIN,
    blocks: SplashBlocks = WINDOW_BLOCKS,
    interpret: bool = False,
) -> Float[Array, "B A H E"]:
    """What the tokens of windows see of the N = ``mask.clean`` + A tokens.

    Arguments as :func:`splash_attention` and :func:`windows_of`, with the same ``blocks``.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    (_, queries, _, _), count, parts = q.shape, k.shape[2], _parts(k)
    padded, keys = windows.code.shape[1], count + -count % blocks.keys
    seen = _Seen(mask.clean, queries, mask.longest)
    how = _kernel_options(_block_sizes(blocks, keys), seen, finish, interpret)
    q = _padded(_scaled(q, finish), padded, parts)
    k, v = (_padded(x, keys, parts) for x in (k, v))
    ids = _fill(segments[:, mask.clean :], padded), _fill(segments, keys)

    def row(part):
        q, k, v, ids, (code, forward, backward) = part
        infos = _mask_info(forward, code, 1), None, _mask_info(backward, code, 0)
        kernel, ids = kernels.SplashAttentionKernel(*infos, **how), kernels.SegmentIds(*ids)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(q, k, v)

    # Tables of blocks are scalars to the kernel, of which it takes one row's.
    return _result(jax.lax.map(row, (q, k, v, ids, windows)), queries)


@dataclasses.dataclass(frozen=True)
class _Behind:
    """Whether a query at a position sees a key of the cache, in a window of so many positions."""

    window: int | None

    def __call__(self, position: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return within(position - key, self.window)


def supports_chain(tokens: int, finish: ScoreTransform, cache: Array | Coded) -> bool:
    """Whether :func:`chain_attention` is the way for a pass of so many tokens a row."""
    kernel = jax.default_backend() == "tpu" and tokens % CHAIN == 0
    return kernel and not finish.alibi and not isinstance(cache, Coded)


def chain_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    positions: Int[Array, "B N"],
    *,
    window: int | None = None,
    finish: ScoreTransform = PLAIN,
    blocks: SplashBlocks = BLOCKS,
    interpret: bool = False,
) -> Float[Array, "B N H E"]:
    """What a piece of a prompt sees of a cache that holds it, each token in its position's cache
    position.

    Slots that no query of a block sees are neither read nor met. There are no gradients.

    Args:
      blocks: positions are keys; all but ``backward`` counts.
      interpret: run without a TPU, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    (_, n, _, _), capacity = q.shape, k.shape[2]
    block, wide = math.gcd(blocks.queries, n), math.gcd(blocks.keys, capacity)
    sizes = kernels.BlockSizes(block, wide, min(wide, blocks.product))
    how = _kernel_options(sizes, _Behind(window), finish, interpret)
    met = chain_blocks(positions, capacity, window, (block, wide))

    def row(part):
        q, k, v, met, positions = part
        info = _mask_info(met, positions, 1)
        return kernels.SplashAttentionKernel(info, None, None, **how)(q, k, v)

    # The table of blocks is scalars to the kernel, of which it takes one row's.
    out = jax.lax.map(row, (_scaled(q, finish), k, v, met, positions))
    return out.transpose(0, 2, 1, 3)


def chain_blocks(
    positions: Int[Array, "B N"], capacity: int, window: int | None, blocks: tuple[int, int]
) -> Bool[Array, "B I J"]:
    """Which blocks of positions a block of queries meets, in so many tokens of either."""
    block, wide = blocks
    grouped = positions.reshape(len(positions), -1, block)
    first, last = grouped.min(2)[..., None], grouped.max(2)[..., None]
    low = jnp.arange(capacity // wide, dtype=jnp.int32) * wide
    met = low <= last
    return met if window is None else met & (low + wide > first - window + 1)


def _kernel_options(
    sizes, seen: Callable, finish: ScoreTransform, interpret: bool
) -> dict[str, Any]:
    """``seen`` of a query's number and a key's place is the mask."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    return {
        "block_sizes": sizes,
        "is_mqa": False,
        "save_residuals": False,
        "mask_value": kernels.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": finish.softcap,
        "residual_checkpoint_name": RESULT,
        "mask_function": seen,
        "interpret": interpret,
    }


def _mask_info(met: Bool[Array, "I J"], code: Int[Array, "A"], axis: int):
    """As the kernel takes it; ``axis`` is what its innermost loop runs over, where a block that is
    skipped names the next one that is met, or the last: nothing is fetched for it."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    at = jax.lax.broadcasted_iota(jnp.int32, met.shape, axis)
    next_met = jax.lax.cummin(jnp.where(met, at, met.shape[axis]), axis, reverse=True)
    last = jnp.max(jnp.where(met, at, 0), axis, keepdims=True)
    data = jnp.minimum(next_met, last)
    return MaskInfo(data[None], None, met[None].astype(jnp.int32), None, code)


def _parts(k: Float[Array, "B K N E"]) -> int:
    """Of the heads: by itself the backward pass takes one of two cores."""
    return 2 if k.shape[1] % 2 == 0 else 1


def _block_sizes(blocks: SplashBlocks, count: int):
    """As the kernel takes them, of so many keys."""
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    wide = blocks.wide(count)
    return jax_splash.BlockSizes(
        block_q=blocks.queries,
        block_kv=blocks.keys,
        block_kv_compute=min(blocks.keys, blocks.product),
        block_q_dkv=blocks.queries,
        block_kv_dkv=wide,
        block_kv_dkv_compute=min(wide, blocks.product),
        use_fused_bwd_kernel=True,
    )


def _scaled(q: Float[Array, "B N H E"], finish: ScoreTransform) -> Float[Array, "B H N E"]:
    scale = q.shape[-1] ** -0.5 if finish.scale is None else finish.scale
    return (q * jnp.asarray(scale, q.dtype)).transpose(0, 2, 1, 3)


def _padded(x: Float[Array, "B H N E"], count: int, parts: int) -> Float[Array, "B P H/P M E"]:
    x = jnp.pad(x, ((0, 0), (0, 0), (0, count - x.shape[2]), (0, 0)))
    return x.reshape(len(x), parts, -1, *x.shape[2:])


def _fill(x: Int[Array, "B N"], count: int, value: int = 0) -> Int[Array, "B M"]:
    return jnp.pad(x, ((0, 0), (0, count - x.shape[1])), constant_values=value)


def _result(out: Float[Array, "B P H/P M E"], count: int) -> Float[Array, "B N H E"]:
    out = out.reshape(len(out), -1, *out.shape[3:])
    return out[:, :, :count].transpose(0, 2, 1, 3)
