"""GPT-2: layer norms and learned positions.

Checkpoints store weights ``[in, out]``, and q, k and v stacked in one tensor.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from specjax.models.blocks import Decoder, make_table
from specjax.models.config import ModelConfig
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names
from specjax.models.sharding import look_up

NAMES = Names(
    layer="transformer.h",
    modules={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    base="transformer.",
    fused_qkv="attn.c_attn",
    transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),
)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
# GPT-2's names of common config keys.
COMMON_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}


class GPT2(Decoder):
    """A stack of pre-norm blocks; tokens and positions have an embedding table each."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool = False):
        super().__init__(cfg, rngs, fused)
        shape = (cfg.max_position, cfg.hidden_size)
        self.positions = make_table(shape, ("positions", "hidden"), rngs)

    def inputs(self, tokens, positions, rows=None):
        embedded_positions = look_up(self.positions[...], positions, self.cfg.max_position)
        return self.embedded(tokens, rows) + embedded_positions


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a GPT-2 ``config.json``.

    ``reorder_and_upcast_attn`` is ignored: it asks for float32 scores, and ours always are.
    """
    defaults = {"bos_token_id": 50256, "eos_token_id": 50256}
    config = defaults | hf_config.renamed(config, COMMON_KEYS)
    hf_config.refuse(config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
    fields = hf_config.gpt_like(config, tied=True)
    return ModelConfig(
        **fields,
        intermediate_size=hf_config.size(config, "intermediate_size", 4 * fields["hidden_size"]),
        max_position=hf_config.size(config, "max_position_embeddings", 1024),
        rope=None,
        norm_eps=hf_config.positive(config, "layer_norm_epsilon", 1e-5),
        activation=hf_config.activation(config, "activation_function", "gelu_new", ACTIVATIONS),
        attention_bias=True,
        mlp_bias=True,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    out = hf_config.common_to_hf(cfg, "GPT2LMHeadModel", dtype) | {
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": cfg.max_position,
        "layer_norm_epsilon": cfg.norm_eps,
        "activation_function": hf_config.activation_to_hf(cfg.activation),
    }
    own_keys = {common: own for own, common in COMMON_KEYS.items()}
    return hf_config.renamed(out, own_keys)
