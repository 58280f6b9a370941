"""Hunyuan, dense: norms on q and k after the rotation, whose base an ``alpha`` stretches."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=LLAMA.layer,
    modules=LLAMA.modules
    | {
        "attention.q_norm": "self_attn.query_layernorm",
        "attention.k_norm": "self_attn.key_layernorm",
    },
)
_DEFAULTS = {"rms_norm_eps": 1e-5}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a dense Hunyuan ``config.json``.

    A ``dynamic`` rope with an ``alpha`` is a default one with the base
    ``theta · alpha ** (E / (E - 2))``, for heads of E entries.
    """
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(name) or {})
    alpha = rope.pop("alpha", None)
    if alpha:
        kept = {key: value for key, value in rope.items() if key == "rope_theta"}
        config = config | {name: kept}
    fields = stack.read(config, defaults=_DEFAULTS)
    if alpha:
        size = fields["head_dim"]
        theta = fields["rope"].theta * alpha ** (size / (size - 2))
        fields["rope"] = dataclasses.replace(fields["rope"], theta=theta)
    return ModelConfig(
        **fields,
        attention_bias=hf_config.flag(config, "attention_bias", False),
        qk_norm="head",
        qk_norm_after_rope=True,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return stack.write(cfg, "HunYuanDenseV1", dtype) | {"attention_bias": cfg.attention_bias}
