"""Forward passes as pure functions of a plain nested dict of params.

:func:`hidden_states` runs whole sequences without a cache, :func:`forward` runs new tokens against
a KV cache. A module is split once per (config, layout), and the functions below close over its
graph definition: as a static argument of jit, a ``GraphDef`` costs milliseconds per call.

Axis legend: B rows, N or T tokens, P auxiliary layers, S cache positions, L layers, K key heads,
E head size, D hidden size, V vocabulary.
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
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax._util.platform import platform
from specjax.models import blocks, sharding
from specjax.models.adapters import attach_adapters
from specjax.models.attention import decode_kernel, dense, long_cache, range_kernel
from specjax.models.attention.long_sequences import Attend, long_attention
from specjax.models.attention.path_order import PathOrder
from specjax.models.blocks import Decoder, Remat
from specjax.models.cache import KVCache, write
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES
from specjax.models.layers import linear
from specjax.models.quantized_cache import KVBuffer

# From this many tokens on, attention of whole sequences is blockwise: dense scores of 16k tokens
# would take 16 GB.
BLOCKWISE_FROM = 2048


def _make_module(cfg: ModelConfig, rngs: nnx.Rngs, fused: bool = False) -> Decoder:
    return FAMILIES[cfg.family].module(cfg, rngs, fused)


@functools.cache
def _abstract_module(cfg: ModelConfig, fused: bool) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """The module without arrays: its graph, and its parameters' shapes and axes."""
    return nnx.split(nnx.eval_shape(lambda: _make_module(cfg, nnx.Rngs(0), fused)))


def init_params(cfg: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32) -> dict:
    """Random params: a nested dict of arrays, linear weights ``[out, in]``."""
    state = nnx.split(_make_module(cfg, nnx.Rngs(params=key)))[1]
    return jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))


def _for_all_layers(cfg: ModelConfig, fused: bool, *extract: Callable) -> dict:
    """``extract`` of each parameter, by default its ``ShapeDtypeStruct``, as a nested dict.

    Of layers with the same parameters only one is made. The time to make them grows with the square
    of their number.
    """
    layers = {}
    tree = {}
    for i in range(cfg.num_layers):
        single = dataclasses.replace(cfg.layer(i), num_layers=1)
        tree = _single_layer(single, fused, extract)
        layers[str(i)] = tree["layers"]["0"]
    return tree | {"layers": layers}


@functools.cache
def _single_layer(cfg: ModelConfig, fused: bool, extract: tuple[Callable, ...]) -> dict:
    """``extract`` of each parameter of a model of one layer."""
    return nnx.to_pure_dict(_abstract_module(cfg, fused)[1], *extract)


def param_shapes(cfg: ModelConfig) -> dict:
    """The nested dict of ``ShapeDtypeStruct`` that :func:`init_params` would fill."""
    return _for_all_layers(cfg, False)


def param_axes(cfg: ModelConfig, fused: bool = False) -> dict:
    """The names of each parameter's axes: a nested dict of tuples."""
    return _for_all_layers(cfg, fused, _axes_of)


def _axes_of(param: nnx.Param) -> tuple[str, ...]:
    return param.get_metadata("axes")


def part_axes(cfg: ModelConfig, params: dict) -> dict:
    """:func:`param_axes` of ``params`` in the inference layout.

    ``params`` may be only a part of the tree, such as one layer.
    """
    axes = param_axes(cfg, fused=True)
    layers = {i: axes["layers"][i] for i in params.get("layers", ())}
    whole = axes | {"layers": layers}
    return {name: whole[name] for name in params}


def num_params(cfg: ModelConfig) -> int:
    """Number of parameters. A tied head counts once; a split model counts one device's share."""
    count = functools.partial(size_per_device, cfg)
    return sum(jax.tree.leaves(jax.tree.map(count, param_shapes(cfg), param_axes(cfg))))


def active_params(cfg: ModelConfig) -> int:
    """Number of parameters that one token uses: of a mixture, its chosen experts' and all others.

    The embedding counts, of which a token reads one row.
    """
    inactive = 0
    for layer in param_shapes(cfg)["layers"].values():
        if cfg.experts is not None and "experts" in layer["mlp"]:
            size = sum(leaf.size for leaf in jax.tree.leaves(layer["mlp"]["experts"]))
            inactive += size // cfg.experts.count * (cfg.experts.count - cfg.experts.active)
    return num_params(cfg) - inactive


