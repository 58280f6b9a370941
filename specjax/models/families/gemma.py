"""Gemma 2 and 3, text models: four norms per block, scaled embeddings, mostly sliding windows.

Attention and MLP have a norm before and one after. Gemma 2 caps attention scores and logits.
Gemma 3 norms q and k, and its sliding layers have a rope of their own.
"""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.families.qwen import NAMES as QWEN
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=QWEN.layer,
    modules=QWEN.modules
    | {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
)
# Gemma 3's base frequencies, of layers with full attention and with a sliding window.
GLOBAL_THETA = 1e6
LOCAL_THETA = 1e4

# What transformers takes where a config says nothing.
_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GEMMA2_DEFAULTS = _DEFAULTS | {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS = _DEFAULTS | {"max_position_embeddings": 131072}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Gemma 2 or 3 text ``config.json``."""
    is_gemma3 = config["model_type"] == "gemma3_text"
    local_rope = None
    if is_gemma3:
        config = _GEMMA3_DEFAULTS | config
        hf_config.refuse(config, {"attn_logit_softcapping": None})
        period = hf_config.size(config, "sliding_window_pattern", 6)
        local_theta = hf_config.positive(config, "rope_local_base_freq", LOCAL_THETA)
        config, local_rope = hf_config.split_ropes(config, local_theta)
        rope = hf_config.rope_from_hf(config, GLOBAL_THETA)
    else:
        config = _GEMMA2_DEFAULTS | config
        period = 2
        rope = hf_config.rope_from_hf(config)
    hf_config.refuse(config, {"use_bidirectional_attention": False})
    fields = hf_config.common(config, tied=True)
    # The last layer of each period has full attention.
    sliding = tuple((layer + 1) % period > 0 for layer in range(fields["num_layers"]))
    return ModelConfig(
        **fields,
        num_kv_heads=hf_config.size(config, "num_key_value_heads"),
        head_dim=hf_config.size(config, "head_dim"),
        intermediate_size=hf_config.size(config, "intermediate_size"),
        max_position=_context(config, rope, is_gemma3),
        rope=rope,
        local_rope=local_rope,
        norm="rms+1",
        norm_after=True,
        embed_scale=fields["hidden_size"] ** 0.5,
        norm_eps=hf_config.positive(config, "rms_norm_eps", 1e-6),
        activation=hf_config.activation(
            config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_tanh", "gelu", "silu")
        ),
        attention_bias=hf_config.flag(config, "attention_bias", False),
        qk_norm="head" if is_gemma3 else None,
        sliding_window=hf_config.size(config, "sliding_window"),
        sliding_layers=hf_config.sliding_layers(config, sliding),
        attention_scale=hf_config.size(config, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=hf_config.positive(config, "attn_logit_softcapping"),
        logit_softcap=hf_config.positive(config, "final_logit_softcapping"),
    )


def _context(config: hf_config.Config, rope: RopeConfig, is_gemma3: bool) -> int:
    """The tokens that a model reads; Gemma 3's configs count stretched positions already."""
    if is_gemma3 and rope.kind == "linear":
        return hf_config.size(config, "max_position_embeddings")
    return hf_config.context(config, rope)


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    assert cfg.rope is not None and cfg.attention_scale is not None, "every Gemma has both"
    is_gemma3 = cfg.family == "gemma3_text"
    positions = cfg.max_position if is_gemma3 else hf_config.context_to_hf(cfg)
    name = "Gemma3ForCausalLM" if is_gemma3 else "Gemma2ForCausalLM"
    out = hf_config.common_to_hf(cfg, name, dtype) | {
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": positions,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_activation": hf_config.activation_to_hf(cfg.activation),
        "attention_bias": cfg.attention_bias,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": hf_config.rope_to_hf(cfg.rope),
        "sliding_window": cfg.sliding_window,
        "layer_types": hf_config.layer_types(cfg),
        "query_pre_attn_scalar": round(cfg.attention_scale**-2),
        "attn_logit_softcapping": cfg.attention_softcap,
        "final_logit_softcapping": cfg.logit_softcap,
    }
    if cfg.local_rope is not None:
        out["rope_local_base_freq"] = cfg.local_rope.theta
    return out
