"""Llama 4, text: attention within chunks, layers without a rope, routed and shared experts.

Queries of layers without a rope are scaled by their position.
"""

from __future__ import annotations

from typing import Any

from specjax.models.config import ExpertsConfig, ModelConfig, QueryScale
from specjax.models.families import mixture, stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names, StackedExperts

NAMES = Names(
    layer=LLAMA.layer,
    modules=LLAMA.modules
    | {
        "mlp.gate": "feed_forward.gate_proj",
        "mlp.up": "feed_forward.up_proj",
        "mlp.down": "feed_forward.down_proj",
        "mlp.router": "feed_forward.router",
        "mlp.experts.gate.weight": "feed_forward.experts.gate_up_proj",
        "mlp.experts.up.weight": "feed_forward.experts.gate_up_proj",
        "mlp.experts.down.weight": "feed_forward.experts.down_proj",
        "mlp.shared.gate": "feed_forward.shared_expert.gate_proj",
        "mlp.shared.up": "feed_forward.shared_expert.up_proj",
        "mlp.shared.down": "feed_forward.shared_expert.down_proj",
    },
    stacked_experts=StackedExperts(transposed=True),
)
_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
}
CHUNKED = "chunked_attention"


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Llama 4 text ``config.json``."""
    chunk = hf_config.size(config, "attention_chunk_size", 8192)
    if "attention_chunk_size" in config and config["attention_chunk_size"] is None:
        chunk = None
    config = stack.with_defaults(config, _DEFAULTS)
    size = hf_config.size(config, "intermediate_size")
    dense = {"intermediate_size": hf_config.size(config, "intermediate_size_mlp")}
    fields = stack.read(mixture.without_experts(config) | dense)
    layers = fields["num_layers"]
    rotations = stack.rotating_layers(config, layers)
    experts = ExpertsConfig(
        count=hf_config.size(config, "num_local_experts", 16),
        active=hf_config.size(config, "num_experts_per_tok", 1),
        size=size,
        scores="sigmoid",
        scales_inputs=True,
        shared_size=size,
    )
    scale = None
    if hf_config.flag(config, "attn_temperature_tuning", True) and not all(rotations):
        beta = hf_config.positive(config, "attn_scale", 0.1)
        scale = QueryScale(beta, hf_config.size(config, "floor_scale", 8192), offset=1)
    windows = {name: value for name, value in config.items() if name == "layer_types"}
    is_normed = hf_config.flag(config, "use_qk_norm", True)
    return ModelConfig(
        **fields,
        **stack.sliding(windows, rotations, chunk),
        chunked=True,
        rope_interleaved=True,
        rope_layers=None if all(rotations) else rotations,
        query_scale=scale,
        qk_norm="head" if is_normed else None,
        qk_norm_kind="rms-plain" if is_normed else None,
        qk_norm_after_rope=is_normed,
        experts=experts,
        expert_layers=mixture.kinds(_expert_layers(config, layers)),
        attention_bias=hf_config.flag(config, "attention_bias", False),
    )


def _expert_layers(config: hf_config.Config, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: those that are listed, or the last one of each step."""
    listed = config.get("moe_layers")
    if listed is not None:
        return tuple(layer in listed for layer in range(layers))
    step = hf_config.size(config, "interleave_moe_layer_step", 1)
    return tuple((layer + 1) % step == 0 for layer in range(layers))


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    experts = cfg.experts
    assert experts is not None, "from_hf gives experts to every Llama 4"
    have_experts = mixture.have_experts(cfg)
    out = stack.write(cfg, "Llama4", dtype) | {
        "intermediate_size": experts.size,
        "intermediate_size_mlp": cfg.intermediate_size,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_layers": [layer for layer, has in enumerate(have_experts) if has],
        "no_rope_layers": [int(rotates) for rotates in cfg.rotations],
        "attention_chunk_size": cfg.sliding_window,
        "layer_types": ["full_attention" if w is None else CHUNKED for w in cfg.windows],
        "use_qk_norm": cfg.qk_norm is not None,
        "attention_bias": cfg.attention_bias,
        "attn_temperature_tuning": cfg.query_scale is not None,
    }
    if cfg.query_scale is not None:
        out |= {"attn_scale": cfg.query_scale.beta, "floor_scale": cfg.query_scale.length}
    return out
