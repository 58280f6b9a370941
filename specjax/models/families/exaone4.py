"""EXAONE 4: norms after attention and MLP and on q and k; layers without a window are not rotated.

The small model has no windows, and there all layers are rotated.
"""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.olmo import NAMES
from specjax.models.hf import config as hf_config

__all__ = ["NAMES", "from_hf", "to_hf"]

_DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5}


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of an EXAONE 4 ``config.json``."""
    fields = stack.read(config, defaults=_DEFAULTS)
    layers = fields["num_layers"]
    windows = stack.sliding(config, _slides(config, layers), 4096)
    slides = windows["sliding_layers"]
    return ModelConfig(
        **fields,
        **windows,
        rope_layers=slides if windows["sliding_window"] else None,
        norm_before=False,
        norm_after=True,
        qk_norm="head",
    )


def _slides(config: hf_config.Config, layers: int) -> tuple[bool, ...]:
    """Which layers slide where the config has no ``layer_types``: a period, or letters L and G."""
    pattern = config.get("sliding_window_pattern") or 4
    if not isinstance(pattern, str):
        return stack.all_but_every(pattern, layers)
    letters = [pattern[layer % len(pattern)] == "L" for layer in range(layers)]
    return (*letters[:-1], False)


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return stack.write(cfg, "Exaone4", dtype) | stack.sliding_to_hf(cfg)
