"""GLM 4.5 and 4.6: half-rotated heads, dense first layers, then grouped and corrected experts."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ExpertsConfig, ModelConfig
from specjax.models.families import mixture, stack
from specjax.models.families.mixture import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "grouped_experts", "grouped_experts_to_hf", "to_hf"]

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a GLM 4 MoE ``config.json``."""
    config = stack.with_defaults(config, _DEFAULTS)
    fields = stack.read(config)
    return ModelConfig(
        **fields,
        **grouped_experts(config, fields["num_layers"]),
        qkv_bias=hf_config.flag(config, "attention_bias", False),
        qk_norm="head" if hf_config.flag(config, "use_qk_norm", False) else None,
    )


def grouped_experts(config: hf_config.Config, layers: int) -> dict[str, Any]:
    """The fields of experts as DeepSeek-V3 has them (arXiv 2412.19437, §2.1.2)."""
    size = hf_config.size(config, "moe_intermediate_size")
    dense = config.get("first_k_dense_replace") or 0
    experts = ExpertsConfig(
        count=hf_config.size(config, "n_routed_experts"),
        active=hf_config.size(config, "num_experts_per_tok"),
        size=size,
        scores="sigmoid",
        normalized=hf_config.flag(config, "norm_topk_prob", True),
        scale=hf_config.positive(config, "routed_scaling_factor", 1.0),
        corrected=True,
        groups=hf_config.size(config, "n_group", 1),
        active_groups=hf_config.size(config, "topk_group", 1),
        group_best=2,
        shared_size=size * (config.get("n_shared_experts") or 0),
    )
    return {
        "experts": experts,
        "expert_layers": mixture.kinds(tuple(i >= dense for i in range(layers))),
        "skipped_tensors": mixture.skipped_layers(config, NAMES, layers),
    }


def grouped_experts_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`grouped_experts`."""
    experts = cfg.experts
    assert experts is not None, "from_hf gives experts to every such model"
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.size,
        "n_shared_experts": experts.shared_size // experts.size,
        "norm_topk_prob": experts.normalized,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.active_groups,
        "first_k_dense_replace": sum(not has for has in mixture.have_experts(cfg)),
    }


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return (
        stack.write(cfg, "Glm4Moe", dtype)
        | grouped_experts_to_hf(cfg)
        | {
            "attention_bias": cfg.qkv_bias,
            "use_qk_norm": cfg.qk_norm is not None,
        }
    )
