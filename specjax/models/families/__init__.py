"""The table of model families, by Hugging Face's ``model_type``.

How to add one: a file here with ``NAMES``, where a checkpoint keeps each parameter; ``from_hf``
and ``to_hf``, its ``config.json`` read into a :class:`ModelConfig` and written again; and a
subclass of :class:`specjax.models.blocks.Decoder` where switches of the config do not say what it
does otherwise, each new weight with its axes. Then its entry in ``FAMILIES``, and a tiny variant
of it in tests/support/variants.py, whose golden file tests/golden/make.py writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specjax._util.checks import quoted
from specjax._util.errors import ModelError
from specjax.models.blocks import Decoder
from specjax.models.config import ModelConfig
from specjax.models.families import bloom, gemma, gpt2, head, llama, neox, opt, qwen
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names


class Family(NamedTuple):
    """One family: its module, its tensor names, its config translation both ways.

    ``complete``: the config with what only the tensors say, each of them a function of its name;
    ``buffers``: tensors of a checkpoint that are no parameters.
    """

    module: type[Decoder]
    names: Names
    from_hf: Callable[[dict[str, Any]], ModelConfig]
    to_hf: Callable[[ModelConfig, str], dict[str, Any]]
    complete: Callable[..., ModelConfig] = lambda cfg, tensors: cfg
    buffers: Callable[[ModelConfig], dict[str, np.ndarray]] = lambda cfg: {}


_LLAMA = Family(Decoder, llama.NAMES, llama.from_hf, llama.to_hf)
_QWEN = Family(Decoder, qwen.NAMES, qwen.from_hf, qwen.to_hf)
_GEMMA = Family(gemma.Gemma, gemma.NAMES, gemma.from_hf, gemma.to_hf)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gpt_neox": Family(neox.NeoX, neox.NAMES, neox.from_hf, neox.to_hf),
    "gpt2": Family(gpt2.GPT2, gpt2.NAMES, gpt2.from_hf, gpt2.to_hf),
    "opt": Family(opt.OPT, opt.NAMES, opt.from_hf, opt.to_hf),
    "bloom": Family(bloom.Bloom, bloom.NAMES, bloom.from_hf, bloom.to_hf),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}
MODELS = tuple(FAMILIES)  # what may be a target
FAMILIES[head.FAMILY] = Family(
    head.EagleHead, head.NAMES, head.from_hf, head.to_hf, head.complete, head.buffers
)


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The :class:`ModelConfig` of a Hugging Face ``config.json``.

    Raises:
      ModelError: the model type, activation, rope kind or another switch is not
        supported, or a value is of a wrong type or out of range; the message names it.
    """
    if head.is_head(config):
        return head.from_hf(config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in MODELS:
        raise ModelError(
            f"model_type {quoted(family)} is not supported; supported: {', '.join(MODELS)}"
        )
    hf_config.check(config)
    return FAMILIES[family].from_hf(config)


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return FAMILIES[cfg.family].to_hf(cfg, dtype)
