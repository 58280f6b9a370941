"""Gemma 2 and 3, text: norms before and after attention and MLP, scaled embeddings, sliding
windows on most layers. Gemma 2 caps scores and logits; Gemma 3 norms q and k, and its sliding
layers have a rope of their own.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from specjax._util.checks import OBJECT, require_all
from specjax._util.errors import ModelError
from specjax.models.blocks import Block, Decoder, Table
from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.families.qwen import NAMES as QWEN
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names
from specjax.models.layers import NORMS, rope_table

NAMES = Names(
    layer=QWEN.layer,
    modules=QWEN.modules
    | {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
)
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4  # Gemma 3's


class GemmaBlock(Block):
    """Attention and MLP between two norms each."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool):
        super().__init__(cfg, rngs, fused)
        self.attention_out_norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps)
        self.mlp_out_norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps)

    def __call__(self, x, table: Table, attend):
        out = self.attention(self.attention_norm(x), table, attend)
        x = x + self.attention_out_norm(out)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))


class Gemma(Decoder):
    """Embeddings grow by the root of their size; sliding layers may have another rope."""

    block = GemmaBlock

    def inputs(self, tokens, positions):
        x = super().inputs(tokens, positions)
        return x * jnp.asarray(self.cfg.hidden_size**0.5, x.dtype)

    def tables(self, positions) -> list[Table]:
        cfg, tables = self.cfg, super().tables(positions)
        if cfg.local_rope is None:
            return tables
        local = rope_table(cfg.local_rope, cfg.head_dim, positions)
        return [t if w is None else local for t, w in zip(tables, cfg.windows, strict=True)]


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Gemma 2 or 3 text ``config.json``."""
    gemma3 = config["model_type"] == "gemma3_text"
    config = _DEFAULTS[gemma3] | config
    hf_config.refuse(config, {"use_bidirectional_attention": False})
    if gemma3:
        hf_config.refuse(config, {"attn_logit_softcapping": None})
    fields = hf_config.common(config, tied=True)
    layers = fields["num_layers"]
    period = hf_config.size(config, "sliding_window_pattern", 6) if gemma3 else 2
    rope, local = _ropes(config) if gemma3 else (hf_config.rope_from_hf(config), None)
    return ModelConfig(
        **fields,
        num_kv_heads=hf_config.size(config, "num_key_value_heads"),
        head_dim=hf_config.size(config, "head_dim"),
        intermediate_size=hf_config.size(config, "intermediate_size"),
        max_position=hf_config.size(config, "max_position_embeddings"),
        rope=rope,
        local_rope=local,
        norm="rms+1",
        norm_eps=hf_config.positive(config, "rms_norm_eps", 1e-6),
        activation=hf_config.activation(
            config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_tanh", "gelu", "silu")
        ),
        attention_bias=hf_config.flag(config, "attention_bias", False),
        qk_norm=gemma3,
        sliding_window=hf_config.size(config, "sliding_window"),
        sliding_layers=hf_config.sliding_layers(
            config, tuple((i + 1) % period > 0 for i in range(layers))
        ),
        attention_scale=hf_config.size(config, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=hf_config.positive(config, "attn_logit_softcapping"),
        logit_softcap=hf_config.positive(config, "final_logit_softcapping"),
    )


_SHARED = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# What transformers takes where a config says nothing; Gemma 3's is the second.
_DEFAULTS = (
    _SHARED
    | {
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    _SHARED | {"max_position_embeddings": 131072},
)


def _ropes(config: hf_config.Config) -> tuple[RopeConfig, RopeConfig]:
    """Gemma 3's ropes of full and of sliding layers, in the old and the new spelling."""
    both = config.get("rope_parameters")
    if not both:
        theta = hf_config.positive(config, "rope_local_base_freq", LOCAL_THETA)
        return hf_config.rope_from_hf(config, GLOBAL_THETA), RopeConfig(theta=theta)
    known = dict.fromkeys(("full_attention", "sliding_attention"), OBJECT)
    require_all("config.json: rope_parameters.", both, known, ModelError)
    if odd := sorted(set(both) - set(known)):
        raise ModelError(f"config.json: rope_parameters must be per layer type, got {odd[0]!r}")
    kinds = ("full_attention", GLOBAL_THETA), ("sliding_attention", LOCAL_THETA)
    full, local = (
        hf_config.rope_from_hf(
            config | {"rope_parameters": both.get(kind), "rope_scaling": None}, theta
        )
        for kind, theta in kinds
    )
    if local.kind != "default":
        raise ModelError(f"rope_type {local.kind!r} is not supported for sliding layers")
    return full, local


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    gemma3 = cfg.family == "gemma3_text"
    name = "Gemma3ForCausalLM" if gemma3 else "Gemma2ForCausalLM"
    out = hf_config.common_to_hf(cfg, name, dtype) | {
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": cfg.max_position,
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
    return out | ({"rope_local_base_freq": cfg.local_rope.theta} if gemma3 else {})
