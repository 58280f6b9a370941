"""Models as pure functions of a plain nested dict of params.

A module is split once per (config, layout) and the functions below close over its graph
definition: handing a ``GraphDef`` to jit as a static argument costs milliseconds per call.

Axis legend: B rows, N or T tokens, S cache positions, L layers, K key heads, E head size,
D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from specjax.models import sharding
from specjax.models.adapters import gated
from specjax.models.attention import dense, long_cache
from specjax.models.attention.long_sequences import Attend, long_attention
from specjax.models.blocks import Decoder, Remat
from specjax.models.cache import KVCache, write
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES
from specjax.models.layers import linear

# From this many tokens on, training attention is blockwise.
BLOCKWISE_FROM = 2048


def _module(cfg: ModelConfig, rngs: nnx.Rngs, fused: bool = False) -> Decoder:
    return FAMILIES[cfg.family].module(cfg, rngs, fused)


@functools.cache
def _abstract(cfg: ModelConfig, fused: bool) -> tuple[nnx.GraphDef, nnx.State]:
    """The module without arrays: its graph, and its parameters' shapes and axes."""
    return nnx.split(nnx.eval_shape(lambda: _module(cfg, nnx.Rngs(0), fused)))


def init_params(cfg: ModelConfig, key: Array, dtype: jnp.dtype = jnp.float32) -> dict:
    """Random params: a nested dict of arrays, linear weights ``[out, in]``."""
    state = nnx.split(_module(cfg, nnx.Rngs(params=key)))[1]
    return jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))


def _of_all_layers(cfg: ModelConfig, fused: bool, *what: Callable) -> dict:
    """``what`` of each parameter; layers are alike, so one is made: many take quadratic time."""
    single = dataclasses.replace(cfg, num_layers=1, sliding_layers=None)
    tree = nnx.to_pure_dict(_abstract(single, fused)[1], *what)
    layer = tree["layers"]["0"]
    return tree | {"layers": {str(i): layer for i in range(cfg.num_layers)}}


def param_shapes(cfg: ModelConfig) -> dict:
    """The nested dict of ``ShapeDtypeStruct`` that :func:`init_params` would fill."""
    return _of_all_layers(cfg, False)


def param_axes(cfg: ModelConfig, fused: bool = False) -> dict:
    """The names of each parameter's axes, as it was made with: a nested dict of tuples."""
    return _of_all_layers(cfg, fused, lambda param: param.get_metadata("axes"))


def part_axes(cfg: ModelConfig, params: dict) -> dict:
    """:func:`param_axes` of params in the inference layout, of which there may be a part."""
    axes = param_axes(cfg, fused=True)
    alike = dict.fromkeys(params.get("layers", ()), axes["layers"]["0"])
    return {name: alike if name == "layers" else axes[name] for name in params}


