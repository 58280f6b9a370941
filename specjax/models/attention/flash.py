"""Attention over long sequences in plain JAX: blocks that nobody sees are never met.

A block of queries meets one block of keys after the other (FlashAttention-2, arXiv 2307.08691),
forward and backward, so that no more of the scores exist than one block. Products take the
inputs' dtype and add up in float32; so does the softmax.

Axis legend: B rows, N queries, S keys, H query heads, K key heads, G = H/K, E head size,
I blocks of queries, J blocks of keys, n and s tokens of one block.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention.dense import (
    MASKED_SCORE,
    PLAIN,
    MaskFn,
    Meta,
    ScoreTransform,
    distances,
    grouped,
    ungrouped,
)

# What the backward pass needs beside the arguments; a remat policy may keep it by this name.
RESULT = "attention"
# The names of its loops in a compiled program.
WHOLE, PART = "blocks seen whole", "blocks seen in part"
# A block has no more scores than a TPU's vector memory holds, and no more tokens than pay; no fewer
# than make a loop's turn worth it. A processor has smaller caches, and small blocks skip more.
BLOCK_SCORES, TPU_BLOCK, MAX_BLOCK, MIN_BLOCK = 1 << 22, 1024, 512, 256


class FlashBlocks(NamedTuple):
    """Which blocks of keys each block of queries meets, in any row.

    ``order`` lists, per block of queries, the blocks of keys that all of it sees, then those seen
    in part, then the rest; the first end at ``whole`` and the second at ``seen``.
    """

    order: Int[Array, "I J"]
    whole: Int[Array, "I"]
    seen: Int[Array, "I"]


class _How(NamedTuple):
    """What is static."""

    mask: MaskFn
    finish: ScoreTransform
    block: int


def block_size(rows: int, groups: int) -> int:
    """Tokens of a block, of queries and keys alike: a power of two."""
    block = TPU_BLOCK if jax.default_backend() == "tpu" else MAX_BLOCK
    while block > MIN_BLOCK and rows * groups * block**2 > BLOCK_SCORES:
        block //= 2
    return block


def blocks_of(mask: MaskFn, query: Meta, key: Meta, block: int) -> FlashBlocks:
    """What :func:`flash_attention` needs to know of a mask, once for all layers and passes."""
    query, key = _padded(query, block), _padded(_with_real(key), block)

    def kinds(i):
        """0, 1 or 2 for each block of keys that is seen not at all, in part, or whole."""
        seen = _mask(mask, _part(query, i, block), key)
        seen = seen.reshape(*seen.shape[:2], -1, block)
        part, whole = seen.any(axis=(0, 1, 3)), seen.all(axis=(0, 1, 3))
        return part.astype(jnp.int32) + whole

    count = next(iter(query.values())).shape[1] // block
    kind = jax.lax.map(kinds, jnp.arange(count))
    order = jnp.argsort(-kind, axis=1).astype(jnp.int32)
    whole, seen = (jnp.sum(kind >= least, axis=1, dtype=jnp.int32) for least in (2, 1))
    return FlashBlocks(order, whole, seen)


def flash_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    query: Meta,
    key: Meta,
    mask: MaskFn,
    blocks: FlashBlocks | None = None,
    *,
    finish: ScoreTransform = PLAIN,
    block: int | None = None,
) -> Float[Array, "B N H E"]:
    """:func:`specjax.models.attention.dense_attention` of what ``mask`` lets queries see.

    A query that sees nothing gets 0. Rows go together and meet the blocks that any of them sees;
    key heads go one after the other. N and S need not divide by ``block``.

    Args:
      query, key: metadata of the N and of the S tokens.
      blocks: :func:`blocks_of` the same arguments and ``block``; made here by default.
    """
    heads, (b, n, h, e) = k.shape[1], q.shape
    block = block or block_size(b, h // heads)
    if blocks is None:
        blocks = blocks_of(mask, query, key, block)
    metas = _padded(query, block), _padded(_with_real(key), block)
    q = grouped(q, heads, finish).reshape(b, heads, h // heads, n, e)
    q, k, v = (jnp.moveaxis(_pad(x, -2, block), 1, 0) for x in (q, k, v))
    out = _flash(_How(mask, finish, block), q, k, v, metas, blocks)
    out = jnp.moveaxis(out, 0, 1)[:, :, :, :n]
    return ungrouped(out.reshape(b, heads, -1, e), n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(
    how: _How,
    q: Float[Array, "K B G N E"],
    k: Float[Array, "K B S E"],
    v: Float[Array, "K B S E"],
    metas: tuple[Meta, Meta],
    blocks: FlashBlocks,
) -> Float[Array, "K B G N E"]:
    return _forward(how, q, k, v, metas, blocks)[0]


def _forward(how: _How, q, k, v, metas, blocks):
    """The result, and each query's logsumexp ``[K, B, G, N]``, 0 where it sees nothing."""

    def head(part):
        q, k, v, slopes = part

        def queries(i):
            own, query = _slice(q, i, how.block), _part(metas[0], i, how.block)

            def meet(masked, turn, state):
                top, total, out = state
                j = blocks.order[i, turn]
                keys, values = _slice(k, j, how.block), _slice(v, j, how.block)
                key = _part(metas[1], j, how.block)
                scores = _finished(how, _products(own, keys), slopes, query, key, masked)
                new_top = jnp.maximum(top, scores.max(-1))
                weights = jnp.exp(scores - new_top[..., None])
                shrink = jnp.exp(top - new_top)
                gain = _dot("bgns,bse->bgne", weights.astype(v.dtype), values)
                total = total * shrink + weights.sum(-1)
                return new_top, total, out * shrink[..., None] + gain

            # Above every masked score: what is masked weighs nothing, also where nothing was seen.
            top = jnp.full(own.shape[:-1], MASKED_SCORE / 2, jnp.float32)
            start = top, jnp.zeros_like(top), jnp.zeros(own.shape, jnp.float32)
            top, total, out = _through(blocks, i, meet, start)
            some = total > 0
            total = jnp.where(some, total, 1.0)
            lse = jnp.where(some, top + jnp.log(total), 0.0)
            return (out / total[..., None]).astype(v.dtype), lse

        out, lse = jax.lax.map(queries, jnp.arange(len(blocks.seen)))
        return _joined(out, 2), _joined(lse, 2)

    return jax.lax.map(head, (q, k, v, _slopes(how.finish, q)))


