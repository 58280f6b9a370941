"""Falcon: parallel blocks, one or few key heads; q, k and v in one tensor, by key head.

The 40B's architecture has a norm each for attention and MLP, the 7B's one for both. The 1B has
ALiBi and blocks that are not parallel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names, Path, Stored


@dataclasses.dataclass(frozen=True)
class FalconNames(Names):
    """The names of a block's norms depend on how many it has."""

    def stored(self, path: Path, cfg: ModelConfig) -> Stored:
        stored = super().stored(path, cfg)
        if not cfg.parallel_residual or cfg.shared_norm or path[0] != "layers":
            return stored
        for ours, theirs in (("attention_norm", "ln_attn"), ("mlp_norm", "ln_mlp")):
            if path[2] == ours:
                return Stored(f"{self.layer}.{path[1]}.{theirs}.{path[-1]}")
        return stored


NAMES = FalconNames(
    layer="transformer.h",
    modules={
        "embed": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.out": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    base="transformer.",
    fused_qkv="self_attention.query_key_value",
    interleaved=True,
)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Falcon ``config.json``.

    transformers scales ALiBi's distances by the root of the head size as well. So do the published
    weights expect it; such a config is refused until our ALiBi does.
    """
    hf_config.refuse(config, {"alibi": False})
    config = {"bos_token_id": 11, "eos_token_id": 11} | config
    fields = hf_config.gpt_like(config, tied=True)
    is_new = hf_config.flag(config, "new_decoder_architecture", False)
    heads: int = fields["num_heads"]
    if is_new:
        heads = hf_config.size(config, "num_kv_heads", heads)
    elif hf_config.flag(config, "multi_query", True):
        heads = 1
    fields["num_kv_heads"] = heads
    parallel = is_new or hf_config.flag(config, "parallel_attn", True)
    norms = hf_config.size(config, "num_ln_in_parallel_attn", 2 if is_new else 1)
    bias = hf_config.flag(config, "bias", False)
    rope = hf_config.rope_from_hf(config)
    return ModelConfig(
        **fields,
        intermediate_size=hf_config.size(config, "ffn_hidden_size", 4 * fields["hidden_size"]),
        max_position=hf_config.context(config, rope),
        rope=rope,
        norm_eps=hf_config.positive(config, "layer_norm_epsilon", 1e-5),
        activation=hf_config.activation(config, "activation", "gelu", ACTIVATIONS),
        parallel_residual=parallel,
        shared_norm=parallel and not (is_new and norms == 2),
        attention_bias=bias,
        mlp_bias=bias,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    assert cfg.rope is not None, "from_hf gives every Falcon a rope"
    is_new = cfg.parallel_residual and (not cfg.shared_norm or cfg.num_kv_heads > 1)
    return hf_config.common_to_hf(cfg, "FalconForCausalLM", dtype) | {
        "new_decoder_architecture": is_new,
        "multi_query": cfg.num_kv_heads == 1,
        "num_kv_heads": cfg.num_kv_heads,
        "parallel_attn": cfg.parallel_residual,
        "num_ln_in_parallel_attn": 1 if cfg.shared_norm else 2,
        "ffn_hidden_size": cfg.intermediate_size,
        "max_position_embeddings": hf_config.context_to_hf(cfg),
        "rope_theta": cfg.rope.theta,
        "rope_scaling": hf_config.rope_to_hf(cfg.rope),
        "layer_norm_epsilon": cfg.norm_eps,
        "activation": hf_config.activation_to_hf(cfg.activation),
        "bias": cfg.mlp_bias,
    }
