"""Attention over long sequences, as in training: the one place that chooses an implementation.

On TPUs it is JAX's splash attention, on GPUs our own kernel
(:mod:`~specjax.models.attention.range_kernel`), if they support the mask. In all other cases it is
:mod:`~specjax.models.attention.flash`.

Axis legend: B rows, N tokens, H query heads, K key heads, E head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from specjax._util.platform import platform
from specjax.models.attention import range_kernel, splash, splash_windows
from specjax.models.attention.dense import Causal, Isolated, MaskFn, Meta, ScoreTransform
from specjax.models.attention.flash import block_size, find_blocks, flash_attention
from specjax.models.sharding import axes_of, head_axis, model_devices, splits_tokens

# attend(q[B,N,H,E], k[B,K,N,E], v[B,K,N,E], sinks[H]) -> [B,N,H,E]; models without sinks leave
# them out.
Attend = Callable[..., Float[Array, "B N H E"]]


def long_attention(
    mask: MaskFn,
    meta: Meta,
    transform: ScoreTransform,
    groups: int,
    rows: NamedSharding | None = None,
) -> Attend:
    """Self-attention of whole sequences with ``mask``; what all layers share is computed here.

    Args:
      meta: metadata of the tokens, ``[B, N, ...]`` each.
      groups: query heads per key head.
      rows: how a batch ``[B, N]`` is sharded over devices. Each device then runs its own rows, and
        skips the blocks that those do not see. If tokens are split as well, its queries are its
        part of each row, and the keys are whole; no kernels run then. If its mesh splits models, a
        device runs its own heads.
    """
    if range_kernel.supports_sequences(mask, transform) and not splits_tokens(rows):
        return _by_range_kernel(mask, meta, transform, groups, rows)
    by_kernel = platform().splash_attention and not splits_tokens(rows)
    if not by_kernel or not splash.supports(mask, transform):
        return _by_blocks(mask, meta, meta, transform, groups, rows)

    assert isinstance(mask, Causal), "splash.supports only causal masks"
    segments = meta["segment"]
    window = mask.window

    def run_kernel(q, k, v, segments):
        return splash.splash_attention(q, k, v, segments, window=window, transform=transform)

    run_kernel = _map_heads(run_kernel, rows, 1)
    if not isinstance(mask, Isolated):
        return lambda q, k, v: run_kernel(q, k, v, segments)

    # Clean tokens see only clean tokens, causally: the same kernel without the windows.
    clean = mask.clean
    if splash_windows.supports_windows(mask, transform, segments.shape[1]):
        attend_windows = _by_window_kernel(mask, meta, transform, rows)
    else:
        query = {name: x[:, clean:] for name, x in meta.items()}
        attend_windows = _by_blocks(mask, query, meta, transform, groups, rows)

    def attend(q, k, v):
        clean_q = q[:, :clean]
        clean_k = k[:, :, :clean]
        clean_v = v[:, :, :clean]
        clean_out = run_kernel(clean_q, clean_k, clean_v, segments[:, :clean])
        return jnp.concatenate([clean_out, attend_windows(q[:, clean:], k, v)], axis=1)

    return attend


def _by_range_kernel(
    mask: MaskFn,
    meta: Meta,
    transform: ScoreTransform,
    groups: int,
    rows: NamedSharding | None,
) -> Attend:
    """:func:`specjax.models.attention.range_kernel.sequence_attention`."""
    make_tables = _map_rows(lambda meta: range_kernel.make_tables(mask, meta), rows)
    tables = make_tables(dict(meta))
    other_heads = _by_blocks(mask, meta, meta, transform, groups, rows)

    def run(q, k, v, tables):
        return range_kernel.sequence_attention(q, k, v, tables, transform=transform)

    run = _map_heads(run, rows, 1)

    def attend(q, k, v):
        if not range_kernel.supports_head(q.shape[-1]):
            return other_heads(q, k, v)
        return run(q, k, v, tables)

    return attend


def _by_window_kernel(
    mask: Isolated, meta: Meta, transform: ScoreTransform, rows: NamedSharding | None
) -> Attend:
    """:func:`specjax.models.attention.splash_windows.window_attention`."""
    make_tables = _map_rows(lambda meta: splash_windows.make_window_tables(mask, meta), rows)
    tables = make_tables(dict(meta))

    def run(q, k, v, segments, tables):
        return splash_windows.window_attention(
            q, k, v, segments, tables, mask=mask, transform=transform
        )

    run = _map_heads(run, rows, 2)
    return lambda q, k, v: run(q, k, v, meta["segment"], tables)


def _by_blocks(
    mask: MaskFn,
    query: Meta,
    key: Meta,
    transform: ScoreTransform,
    groups: int,
    rows: NamedSharding | None,
) -> Attend:
    """:func:`specjax.models.attention.flash.flash_attention`; each device has blocks of its own."""
    shape = query["position"].shape
    count = rows.shard_shape(shape)[0] if rows else shape[0]
    block = block_size(count, groups)
    own = transform
    if rows is not None:
        own = transform._replace(shards=model_devices(rows))

    # Each device's tables get a first axis of size 1, over which they are sharded as rows are.
    def make_table(query, key):
        return jax.tree.map(lambda x: x[None], find_blocks(mask, query, key, block))

    def run(q, k, v, sinks, query, key, blocks):
        blocks = jax.tree.map(lambda x: x[0], blocks)
        return flash_attention(q, k, v, query, key, mask, blocks, sinks, transform=own, block=block)

    if rows is not None:
        of_queries = PartitionSpec(*rows.spec)
        of_keys = PartitionSpec(rows.spec[0])
        of_device = PartitionSpec(axes_of(rows))
        heads = head_axis(rows)
        own_queries, own_keys = _of_heads(rows)
        mapped = functools.partial(jax.shard_map, mesh=rows.mesh, check_vma=False)
        make_table = mapped(make_table, in_specs=(of_queries, of_keys), out_specs=of_device)
        run = mapped(
            run,
            in_specs=(
                own_queries,
                own_keys,
                own_keys,
                PartitionSpec(heads),
                of_queries,
                of_keys,
                of_device,
            ),
            out_specs=own_queries,
        )
    blocks = make_table(query, key)
    return lambda q, k, v, sinks=None: run(q, k, v, sinks, query, key, blocks)


def _of_heads(rows: NamedSharding) -> tuple[PartitionSpec, PartitionSpec]:
    """The shardings of queries ``[B, N, H, E]``, and of keys and values ``[B, K, N, E]``."""
    tokens = rows.spec[1] if splits_tokens(rows) else None
    heads = head_axis(rows)
    return PartitionSpec(rows.spec[0], tokens, heads), PartitionSpec(rows.spec[0], heads)


def _map_heads(run: Callable, rows: NamedSharding | None, others: int) -> Callable:
    """``run(q, k, v, ...)`` on each device's own rows and heads; its result is like ``q``.

    ``others`` arguments follow, with rows first.
    """
    if rows is None:
        return run
    queries, keys = _of_heads(rows)
    in_specs = (queries, keys, keys, *[PartitionSpec(rows.spec[0])] * others)
    return jax.shard_map(run, mesh=rows.mesh, in_specs=in_specs, out_specs=queries, check_vma=False)


def _map_rows(run: Callable, rows: NamedSharding | None) -> Callable:
    """``run`` on each device's own rows: the first axis of all its arguments and results."""
    if rows is None:
        return run
    spec = PartitionSpec(rows.spec[0])
    return jax.shard_map(run, mesh=rows.mesh, in_specs=spec, out_specs=spec, check_vma=False)
