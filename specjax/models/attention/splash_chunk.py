"""Prefill chunks against a long cache, through JAX's TPU kernel.

A chunk is a chain of tokens at consecutive positions, already written to the cache. What a query
sees depends on its position, which is data: its code for the kernel is the position itself. Blocks
of cache positions that no query of a block sees are neither read nor computed.

Axis legend: B rows, N tokens of a chunk, S cache positions, H query heads, K key heads, E head
size, I blocks of queries, J blocks of cache positions.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax._util.platform import platform
from specjax.models.attention import splash
from specjax.models.attention.dense import SCALE_ONLY, ScoreTransform, in_window
from specjax.models.attention.splash import BLOCKS, SplashBlocks
from specjax.models.quantized_cache import KVBuffer, QuantizedKV

CHUNK_MULTIPLE = 256  # tokens; the kernel is worth it for chunks that are a multiple of this


@dataclasses.dataclass(frozen=True)
class _PositionMask:
    """Whether a query at a position sees a cache position, within ``window`` positions."""

    window: int | None

    def __call__(self, position: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return in_window(position - key, self.window)


LARGEST_HEAD = 256  # latents are larger, and the kernel keeps whole blocks of them


def supports_chunk(tokens: int, transform: ScoreTransform, cache: KVBuffer) -> bool:
    """Whether :func:`chunk_attention` should run a pass of ``tokens`` tokens per row."""
    wide = platform().splash_attention and tokens % CHUNK_MULTIPLE == 0
    supported = not transform.alibi and not transform.sinks and cache.shape[-1] <= LARGEST_HEAD
    return wide and supported and not isinstance(cache, QuantizedKV)


def chunk_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    positions: Int[Array, "B N"],
    *,
    window: int | None = None,
    transform: ScoreTransform = SCALE_ONLY,
    blocks: SplashBlocks = BLOCKS,
    interpret: bool = False,
) -> Float[Array, "B N H E"]:
    """Causal attention of a prefill chunk to the cache that holds it and all before it.

    Each token is in the cache position of its position. There are no gradients.

    Args:
      window: positions that a query sees, its own included.
      blocks: a block's keys are cache positions; ``backward`` is not used.
      interpret: run without a TPU, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    capacity = k.shape[2]
    # The largest blocks that divide the chunk and the cache: nothing is padded.
    block = math.gcd(blocks.queries, q.shape[1])
    wide = math.gcd(blocks.keys, capacity)
    sizes = kernels.BlockSizes(block, wide, min(wide, blocks.product))
    options = splash.kernel_options(sizes, _PositionMask(window), transform, interpret)
    visited = chunk_blocks(positions, capacity, window, (block, wide))

    def run_row(args):
        q, k, v, visited, positions = args
        info = splash.mask_info(visited, positions, axis=1)
        return kernels.SplashAttentionKernel(info, None, None, **options)(q, k, v)

    # The table is a scalar argument of the kernel, which has room for one row's: hence `lax.map`.
    arguments = (splash.scale_queries(q, transform), k, v, visited, positions)
    return jax.lax.map(run_row, arguments).transpose(0, 2, 1, 3)


def chunk_blocks(
    positions: Int[Array, "B N"], capacity: int, window: int | None, blocks: tuple[int, int]
) -> Bool[Array, "B I J"]:
    """Which blocks of cache positions each block of queries visits.

    ``blocks`` are the tokens of a block of queries and the positions of a block of the cache.
    """
    block, wide = blocks
    per_block = positions.reshape(len(positions), -1, block)
    first = per_block.min(2)[..., None]
    last = per_block.max(2)[..., None]
    low = jnp.arange(capacity // wide, dtype=jnp.int32) * wide
    visited = low <= last
    if window is None:
        return visited
    return visited & (low + wide > first - window + 1)
