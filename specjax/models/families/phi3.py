"""Phi 3 and 4: q, k, v in one tensor, gate and up in another; longrope; partly rotated heads."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config

NAMES = dataclasses.replace(LLAMA, fused_qkv="self_attn.qkv_proj", fused_gate_up="mlp.gate_up_proj")
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Phi 3 ``config.json``.

    What its oldest configs call ``su`` or ``yarn`` is longrope.
    """
    config = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if rope and (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):
            config[name] = rope | {"type": "longrope", "rope_type": "longrope"}
    fields = stack.read(config, defaults=_DEFAULTS)
    everywhere = (True,) * fields["num_layers"]
    return ModelConfig(**fields, **stack.sliding(config, everywhere))


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    out = stack.write(cfg, "Phi3", dtype) | {"sliding_window": cfg.sliding_window}
    if cfg.rope is not None and cfg.rope.kind == "longrope":
        out["original_max_position_embeddings"] = cfg.rope.original_max_position
    return out
