"""BLOOM: ALiBi in place of position embeddings, and a norm after the token embedding.

Checkpoints interleave q, k and v head by head.
"""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer="transformer.h",
    modules={
        "embed": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
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
# BLOOM's names of common config keys.
_COMMON_KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a BLOOM ``config.json``.

    ``slow_but_exact`` is ignored: it only changes the order of sums in a sharded product. ALiBi
    has no longest sequence; ``seq_length`` is the length in training.
    """
    config = {"bos_token_id": 1, "eos_token_id": 2} | hf_config.renamed(config, _COMMON_KEYS)
    hf_config.refuse(config, {"apply_residual_connection_post_layernorm": False})
    fields = hf_config.gpt_like(config, tied=True)
    return ModelConfig(
        **fields,
        intermediate_size=4 * fields["hidden_size"],
        max_position=hf_config.size(config, "seq_length", 2048),
        rope=None,
        alibi=True,
        embed_norm=True,
        norm_eps=hf_config.positive(config, "layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        attention_bias=True,
        mlp_bias=True,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    out = hf_config.common_to_hf(cfg, "BloomForCausalLM", dtype)
    # transformers reads the hidden size under its common name, too.
    own_keys = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    return hf_config.renamed(out, own_keys) | {
        "layer_norm_epsilon": cfg.norm_eps,
        "seq_length": cfg.max_position,
    }
