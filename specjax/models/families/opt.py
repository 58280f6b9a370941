"""OPT: layer norms and learned positions, whose table starts at row 2.

OPT-350M has its norms after attention and MLP, and a token embedding smaller than the hidden size.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from specjax.models.blocks import Decoder, make_table
from specjax.models.config import ModelConfig
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names
from specjax.models.layers import Linear
from specjax.models.sharding import look_up

NAMES = Names(
    layer="model.decoder.layers",
    modules={
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "norm": "model.decoder.final_layer_norm",
        "attention_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.out_proj",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
POSITION_OFFSET = 2  # rows 0 and 1 of the position table were for padding in training


class OPT(Decoder):
    """Tokens and positions have an embedding table each; the tokens' one may be projected."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool = False):
        super().__init__(cfg, rngs, fused)
        rows = cfg.max_position + POSITION_OFFSET
        d = cfg.hidden_size
        self.positions = make_table((rows, d), ("positions", "hidden"), rngs)
        if cfg.embed_size is not None:
            e = cfg.embed_size
            self.project_in = Linear((d, e), ("hidden", "embedding"), False, cfg.shards, rngs)
            self.project_out = Linear((e, d), ("embedding", "hidden"), False, cfg.shards, rngs)

    def inputs(self, tokens, positions, rows=None):
        x = self.embedded(tokens, rows)
        if self.cfg.embed_size is not None:
            x = self.project_in(x)
        count = self.cfg.max_position + POSITION_OFFSET
        return x + look_up(self.positions[...], positions + POSITION_OFFSET, count)

    def outputs(self, x):
        x = super().outputs(x)
        if self.cfg.embed_size is not None:
            x = self.project_out(x)
        return x


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of an OPT ``config.json``."""
    config = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1} | config
    hf_config.refuse(config, {"layer_norm_elementwise_affine": True})
    fields = hf_config.gpt_like(config, tied=True)
    bias = hf_config.flag(config, "enable_bias", True)
    embed_size = hf_config.size(config, "word_embed_proj_dim", fields["hidden_size"])
    norm_before = hf_config.flag(config, "do_layer_norm_before", True)
    no_final_norm = hf_config.flag(config, "_remove_final_layer_norm", False)
    return ModelConfig(
        **fields,
        intermediate_size=hf_config.size(config, "ffn_dim"),
        max_position=hf_config.size(config, "max_position_embeddings", 2048),
        rope=None,
        norm_before=norm_before,
        final_norm=norm_before and not no_final_norm,
        activation=hf_config.activation(config, "activation_function", "relu", ACTIVATIONS),
        attention_bias=bias,
        mlp_bias=bias,
        embed_size=None if embed_size == fields["hidden_size"] else embed_size,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return hf_config.common_to_hf(cfg, "OPTForCausalLM", dtype) | {
        "ffn_dim": cfg.intermediate_size,
        "max_position_embeddings": cfg.max_position,
        "do_layer_norm_before": cfg.norm_before,
        "_remove_final_layer_norm": cfg.norm_before and not cfg.final_norm,
        "activation_function": hf_config.activation_to_hf(cfg.activation),
        "enable_bias": cfg.attention_bias,
        "word_embed_proj_dim": cfg.embed_size or cfg.hidden_size,
    }
