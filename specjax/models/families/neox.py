"""GPT-NeoX (Pythia): layer norms, rotary positions on a part of each head, parallel blocks.

In a parallel block attention and MLP read the same input. Checkpoints interleave q, k and v head
by head.
"""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer="gpt_neox.layers",
    modules={
        "embed": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.out": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    base="gpt_neox.",
    head="embed_out.weight",
    fused_qkv="attention.query_key_value",
    interleaved=True,
    ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    renamed={"lm_head.weight": "embed_out.weight"},
)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a GPT-NeoX ``config.json``."""
    config = {"bos_token_id": 0, "eos_token_id": 2} | config
    fields = hf_config.gpt_like(config)
    theta = hf_config.positive(config, "rotary_emb_base", 10000.0)
    rope, rotary_dim = hf_config.partial_rope(config, fields["head_dim"], 0.25, "rotary_pct", theta)
    return ModelConfig(
        **fields,
        intermediate_size=hf_config.size(config, "intermediate_size"),
        max_position=hf_config.context(config, rope),
        rope=rope,
        rotary_dim=rotary_dim,
        norm_eps=hf_config.positive(config, "layer_norm_eps", 1e-5),
        activation=hf_config.activation(config, "hidden_act", "gelu", ACTIVATIONS),
        attention_bias=hf_config.flag(config, "attention_bias", True),
        mlp_bias=True,
        parallel_residual=hf_config.flag(config, "use_parallel_residual", True),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    assert cfg.rope is not None and cfg.rotary_dim is not None, "every GPT-NeoX has a rope"
    return hf_config.common_to_hf(cfg, "GPTNeoXForCausalLM", dtype) | {
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": hf_config.context_to_hf(cfg),
        "rotary_pct": cfg.rotary_dim / cfg.head_dim,
        "rotary_emb_base": cfg.rope.theta,
        "rope_scaling": hf_config.rope_to_hf(cfg.rope),
        "layer_norm_eps": cfg.norm_eps,
        "hidden_act": hf_config.activation_to_hf(cfg.activation),
        "attention_bias": cfg.attention_bias,
        "use_parallel_residual": cfg.parallel_residual,
    }
