"""OLMo 1 to 3.

OLMo 1 has layer norms without weights, and may limit q, k and v. In OLMo 2 the norms come after
attention and MLP, and one norm spans all heads of q, another all of k. OLMo 3 has sliding windows,
whose layers keep the rope unstretched.
"""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.families import stack
from specjax.models.families.qwen import NAMES as QWEN
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=QWEN.layer,
    modules=QWEN.modules
    | {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
)
_CLASSES = {"olmo": "Olmo", "olmo2": "Olmo2", "olmo3": "Olmo3"}
_DEFAULTS = {"rms_norm_eps": 1e-5}
OLMO1_EPS = 1e-5
OLMO3_THETA = 5e5
OLMO3_PERIOD = 4


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of an OLMo ``config.json``."""
    family = config["model_type"]
    defaults = _DEFAULTS
    local_rope = None
    if family == "olmo3":
        defaults = _DEFAULTS | {"rope_theta": OLMO3_THETA}
        config, local_rope = hf_config.split_ropes(config, OLMO3_THETA)
    fields = stack.read(config, defaults=defaults)
    bias = hf_config.flag(config, "attention_bias", False)
    if family == "olmo":
        fields["norm_eps"] = OLMO1_EPS
        clip = hf_config.positive(config, "clip_qkv")
        return ModelConfig(**fields, norm="layer-plain", attention_bias=bias, attention_clip=clip)
    if family == "olmo3":
        slides = stack.all_but_every(OLMO3_PERIOD, fields["num_layers"])
        fields |= stack.sliding(config, slides, 4096) | {"local_rope": local_rope}
    return ModelConfig(
        **fields, norm_before=False, norm_after=True, qk_norm="all", attention_bias=bias
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    out = stack.write(cfg, _CLASSES[cfg.family], dtype) | {"attention_bias": cfg.attention_bias}
    if cfg.family == "olmo":
        return out | {"clip_qkv": cfg.attention_clip}
    if cfg.family == "olmo3":
        assert isinstance(cfg.local_rope, RopeConfig), "from_hf gives one to every OLMo 3"
        return out | stack.sliding_to_hf(cfg) | hf_config.ropes_to_hf(cfg)
    return out
