"""Mixtral: Mistral's blocks, with experts in the place of every MLP."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ExpertsConfig, ModelConfig
from specjax.models.families import mixture, stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=LLAMA.layer,
    modules=LLAMA.modules
    | {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
    },
)
_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Mixtral ``config.json``."""
    fields = stack.read(mixture.without_experts(config), defaults=_DEFAULTS)
    experts = ExpertsConfig(
        count=hf_config.size(config, "num_local_experts", 8),
        active=hf_config.size(config, "num_experts_per_tok", 2),
        size=fields["intermediate_size"],
        normalized=True,
    )
    slides = (True,) * fields["num_layers"]
    return ModelConfig(**fields, **stack.sliding(config, slides), experts=experts)


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    assert cfg.experts is not None, "from_hf gives experts to every Mixtral"
    return stack.write(cfg, "Mixtral", dtype) | {
        "sliding_window": cfg.sliding_window,
        "num_local_experts": cfg.experts.count,
        "num_experts_per_tok": cfg.experts.active,
    }
