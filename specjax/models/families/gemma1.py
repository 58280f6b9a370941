"""Gemma 1: scaled embeddings, norms scaled by ``1 + weight``, tied tables."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Gemma 1 ``config.json``.

    Its first configs name the exact GELU, although the models were trained with the approximate
    one. transformers takes the approximate one as well.
    """
    hf_config.refuse(config, {"use_bidirectional_attention": False})
    fields = stack.read(config, defaults=_DEFAULTS, activations=("gelu_tanh", "gelu"))
    fields["activation"] = "gelu_tanh"
    return ModelConfig(
        **fields,
        norm="rms+1",
        embed_scale=fields["hidden_size"] ** 0.5,
        attention_bias=hf_config.flag(config, "attention_bias", False),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return stack.write(cfg, "Gemma", dtype) | {"attention_bias": cfg.attention_bias}
