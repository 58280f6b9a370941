"""The windows of SDSAT's isolated mask, through JAX's TPU kernel.

A row is ``clean`` tokens followed by windows (:class:`~specjax.models.attention.dense.Isolated`). A
window's token sees the clean tokens of its document before the window's start, and its window up to
itself. Where windows start differs from row to row, so no static mask fits. Instead each query gets
one int32 code from which the kernel computes what it sees, and a table says which blocks to visit.
Both are made once per batch, for all layers.

A *place* is an index in the row, as opposed to a position in the document.

Axis legend: B rows, N tokens, A tokens of windows, H query heads, K key heads, E head size,
I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention import splash
from specjax.models.attention.dense import SCALE_ONLY, Isolated, MaskFn, Meta, ScoreTransform
from specjax.models.attention.key_ranges import document_starts
from specjax.models.attention.splash import BLOCKS, SplashBlocks

SCOPE = "windows"  # the name of this attention in a compiled program
# A row has few window tokens, and a small block of them sees fewer of the keys.
WINDOW_BLOCKS = BLOCKS._replace(queries=512)


class WindowTables(NamedTuple):
    """What :func:`window_attention` needs to know of a batch's windows.

    ``code`` says what a query sees (:class:`_WindowMask`). ``forward`` and ``backward`` are the
    blocks of keys that each block of queries visits.
    """

    code: Int[Array, "B A"]
    forward: Bool[Array, "B I J"]
    backward: Bool[Array, "B I J"]


@dataclasses.dataclass(frozen=True)
class _WindowMask:
    """Whether a query with a code sees a key.

    It sees the keys before its window's start, and those of the window up to itself. A code packs
    three numbers into an int32, with as many bits as each needs, the first one highest: the place
    where the window starts, the query's number after the ``clean`` tokens, and its index in the
    window. Documents are told apart by segment ids.
    """

    clean: int
    queries: int
    longest: int

    @property
    def bits(self) -> tuple[int, int, int]:
        """Bits of each of the three numbers."""
        sizes = (self.clean, self.queries, self.longest)
        start, query, index = ((n - 1).bit_length() for n in sizes)
        return start, query, index

    def encode(self, start: Array, query: Array, index: Array) -> Array:
        _, query_bits, index_bits = self.bits
        return (((start << query_bits) | query) << index_bits) | index

    def __call__(self, code: Array, key: Array) -> Array:
        """``code`` is a query's, ``key`` a place; both int32."""
        _, query_bits, index_bits = self.bits
        start = code >> (query_bits + index_bits)
        query = (code >> index_bits) & ((1 << query_bits) - 1)
        back = (self.clean + query) - key  # how many places the key is before the query
        # The last of the three numbers is the index in the window.
        return (key < start) | ((back >= 0) & (back <= (code & ((1 << index_bits) - 1))))


def supports_windows(mask: MaskFn, transform: ScoreTransform, count: int) -> bool:
    """Whether the kernel can be told what the windows among ``count`` tokens see.

    Their longest length must be known, and a code must fit into an int32.
    """
    if not splash.supports(mask, transform) or not isinstance(mask, Isolated):
        return False
    if not mask.longest or mask.window is not None:
        return False
    bits = _WindowMask(mask.clean, count - mask.clean, mask.longest).bits
    return sum(bits) < 32


