"""Qwen 1.5 and 2 MoE, with a gated shared expert, and Qwen 3 MoE: experts on chosen layers."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ExpertsConfig, ModelConfig
from specjax.models.families import mixture, stack
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=mixture.NAMES.layer,
    modules=mixture.MODULES
    | {
        "mlp.shared.gate": "mlp.shared_expert.gate_proj",
        "mlp.shared.up": "mlp.shared_expert.up_proj",
        "mlp.shared.down": "mlp.shared_expert.down_proj",
        "mlp.shared_gate": "mlp.shared_expert_gate.weight",
    },
)
_DEFAULTS = {"max_position_embeddings": 32768}
_QWEN2 = {
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_QWEN3 = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Qwen2 or Qwen3 MoE ``config.json``."""
    is_third = config["model_type"] == "qwen3_moe"
    if "num_local_experts" in config:  # as newer versions of transformers write it
        config = {"num_experts": config["num_local_experts"]} | mixture.without_experts(config)
    config = stack.with_defaults(config, _DEFAULTS | (_QWEN3 if is_third else _QWEN2))
    fields = stack.read(config)
    layers = fields["num_layers"]
    experts = ExpertsConfig(
        count=hf_config.size(config, "num_experts"),
        active=hf_config.size(config, "num_experts_per_tok"),
        size=hf_config.size(config, "moe_intermediate_size"),
        normalized=hf_config.flag(config, "norm_topk_prob", False),
        shared_size=0 if is_third else hf_config.size(config, "shared_expert_intermediate_size"),
        shared_gate=not is_third,
    )
    dense = config.get("mlp_only_layers") or []
    step = hf_config.size(config, "decoder_sparse_step", 1)
    have_experts = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    bias = hf_config.flag(config, "qkv_bias", True)
    return ModelConfig(
        **fields,
        **_windows(config, layers, is_third),
        experts=experts,
        expert_layers=mixture.kinds(have_experts),
        qkv_bias=not is_third and bias,
        attention_bias=is_third and hf_config.flag(config, "attention_bias", False),
        qk_norm="head" if is_third else None,
    )


def _windows(config: hf_config.Config, layers: int, is_third: bool) -> dict[str, Any]:
    if not hf_config.flag(config, "use_sliding_window", False):
        return {}
    if is_third:
        return stack.sliding(config, (True,) * layers, 4096)
    below = hf_config.size(config, "max_window_layers", 28)
    slides = tuple(i % 2 == 0 and i < below for i in range(layers))
    return stack.sliding(config, slides, 4096)


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    experts = cfg.experts
    assert experts is not None, "from_hf gives experts to every such Qwen"
    is_third = cfg.family == "qwen3_moe"
    have_experts = mixture.have_experts(cfg)
    out = stack.write(cfg, "Qwen3Moe" if is_third else "Qwen2Moe", dtype) | {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, has in enumerate(have_experts) if not has],
        "use_sliding_window": cfg.sliding_window is not None,
    }
    if cfg.sliding_window is not None:
        out |= stack.sliding_to_hf(cfg)
    if is_third:
        return out | {"attention_bias": cfg.attention_bias}
    shared = {"shared_expert_intermediate_size": experts.shared_size}
    return out | shared | {"qkv_bias": cfg.qkv_bias}
