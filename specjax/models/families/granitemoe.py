"""Granite MoE: Granite's multipliers, and experts in every layer, all in one tensor."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ExpertsConfig, ModelConfig
from specjax.models.families import mixture, stack
from specjax.models.families.granite import multipliers, multipliers_to_hf
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names, StackedExperts

NAMES = Names(
    layer=LLAMA.layer,
    modules=LLAMA.modules
    | {
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.gate": "block_sparse_moe.input_linear",
        "mlp.experts.up": "block_sparse_moe.input_linear",
        "mlp.experts.down": "block_sparse_moe.output_linear",
    },
    stacked_experts=StackedExperts(),
)


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Granite MoE ``config.json``."""
    fields = stack.read(mixture.without_experts(config))
    experts = ExpertsConfig(
        count=hf_config.size(config, "num_local_experts", 8),
        active=hf_config.size(config, "num_experts_per_tok", 2),
        size=fields["intermediate_size"],
        normalized=True,
    )
    return ModelConfig(
        **fields,
        **multipliers(config),
        experts=experts,
        attention_bias=hf_config.flag(config, "attention_bias", False),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    assert cfg.experts is not None, "from_hf gives experts to every Granite MoE"
    return (
        stack.write(cfg, "GraniteMoe", dtype)
        | multipliers_to_hf(cfg)
        | {
            "attention_bias": cfg.attention_bias,
            "num_local_experts": cfg.experts.count,
            "num_experts_per_tok": cfg.experts.active,
        }
    )
