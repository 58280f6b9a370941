"""Qwen 1.5, 2, 2.5 and 3: Llama's blocks with biases on q, k, v (2), or norms on q, k (3).

Their vocabularies are padded, by different amounts in models of different size: ids beyond
the tokenizer's are masked where tokens are drawn.
"""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.families.llama import swiglu, swiglu_to_hf
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=LLAMA.layer,
    modules=LLAMA.modules
    | {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
)


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Qwen2 or Qwen3 ``config.json``."""
    qwen3 = config["model_type"] == "qwen3"
    if qwen3:
        config = {"head_dim": 128} | config  # transformers' default, whatever the hidden size
    fields = swiglu(config)
    window, slides = _windows(config, fields["num_layers"])
    return ModelConfig(
        **fields,
        num_kv_heads=hf_config.size(config, "num_key_value_heads", fields["num_heads"]),
        max_position=hf_config.size(config, "max_position_embeddings", 32768),
        qkv_bias=not qwen3,
        qk_norm=qwen3,
        attention_bias=qwen3 and hf_config.flag(config, "attention_bias", False),
        sliding_window=window,
        sliding_layers=slides,
    )


def _windows(config: hf_config.Config, layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window and the layers it holds for: from ``max_window_layers`` on, by default."""
    if not hf_config.flag(config, "use_sliding_window", False):
        return None, None
    first = hf_config.size(config, "max_window_layers", 28)
    slides = hf_config.sliding_layers(config, tuple(i >= first for i in range(layers)))
    if slides is not None and not any(slides):
        return None, None
    return hf_config.size(config, "sliding_window", 4096), slides


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    qwen3 = cfg.family == "qwen3"
    out = swiglu_to_hf(cfg, "Qwen3ForCausalLM" if qwen3 else "Qwen2ForCausalLM", dtype)
    out["use_sliding_window"] = cfg.sliding_window is not None
    if cfg.sliding_window is not None:
        out |= {"sliding_window": cfg.sliding_window, "layer_types": hf_config.layer_types(cfg)}
    return out | ({"attention_bias": cfg.attention_bias} if qwen3 else {})