def make_window_tables(
    mask: Isolated, meta: Meta, blocks: SplashBlocks = WINDOW_BLOCKS
) -> WindowTables:
    """Tables for rows ``[B, clean + A]`` in which positions rise by one within a segment.

    Args:
      mask: one for which :func:`supports_windows` holds.
      meta: what ``mask`` reads, ``[B, clean + A]`` each.
    """
    clean = mask.clean
    count = meta["position"].shape[1]
    queries = count - clean
    keys = count + -count % blocks.keys
    tail = {name: x[:, clean:] for name, x in meta.items()}
    is_real = (tail["windows"] > 0) & (tail["segment"] > 0)
    document_start = document_starts(meta, clean)
    start = jnp.where(is_real, tail["starts"] + document_start, 0)
    index = jnp.where(is_real, tail["position"] - tail["starts"], 0)
    query = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32), start.shape)
    code = _WindowMask(clean, queries, mask.longest).encode(start, query, index)

    # A query sees two ranges of places: its window up to itself, and its document before the
    # window. Padding sees itself, too, so that no softmax divides by zero.
    window_begins = clean + query - index
    window_ends = clean + query + 1
    document_begins = jnp.where(is_real, jnp.maximum(document_start, 0), keys)

    def visited(wide: int) -> Bool[Array, "B I J"]:
        sizes = keys, blocks.queries, wide
        in_window = _overlaps(window_begins, window_ends, *sizes)
        return in_window | _overlaps(document_begins, start, *sizes)

    code = splash.pad_tokens(code, queries + -queries % blocks.queries)
    return WindowTables(code, visited(blocks.keys), visited(blocks.wide(keys)))


def _overlaps(
    begins: Int[Array, "B A"], ends: Int[Array, "B A"], keys: int, block: int, wide: int
) -> Bool[Array, "B I J"]:
    """Whether the ranges of a block of queries overlap a block of ``wide`` keys.

    Each query's range is ``begins`` to ``ends``, without the end. A block's range goes from the
    first begin to the last end. It may include a block of keys that no query sees: the kernel then
    masks that one.
    """
    rows, queries = begins.shape
    low = jnp.arange(keys // wide, dtype=jnp.int32) * wide
    padded = queries + -queries % block
    begins = splash.pad_tokens(begins, padded, keys).reshape(rows, -1, block)
    ends = splash.pad_tokens(ends, padded).reshape(rows, -1, block)
    first = begins.min(2)[..., None]
    last = ends.max(2)[..., None]
    return (first < low + wide) & (last > low)


@jax.named_scope(SCOPE)
def window_attention(
    q: Float[Array, "B A H E"],
    k: Float[Array, "B K N E"],
    v: Float[Array, "B K N E"],
    segments: Int[Array, "B N"],
    tables: WindowTables,
    *,
    mask: Isolated,
    transform: ScoreTransform = SCALE_ONLY,
    blocks: SplashBlocks = WINDOW_BLOCKS,
    interpret: bool = False,
) -> Float[Array, "B A H E"]:
    """What the A tokens of windows see of the N = ``mask.clean`` + A tokens.

    Arguments as for :func:`specjax.models.attention.splash.splash_attention`; ``tables`` are
    :func:`make_window_tables` of the same ``mask`` and ``blocks``.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    queries = q.shape[1]
    count = k.shape[2]
    parts = splash.head_parts(k)
    padded = tables.code.shape[1]
    keys = count + -count % blocks.keys
    sees = _WindowMask(mask.clean, queries, mask.longest)
    sizes = splash.block_sizes(blocks, keys)
    options = splash.kernel_options(sizes, sees, transform, interpret)
    q = splash.split_heads(splash.scale_queries(q, transform), padded, parts)
    k, v = (splash.split_heads(x, keys, parts) for x in (k, v))
    query_segments = splash.pad_tokens(segments[:, mask.clean :], padded)
    key_segments = splash.pad_tokens(segments, keys)

    def run_row(args):
        q, k, v, segment_ids, (code, forward, backward) = args
        forward_info = splash.mask_info(forward, code, axis=1)
        backward_info = splash.mask_info(backward, code, axis=0)
        kernel = kernels.SplashAttentionKernel(forward_info, None, backward_info, **options)
        ids = kernels.SegmentIds(*segment_ids)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(q, k, v)

    # The table is a scalar argument of the kernel, which has room for one row's: hence `lax.map`.
    segment_ids = (query_segments, key_segments)
    return splash.join_heads(jax.lax.map(run_row, (q, k, v, segment_ids, tables)), queries)
