"""SmolLM 3: every fourth layer has no rotary positions."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a SmolLM 3 ``config.json``."""
    fields = stack.read(config, defaults=_DEFAULTS)
    rotations = stack.rotating_layers(config, fields["num_layers"])
    windows = {}
    if hf_config.flag(config, "use_sliding_window", False):
        windows = stack.sliding(config, tuple(not rotates for rotates in rotations))
    return ModelConfig(
        **fields,
        **windows,
        rope_layers=None if all(rotations) else rotations,
        attention_bias=hf_config.flag(config, "attention_bias", False),
        mlp_bias=hf_config.flag(config, "mlp_bias", False),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return (
        stack.write(cfg, "SmolLM3", dtype)
        | stack.sliding_to_hf(cfg)
        | {
            "use_sliding_window": cfg.sliding_window is not None,
            "no_rope_layers": [int(rotates) for rotates in cfg.rotations],
            "attention_bias": cfg.attention_bias,
            "mlp_bias": cfg.mlp_bias,
        }
    )
