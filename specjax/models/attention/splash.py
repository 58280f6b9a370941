"""JAX's TPU kernel, splash attention: for packed documents, and what its other uses share.

The kernel's own masks depend only on places in a row. It knows causal and sliding masks before it
runs, and skips the blocks that they hide. Documents are told apart by segment ids, which mask
scores but skip no block.

Other masks depend on data. For those the kernel gets one int32 code per query, from which a mask
function computes what the query sees, and a table of the blocks to visit
(:mod:`~specjax.models.attention.splash_windows`, :mod:`~specjax.models.attention.splash_chunk`).

The kernel is imported where it runs: at the top of the file, it would cost every program a tenth
of a second.

Axis legend: B rows, N tokens, M tokens padded to blocks, A queries, H query heads, K key heads,
E head size, P parts of the heads, I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention.dense import SCALE_ONLY, Causal, MaskFn, ScoreTransform
from specjax.models.attention.flash import RESULT


class SplashBlocks(NamedTuple):
    """Tokens of the kernel's blocks, all multiples of 128.

    ``queries`` and ``keys``: of a block in the forward pass. ``backward``: keys of a block in the
    backward pass, which keeps one partial gradient of the queries per block of keys. ``product``:
    keys of one product, of which a block has several.
    """

    queries: int
    keys: int
    backward: int
    product: int

    def wide(self, count: int) -> int:
        """Keys of a block in the backward pass; a block has to divide all ``count`` keys."""
        if count % self.backward == 0:
            return self.backward
        return self.keys


# The sizes for which the TPU compiler schedules the fewest instruction bundles.
BLOCKS = SplashBlocks(queries=1024, keys=1024, backward=2048, product=512)


def supports(mask: MaskFn, transform: ScoreTransform) -> bool:
    """Whether the kernel can run attention with this mask and transform."""
    if transform.alibi or transform.sinks:
        return False
    return isinstance(mask, Causal) and not mask.chunked and transform.shards == 1


def splash_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K N E"],
    v: Float[Array, "B K N E"],
    segments: Int[Array, "B N"],
    *,
    window: int | None = None,
    transform: ScoreTransform = SCALE_ONLY,
    blocks: SplashBlocks = BLOCKS,
    interpret: bool = False,
) -> Float[Array, "B N H E"]:
    """Causal attention within segments, whose positions rise by one from token to token.

    Args:
      window: positions that a query sees, its own included.
      blocks: ``queries`` must divide ``keys``, or the other way round.
      interpret: run without a TPU, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    count = q.shape[1]
    heads = q.shape[2]
    parts = head_parts(k)
    padded = count + -count % max(blocks.queries, blocks.keys)
    shape = (padded, padded)
    if window is None:
        mask = jax_splash.CausalMask(shape)
    else:
        mask = jax_splash.LocalMask(shape, (window - 1, 0), 0)
    kernel = jax_splash.make_splash_mha(
        jax_splash.MultiHeadMask([mask] * (heads // parts)),
        block_sizes=block_sizes(blocks, padded),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=transform.softcap,
        residual_checkpoint_name=RESULT,
        interpret=interpret,
    )
    # The kernel takes one row without padding of its own: rows and parts of the heads are vmapped.
    q, k, v = (split_heads(x, padded, parts) for x in (scale_queries(q, transform), k, v))
    segments = pad_tokens(segments, padded)

    def run_row(q, k, v, segments):
        ids = jax_splash.SegmentIds(segments, segments)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(q, k, v)

    return join_heads(jax.vmap(run_row)(q, k, v, segments), count)


def kernel_options(
    sizes: Any, sees: Callable[[Array, Array], Array], transform: ScoreTransform, interpret: bool
) -> dict[str, Any]:
    """Arguments of ``SplashAttentionKernel`` whose mask is ``sees(code of a query, key place)``."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    return {
        "block_sizes": sizes,
        "is_mqa": False,
        "save_residuals": False,
        "mask_value": kernels.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": transform.softcap,
        "residual_checkpoint_name": RESULT,
        "mask_function": sees,
        "interpret": interpret,
    }


def mask_info(visited: Bool[Array, "I J"], code: Int[Array, "A"], axis: int):
    """The table of blocks to visit, in the kernel's form, and the queries' codes.

    ``axis`` is what the kernel's inner loop runs over. While it fetches a block, it reads in this
    table which one comes next. A block that is skipped therefore names the next visited one, or
    the last one: nothing is fetched for it.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    index = jax.lax.broadcasted_iota(jnp.int32, visited.shape, axis)
    visited_index = jnp.where(visited, index, visited.shape[axis])
    next_visited = jax.lax.cummin(visited_index, axis, reverse=True)
    last = jnp.max(jnp.where(visited, index, 0), axis, keepdims=True)
    fetched = jnp.minimum(next_visited, last)
    return MaskInfo(
        fetched[None],
        None,
        visited[None].astype(jnp.int32),
        None,
        code,  # pyright: ignore[reportArgumentType]  typed as NumPy's; the kernel passes it to jax
    )


def block_sizes(blocks: SplashBlocks, count: int):
    """The kernel's own ``BlockSizes``, for ``count`` keys."""
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


def head_parts(k: Float[Array, "B K N E"]) -> int:
    """The number of groups in which the heads run: two if possible.

    One call of the backward pass occupies only one of a chip's two cores.
    """
    return 2 if k.shape[1] % 2 == 0 else 1


def scale_queries(q: Float[Array, "B N H E"], transform: ScoreTransform) -> Float[Array, "B H N E"]:
    """``q`` with heads before tokens, and scaled: the kernel has no scale of its own."""
    scale = transform.query_scale(q.shape[-1])
    return (q * jnp.asarray(scale, q.dtype)).transpose(0, 2, 1, 3)


def split_heads(x: Float[Array, "B H N E"], count: int, parts: int) -> Float[Array, "B P H/P M E"]:
    """``x`` padded to ``count`` tokens, its heads in ``parts`` groups."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, count - x.shape[2]), (0, 0)))
    return x.reshape(len(x), parts, -1, *x.shape[2:])


def join_heads(out: Any, count: int) -> Float[Array, "B N H E"]:
    """The kernel's ``[B, P, H/P, M, E]`` without its padding; the inverse of :func:`split_heads`.

    ``out`` is ``Any``, because the kernel's result is typed as a union; here it is an array.
    """
    out = out.reshape(len(out), -1, *out.shape[3:])
    return out[:, :, :count].transpose(0, 2, 1, 3)


def pad_tokens(x: Int[Array, "B N"], count: int, value: int = 0) -> Int[Array, "B M"]:
    """``x`` padded to ``count`` tokens."""
    return jnp.pad(x, ((0, 0), (0, count - x.shape[1])), constant_values=value)