def num_params(cfg: ModelConfig) -> int:
    """Number of parameters, a tied head counted once; of a split model those of one device."""

    def count(leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> int:
        # Heads and columns are the device's own in ``cfg``, the vocabulary is the whole one.
        shared = "vocab" in axes and any(sharding.partition(axes, leaf.shape, cfg.shards))
        return leaf.size // cfg.shards if shared else leaf.size

    return sum(jax.tree.leaves(jax.tree.map(count, param_shapes(cfg), param_axes(cfg))))


def head_matrix(cfg: ModelConfig, params: dict) -> Float[Array, "V D"]:
    """The output table, for losses that take their own product with it and cap it."""
    return params["embed"] if cfg.tie_embeddings else params["head"]


def is_fused(params: dict) -> bool:
    """Whether ``params`` are in the inference layout of :func:`specjax.models.blocks.fuse`."""
    return "qkv" in params["layers"]["0"]["attention"]


def logits_of(
    cfg: ModelConfig, params: dict, hidden: Float[Array, "B N D"]
) -> Float[Array, "B N V"]:
    """Logits of hidden states, in the model's dtype; −inf at adaptive ids.

    Those are inputs alone: no law that comes of these logits emits them, wherever in the
    vocabulary they stand.
    """
    logits = sharding.gather_logits(linear(hidden, head_matrix(cfg, params)), cfg.vocab_size)
    cap = cfg.logit_softcap
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    barred = np.isin(np.arange(logits.shape[-1]), cfg.adaptive_ids)
    return jnp.where(barred, -jnp.inf, logits) if barred.any() else logits


def module_of(cfg: ModelConfig, params: dict) -> nnx.Module:
    """The model's module around these params."""
    return nnx.merge(_abstract(cfg, is_fused(params))[0], params)


def _scores(cfg: ModelConfig) -> dense.ScoreTransform:
    return dense.ScoreTransform(cfg.attention_scale, cfg.attention_softcap, cfg.alibi, cfg.shards)


class HiddenStates(NamedTuple):
    """Final-normed hidden states ``[B, T, D]``, and what the P auxiliary layers read; None:
    none."""

    hidden: Float[Array, "B T D"]
    aux: Float[Array, "B T P D"] | None


def hidden_states(
    cfg: ModelConfig,
    params: dict,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    aux_layers: tuple[int, ...] = (),
    mask_fn: dense.MaskFn | None = None,
    meta: dense.Meta | None = None,
    backend: str = "auto",
    remat: Remat = False,
    scan: bool = False,
    rows: NamedSharding | None = None,
    features: Float[Array, "B T D"] | None = None,
) -> HiddenStates:
    """Runs whole sequences without a cache, for training and scoring.

    Args:
      positions: int32, within the document.
      segments: int32, 0 is padding. A token attends causally within its segment, unless
        ``mask_fn`` says otherwise; sliding windows come on top.
      aux_layers: layers whose inputs at every token are returned, too.
      mask_fn: what a token sees, by the metadata of both tokens; causal by default.
      meta: further per-token metadata for ``mask_fn``, ``[B, T, ...]`` each.
      backend: ``dense``, ``blockwise``, or ``auto`` by length.
      remat: recompute each block in the backward pass. ``attention``: keep the results of a long
        sequence's attention and recompute the rest.
      scan: compile one block (one period, where layers alternate) and scan the stacked layers.
        Compile time then does not grow with the depth.
      rows: how the rows lie over devices, each of which works on its own; None: all on one.
      features: what a head reads beside the tokens (:mod:`specjax.models.head`).
    """
    finish = _scores(cfg)
    windows = cfg.windows
    meta = {"position": positions, "segment": segments, **(meta or {})}
    if backend == "auto":
        backend = "blockwise" if tokens.shape[1] >= BLOCKWISE_FROM else "dense"
    choose = _dense if backend == "dense" else long_attention
    masks = {w: dense.windowed(mask_fn or dense.causal_mask, w) for w in set(windows)}
    groups = cfg.num_heads // cfg.num_kv_heads
    attends = {w: choose(mask, meta, finish, groups, rows) for w, mask in masks.items()}

    def attend(layer, q, k, v):
        return attends[windows[layer]](q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))

    run = module_of(cfg, gated(cfg, params, tokens))
    hidden, aux = run(
        tokens,
        positions,
        attend,
        remat=remat,
        scan=scan,
        aux_layers=aux_layers,
        features=features,
        rows=rows,
    )
    return HiddenStates(hidden, aux)


def _dense(mask: dense.MaskFn, meta: dense.Meta, finish: dense.ScoreTransform, *_) -> Attend:
    """:func:`long_attention` for short sequences."""
    seen = mask(meta, meta)
    distance = dense.distances(meta, meta) if finish.alibi else None

    def attend(q, k, v):
        return dense.dense_attention(q, k, v, seen, finish, distance)

    return attend


class ForwardPass(NamedTuple):
    """A pass over new tokens: final-normed hidden states (a head's own are not normed), the cache
    with the new entries, and what the P auxiliary layers read; None where there are none."""

    hidden: Float[Array, "B max(N,pass_width) D"]
    cache: KVCache
    aux_states: Float[Array, "B max(N,pass_width) P D"] | None


