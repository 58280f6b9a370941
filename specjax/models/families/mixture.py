"""What families with experts share: tensor names, and the layers that have experts."""

from __future__ import annotations

from specjax.models.config import ModelConfig
from specjax.models.families.qwen import NAMES as QWEN
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

MODULES = QWEN.modules | {
    "mlp.router": "mlp.gate",
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
NAMES = Names(layer=QWEN.layer, modules=MODULES)


def without_experts(config: hf_config.Config) -> hf_config.Config:
    """``config`` without the key that families without experts refuse."""
    return {key: value for key, value in config.items() if key != "num_local_experts"}


def kinds(layers: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """``expert_layers`` of a config; None where all layers have experts."""
    return None if all(layers) else layers


def have_experts(cfg: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has experts: the inverse of :func:`kinds`."""
    return cfg.expert_layers or (True,) * cfg.num_layers


def skipped_layers(config: hf_config.Config, names: Names, layers: int) -> tuple[str, ...]:
    """The prefixes of layers behind the last one, which predict further tokens (MTP)."""
    count = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 1
    return tuple(f"{names.layer}.{layers + i}." for i in range(count))
