"""ERNIE 4.5 MoE: rotated pairs of adjacent entries, experts from a layer on, corrected choices."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ExpertsConfig, ModelConfig
from specjax.models.families import mixture, stack
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names, Path, Stored


class ErnieNames(Names):
    """The corrections are stored as a row."""

    def stored(self, path: Path, cfg: ModelConfig) -> Stored:
        return super().stored(path, cfg)._replace(in_row=path[-1] == "correction")


NAMES = ErnieNames(
    layer=mixture.NAMES.layer,
    modules=mixture.MODULES | {"mlp.router.correction": "mlp.moe_statics.e_score_correction_bias"},
)
_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of an ERNIE 4.5 MoE ``config.json``."""
    fields = stack.read(config, defaults=_DEFAULTS)
    layers = fields["num_layers"]
    bias = hf_config.flag(config, "use_bias", False)
    size = hf_config.size(config, "moe_intermediate_size", 1536)
    shared = config.get("moe_num_shared_experts", 2) or 0
    experts = ExpertsConfig(
        count=hf_config.size(config, "moe_num_experts", 64),
        active=hf_config.size(config, "moe_k", 6),
        size=size,
        normalized=True,
        corrected=True,
        shared_size=size * shared,
    )
    if bias and shared:
        raise hf_config.unsupported("use_bias", bias)
    first = config.get("moe_layer_start_index", 1) or 0
    last = config.get("moe_layer_end_index", -1)
    last = layers - 1 if last in (None, -1) else last
    step = hf_config.size(config, "moe_layer_interval", 1)
    have_experts = tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers))
    return ModelConfig(
        **fields,
        experts=experts,
        expert_layers=mixture.kinds(have_experts),
        rope_interleaved=True,
        attention_bias=bias,
        mlp_bias=bias,
        skipped_tensors=("model.mtp_",),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    experts = cfg.experts
    assert experts is not None, "from_hf gives experts to every such ERNIE"
    with_experts = [i for i, has in enumerate(mixture.have_experts(cfg)) if has]
    return stack.write(cfg, "Ernie4_5_Moe", dtype) | {
        "use_bias": cfg.mlp_bias,
        "moe_num_experts": experts.count,
        "moe_k": experts.active,
        "moe_intermediate_size": experts.size,
        "moe_num_shared_experts": experts.shared_size // experts.size,
        "moe_layer_start_index": with_experts[0],
        "moe_layer_end_index": with_experts[-1],
        "moe_layer_interval": 1 if len(with_experts) < 2 else with_experts[1] - with_experts[0],
    }
