"""GLM 4 (``glm``) and GLM 4 0414 (``glm4``): half-rotated heads of adjacent pairs.

Gate and up are one tensor. ``glm4`` has norms before and after attention and MLP.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config

NAMES = dataclasses.replace(
    LLAMA,
    modules=LLAMA.modules
    | {
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
    fused_gate_up="mlp.gate_up_proj",
)
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a GLM ``config.json``."""
    return ModelConfig(
        **stack.read(config, defaults=_DEFAULTS),
        rope_interleaved=True,
        qkv_bias=hf_config.flag(config, "attention_bias", True),
        norm_after=config["model_type"] == "glm4",
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    name = "Glm4" if cfg.family == "glm4" else "Glm"
    return stack.write(cfg, name, dtype) | {"attention_bias": cfg.qkv_bias}
