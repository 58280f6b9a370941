"""Attention over long sequences in plain JAX, which skips blocks that no query sees.

A block of queries visits one block of keys after the other (FlashAttention-2, arXiv 2307.08691),
forward and backward, so that the scores of only one block exist at a time. Products take the
inputs' dtype and sum in float32; the softmax is float32, too.

Axis legend: B rows, N queries, S keys, H query heads, K key heads, G = H/K, E head size,
I blocks of queries, J blocks of keys, n and s tokens of one block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from specjax._util.platform import platform
from specjax.models.attention.dense import (
    MASKED_SCORE,
    SCALE_ONLY,
    MaskFn,
    Meta,
    ScoreTransform,
    distances,
    group_queries,
    ungroup_queries,
)

# The result and its logsumexp, which the backward pass reads; a remat policy may keep them by this
# name.
RESULT = "attention"
# The names of the two loops in a compiled program.
UNMASKED = "blocks without a mask"
MASKED = "blocks with a mask"
# A block has no more scores than a TPU's vector memory holds. Fewer than 256 tokens are not worth
# an iteration. The largest block depends on the platform: smaller ones skip more, and fit the
# smaller caches of a CPU.
BLOCK_SCORES = 1 << 22
MIN_BLOCK = 256


class FlashBlocks(NamedTuple):
    """Which blocks of keys each block of queries visits, for all rows of a batch.

    ``order[i]`` lists the blocks of keys: first those that every query of block i sees in full,
    then those seen in part, then the others. Blocks ``order[i, :whole[i]]`` need no mask;
    ``order[i, seen[i]:]`` are skipped.
    """

    order: Int[Array, "I J"]
    whole: Int[Array, "I"]
    seen: Int[Array, "I"]


class _Static(NamedTuple):
    """Arguments that are not traced."""

    mask: MaskFn
    transform: ScoreTransform
    block: int


def block_size(rows: int, groups: int) -> int:
    """Tokens of a block, for queries and for keys: a power of two."""
    block = platform().attention_block
    while block > MIN_BLOCK and rows * groups * block**2 > BLOCK_SCORES:
        block //= 2
    return block


def find_blocks(mask: MaskFn, query: Meta, key: Meta, block: int) -> FlashBlocks:
    """The blocks that a mask lets queries see.

    Made once for all layers that share the mask, and for the forward and the backward pass.
    """
    query = _pad_meta(query, block)
    key = _pad_meta(_with_real(key), block)

    def classify(i: Int[Array, ""]) -> Int[Array, "J"]:
        """For each block of keys: 0 if query block i does not see it, 1 in part, 2 whole."""
        visible = _real_mask(mask, _meta_block(query, i, block), key)
        visible = visible.reshape(*visible.shape[:2], -1, block)
        in_part = visible.any(axis=(0, 1, 3))
        whole = visible.all(axis=(0, 1, 3))
        return in_part.astype(jnp.int32) + whole

    count = next(iter(query.values())).shape[1] // block
    # `lax.map`: the mask of only one block of queries exists at a time.
    kind = jax.lax.map(classify, jnp.arange(count))
    order = jnp.argsort(-kind, axis=1).astype(jnp.int32)
    whole = jnp.sum(kind >= 2, axis=1, dtype=jnp.int32)
    seen = jnp.sum(kind >= 1, axis=1, dtype=jnp.int32)
    return FlashBlocks(order, whole, seen)


def flash_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    query: Meta,
    key: Meta,
    mask: MaskFn,
    blocks: FlashBlocks | None = None,
    sinks: Float[Array, "H"] | None = None,
    *,
    transform: ScoreTransform = SCALE_ONLY,
    block: int | None = None,
) -> Float[Array, "B N H E"]:
    """:func:`specjax.models.attention.dense.dense_attention` under ``mask``, block by block.

    A query that sees nothing gets 0. All rows of a batch visit the blocks that any of them sees.
    Key heads run one after the other. N and S need not be multiples of ``block``.

    Args:
      query, key: metadata of the N queries and of the S keys.
      blocks: :func:`find_blocks` of the same arguments and ``block``; made here by default.
      sinks: one more score of each head, for a transform that has them.
      block: tokens of a block; :func:`block_size` by default.
    """
    heads = k.shape[1]
    b, n, h, e = q.shape
    block = block or block_size(b, h // heads)
    if blocks is None:
        blocks = find_blocks(mask, query, key, block)
    metas = _pad_meta(query, block), _pad_meta(_with_real(key), block)

    # Key heads lead, for `lax.map` over them.
    q = group_queries(q, heads, transform).reshape(b, heads, h // heads, n, e)
    q, k, v = (jnp.moveaxis(pad_tokens(x, -2, block), 1, 0) for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(heads, -1)
    out = _flash(_Static(mask, transform, block), q, k, v, sinks, metas, blocks)
    out = jnp.moveaxis(out, 0, 1)[:, :, :, :n]
    return ungroup_queries(out.reshape(b, heads, -1, e), n)


def _without_lse(
    static: _Static,
    q: Float[Array, "K B G N E"],
    k: Float[Array, "K B S E"],
    v: Float[Array, "K B S E"],
    sinks: Float[Array, "K G"] | None,
    metas: tuple[Meta, Meta],
    blocks: FlashBlocks,
) -> Float[Array, "K B G N E"]:
    """The result of :func:`_forward` alone: the function that gets a custom gradient."""
    return _forward(static, q, k, v, sinks, metas, blocks)[0]


_flash = jax.custom_vjp(_without_lse, nondiff_argnums=(0,))


class _Head(NamedTuple):
    """What the forward pass reads of one key head."""

    q: Float[Array, "B G N E"]
    k: Float[Array, "B S E"]
    v: Float[Array, "B S E"]
    slopes: Float[Array, "G"] | None
    sinks: Float[Array, "G"] | None


def _forward(static: _Static, q, k, v, sinks, metas: tuple[Meta, Meta], blocks: FlashBlocks):
    """The result, and each query's logsumexp ``[K, B, G, N]``, 0 where it sees nothing."""

    def run_head(head: _Head):
        def run_queries(i):
            return _forward_queries(static, head, metas, blocks, i)

        out, lse = jax.lax.map(run_queries, jnp.arange(len(blocks.seen)))
        return _join_blocks(out, 2), _join_blocks(lse, 2)

    return jax.lax.map(run_head, _Head(q, k, v, _slopes(static.transform, q), sinks))


