"""Helium and ERNIE 4.5, dense: Llama's blocks with rotated pairs of adjacent entries."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_HELIUM = {
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 1e5,
}
_ERNIE = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Helium or ERNIE 4.5 ``config.json``."""
    if config["model_type"] == "ernie4_5":
        bias = hf_config.flag(config, "use_bias", False)
        return ModelConfig(
            **stack.read(config, defaults=_ERNIE),
            rope_interleaved=True,
            attention_bias=bias,
            mlp_bias=bias,
        )
    return ModelConfig(
        **stack.read(config, defaults=_HELIUM),
        rope_interleaved=True,
        qkv_bias=hf_config.flag(config, "attention_bias", False),
        mlp_bias=hf_config.flag(config, "mlp_bias", False),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    if cfg.family == "ernie4_5":
        return stack.write(cfg, "Ernie4_5", dtype) | {"use_bias": cfg.mlp_bias}
    biases = {"attention_bias": cfg.qkv_bias, "mlp_bias": cfg.mlp_bias}
    return stack.write(cfg, "Helium", dtype) | biases
