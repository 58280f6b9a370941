"""Command R (Cohere) and Command R7B (Cohere 2): parallel blocks with one norm, adjacent pairs.

Norms have a scale and no bias. The sliding layers of Cohere 2 are rotated, its others are not.
"""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.qwen import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
COHERE_THETA = 5e5
COHERE2_WINDOW = 4096


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a Cohere or Cohere 2 ``config.json``."""
    is_second = config["model_type"] == "cohere2"
    defaults = _DEFAULTS if is_second else _DEFAULTS | {"rope_theta": COHERE_THETA}
    fields = stack.read(config, defaults=defaults, eps_name="layer_norm_eps")
    layers = fields["num_layers"]
    if is_second:
        period = hf_config.size(config, "sliding_window_pattern", 4)
        fields |= stack.sliding(config, stack.all_but_every(period, layers), COHERE2_WINDOW)
        slides = fields["sliding_layers"] or (fields["sliding_window"] is not None,) * layers
        fields["rope_layers"] = None if all(slides) else slides
    elif hf_config.flag(config, "use_qk_norm", False):
        fields["qk_norm"] = "heads"
    return ModelConfig(
        **fields,
        norm="layer-scale",
        parallel_residual=True,
        shared_norm=True,
        rope_interleaved=True,
        attention_bias=hf_config.flag(config, "attention_bias", False),
        logit_scale=hf_config.positive(config, "logit_scale", 0.0625),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    is_second = cfg.family == "cohere2"
    name = "Cohere2" if is_second else "Cohere"
    out = stack.write(cfg, name, dtype, eps_name="layer_norm_eps") | {
        "attention_bias": cfg.attention_bias,
        "logit_scale": cfg.logit_scale,
    }
    if is_second:
        return out | stack.sliding_to_hf(cfg)
    return out | {"use_qk_norm": cfg.qk_norm is not None}