def _forward_queries(
    static: _Static, head: _Head, metas: tuple[Meta, Meta], blocks: FlashBlocks, i
) -> tuple[Float[Array, "B G n E"], Float[Array, "B G n"]]:
    """Result and logsumexp of query block ``i``, by the online softmax."""
    queries = _take_block(head.q, i, static.block)
    query = _meta_block(metas[0], i, static.block)

    def visit(masked: bool, step, state):
        # The largest score so far, the sum of weights, and the weighted sum of values.
        top, total, out = state
        j = blocks.order[i, step]
        keys = _take_block(head.k, j, static.block)
        values = _take_block(head.v, j, static.block)
        key = _meta_block(metas[1], j, static.block)
        products = _products(queries, keys)
        scores = _transformed_scores(static, products, head.slopes, query, key, masked)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        # What was summed so far is relative to the former largest score.
        shrink = jnp.exp(top - new_top)
        gain = _dot("bgns,bse->bgne", weights.astype(values.dtype), values)
        total = total * shrink + weights.sum(-1)
        return new_top, total, out * shrink[..., None] + gain

    # It starts above every masked score, so that those weigh nothing even where a query has seen
    # no key yet.
    top = jnp.full(queries.shape[:-1], MASKED_SCORE / 2, jnp.float32)
    total = jnp.zeros_like(top)
    if head.sinks is not None:  # scores of weight 1, relative to themselves, and of value zero
        top = jnp.broadcast_to(head.sinks[:, None], top.shape)
        total = jnp.ones_like(top)
    state = (top, total, jnp.zeros(queries.shape, jnp.float32))
    top, total, out = _visit_blocks(blocks, i, visit, state)
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1.0)
    lse = jnp.where(sees_any, top + jnp.log(total), 0.0)
    return (out / total[..., None]).astype(head.v.dtype), lse


