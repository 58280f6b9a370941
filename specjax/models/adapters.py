"""Gated adapters: low-rank updates of a model's weights that act on its adaptive tokens alone.

``y = W x + [x is of an adaptive token] · up (down x)``, and a row of their own in the place of
the tokens' embedding (gated LoRA: Samragh et al. 2025, arXiv 2507.11851, there for mask tokens). At
every other token the product is the base's, bit for bit; and as those never attend to adaptive
ones, so is everything that the model says there.

Adapters are a tree beside the params, ``{"embed": [ids, width], "layers": {i: {module: {weight:
{"down": [rank, in], "up": [out, rank]}}}}}``, of the weights that have one. A pass with them takes
``params | {"adapters": tree}``. Products are :func:`specjax.models.layers.linear`'s, look-ups
:func:`specjax.models.sharding.look_up`'s; no other module knows of them.

Axis legend: B rows, N tokens, O outputs, I inputs, A adaptive ids, V vocabulary, D embedding size.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Bool, Float, Int

from specjax.models.config import ModelConfig

KEY = "adapters"  # of the tree, among the params of a pass
DOWN, UP = "down", "up"  # of a pair


class Adapted:
    """A weight with its adapter, in the place of an array."""

    def __getitem__(self, index: types.EllipsisType) -> Adapted:
        """Itself: modules read the value of a parameter as ``param[...]``."""
        return self


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("base", "down", "up", "gate"), meta_fields=()
)
@dataclasses.dataclass(frozen=True, eq=False)
class LowRank(Adapted):
    """A matrix, and its update at the tokens of ``gate``."""

    base: Any  # [O, I], maybe quantized
    down: Float[Array, "rank I"]
    up: Float[Array, "O rank"]
    gate: Bool[Array, "B N"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("base", "rows"), meta_fields=("ids",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class OwnRows(Adapted):
    """A table, and what stands in the place of the rows ``ids``; it need not hold those."""

    base: Any  # [V, D]
    rows: Float[Array, "A D"]
    ids: tuple[int, ...]

    def replaced(
        self, tokens: Int[Array, "B N"], vectors: Float[Array, "B N D"]
    ) -> Float[Array, "B N D"]:
        """``vectors`` of ``tokens``, with the own rows where they are due."""
        own = tokens[..., None] == np.array(self.ids)
        return jnp.where(own.any(-1)[..., None], self.rows[own.argmax(-1)], vectors)


def gated(cfg: ModelConfig, params: dict, tokens: Int[Array, "B N"]) -> dict:
    """The params of a pass over ``tokens``, each weight with its adapter; most have none."""
    if KEY not in params:
        return params
    params = dict(params)
    adapters, ids = params.pop(KEY), distinct(cfg.adaptive_ids)
    gate = jnp.isin(tokens, np.array(ids))
    layers = adapt(params["layers"], adapters["layers"], functools.partial(LowRank, gate=gate))
    return params | {"embed": OwnRows(params["embed"], adapters["embed"], ids), "layers": layers}


def adapt(layers: dict, pairs: dict, make: Callable[..., Any]) -> dict:
    """The layers with ``make(weight, down=…, up=…)`` in the place of each weight with a pair."""

    def module(base: dict, own: dict) -> dict:
        made = {name: make(base[name]["weight"], **pair) for name, pair in own.items()}
        return base | {name: base[name] | {"weight": weight} for name, weight in made.items()}

    return {
        i: block | {name: module(block[name], own) for name, own in pairs[i].items()}
        for i, block in layers.items()
    }


def distinct(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The adaptive ids in the order of their rows, each once."""
    return tuple(sorted(set(ids)))


def fuse_adapters(cfg: ModelConfig, adapters: dict) -> dict:
    """Adapters of the inference layout (:func:`specjax.models.blocks.fuse`)."""
    queries, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    columns = cfg.intermediate_size
    joins = {
        "attention": ("qkv", {"q": queries, "k": keys, "v": keys}),
        "mlp": ("gate_up", {"gate": columns, "up": columns} if cfg.gated_mlp else {}),
    }
    layers = {
        i: {name: _join(module, *joins[name]) for name, module in block.items()}
        for i, block in adapters["layers"].items()
    }
    return adapters | {"layers": layers}


def _join(module: dict, joined: str, outputs: dict[str, int]) -> dict:
    """The adapters of matrices that are joined row-wise, as one: each keeps its own rank."""
    own = [name for name in outputs if name in module]
    kept = {name: pair for name, pair in module.items() if name not in own}
    if not own:
        return kept
    down = jnp.concatenate([module[name][DOWN] for name in own])
    none = {name: jnp.zeros((size, 0), down.dtype) for name, size in outputs.items()}
    up = block_diag(*[module[n][UP] if n in module else none[n] for n in outputs])
    return kept | {joined: {DOWN: down, UP: up}}