def size_per_device(cfg: ModelConfig, leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> int:
    """Elements of a parameter on one device, by its shape in :func:`param_shapes`."""
    # A split config counts heads and columns per device already, but the vocabulary as a whole.
    if axes[0] == sharding.VOCABULARY:
        rows = -(-leaf.shape[0] // cfg.shards)  # padded, so that all have as many
        return leaf.size // leaf.shape[0] * rows
    return leaf.size


def head_matrix(cfg: ModelConfig, params: dict) -> Float[Array, "V D"]:
    """The output table, for losses that compute and cap the logits by themselves."""
    return params["embed"] if cfg.tie_embeddings else params["head"]


def is_fused(params: dict) -> bool:
    """Whether ``params`` are in the inference layout of :func:`specjax.models.blocks.fuse`."""
    attention = params["layers"]["0"]["attention"]
    return "qkv" in attention or "key_up" in attention


def logits_of(
    cfg: ModelConfig, params: dict, hidden: Float[Array, "B N D"], own: bool = False
) -> Float[Array, "B N V"]:
    """Logits of hidden states, in the model's dtype; −inf at the adaptive ids.

    Those ids are only inputs. No distribution that comes from these logits can emit them.

    Args:
      own: for a model whose tables are split (:func:`splits_tables`), only the logits ``[B, N, v]``
        of this device's share. At ids that pad the last share they are any numbers.
    """
    shards = cfg.shards if own else 1
    logits = linear(hidden, head_matrix(cfg, params))
    if not own:
        logits = sharding.gather_logits(logits, cfg.vocab_size)
    if cfg.head_bias:
        logits = logits + sharding.own_entries(params["head_bias"], shards)
    cap = cfg.logit_softcap
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    # A numpy mask is known at trace time: a model without such ids gets no operation for them.
    is_adaptive = np.isin(np.arange(cfg.vocab_size), cfg.adaptive_ids)
    if not is_adaptive.any():
        return logits
    return jnp.where(sharding.own_entries(is_adaptive, shards), -jnp.inf, logits)


def splits_tables(cfg: ModelConfig, params: dict) -> bool:
    """Whether this device has a share of the output table, seen inside ``shard_map``."""
    return head_matrix(cfg, params).shape[0] < cfg.vocab_size


def module_of(cfg: ModelConfig, params: dict) -> Decoder:
    """The model's module with these params."""
    graph, _ = _abstract_module(cfg, is_fused(params))
    return nnx.merge(graph, params)


def _score_transform(cfg: ModelConfig) -> dense.ScoreTransform:
    return dense.ScoreTransform(
        scale=cfg.attention_scale,
        softcap=cfg.attention_softcap,
        alibi=cfg.alibi,
        shards=cfg.shards,
        sinks=cfg.sinks,
    )


class HiddenStates(NamedTuple):
    """Final-normed hidden states ``[B, T, D]``, and the inputs of the P auxiliary layers, if any.

    A draft head's hidden states are not normed.
    """

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
    labels: Float[Array, ""] | None = None,
) -> HiddenStates:
    """Runs whole sequences without a cache, for training and scoring.

    Args:
      positions: int32, within the document.
      segments: int32, 0 is padding. A token attends causally within its segment, unless
        ``mask_fn`` says otherwise. A layer's sliding window limits either mask further.
      aux_layers: layers whose inputs at every token are returned, too.
      mask_fn: which tokens a token sees, by the metadata of both; causal by default.
      meta: further per-token metadata for ``mask_fn``, ``[B, T, ...]`` each.
      backend: ``dense``, ``blockwise``, or ``auto`` by length.
      remat: recompute each block in the backward pass. ``attention``: keep the results of a long
        sequence's attention and recompute the rest.
      scan: compile one block (one period, if layers alternate) and scan the stacked layers.
        Compile time then does not grow with the depth.
      rows: how ``[B, T]`` is sharded over devices; None: all on one device. Each runs its own rows.
        If tokens are split, it runs its part of a row, and gathers keys and values in every layer.
      features: what a draft head reads beside the tokens (:mod:`specjax.models.head`).
      labels: how many labels the caller's loss sums over. In its gradients the balancing loss of a
        mixture (``ExpertsConfig.balance``) counts so many times. None: it is not added.
    """
    all_meta = {"position": positions, "segment": segments, **(meta or {})}
    if backend == "auto":
        backend = "blockwise" if tokens.shape[1] >= BLOCKWISE_FROM else "dense"
    attend = _sequence_attention(cfg, mask_fn or dense.causal_mask, all_meta, backend, rows)
    run = module_of(cfg, attach_adapters(cfg, params, tokens))
    hidden, aux = run(tokens, positions, attend, remat, scan, aux_layers, features, rows, labels)
    return HiddenStates(hidden, aux)


def _sequence_attention(
    cfg: ModelConfig,
    mask_fn: dense.MaskFn,
    meta: dense.Meta,
    backend: str,
    rows: NamedSharding | None,
) -> blocks.Attend:
    """Each layer's attention within the sequences; layers of the same window share its masks."""
    transform = _score_transform(cfg)
    windows = cfg.windows
    make_attention = _dense_attention if backend == "dense" else long_attention
    # In the order of the layers: a set's order may differ between processes, and a program in
    # another order is not found in the cache of compiled programs.
    masks = {}
    for window in dict.fromkeys(windows):
        masks[window] = dense.windowed(mask_fn, window, cfg.chunked)
    # Key heads that are fewer than the devices are repeated (`split_by_heads`).
    groups = cfg.num_heads // max(cfg.num_kv_heads, sharding.model_devices(rows))
    by_window = {
        window: make_attention(mask, meta, transform, groups, rows)
        for window, mask in masks.items()
    }

    def attend(layer, q, k, v, sinks=None):
        q = sharding.split_by_heads(q, rows)
        k = sharding.split_by_heads(k, rows, whole=True)
        v = v if v is None else sharding.split_by_heads(v, rows, whole=True)
        # Heads before tokens in keys and values, as in a cache.
        attend_layer = by_window[windows[layer]]
        k = k.transpose(0, 2, 1, 3)
        v = k if v is None else v.transpose(0, 2, 1, 3)
        return attend_layer(q, k, v) if sinks is None else attend_layer(q, k, v, sinks)

    return attend


def _dense_attention(
    mask: dense.MaskFn, meta: dense.Meta, transform: dense.ScoreTransform, *_
) -> Attend:
    """:func:`long_attention` for short sequences."""
    visible = mask(meta, meta)
    distance = dense.distances(meta, meta) if transform.alibi else None

    def attend(q, k, v, sinks=None):
        return dense.dense_attention(q, k, v, visible, transform, distance, sinks)

    return attend


class ForwardPass(NamedTuple):
    """The result of a pass over new tokens.

    ``hidden``: final-normed hidden states; a draft head's are not normed. ``cache``: the cache with
    the new entries. ``aux_states``: the inputs of the P auxiliary layers, None if there are none.
    """

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
    visible: Bool[Array | np.ndarray, "B N T"] | None = None,
    *,
    base: Int[Array, "B"] | None = None,
    tree_positions: Int[Array, "B T"] | None = None,
    pass_width: int = 1,
    aux_layers: tuple[int, ...] = (),
    features: Float[Array, "B N D"] | None = None,
) -> ForwardPass:
    """Runs N new tokens per row against the cache and writes them at ``start``.

    Write, then commit: the new keys and values go to the cache positions ``start .. start + N - 1``
    of their row. :func:`specjax.models.cache.commit_path` decides later which of them are kept.

    Args:
      positions: int32; in a token tree ``start + depth``, not the cache position.
      start: int32, the cache position of each row's first new token, at most the capacity − N.
      visible: ``visible[b, i, j]``: new token i sees cache position ``base + j``; None: a chain.
      base: int32, the number of committed tokens; ``start`` by default. It is below ``start`` if
        a tree grows level by level; T then also counts the levels that are already written.
      tree_positions: positions of those T tokens, read only under a sliding window or ALiBi.
      pass_width: a pass over fewer tokens is padded to this many with copies of the last one. The
        copies' results are returned, but not written to the cache.
      aux_layers: layers whose inputs at every token are returned, too.
      features: what a draft head reads beside the tokens (:mod:`specjax.models.head`).

    Raises:
      ValueError: the pass has more tokens than the ring of a sliding-window layer has room for.
    """
    n = tokens.shape[1]
    count = n if visible is None else visible.shape[-1]
    order = _path_order(start, base, visible, pass_width)
    one_by_one = platform().orders_trees and pass_width >= max(n, 2)
    if pass_width > n:
        tokens = pad_pass(tokens, pass_width)
        positions = pad_pass(positions, pass_width)
        visible = _pad_optional(visible, pass_width)
        features = _pad_optional(features, pass_width)
    base = start if base is None else base
    queries = _Queries(positions, base, visible, count, tree_positions, order, one_by_one)
    attend = _CacheAttention(cfg, cache, queries, start, n)
    run = module_of(cfg, attach_adapters(cfg, params, tokens))
    hidden, aux_states = run(tokens, positions, attend, aux_layers=aux_layers, features=features)
    return ForwardPass(hidden, attend.cache(), aux_states)