def _forward_for_grad(static: _Static, q, k, v, sinks, metas, blocks):
    """:func:`_forward`, and what :func:`_backward` reads."""
    results = _forward(static, q, k, v, sinks, metas, blocks)
    out, lse = (checkpoint_name(x, RESULT) for x in results)
    return out, (q, k, v, sinks, metas, blocks, out, lse)


class _HeadGrads(NamedTuple):
    """What the backward pass reads of one key head.

    ``delta`` is the sum over E of result times its gradient, float32 (D in FlashAttention-2).
    """

    q: Float[Array, "B G N E"]
    k: Float[Array, "B S E"]
    v: Float[Array, "B S E"]
    d_out: Float[Array, "B G N E"]
    delta: Float[Array, "B G N"]
    lse: Float[Array, "B G N"]
    slopes: Float[Array, "G"] | None


def _backward(static: _Static, kept, d_out):
    """The gradients of q, k, v and the sinks; the metadata and the tables have none.

    The scores are computed again, a block at a time: five products per block.
    """
    q, k, v, sinks, metas, blocks, out, lse = kept
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

    def run_head(head: _HeadGrads):
        def run_queries(sums, i):
            return _backward_queries(static, head, metas, blocks, sums, i)

        # Every block of queries adds to the gradients of all keys: hence a scan, not a map.
        zeros = (jnp.zeros(head.k.shape, jnp.float32), jnp.zeros(head.v.shape, jnp.float32))
        (d_k, d_v), d_q = jax.lax.scan(run_queries, zeros, jnp.arange(len(blocks.seen)))
        return _join_blocks(d_q, 2), d_k.astype(head.k.dtype), d_v.astype(head.v.dtype)

    slopes = _slopes(static.transform, q)
    heads = _HeadGrads(q, k, v, d_out.astype(v.dtype), delta, lse, slopes)
    d_q, d_k, d_v = jax.lax.map(run_head, heads)
    d_sinks = None
    if sinks is not None:  # a sink's weight only takes from the others
        weights = jnp.exp(sinks[:, None, :, None] - lse)
        d_sinks = -jnp.sum(weights * delta, axis=(1, 3))
    return d_q, d_k, d_v, d_sinks, None, None


def _backward_queries(
    static: _Static,
    head: _HeadGrads,
    metas: tuple[Meta, Meta],
    blocks: FlashBlocks,
    sums: tuple[Float[Array, "B S E"], Float[Array, "B S E"]],
    i,
):
    """The gradients of all keys and values with query block ``i`` added, and of its queries."""
    queries = _take_block(head.q, i, static.block)
    d_outs = _take_block(head.d_out, i, static.block)
    lses = _take_block(head.lse[..., None], i, static.block)
    deltas = _take_block(head.delta[..., None], i, static.block)
    query = _meta_block(metas[0], i, static.block)

    def visit(masked: bool, step, state):
        d_q, d_k, d_v = state
        j = blocks.order[i, step]
        keys = _take_block(head.k, j, static.block)
        values = _take_block(head.v, j, static.block)
        key = _meta_block(metas[1], j, static.block)
        transform = functools.partial(
            _transformed_scores, static, slopes=head.slopes, query=query, key=key, masked=masked
        )
        scores, pull_back = jax.vjp(transform, _products(queries, keys))
        weights = jnp.exp(scores - lses)
        d_weights = _products(d_outs, values)
        (d_products,) = pull_back(weights * (d_weights - deltas))
        weights = weights.astype(values.dtype)
        d_products = d_products.astype(keys.dtype)
        d_q += _dot("bgns,bse->bgne", d_products, keys)
        d_k = _add_to_block(d_k, _dot("bgns,bgne->bse", d_products, queries), j)
        d_v = _add_to_block(d_v, _dot("bgns,bgne->bse", weights, d_outs), j)
        return d_q, d_k, d_v

    state = (jnp.zeros(queries.shape, jnp.float32), *sums)
    d_q, d_k, d_v = _visit_blocks(blocks, i, visit, state)
    return (d_k, d_v), d_q.astype(head.q.dtype)