def _keep(how: _How, q, k, v, metas, blocks):
    out, lse = (checkpoint_name(x, RESULT) for x in _forward(how, q, k, v, metas, blocks))
    return out, (q, k, v, metas, blocks, out, lse)


def _backward(how: _How, kept, d_out):
    """The scores once more, a block at a time; five products each."""
    q, k, v, metas, blocks, out, lse = kept
    own = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

    def head(part):
        q, k, v, d_out, own, lse, slopes = part

        def queries(sums, i):
            queries, d_outs = _slice(q, i, how.block), _slice(d_out, i, how.block)
            lses, owns = (_slice(x[..., None], i, how.block) for x in (lse, own))
            query = _part(metas[0], i, how.block)

            def meet(masked, turn, state):
                d_q, d_k, d_v = state
                j = blocks.order[i, turn]
                keys, values = _slice(k, j, how.block), _slice(v, j, how.block)
                key = _part(metas[1], j, how.block)
                finished = functools.partial(
                    _finished, how, slopes=slopes, query=query, key=key, masked=masked
                )
                scores, pull = jax.vjp(finished, _products(queries, keys))
                weights = jnp.exp(scores - lses)
                d_weights = _products(d_outs, values)
                (d_scores,) = pull(weights * (d_weights - owns))
                weights, d_scores = weights.astype(v.dtype), d_scores.astype(k.dtype)
                d_q += _dot("bgns,bse->bgne", d_scores, keys)
                d_k = _add(d_k, _dot("bgns,bgne->bse", d_scores, queries), j)
                d_v = _add(d_v, _dot("bgns,bgne->bse", weights, d_outs), j)
                return d_q, d_k, d_v

            start = jnp.zeros(queries.shape, jnp.float32), *sums
            d_q, *sums = _through(blocks, i, meet, start)
            return tuple(sums), d_q.astype(q.dtype)

        zero = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        (d_k, d_v), d_q = jax.lax.scan(queries, zero, jnp.arange(len(blocks.seen)))
        return _joined(d_q, 2), d_k.astype(k.dtype), d_v.astype(v.dtype)

    slopes = _slopes(how.finish, q)
    grads = jax.lax.map(head, (q, k, v, d_out.astype(v.dtype), own, lse, slopes))
    return *grads, None, None


