"""Arcee and Nemotron: an MLP of squared ReLU without a gate; Nemotron has layer norms."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_ARCEE = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_NEMOTRON = {"max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5}
ACTIVATIONS = ("relu2", "gelu", "gelu_tanh", "relu", "silu")
_NORM_EPS = {"arcee": "rms_norm_eps", "nemotron": "norm_eps"}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of an Arcee or Nemotron ``config.json``."""
    family = config["model_type"]
    is_nemotron = family == "nemotron"
    fields = stack.read(
        config,
        defaults=_NEMOTRON if is_nemotron else _ARCEE,
        activations=ACTIVATIONS,
        eps_name=_NORM_EPS[family],
    )
    return ModelConfig(
        **fields,
        norm="layer+1" if is_nemotron else "rms",
        gated_mlp=False,
        attention_bias=hf_config.flag(config, "attention_bias", False),
        mlp_bias=hf_config.flag(config, "mlp_bias", False),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    name = "Nemotron" if cfg.family == "nemotron" else "Arcee"
    out = stack.write(cfg, name, dtype, eps_name=_NORM_EPS[cfg.family])
    return out | {"attention_bias": cfg.attention_bias, "mlp_bias": cfg.mlp_bias}
