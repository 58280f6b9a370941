"""Attention over long sequences, as training reads them: the one place that chooses how.

On TPU it is JAX's splash attention where that knows the mask, else and elsewhere our own blocks.
(cuDNN, by ``jax.nn.dot_product_attention``, takes neither packed documents nor what comes of them.)

Axis legend: B rows, N tokens, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from specjax.models.attention import splash
from specjax.models.attention.dense import Isolated, MaskFn, Meta, ScoreTransform
from specjax.models.attention.flash import block_size, blocks_of, flash_attention

# attend(q[B,N,H,E], k[B,K,N,E], v[B,K,N,E]) -> [B,N,H,E]
Attend = Callable[[Array, Array, Array], Float[Array, "B N H E"]]


def long_attention(
    mask: MaskFn, meta: Meta, finish: ScoreTransform, groups: int, rows: NamedSharding | None = None
) -> Attend:
    """Self-attention of whole sequences with ``mask``; what layers share is worked out here.

    Args:
      meta: metadata of the tokens, ``[B, N, ...]`` each.
      groups: query heads of a key head.
      rows: how a batch's rows lie over devices: each then runs its own, and skips for them alone.
    """
    if jax.default_backend() != "tpu" or not splash.supports(mask, finish):
        return _own_blocks(mask, meta, meta, finish, groups, rows)
    segments, window = meta["segment"], mask.window

    def by_kernel(q, k, v, segments):
        return splash.splash_attention(q, k, v, segments, window=window, finish=finish)

    by_kernel = _by_rows(by_kernel, rows)
    if not isinstance(mask, Isolated):
        return lambda q, k, v: by_kernel(q, k, v, segments)
    # Clean tokens see clean ones before them.
    count = mask.clean
    if splash.supports_windows(mask, finish, segments.shape[1]):
        behind = _windows(mask, meta, finish, rows)
    else:
        behind = _own_blocks(mask, _from(meta, count), meta, finish, groups, rows)

    def attend(q, k, v):
        own = (x[:, :, :count] for x in (k, v))
        clean = by_kernel(q[:, :count], *own, segments[:, :count])
        return jnp.concatenate([clean, behind(q[:, count:], k, v)], axis=1)

    return attend


def _windows(
    mask: Isolated, meta: Meta, finish: ScoreTransform, rows: NamedSharding | None
) -> Attend:
    """:func:`specjax.models.attention.splash.window_attention`."""
    windows = _by_rows(lambda meta: splash.windows_of(mask, meta), rows)(dict(meta))

    def run(q, k, v, segments, windows):
        return splash.window_attention(q, k, v, segments, windows, mask=mask, finish=finish)

    run = _by_rows(run, rows)
    return lambda q, k, v: run(q, k, v, meta["segment"], windows)


def _from(meta: Meta, count: int) -> Meta:
    return {name: x[:, count:] for name, x in meta.items()}


def _own_blocks(
    mask: MaskFn,
    query: Meta,
    key: Meta,
    finish: ScoreTransform,
    groups: int,
    rows: NamedSharding | None,
) -> Attend:
    """:func:`specjax.models.flash.flash_attention`; each device has blocks of its own."""
    shape = query["position"].shape
    count, _ = rows.shard_shape(shape) if rows else shape
    block = block_size(count, groups)

    def table(query, key):
        return jax.tree.map(lambda x: x[None], blocks_of(mask, query, key, block))

    blocks = _by_rows(table, rows)(query, key)

    def run(q, k, v, query, key, blocks):
        blocks = jax.tree.map(lambda x: x[0], blocks)
        return flash_attention(q, k, v, query, key, mask, blocks, finish=finish, block=block)

    run = _by_rows(run, rows)
    return lambda q, k, v: run(q, k, v, query, key, blocks)


def _by_rows(run: Callable, rows: NamedSharding | None) -> Callable:
    """``run`` on each device's rows, which all its arguments and its results have first."""
    if rows is None:
        return run
    spec = PartitionSpec(rows.spec[0])
    return jax.shard_map(run, mesh=rows.mesh, in_specs=spec, out_specs=spec, check_vma=False)
