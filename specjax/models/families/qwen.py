"""Qwen 1.5 to 3: Llama's blocks, with biases on q, k, v (up to 2.5) or norms on q, k (3).

Their vocabularies are padded, by different amounts in models of different sizes. Ids that the
tokenizer does not have are masked where tokens are drawn.
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

MAX_POSITION = 32768  # in transformers, where a config names none


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Qwen2 or Qwen3 ``config.json``."""
    is_qwen3 = config["model_type"] == "qwen3"
    if is_qwen3:
        config = {"head_dim": 128} | config  # transformers' default, whatever the hidden size
    fields = swiglu(config, MAX_POSITION)
    window, sliding_layers = _windows(config, fields["num_layers"])
    return ModelConfig(
        **fields,
        num_kv_heads=hf_config.size(config, "num_key_value_heads", fields["num_heads"]),
        qkv_bias=not is_qwen3,
        qk_norm="head" if is_qwen3 else None,
        attention_bias=is_qwen3 and hf_config.flag(config, "attention_bias", False),
        sliding_window=window,
        sliding_layers=sliding_layers,
    )


def _windows(config: hf_config.Config, layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """The sliding window, and which layers have it: by default from ``max_window_layers`` on."""
    if not hf_config.flag(config, "use_sliding_window", False):
        return None, None
    first = hf_config.size(config, "max_window_layers", 28)
    default = tuple(layer >= first for layer in range(layers))
    sliding_layers = hf_config.sliding_layers(config, default)
    if sliding_layers is not None and not any(sliding_layers):
        return None, None
    return hf_config.size(config, "sliding_window", 4096), sliding_layers


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    is_qwen3 = cfg.family == "qwen3"
    architecture = "Qwen3ForCausalLM" if is_qwen3 else "Qwen2ForCausalLM"
    out = swiglu_to_hf(cfg, architecture, dtype)
    out["use_sliding_window"] = cfg.sliding_window is not None
    if cfg.sliding_window is not None:
        out |= {"sliding_window": cfg.sliding_window, "layer_types": hf_config.layer_types(cfg)}
    if is_qwen3:
        out["attention_bias"] = cfg.attention_bias
    return out
