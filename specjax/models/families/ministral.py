"""Ministral: sliding windows on chosen layers; Ministral 3 scales queries by their position."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig, QueryScale
from specjax.models.families import stack
from specjax.models.families.llama import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_DEFAULTS3 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
BETA = "llama_4_scaling_beta"


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Ministral or Ministral 3 ``config.json``."""
    if config["model_type"] == "ministral3":
        return _third_from_hf(config)
    fields = stack.read(config, defaults=_DEFAULTS)
    return ModelConfig(**fields, **stack.sliding(config, (True,) * fields["num_layers"], 4096))


def _third_from_hf(config: hf_config.Config) -> ModelConfig:
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(name) or {})
    beta = rope.pop(BETA, None)
    rope.pop("max_position_embeddings", None)  # repeats the one outside
    fields = stack.read(config | {name: rope}, defaults=_DEFAULTS3)
    scale = None
    if beta is not None:
        scale = QueryScale(beta, fields["rope"].original_max_position)
    slides = (True,) * fields["num_layers"]
    return ModelConfig(**fields, **stack.sliding(config, slides), query_scale=scale)


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    if cfg.family == "ministral":
        return stack.write(cfg, "Ministral", dtype) | stack.sliding_to_hf(cfg)
    out: dict[str, Any] = stack.write(cfg, "Ministral3", dtype)
    out["sliding_window"] = cfg.sliding_window
    if cfg.query_scale is not None:
        out["rope_scaling"] |= {BETA: cfg.query_scale.beta}
    return out
