"""StarCoder 2: layer norms, biases, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=LLAMA.layer, modules=LLAMA.modules | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
)
_DEFAULTS = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "silu")


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a StarCoder 2 ``config.json``."""
    bias = hf_config.flag(config, "use_bias", True)
    fields = stack.read(
        config, defaults=_DEFAULTS, activations=ACTIVATIONS, eps_name="norm_epsilon"
    )
    return ModelConfig(
        **fields,
        **stack.sliding(config, (True,) * fields["num_layers"]),
        norm="layer",
        gated_mlp=False,
        attention_bias=bias,
        mlp_bias=bias,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return stack.write(cfg, "Starcoder2", dtype, eps_name="norm_epsilon") | {
        "use_bias": cfg.mlp_bias,
        "sliding_window": cfg.sliding_window,
    }
