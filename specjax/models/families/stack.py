"""The plain stack: what most families' ``config.json`` say under the same names, read and written.

A family's file adds its own switches. It gives the values that transformers takes where a config
says nothing, and the keys that it names otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax._util.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.hf import config as hf_config

# The classes of transformers end with these, with the output head and without it.
WITH_HEAD = "ForCausalLM"
WITHOUT_HEAD = "Model"


def with_defaults(config: hf_config.Config, defaults: Mapping[str, Any]) -> hf_config.Config:
    """``config`` with ``defaults`` where it has no value; null counts as none."""
    return {**defaults, **{name: value for name, value in config.items() if value is not None}}


def read(
    config: hf_config.Config,
    *,
    defaults: Mapping[str, Any] | None = None,
    activations: tuple[str, ...] = ("silu",),
    activation_name: str = "hidden_act",
    eps_name: str = "rms_norm_eps",
    rotated: float = 1.0,
) -> dict[str, Any]:
    """The fields of :class:`ModelConfig` that every family of the plain stack has.

    Args:
      defaults: what transformers takes where the config says nothing, by the config's own names.
      activations: those that are supported, by our names; the first one is the default.
      activation_name, eps_name: the family's keys of the activation and of the norms' epsilon.
      rotated: the fraction of each head that is rotated where the config gives none.
    """
    config = with_defaults(config, defaults or {})
    head_dim = hf_config.head_dim(config)
    theta = hf_config.positive(config, "rope_theta", 10000.0)
    max_position = hf_config.size(config, "max_position_embeddings", hf_config.MAX_POSITION)
    rope, rotary_dim = hf_config.partial_rope(
        config, head_dim, rotated, theta=theta, max_position=max_position
    )
    fields = hf_config.common(config)
    default_activation = hf_config.activation_to_hf(activations[0])
    return fields | {
        "num_kv_heads": hf_config.size(config, "num_key_value_heads", fields["num_heads"]),
        "head_dim": head_dim,
        "intermediate_size": hf_config.size(config, "intermediate_size"),
        "rope": rope,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "max_position": hf_config.context(config, rope, max_position),
        "norm_eps": hf_config.positive(config, eps_name, 1e-6),
        "activation": hf_config.activation(
            config, activation_name, default_activation, activations
        ),
    }


def write(
    cfg: ModelConfig,
    name: str,
    dtype: str,
    *,
    activation_name: str = "hidden_act",
    eps_name: str = "rms_norm_eps",
) -> dict[str, Any]:
    """The inverse of :func:`read`. ``name`` begins the names of the family's classes."""
    out = hf_config.common_to_hf(cfg, name + WITH_HEAD, dtype) | {
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": hf_config.context_to_hf(cfg),
        eps_name: cfg.norm_eps,
        activation_name: hf_config.activation_to_hf(cfg.activation),
    }
    if cfg.rope is not None:
        out |= {"rope_theta": cfg.rope.theta, "rope_scaling": hf_config.rope_to_hf(cfg.rope)}
        out["partial_rotary_factor"] = (cfg.rotary_dim or cfg.head_dim) / cfg.head_dim
    return out


def sliding(
    config: hf_config.Config, default: tuple[bool, ...], window: int | None = None
) -> dict[str, Any]:
    """The fields of a sliding window: its size, and which layers have it.

    ``default`` holds for the layers if the config has no ``layer_types``, ``window`` if it has no
    ``sliding_window`` at all; null means none.
    """
    if "sliding_window" in config:
        window = config["sliding_window"] and hf_config.size(config, "sliding_window")
    layers = hf_config.sliding_layers(config, default)
    if window is None or (layers is not None and not any(layers)):
        return {"sliding_window": None, "sliding_layers": None}
    return {"sliding_window": window, "sliding_layers": layers}


def sliding_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`sliding`."""
    return {"sliding_window": cfg.sliding_window, "layer_types": hf_config.layer_types(cfg)}


def all_but_every(period: int, layers: int) -> tuple[bool, ...]:
    """True for all layers but the last one of each period."""
    return tuple((layer + 1) % period > 0 for layer in range(layers))


def rotating_layers(config: hf_config.Config, layers: int) -> tuple[bool, ...]:
    """Which layers have a rope: those that are listed, or all but the last one of each period.

    Despite its name, ``no_rope_layers`` has 1 for layers with a rope.

    Raises:
      ModelError: it has fewer entries than there are layers.
    """
    listed = config.get("no_rope_layers")
    if not listed:
        return all_but_every(hf_config.size(config, "no_rope_layer_interval", 4), layers)
    if len(listed) < layers:
        raise ModelError(
            f"config.json: no_rope_layers has {len(listed)} entries for {layers} layers"
        )
    return tuple(flag == 1 for flag in listed[:layers])
