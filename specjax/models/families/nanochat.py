"""nanochat: norms without weights, on q and k after the rotation, squared ReLU, capped logits.

It rotates heads the other way round.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import stack
from specjax.models.families.llama import NAMES as LLAMA
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names

NAMES = Names(
    layer=LLAMA.layer, modules=LLAMA.modules | {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
)


def from_hf(config: hf_config.Config) -> ModelConfig:
    """The :class:`ModelConfig` of a nanochat ``config.json``."""
    fields = stack.read(config, activations=("relu2", "gelu", "gelu_tanh", "relu", "silu"))
    fields["rope"] = dataclasses.replace(fields["rope"], reversed=True)
    cap = 15.0 if "final_logit_softcapping" not in config else None
    return ModelConfig(
        **fields,
        norm="rms-plain",
        embed_norm=True,
        qk_norm="head",
        qk_norm_after_rope=True,
        gated_mlp=False,
        attention_bias=hf_config.flag(config, "attention_bias", False),
        logit_softcap=hf_config.positive(config, "final_logit_softcapping", cap),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return stack.write(cfg, "NanoChat", dtype) | {
        "attention_bias": cfg.attention_bias,
        "final_logit_softcapping": cfg.logit_softcap,
    }