def _path_order(
    start: Int[Array, "B"],
    base: Int[Array, "B"] | None,
    visible: Bool[Array | np.ndarray, "B N T"] | None,
    pass_width: int,
) -> PathOrder | None:
    """The order of a whole tree's keys in a padded pass.

    None: there is no tree, or a part of one, it does not fit into the width, or the platform does
    without.
    """
    if visible is None or base is not None or pass_width == 1 or visible.shape[1] > pass_width:
        return None
    if not platform().orders_trees:
        return None
    return PathOrder.of(start, visible).padded(pass_width)


class _Queries(NamedTuple):
    """The arguments of :func:`specjax.models.attention.dense.cache_mask` that all layers share."""

    positions: Int[Array, "B N"]
    base: Int[Array, "B"]
    visible: Bool[Array | np.ndarray, "B N T"] | None
    count: int
    tree_positions: Int[Array, "B T"] | None
    order: PathOrder | None  # of a tree's pass whose bits are to be a chain's
    one_by_one: bool  # whether values are added up so that trees and chains have equal bits


class _LayerKind(NamedTuple):
    """Layers of the same kind share their masks."""

    window: int | None
    capacity: int
    is_ring: bool


class _CacheAttention:
    """``attend(layer, q, k, v)`` that first writes the new keys and values to the cache.

    New tokens then see each other and the committed ones in one read of the cache.
    """

    def __init__(
        self, cfg: ModelConfig, cache: KVCache, queries: _Queries, start: Int[Array, "B"], n: int
    ):
        self._cache = cache
        self._start = start
        self._n = n
        self._keys = list(cache.k)
        self._values = list(cache.v)
        self._kinds = []
        for layer, k in enumerate(cache.k):
            kind = _LayerKind(cfg.windows[layer], k.shape[2], cache.is_ring(layer))
            self._kinds.append(kind)
        # One mask per kind, not per layer. In the layers' order: see _sequence_attention.
        self._by_kind = {
            kind: _attention_of_kind(cfg, kind, queries) for kind in dict.fromkeys(self._kinds)
        }

    @jax.named_scope("attention")
    def __call__(self, layer, q, k, v, sinks=None):
        attention = self._by_kind[self._kinds[layer]]
        if v is not None and attention.kernel_supports(self._keys[layer]):
            out, self._keys[layer], self._values[layer] = attention.write_and_attend(
                q, k, v, self._keys[layer], self._values[layer], self._start, self._n
            )
            return out
        keys = self._write(self._keys, layer, k)
        values = keys if v is None else self._write(self._values, layer, v)
        return attention.attend(q, keys, values, sinks)

    def _write(self, buffers: list[KVBuffer], layer: int, new: Float[Array, "B N K E"]) -> KVBuffer:
        """The layer's buffer with its new entries, which is kept in ``buffers``, too."""
        # Only the first N tokens are new: what pads the pass is not written.
        new = new[:, : self._n].transpose(0, 2, 1, 3)
        buffer = write(buffers[layer], new, self._start, self._kinds[layer].is_ring)
        buffers[layer] = buffer
        return buffer

    def cache(self) -> KVCache:
        """The cache with the entries of all layers that have run."""
        return dataclasses.replace(self._cache, k=tuple(self._keys), v=tuple(self._values))