_flash.defvjp(_forward_for_grad, _backward)


def _visit_blocks(
    blocks: FlashBlocks, i: Int[Array, ""], visit: Callable[[bool, Any, Any], Any], state: Any
) -> Any:
    """Folds ``visit(masked, step, state)`` over the blocks of keys that query block ``i`` sees.

    Two loops, because blocks that are seen in full need no mask.
    """
    whole = blocks.whole[i]
    seen = blocks.seen[i]
    with jax.named_scope(UNMASKED):
        state = jax.lax.fori_loop(0, whole, functools.partial(visit, False), state)
    with jax.named_scope(MASKED):
        return jax.lax.fori_loop(whole, seen, functools.partial(visit, True), state)


def _transformed_scores(
    static: _Static,
    products: Float[Array, "B G n s"],
    slopes: Float[Array, "G"] | None,
    query: Meta,
    key: Meta,
    masked: bool,
) -> Float[Array, "B G n s"]:
    """The scores that the softmax takes: capped, with ALiBi, masked."""
    scores = static.transform.apply_softcap(products)
    if slopes is not None:
        distance = distances(query, key)[:, None].astype(jnp.float32)
        scores = scores - slopes[:, None, None] * distance
    if masked:
        visible = _real_mask(static.mask, query, key)[:, None]
        scores = jnp.where(visible, scores, MASKED_SCORE)
    return scores


def _slopes(transform: ScoreTransform, q: Float[Array, "K B G N E"]) -> Float[Array, "K G"] | None:
    if not transform.alibi:
        return None
    return transform.slopes(q.shape[0], q.shape[2])


def _products(x: Float[Array, "B G n E"], y: Float[Array, "B s E"]) -> Float[Array, "B G n s"]:
    return _dot("bgne,bse->bgns", x, y)


def _dot(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _add_to_block(
    total: Float[Array, "B S E"], part: Float[Array, "B s E"], j
) -> Float[Array, "B S E"]:
    """``total`` with ``part`` added to its block ``j``."""
    block = part.shape[1]
    new = _take_block(total, j, block) + part
    return jax.lax.dynamic_update_slice_in_dim(total, new, j * block, 1)


def _take_block(x: Array, i, block: int) -> Array:
    """Block ``i`` of the tokens, which are the last axis but one."""
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, x.ndim - 2)


def _meta_block(meta: Meta, i, block: int) -> Meta:
    return {name: jax.lax.dynamic_slice_in_dim(x, i * block, block, 1) for name, x in meta.items()}


def _join_blocks(blocks: Array, axis: int) -> Array:
    """Blocks ``[I, ...]``, concatenated along ``axis``."""
    x = jnp.moveaxis(blocks, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _real_mask(mask: MaskFn, query: Meta, key: Meta) -> Bool[Array, "B n s"]:
    """``mask``, false at keys that only pad the last block."""
    return mask(query, key) & key["real"][:, None, :]


def _with_real(key: Meta) -> Meta:
    """``key`` and ``real``: true here, and false in what :func:`_pad_meta` adds."""
    return {**key, "real": jnp.ones(next(iter(key.values())).shape[:2], bool)}


def _pad_meta(meta: Meta, block: int) -> Meta:
    return {name: pad_tokens(jnp.asarray(x), 1, block) for name, x in meta.items()}


def pad_tokens(x: Array, axis: int, block: int, value: int = 0) -> Array:
    """``x`` with ``value`` at the end of ``axis``, up to a multiple of ``block``."""
    axis %= x.ndim
    missing = -x.shape[axis] % block
    if not missing:
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, missing)
    return jnp.pad(x, padding, constant_values=value)
