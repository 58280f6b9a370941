"""DeepSeek-V2 and V3: latent attention, dense first layers, then shared and routed experts."""

from __future__ import annotations

import math
from typing import Any

from specjax.models.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from specjax.models.families import mixture, stack
from specjax.models.families.glm4_moe import grouped_experts, grouped_experts_to_hf
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=mixture.NAMES.layer,
    modules=mixture.MODULES
    | {
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
    },
)
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V2 = {
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
}
_V3 = {
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a DeepSeek-V2 or V3 ``config.json``."""
    is_third = config["model_type"] == "deepseek_v3"
    has_query_rank = config.get("q_lora_rank", 1) is not None
    config = stack.with_defaults(config, _LATENT | (_V3 if is_third else _V2))
    latent = LatentConfig(
        query_rank=hf_config.size(config, "q_lora_rank") if has_query_rank else None,
        rank=hf_config.size(config, "kv_lora_rank"),
        plain=hf_config.size(config, "qk_nope_head_dim"),
        rotated=hf_config.size(config, "qk_rope_head_dim"),
        value=hf_config.size(config, "v_head_dim"),
    )
    # The rope is that of the rotated part alone.
    fields = stack.read(config | {"head_dim": latent.rotated})
    layers = fields["num_layers"]
    mixed = grouped_experts(config, layers)
    if not is_third:
        mixed["experts"] = _second_experts(config)
    size = latent.plain + latent.rotated
    fields |= {"head_dim": size, "rotary_dim": latent.rotated, "num_kv_heads": 1}
    return ModelConfig(
        **fields,
        **mixed,
        latent=latent,
        rope_interleaved=not is_third or hf_config.flag(config, "rope_interleave", True),
        attention_bias=hf_config.flag(config, "attention_bias", False),
        attention_scale=size**-0.5 * _temperature(fields["rope"]),
    )


def _second_experts(config: hf_config.Config) -> ExpertsConfig:
    """DeepSeek-V2's: by softmax, perhaps within the groups of the best experts."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise hf_config.unsupported("topk_method", method)
    is_grouped = method != "greedy"
    size = hf_config.size(config, "moe_intermediate_size")
    return ExpertsConfig(
        count=hf_config.size(config, "n_routed_experts"),
        active=hf_config.size(config, "num_experts_per_tok"),
        size=size,
        scale=hf_config.positive(config, "routed_scaling_factor", 1.0),
        groups=hf_config.size(config, "n_group", 1) if is_grouped else 1,
        active_groups=hf_config.size(config, "topk_group", 1) if is_grouped else 1,
        shared_size=size * (config.get("n_shared_experts") or 0),
    )


def _temperature(rope: RopeConfig) -> float:
    """What a stretched rope multiplies scores by (YaRN, arXiv 2309.00071, §3.4)."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    latent, experts = cfg.latent, cfg.experts
    assert latent is not None and experts is not None, "from_hf gives both to every DeepSeek"
    name = "DeepseekV3" if cfg.family == "deepseek_v3" else "DeepseekV2"
    out = (
        stack.write(cfg, name, dtype)
        | grouped_experts_to_hf(cfg)
        | {
            "num_key_value_heads": cfg.num_heads,
            "head_dim": latent.rotated,
            "partial_rotary_factor": 1.0,
            "kv_lora_rank": latent.rank,
            "q_lora_rank": latent.query_rank,
            "qk_nope_head_dim": latent.plain,
            "qk_rope_head_dim": latent.rotated,
            "v_head_dim": latent.value,
            "attention_bias": cfg.attention_bias,
        }
    )
    if cfg.family == "deepseek_v3":
        return out | {"rope_interleave": cfg.rope_interleaved}
    return out | {"topk_method": "group_limited_greedy" if experts.groups > 1 else "greedy"}