class _KindAttention(NamedTuple):
    """Attention of the layers of a kind.

    ``attend(q, keys, values, sinks)`` is for caches that have the new entries.
    ``write_and_attend(q, new_k, new_v, keys, values, start, new_tokens)`` writes them itself, by
    the kernel for narrow passes on a GPU, if ``kernel_supports(keys)``.
    """

    attend: Attend
    write_and_attend: Callable[..., tuple[Array, Array, Array]]
    kernel_supports: Callable[[KVBuffer], bool]


def _attention_of_kind(cfg: ModelConfig, kind: _LayerKind, queries: _Queries) -> _KindAttention:
    """Attention of the new tokens to the cache of one layer; the masks are made here, once.

    Raises:
      ValueError: the pass has more tokens than a ring has room for.
    """
    tokens = queries.positions.shape[1]
    queries = _pad_single_query(cfg, queries)
    positions, base, visible, count, tree_positions, order, one_by_one = queries
    window, capacity, is_ring = kind
    if is_ring:
        _check_ring_room(kind, count)
    transform = _score_transform(cfg)
    mask = None
    distance = None
    reads_whole = long_cache.reads_whole(positions.size * cfg.num_heads, capacity)
    # Of a plain chain the mask follows from the positions.
    is_chunked = cfg.chunked and window is not None
    has_mask = is_ring or visible is not None or is_chunked
    if has_mask:
        mask = dense.cache_mask(
            positions, base, visible, count, capacity, window, tree_positions, cfg.chunked
        )
        if cfg.alibi:
            distance = dense.cache_distances(positions, base, count, capacity, tree_positions)
    own_mask = mask
    if is_ring or is_chunked or not reads_whole:
        order = None  # their sums have an order of their own
        one_by_one = False
    if order is not None or (reads_whole and not has_mask):
        # A chain: each token is in the cache position of its position.
        distance = dense.chain_distances(positions, capacity)
        mask = dense.in_window(distance, window)
    last_visible = base + count - 1
    # Blocks before the window are skipped, except in a ring: there they may hold newer tokens.
    skip_window = None if is_ring else window

    def attend(q, k, v, sinks):
        if own_mask is None and range_kernel.supports_prefill(positions.shape[1], transform, k):
            return range_kernel.prefill_attention(
                q, k, v, positions, window=window, transform=transform
            )
        if positions.shape[1] > tokens:
            q = pad_pass(q, positions.shape[1])
        if reads_whole:
            assert mask is not None, "a cache that is read whole has a mask"
            out = dense.dense_attention(
                q, k, v, mask, transform, distance, sinks, order, one_by_one=one_by_one
            )
        else:
            out = long_cache.cached_attention(
                q,
                k,
                v,
                positions,
                last_visible,
                mask,
                distance,
                sinks,
                window=skip_window,
                transform=transform,
            )
        return out[:, :tokens]

    write_and_attend = functools.partial(
        decode_kernel.decode_attention,
        positions=positions,
        last_visible=last_visible,
        mask=own_mask,
        window=window,
        transform=transform,
    )
    supports = functools.partial(
        decode_kernel.supports_decode, positions.shape[1], cfg.num_heads, transform=transform
    )
    return _KindAttention(attend, write_and_attend, supports)


