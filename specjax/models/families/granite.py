"""Granite 3 and 4, dense: multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "multipliers", "multipliers_to_hf", "to_hf"]


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Granite ``config.json``."""
    return ModelConfig(
        **stack.read(config),
        **multipliers(config),
        attention_bias=hf_config.flag(config, "attention_bias", False),
        mlp_bias=hf_config.flag(config, "mlp_bias", False),
    )


def multipliers(config: hf_config.Config) -> dict[str, Any]:
    """The fields of Granite's multipliers."""
    return {
        "embed_scale": hf_config.positive(config, "embedding_multiplier", 1.0),
        "attention_scale": hf_config.positive(config, "attention_multiplier", 1.0),
        "residual_scale": hf_config.positive(config, "residual_multiplier", 1.0),
        "logit_scale": 1 / hf_config.positive(config, "logits_scaling", 1.0),
    }


def multipliers_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`multipliers`."""
    return {
        "embedding_multiplier": cfg.embed_scale,
        "attention_multiplier": cfg.attention_scale,
        "residual_multiplier": cfg.residual_scale,
        "logits_scaling": 1 / cfg.logit_scale,
    }


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    biases = {"attention_bias": cfg.attention_bias, "mlp_bias": cfg.mlp_bias}
    return stack.write(cfg, "Granite", dtype) | multipliers_to_hf(cfg) | biases
