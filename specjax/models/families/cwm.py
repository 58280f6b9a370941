"""CWM: Llama's blocks, with sliding windows on three of four layers."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
PERIOD = 4


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a CWM ``config.json``."""
    fields = stack.read(config, defaults=_DEFAULTS)
    slides = tuple(layer % PERIOD > 0 for layer in range(fields["num_layers"]))
    bias = hf_config.flag(config, "mlp_bias", False)
    return ModelConfig(**fields, **stack.sliding(config, slides, 8192), mlp_bias=bias)


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return stack.write(cfg, "Cwm", dtype) | stack.sliding_to_hf(cfg) | {"mlp_bias": cfg.mlp_bias}