def forward(
    cfg: ModelConfig,
    params: dict,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    start: Int[Array, "B"],
    visible: Bool[Array, "B N T"] | None = None,
    *,
    base: Int[Array, "B"] | None = None,
    tree_positions: Int[Array, "B T"] | None = None,
    pass_width: int = 1,
    aux_layers: tuple[int, ...] = (),
    features: Float[Array, "B N D"] | None = None,
) -> ForwardPass:
    """Runs N new tokens per row against the cache and writes them at ``start``.

    Write, then commit: the new keys and values land in positions ``start .. start + N - 1`` of
    their row; which of them stay is decided later (:func:`specjax.models.cache.commit_path`).

    Args:
      positions: int32; ``start + depth`` for a token tree, never the cache position.
      start: int32, the cache position of each row's first new token. ``start + N`` must not exceed
        the cache's positions: ``dynamic_update_slice`` would shift the write.
      visible: ``visible[b, i, j]``: new token i sees the token of cache position ``base + j``.
        None: a causal chain of the new tokens.
      base: int32, the number of committed tokens; ``start`` by default. Below ``start`` where
        a tree grows level by level: T then counts the levels already written, too.
      tree_positions: positions of those T tokens, read only under a sliding window or ALiBi.
      pass_width: the pass runs over at least so many tokens; the last one again where there are
      fewer.
      aux_layers: layers whose inputs at every token are wanted, too.
      features: what a head reads beside the tokens (:mod:`specjax.models.head`).
    """
    n, chain = tokens.shape[1], visible is None
    count = n if chain else visible.shape[-1]
    if pass_width > n:
        tokens, positions = pad_pass(tokens, pass_width), pad_pass(positions, pass_width)
        visible = None if chain else pad_pass(visible, pass_width)
        features = None if features is None else pad_pass(features, pass_width)
    base = start if base is None else base
    around = [cache.goes_round(layer) for layer in range(cfg.num_layers)]
    kinds = [(cfg.windows[i], k.shape[2], around[i]) for i, k in enumerate(cache.k)]
    seen = positions, base, visible, count
    attends = {kind: _cached(cfg, *kind, *seen, tree_positions) for kind in set(kinds)}
    keys, values = list(cache.k), list(cache.v)

    @jax.named_scope("attention")
    def attend(layer, q, k, v):
        k, v = (x[:, :n].transpose(0, 2, 1, 3) for x in (k, v))
        keys[layer] = write(keys[layer], k, start, around[layer])
        values[layer] = write(values[layer], v, start, around[layer])
        return attends[kinds[layer]](q, keys[layer], values[layer])

    run = module_of(cfg, gated(cfg, params, tokens))
    hidden, aux_states = run(tokens, positions, attend, aux_layers=aux_layers, features=features)
    return ForwardPass(hidden, cache.replace(k=tuple(keys), v=tuple(values)), aux_states)


def _cached(
    cfg: ModelConfig,
    window: int | None,
    capacity: int,
    around: bool,
    positions: Int[Array, "B N"],
    base: Int[Array, "B"],
    visible: Bool[Array, "B N T"] | None,
    count: int,
    tree_positions: Int[Array, "B T"] | None,
) -> Attend:
    """Attention to a cache of so many positions, in all layers of a window; the masks are made
    once.

    ``around``: whether positions go round in it. Other arguments as
    :func:`specjax.models.attention.dense.cache_mask`.
    """
    if around and count > capacity - window:
        raise ValueError(
            f"a pass over {count} tokens: layers of a sliding window of {window} have {capacity} "
            f"positions, room for {capacity - window} new tokens; feed them in pieces"
        )
    finish, mask, distance = _scores(cfg), None, None
    whole = long_cache.reads_whole(positions.size * cfg.num_heads, capacity)
    if around or visible is not None:
        arguments = positions, base, visible, count, capacity, window, tree_positions
        mask = dense.cache_mask(*arguments)
        if cfg.alibi:
            distance = dense.cache_distances(positions, base, count, capacity, tree_positions)
    elif whole:
        distance = dense.chain_distances(positions, capacity)
        mask = dense.within(distance, window)
    top, first = base + count - 1, None if around else window

    def attend(q, k, v):
        if whole:
            return dense.dense_attention(q, k, v, mask, finish, distance)
        how = {"window": first, "finish": finish}
        return long_cache.cached_attention(q, k, v, positions, top, mask, distance, **how)

    return attend


def pad_pass(x: Array, pass_width: int) -> Array:
    """``x`` with its last entry along axis 1 repeated until there are ``pass_width``."""
    pad = [(0, pass_width - x.shape[1] if axis == 1 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, pad, mode="edge")
