"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Llama 1/2/3.x, CodeLlama, TinyLlama and Mistral differ only in :class:`ModelConfig`.
"""

from __future__ import annotations

from typing import Any

from specjax._util.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer="model.layers",
    modules={
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)

MISTRAL_MAX_POSITION = 131072  # in transformers, where a config names none


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Llama or Mistral ``config.json``."""
    is_mistral = config["model_type"] == "mistral"
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported for the Llama family")
    # What transformers takes where the config does not say.
    kv_heads = 8 if is_mistral else hf_config.size(config, "num_attention_heads")
    max_position = MISTRAL_MAX_POSITION if is_mistral else hf_config.MAX_POSITION
    return ModelConfig(
        **swiglu(config, max_position),
        num_kv_heads=hf_config.size(config, "num_key_value_heads", kv_heads),
        attention_bias=hf_config.flag(config, "attention_bias", False),
        mlp_bias=hf_config.flag(config, "mlp_bias", False),
        sliding_window=_mistral_window(config) if is_mistral else None,
    )


def swiglu(config: hf_config.Config, max_position: int) -> dict[str, Any]:
    """The fields that Llama, Mistral and Qwen read under the same names.

    ``max_position`` is the family's ``max_position_embeddings`` where the config has none.
    """
    rope = hf_config.rope_from_hf(config, max_position=max_position)
    return hf_config.common(config) | {
        "head_dim": hf_config.head_dim(config),
        "intermediate_size": hf_config.size(config, "intermediate_size"),
        "rope": rope,
        "max_position": hf_config.context(config, rope, max_position),
        "norm_eps": hf_config.positive(config, "rms_norm_eps", 1e-6),
        "activation": hf_config.activation(config, "hidden_act", "silu", ("silu",)),
    }


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    if cfg.family == "mistral":
        out = swiglu_to_hf(cfg, "MistralForCausalLM", dtype)
        return out | {"sliding_window": cfg.sliding_window}
    out = swiglu_to_hf(cfg, "LlamaForCausalLM", dtype)
    return out | {"attention_bias": cfg.attention_bias, "mlp_bias": cfg.mlp_bias}


def swiglu_to_hf(cfg: ModelConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """The inverse of :func:`swiglu`."""
    assert cfg.rope is not None, "every model of these families has a rope"
    return hf_config.common_to_hf(cfg, architecture, dtype) | {
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": hf_config.context_to_hf(cfg),
        "rms_norm_eps": cfg.norm_eps,
        "hidden_act": cfg.activation,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": hf_config.rope_to_hf(cfg.rope),
    }


def _mistral_window(config: hf_config.Config) -> int | None:
    """Mistral's sliding window, as in transformers: 4096 if absent, none if null."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return hf_config.size(config, "sliding_window", 4096)
