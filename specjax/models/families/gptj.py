"""GPT-J: parallel blocks with one norm, rotated pairs of adjacent entries, a bias on the logits."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.families.gpt2 import COMMON_KEYS
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer="transformer.h",
    modules={
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "attention_norm": "ln_1",
        "attention.q": "attn.q_proj",
        "attention.k": "attn.k_proj",
        "attention.v": "attn.v_proj",
        "attention.out": "attn.out_proj",
        "mlp.up": "mlp.fc_in",
        "mlp.down": "mlp.fc_out",
    },
    base="transformer.",
    ignored=("attn.bias", "attn.masked_bias"),
)
ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "silu")


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a GPT-J ``config.json``."""
    config = hf_config.renamed(config, COMMON_KEYS)
    fields = hf_config.gpt_like(config)
    return ModelConfig(
        **fields,
        intermediate_size=hf_config.size(config, "intermediate_size", 4 * fields["hidden_size"]),
        max_position=hf_config.size(config, "max_position_embeddings", 2048),
        rope=RopeConfig(),
        rope_interleaved=True,
        rotary_dim=hf_config.size(config, "rotary_dim", 64),
        norm_eps=hf_config.positive(config, "layer_norm_epsilon", 1e-5),
        activation=hf_config.activation(config, "activation_function", "gelu_new", ACTIVATIONS),
        parallel_residual=True,
        shared_norm=True,
        mlp_bias=True,
        head_bias=True,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    out = hf_config.common_to_hf(cfg, "GPTJForCausalLM", dtype) | {
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": cfg.max_position,
        "rotary_dim": cfg.rotary_dim,
        "layer_norm_epsilon": cfg.norm_eps,
        "activation_function": hf_config.activation_to_hf(cfg.activation),
    }
    return hf_config.renamed(out, {common: own for own, common in COMMON_KEYS.items()})
