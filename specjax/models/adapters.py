"""Gated adapters: low-rank updates of a model's weights that act on its adaptive tokens alone.

``y = W x + [x is of an adaptive token] · up (down x)``, and adaptive tokens have embeddings of
their own (gated LoRA: Samragh et al. 2025, arXiv 2507.11851, there for mask tokens). The bracket is
1 at adaptive tokens and 0 elsewhere. At an ordinary token the product is the base model's, bit for
bit. Ordinary tokens never attend to adaptive ones, so all their results are the base model's, too.

Adapters are a tree beside the params, ``{"embed": [ids, D], "layers": {i: {module: {weight:
{"down": [rank, in], "up": [out, rank]}}}}}``; weights without an adapter are left out. A pass with
adapters takes ``params | {"adapters": tree}``. :func:`specjax.models.layers.linear` computes the
products and :func:`specjax.models.sharding.look_up` the embeddings. No other module knows of
adapters.

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
# The two factors of an adapter.
DOWN = "down"
UP = "up"


class Adapted:
    """A weight with its adapter; it takes the place of an array among the params."""

    def __getitem__(self, index: types.EllipsisType) -> Adapted:
        """Itself: modules read the value of a parameter as ``param[...]``."""
        return self


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("base", "down", "up", "gate"), meta_fields=()
)
@dataclasses.dataclass(frozen=True, eq=False)
class LowRank(Adapted):
    """A matrix, and its update at the tokens where ``gate`` is true."""

    base: Any  # [O, I]; may be quantized
    down: Float[Array, "rank I"]
    up: Float[Array, "O rank"]
    gate: Bool[Array, "B N"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("base", "rows"), meta_fields=("ids",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class ReplacedRows(Adapted):
    """A table, and other vectors for the ``ids``; the table need not have rows for those."""

    base: Any  # [V, D]; may be quantized
    rows: Float[Array, "A D"]
    ids: tuple[int, ...]

    def replace_vectors(
        self, tokens: Int[Array, "B N"], vectors: Float[Array, "B N D"]
    ) -> Float[Array, "B N D"]:
        """``vectors`` of ``tokens``, replaced where the token is one of the ``ids``."""
        matches = tokens[..., None] == np.array(self.ids)
        return jnp.where(matches.any(-1)[..., None], self.rows[matches.argmax(-1)], vectors)


def attach_adapters(cfg: ModelConfig, params: dict, tokens: Int[Array, "B N"]) -> dict:
    """The params of a pass over ``tokens``, with each adapter joined to its weight.

    Params without adapters are returned as they are.
    """
    if KEY not in params:
        return params
    params = dict(params)
    adapters = params.pop(KEY)
    ids = distinct(cfg.adaptive_ids)
    # The gate is per token: within one batch adapters act on some tokens and not on others.
    gate = jnp.isin(tokens, np.array(ids))
    layers = adapt(params["layers"], adapters["layers"], functools.partial(LowRank, gate=gate))
    embed = ReplacedRows(params["embed"], adapters["embed"], ids)
    return params | {"embed": embed, "layers": layers}


def adapt(layers: dict, adapters: dict, make: Callable[..., Any]) -> dict:
    """The layers with ``make(weight, down=…, up=…)`` in the place of each adapted weight."""

    def adapt_module(module: dict, pairs: dict) -> dict:
        adapted = dict(module)
        for name, pair in pairs.items():
            weight = make(module[name]["weight"], **pair)
            adapted[name] = module[name] | {"weight": weight}
        return adapted

    adapted_layers = {}
    for i, block in layers.items():
        modules = {name: adapt_module(block[name], pairs) for name, pairs in adapters[i].items()}
        adapted_layers[i] = block | modules
    return adapted_layers


def distinct(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The adaptive ids without repetition, in the order of their embedding rows."""
    return tuple(sorted(set(ids)))


def fuse_adapters(cfg: ModelConfig, adapters: dict) -> dict:
    """Adapters in the inference layout (:func:`specjax.models.blocks.fuse`)."""
    queries = cfg.num_heads * cfg.head_dim
    keys = cfg.num_kv_heads * cfg.head_dim
    columns = cfg.intermediate_size
    fused_names = {"attention": "qkv", "mlp": "gate_up"}
    outputs = {"attention": {"q": queries, "k": keys, "v": keys}, "mlp": {}}
    if cfg.latent is not None:  # queries, latents and keys are not joined
        outputs["attention"] = {}
    if cfg.gated_mlp:
        outputs["mlp"] = {"gate": columns, "up": columns}

    layers = {}
    for i, block in adapters["layers"].items():
        layers[i] = {
            name: _fuse_module(module, fused_names[name], outputs[name])
            for name, module in block.items()
        }
    return adapters | {"layers": layers}


def _fuse_module(module: dict, fused_name: str, outputs: dict[str, int]) -> dict:
    """The adapters of a module, those of the matrices in ``outputs`` joined to one.

    ``outputs`` has each matrix's number of rows, in the order in which they are joined. Each
    adapter keeps its own rank: ``down`` factors are concatenated, ``up`` factors are the blocks of
    a block-diagonal matrix. A matrix without an adapter has rows of zeros.
    """
    adapted = [name for name in outputs if name in module]
    rest = {name: pair for name, pair in module.items() if name not in adapted}
    if not adapted:
        return rest
    down = jnp.concatenate([module[name][DOWN] for name in adapted])
    blocks = []
    for name, size in outputs.items():
        if name in module:
            blocks.append(module[name][UP])
        else:
            blocks.append(jnp.zeros((size, 0), down.dtype))
    return rest | {fused_name: {DOWN: down, UP: block_diag(*blocks)}}