_flash.defvjp(_keep, _backward)


def _through(blocks: FlashBlocks, i: Int[Array, ""], meet, state):
    """The turns of query block ``i``: no mask is made where all is seen."""
    whole, seen = blocks.whole[i], blocks.seen[i]
    with jax.named_scope(WHOLE):
        state = jax.lax.fori_loop(0, whole, functools.partial(meet, False), state)
    with jax.named_scope(PART):
        return jax.lax.fori_loop(whole, seen, functools.partial(meet, True), state)


def _finished(how: _How, scores, slopes, query: Meta, key: Meta, masked: bool):
    """Scores ``[B, G, n, s]`` as the softmax takes them."""
    scores = how.finish.capped(scores)
    if slopes is not None:
        far = distances(query, key)[:, None].astype(jnp.float32)
        scores = scores - slopes[:, None, None] * far
    if masked:
        scores = jnp.where(_mask(how.mask, query, key)[:, None], scores, MASKED_SCORE)
    return scores


def _slopes(finish: ScoreTransform, q: Float[Array, "K B G N E"]) -> Float[Array, "K G"] | None:
    return finish.slopes(q.shape[0], q.shape[2]) if finish.alibi else None


def _products(x: Float[Array, "B G n E"], y: Float[Array, "B s E"]) -> Float[Array, "B G n s"]:
    return _dot("bgne,bse->bgns", x, y)


def _dot(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _add(total: Float[Array, "B S E"], part: Float[Array, "B s E"], j) -> Float[Array, "B S E"]:
    """``total`` with ``part`` added to its block ``j``."""
    block = part.shape[1]
    new = _slice(total, j, block) + part
    return jax.lax.dynamic_update_slice_in_dim(total, new, j * block, 1)


def _slice(x: Array, i, block: int) -> Array:
    """Block ``i`` of the tokens, which are the last axis but one."""
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, x.ndim - 2)


def _part(meta: Meta, i, block: int) -> Meta:
    return {name: jax.lax.dynamic_slice_in_dim(x, i * block, block, 1) for name, x in meta.items()}


def _joined(blocks: Array, axis: int) -> Array:
    """Blocks ``[I, ...]`` next to each other along ``axis``."""
    x = jnp.moveaxis(blocks, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _mask(mask: MaskFn, query: Meta, key: Meta) -> Bool[Array, "B n s"]:
    return mask(query, key) & key["real"][:, None, :]


def _with_real(key: Meta) -> Meta:
    """Padded by False like all metadata, ``real`` says which keys there are."""
    return {**key, "real": jnp.ones(next(iter(key.values())).shape[:2], bool)}


def _padded(meta: Meta, block: int) -> Meta:
    return {name: _pad(jnp.asarray(x), 1, block) for name, x in meta.items()}


def _pad(x: Array, axis: int, block: int) -> Array:
    """Zeros behind ``axis``, so that blocks divide it."""
    axis %= x.ndim
    more = -x.shape[axis] % block
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x
