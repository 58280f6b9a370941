"""Phi 1 and 2: parallel blocks with one norm, partly rotated heads, a bias on the logits."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=LLAMA.layer,
    modules=LLAMA.modules
    | {
        "norm": "model.final_layernorm",
        "attention.out": "self_attn.dense",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
)
_DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "silu")


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Phi ``config.json``."""
    return ModelConfig(
        **stack.read(
            config, defaults=_DEFAULTS, activations=ACTIVATIONS, eps_name="layer_norm_eps"
        ),
        norm="layer",
        parallel_residual=True,
        shared_norm=True,
        gated_mlp=False,
        attention_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm="head" if hf_config.flag(config, "qk_layernorm", False) else None,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    out = stack.write(cfg, "Phi", dtype, eps_name="layer_norm_eps")
    return out | {"qk_layernorm": cfg.qk_norm is not None}
