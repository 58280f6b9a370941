"""OLMoE: experts in every layer, one norm over all heads of q, another over those of k."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ExpertsConfig, ModelConfig
from specjax.models.families import stack
from specjax.models.families.mixture import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of an OLMoE ``config.json``."""
    fields = stack.read(config, defaults=_DEFAULTS)
    experts = ExpertsConfig(
        count=hf_config.size(config, "num_experts", 64),
        active=hf_config.size(config, "num_experts_per_tok", 8),
        size=fields["intermediate_size"],
        normalized=hf_config.flag(config, "norm_topk_prob", False),
    )
    # Its q and k are normed before they are limited, others' after that.
    hf_config.refuse(config, {"clip_qkv": None})
    return ModelConfig(
        **fields,
        experts=experts,
        qk_norm="all",
        attention_bias=hf_config.flag(config, "attention_bias", False),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    assert cfg.experts is not None, "from_hf gives experts to every OLMoE"
    return stack.write(cfg, "Olmoe", dtype) | {
        "num_experts": cfg.experts.count,
        "num_experts_per_tok": cfg.experts.active,
        "norm_topk_prob": cfg.experts.normalized,
        "attention_bias": cfg.attention_bias,
    }
