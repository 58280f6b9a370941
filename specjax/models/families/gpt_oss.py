"""gpt-oss: attention sinks, alternating windows, experts with biases and a limited gate."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ExpertsConfig, ModelConfig
from specjax.models.families import mixture, stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names, StackedExperts

NAMES = Names(
    layer=LLAMA.layer,
    modules=LLAMA.modules
    | {
        "attention.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router",
        "mlp.experts.gate.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.gate.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.up.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.up.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down.weight": "mlp.experts.down_proj",
        "mlp.experts.down.bias": "mlp.experts.down_proj_bias",
    },
    stacked_experts=StackedExperts(transposed=True, interleaved=True),
)
_DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1.5e5,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a gpt-oss ``config.json``."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = config | {"rope_scaling": _ROPE}
    fields = stack.read(mixture.without_experts(config), defaults=_DEFAULTS)
    slides = tuple(layer % 2 == 0 for layer in range(fields["num_layers"]))
    alpha = hf_config.positive(config, "swiglu_alpha", 1.702)
    limit = hf_config.positive(config, "swiglu_limit", 7.0)
    experts = ExpertsConfig(
        count=hf_config.size(config, "num_local_experts", 128),
        active=hf_config.size(config, "num_experts_per_tok", 4),
        size=fields["intermediate_size"],
        normalized=True,
        router_bias=True,
        biases=True,
        clip=(alpha, limit),
    )
    return ModelConfig(
        **fields,
        **stack.sliding(config, slides, 128),
        experts=experts,
        sinks=True,
        attention_bias=hf_config.flag(config, "attention_bias", True),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    experts = cfg.experts
    assert experts is not None and experts.clip is not None, "from_hf gives both to every gpt-oss"
    return (
        stack.write(cfg, "GptOss", dtype)
        | stack.sliding_to_hf(cfg)
        | {
            "attention_bias": cfg.attention_bias,
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.active,
            "swiglu_alpha": experts.clip[0],
            "swiglu_limit": experts.clip[1],
        }
    )
