"""Attention with its mask as a function of per-token metadata, and two backends.

What a token may see is a property of the two tokens: packed documents, token trees,
sliding windows and draft windows differ only in the mask function. ``dense`` builds the
mask once and suits decoding; ``blockwise`` is an online softmax over key blocks that never
holds an ``[N, S]`` score matrix and suits long training sequences.

Axis legend: B rows, N queries, S keys, H query heads, K key heads, G = H/K, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Meta = Mapping[str, Array]  # per-token arrays, each [B, tokens, ...]
MaskFn = Callable[[Meta, Meta], Bool[Array, "B N S"]]

PADDING_SEGMENT = 0
# Large and finite: a row that sees nothing gets a uniform softmax instead of NaN.
MASKED_SCORE = -1e30


def causal_mask(query: Meta, key: Meta, window: int | None = None) -> Bool[Array, "B N S"]:
    """Keys of the same segment at or before the query's position; padding sees nothing.

    Metadata: ``segment`` int32 (0 = padding) and ``position`` int32. ``window`` is the
    number of positions a token sees, itself included.
    """
    same = query["segment"][:, :, None] == key["segment"][:, None, :]
    distance = query["position"][:, :, None] - key["position"][:, None, :]
    seen = same & (distance >= 0) & (key["segment"] != PADDING_SEGMENT)[:, None, :]
    return seen if window is None else seen & (distance < window)


def cache_mask(
    positions: Int[Array, "B N"],
    base: Int[Array, "B"],
    visible: Bool[Array, "B N T"],
    slots: int,
    window: int | None = None,
    tree_positions: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B N S"]:
    """Which cache slots each new token sees.

    Slots below ``base`` hold the committed tokens, slot = position. Slot ``base + j`` holds
    token j of the T above them, seen by new token i where ``visible[b, i, j]`` (for a chain:
    j ≤ i; for a tree: j is an ancestor of i, or i itself). ``window`` counts positions, not
    slots: ``tree_positions`` are those of the T tokens where they are not just the new ones.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)
    new = slot[None, :] - base[:, None]  # index among the T tokens, < 0 if committed
    count = visible.shape[-1]
    inside = jnp.clip(new, 0, count - 1)
    tree = jnp.take_along_axis(visible, inside[:, None, :], axis=2)
    tree &= (new < count)[:, None, :]
    committed = (new < 0)[:, None, :]
    mask = committed | tree
    if window is None:
        return mask
    above = positions if tree_positions is None else tree_positions
    new_positions = jnp.take_along_axis(above, inside, axis=1)
    key_position = jnp.where(new < 0, slot[None, :], new_positions)
    return mask & (positions[:, :, None] - key_position[:, None, :] < window)


def dense_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    mask: Bool[Array, "B N S"],
) -> Float[Array, "B N H E"]:
    """Softmax attention over the whole key axis; scores and softmax in float32."""
    b, n, h, e = q.shape
    groups = h // k.shape[1]
    # Queries of one key head become rows of one product: GQA without repeating k and v.
    q = q.reshape(b, n, k.shape[1], groups, e).transpose(0, 2, 3, 1, 4)
    q = q.reshape(b, k.shape[1], groups * n, e) * jnp.asarray(e**-0.5, q.dtype)
    scores = jnp.einsum("bkne,bkse->bkns", q, k, preferred_element_type=jnp.float32)
    mask = jnp.tile(mask, (1, groups, 1))[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED_SCORE), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkns,bkse->bkne", weights, v)
    out = out.reshape(b, k.shape[1], groups, n, e).transpose(0, 3, 1, 2, 4)
    return out.reshape(b, n, h, e)


def blockwise_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    query: Meta,
    key: Meta,
    mask_fn: MaskFn,
    block: int = 512,
) -> Float[Array, "B N H E"]:
    """The same function by an online softmax over key blocks (arXiv 1805.02867).

    Memory is ``O(N · block)``; the backward pass recomputes each block. S is padded to a
    multiple of ``block`` with keys that nothing sees.
    """
    b, n, h, e = q.shape
    heads, slots = k.shape[1], k.shape[2]
    pad = -slots % block
    blocks = (slots + pad) // block
    q = q.reshape(b, n, heads, h // heads, e).astype(jnp.float32) * e**-0.5

    def split(x: Array, axis: int) -> Array:
        x = jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)])
        shape = (*x.shape[:axis], blocks, block, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    real = jnp.broadcast_to(jnp.arange(slots) < slots, (b, slots))
    xs = (split(k, 2), split(v, 2), {m: split(x, 1) for m, x in key.items()}, split(real, 1))

    @jax.checkpoint
    def step(carry, xs):
        top, total, out = carry
        k, v, meta, real = xs
        scores = jnp.einsum("bnkge,bkse->bnkgs", q, k.astype(jnp.float32))
        mask = (mask_fn(query, meta) & real[:, None, :])[:, :, None, None, :]
        scores = jnp.where(mask, scores, MASKED_SCORE)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None]) * mask
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(-1)
        gain = jnp.einsum("bnkgs,bkse->bnkge", weights, v.astype(jnp.float32))
        return (new_top, total, out * shrink[..., None] + gain), None

    shape = (b, n, heads, h // heads)
    start = (
        jnp.full(shape, MASKED_SCORE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, e), jnp.float32),
    )
    (_, total, out), _ = jax.lax.scan(step, start, xs)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(b, n, h, e).astype(v.dtype)