def _pad_single_query(cfg: ModelConfig, queries: _Queries) -> _Queries:
    """The queries with as many tokens as a product with a head's cache wants.

    Where each query has a key head of its own, a pass over one token has a single query per head.
    """
    width = platform().head_queries
    if queries.positions.shape[1] * cfg.num_heads >= width * cfg.cached_heads:
        return queries
    return queries._replace(
        positions=pad_pass(queries.positions, width),
        visible=_pad_optional(queries.visible, width),
        order=queries.order and queries.order.padded(width),
    )


def _check_ring_room(kind: _LayerKind, count: int) -> None:
    """Raises ValueError if a pass has more tokens than a ring has room for."""
    assert kind.window is not None, "only layers of a sliding window are rings"
    room = kind.capacity - kind.window
    if count > room:
        raise ValueError(
            f"a pass over {count} tokens: layers of a sliding window of {kind.window} have "
            f"{kind.capacity} positions, room for {room} new tokens; prefill in smaller chunks"
        )


def pad_pass(x: Array | np.ndarray, pass_width: int) -> Array:
    """``x`` with its last entry along axis 1 repeated until there are ``pass_width``."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, pass_width - x.shape[1])
    return jnp.pad(x, padding, mode="edge")


def _pad_optional(x: Array | np.ndarray | None, pass_width: int) -> Array | None:
    return None if x is None else pad_pass(x, pass_width)
