"""Seed-OSS: Llama's blocks with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Seed-OSS ``config.json``."""
    bias = hf_config.flag(config, "attention_bias", True)
    out_bias = hf_config.flag(config, "attention_out_bias", False)
    if out_bias and not bias:
        hf_config.refuse(config, {"attention_out_bias": False})
    return ModelConfig(
        **stack.read(config, defaults=_DEFAULTS),
        attention_bias=bias and out_bias,
        qkv_bias=bias and not out_bias,
        mlp_bias=hf_config.flag(config, "mlp_bias", False),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return stack.write(cfg, "SeedOss", dtype) | {
        "attention_bias": cfg.attention_bias or cfg.qkv_bias,
        "attention_out_bias": cfg.attention_bias,
        "mlp_bias": cfg.mlp_bias,
    }
