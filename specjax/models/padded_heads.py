"""Heads of zeros beside a model's own, so that more devices can share it.

A head of zeros has the value zero at every token, whatever it attends to. So the model's outputs
stay the same, but for the order of their sums. Each such head takes its part of the KV cache.

Axis legend: H query heads, K key heads, E head size, D hidden size.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from specjax._util.errors import ModelError
from specjax.models.config import ModelConfig


def pad_heads(cfg: ModelConfig, params: dict, heads: int) -> tuple[ModelConfig, dict]:
    """A model of ``heads`` query heads, of which those beyond its own are zeros.

    Each key head keeps its number of query heads, so there are more key heads, too.

    Args:
      params: plain ones, not in the inference layout.

    Raises:
      ModelError: the model has more heads, they cannot be grouped so, or a head depends on others.
    """
    groups = cfg.num_heads // cfg.num_kv_heads
    if heads < cfg.num_heads or heads % groups:
        raise ModelError(
            f"{heads} heads: the model has {cfg.num_heads}, {groups} for each key head: choose a "
            f"multiple of {groups} that is not below"
        )
    if cfg.latent is not None or cfg.alibi or cfg.qk_norm in ("heads", "all"):
        raise ModelError(
            f"{cfg.family}: heads of zeros would change the others (latent attention, ALiBi, or "
            "norms over heads)"
        )
    padded = dataclasses.replace(cfg, num_heads=heads, num_kv_heads=heads // groups)
    queries = (heads - cfg.num_heads) * cfg.head_dim
    keys = queries // groups

    def pad(attention: dict) -> dict:
        added = {"q": queries, "k": keys, "v": keys}
        rows = {
            name: {leaf: _pad(x, 0, added[name]) for leaf, x in attention[name].items()}
            for name in added
        }
        out = attention["out"] | {"weight": _pad(attention["out"]["weight"], 1, queries)}
        sinks = {}
        if "sinks" in attention:
            sinks = {"sinks": _pad(attention["sinks"], 0, heads - cfg.num_heads)}
        return attention | rows | sinks | {"out": out}

    layers = {
        i: block | {"attention": pad(block["attention"])} for i, block in params["layers"].items()
    }
    return padded, params | {"layers": layers}


def _pad(x: Array, axis: int, count: int) -> Array:
    """``x`` with ``count`` zeros after its entries along ``axis``."""
    widths = [(0, count if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths)
