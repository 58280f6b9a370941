"""Attention over long sequences by JAX's own TPU kernel, splash attention.

Its masks are of places in a row: causal and sliding ones are known before it runs, and it skips
what they hide; packed documents are masked, but skipped no block for.

Axis legend: B rows, N tokens, H query heads, K key heads, E head size, P parts of the heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.attention import PLAIN, Causal, Scores
from specjax.models.flash import RESULT

# Tokens of a block, chosen by the bundles that the TPU compiler schedules for it. The backward
# kernel keeps one partial gradient of the queries per block of keys, so those are wide.
BLOCK, WIDE, PRODUCT = 1024, 2048, 512


def takes(mask, finish: Scores) -> bool:
    """Whether the kernel knows such attention."""
    return isinstance(mask, Causal) and not finish.alibi and finish.shards == 1


def splash_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K N E"],
    v: Float[Array, "B K N E"],
    segments: Int[Array, "B N"],
    *,
    window: int | None = None,
    finish: Scores = PLAIN,
    blocks: tuple[int, int, int] = (BLOCK, WIDE, PRODUCT),
    interpret: bool = False,
) -> Float[Array, "B N H E"]:
    """Causal attention within segments, whose positions rise by one from token to token.

    Args:
      blocks: tokens of a block; of a block of keys in the backward pass, if that divides the row;
        and keys of one product. Multiples of 128.
      interpret: run without a TPU, slowly.
    """
    # Only where it runs: every program would start a tenth of a second later.
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    (b, count, heads, size), key_heads = q.shape, k.shape[1]
    block, wide, product = blocks
    padded = count + -count % block
    wide = wide if padded % wide == 0 else block
    shape = (padded, padded)
    parts = 2 if key_heads % 2 == 0 else 1  # by itself the backward pass takes one of two cores
    if window is None:
        mask = jax_splash.CausalMask(shape)
    else:
        mask = jax_splash.LocalMask(shape, (window - 1, 0), 0)
    kernel = jax_splash.make_splash_mha(
        jax_splash.MultiHeadMask([mask] * (heads // parts)),
        block_sizes=jax_splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=min(block, product),
            block_q_dkv=block,
            block_kv_dkv=wide,
            block_kv_dkv_compute=min(wide, product),
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=finish.softcap,
        residual_checkpoint_name=RESULT,
        interpret=interpret,
    )
    scale = size**-0.5 if finish.scale is None else finish.scale
    q = (q * jnp.asarray(scale, q.dtype)).transpose(0, 2, 1, 3)
    more = ((0, 0), (0, 0), (0, padded - count), (0, 0))
    q, k, v = (jnp.pad(x, more).reshape(b, parts, -1, padded, size) for x in (q, k, v))
    segments = jnp.pad(segments, (more[0], more[2]))

    def row(q, k, v, segments):
        ids = jax_splash.SegmentIds(segments, segments)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(q, k, v)

    out = jax.vmap(row)(q, k, v, segments).reshape(b, heads, padded, size)
    return out[:, :, :count].transpose(0, 2, 1, 3)
