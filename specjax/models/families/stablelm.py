"""StableLM 2: layer norms, partly rotated heads, and perhaps parallel blocks or norms on q and k.

Each head of q and k then has a norm of its own, stored apart.
"""

from __future__ import annotations

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
        "attention.q_norm": "self_attn.q_layernorm.norms.{}",
        "attention.k_norm": "self_attn.k_layernorm.norms.{}",
    },
)
_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a StableLM ``config.json``."""
    parallel = hf_config.flag(config, "use_parallel_residual", False)
    qk_norm = hf_config.flag(config, "qk_layernorm", False)
    return ModelConfig(
        **stack.read(config, defaults=_DEFAULTS, eps_name="layer_norm_eps"),
        norm="layer",
        qkv_bias=hf_config.flag(config, "use_qkv_bias", False),
        qk_norm="heads" if qk_norm else None,
        qk_norm_kind="layer-scale" if qk_norm else None,
        parallel_residual=parallel,
        shared_norm=parallel,
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return stack.write(cfg, "StableLm", dtype, eps_name="layer_norm_eps") | {
        "use_qkv_bias": cfg.qkv_bias,
        "qk_layernorm": cfg.qk_norm is not None,
        "use_parallel_residual": cfg.parallel_residual,
    }
