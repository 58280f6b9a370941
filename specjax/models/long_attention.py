"""Attention over long sequences: the one place that chooses how.

Axis legend: B rows, N tokens, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Float

from specjax.models.attention import MaskFn, Meta, Scores
from specjax.models.flash import block_size, blocks_of, flash_attention

# attend(q[B,N,H,E], k[B,K,N,E], v[B,K,N,E]) -> [B,N,H,E]
Attend = Callable[[Array, Array, Array], Float[Array, "B N H E"]]


def long_attention(mask: MaskFn, meta: Meta, finish: Scores, groups: int) -> Attend:
    """Self-attention of whole sequences with ``mask``; what layers share is worked out here.

    Args:
      meta: metadata of the tokens, ``[B, N, ...]`` each.
      groups: query heads of a key head.
    """
    block = block_size(len(meta["position"]), groups)
    blocks = blocks_of(mask, meta, meta, block)

    def attend(q, k, v):
        return flash_attention(q, k, v, meta, meta, mask, blocks, finish=finish, block=block)

    return attend
