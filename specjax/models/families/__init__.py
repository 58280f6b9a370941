"""The table of model families, by Hugging Face's ``model_type``.

To add one, write a file here with three or four things:

- ``NAMES``: where a checkpoint keeps each parameter.
- ``from_hf``: reads its ``config.json`` into a :class:`ModelConfig`.
- ``to_hf``: writes the ``config.json`` again.
- A subclass of :class:`specjax.models.blocks.Decoder`, where switches of the config do not suffice.
  Each new weight names its axes.

Then add an entry to ``FAMILIES``, and a tiny variant to tests/support/variants.py. The script
tests/golden/make.py writes its golden file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specjax.models.blocks import Decoder
from specjax.models.config import ModelConfig
from specjax.models.families import (
    arcee,
    bloom,
    cohere,
    cwm,
    deepseek,
    ernie4_5_moe,
    exaone4,
    falcon,
    gemma,
    gemma1,
    glm,
    glm4_moe,
    gpt2,
    gpt_oss,
    gptj,
    granite,
    granitemoe,
    head_layouts,
    helium,
    hunyuan,
    llama,
    llama4,
    ministral,
    mixtral,
    multimodal,
    nanochat,
    neox,
    olmo,
    olmoe,
    opt,
    phi,
    phi3,
    qwen,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    stack,
    starcoder2,
)
from specjax.models.families.head import EagleHead
from specjax.models.families.head_config import FAMILY as HEAD_FAMILY
from specjax.models.hf import config as hf_config
from specjax.models.hf import kinds
from specjax.models.hf.names import Names


class Family(NamedTuple):
    """One family: its module, its tensor names, its config translation both ways.

    ``from_hf`` raises :class:`ModelError` for a value that is wrong or not supported.
    ``complete(cfg, tensors)`` gives the config with what only a checkpoint's tensors show;
    ``tensors`` maps each name to a function that reads that tensor. ``buffers(cfg)`` gives a
    checkpoint's tensors that are no parameters. A family's configs may be a subclass of its own, so
    they are not typed more closely here.
    """

    module: type[Decoder]
    names: Names
    from_hf: Callable[[dict[str, Any]], ModelConfig]
    to_hf: Callable[..., dict[str, Any]]
    complete: Callable[..., ModelConfig] = lambda cfg, tensors: cfg
    buffers: Callable[..., dict[str, np.ndarray]] = lambda cfg: {}


def _classes(name: str) -> tuple[str, str]:
    return name + stack.WITH_HEAD, name + stack.WITHOUT_HEAD


# Families of the plain stack, whose switches suffice: the module, and the name of its classes.
_PLAIN = {
    "arcee": (arcee, "Arcee"),
    "cohere": (cohere, "Cohere"),
    "cohere2": (cohere, "Cohere2"),
    "cwm": (cwm, "Cwm"),
    "deepseek_v2": (deepseek, "DeepseekV2"),
    "deepseek_v3": (deepseek, "DeepseekV3"),
    "ernie4_5": (helium, "Ernie4_5"),
    "ernie4_5_moe": (ernie4_5_moe, "Ernie4_5_Moe"),
    "exaone4": (exaone4, "Exaone4"),
    "falcon": (falcon, "Falcon"),
    "gemma": (gemma1, "Gemma"),
    "glm": (glm, "Glm"),
    "glm4": (glm, "Glm4"),
    "glm4_moe": (glm4_moe, "Glm4Moe"),
    "gpt_oss": (gpt_oss, "GptOss"),
    "gptj": (gptj, "GPTJ"),
    "granite": (granite, "Granite"),
    "granitemoe": (granitemoe, "GraniteMoe"),
    "helium": (helium, "Helium"),
    "hunyuan_v1_dense": (hunyuan, "HunYuanDenseV1"),
    "llama4_text": (llama4, "Llama4"),
    "ministral": (ministral, "Ministral"),
    "ministral3": (ministral, "Ministral3"),
    "mixtral": (mixtral, "Mixtral"),
    "nanochat": (nanochat, "NanoChat"),
    "nemotron": (arcee, "Nemotron"),
    "olmo": (olmo, "Olmo"),
    "olmo2": (olmo, "Olmo2"),
    "olmo3": (olmo, "Olmo3"),
    "olmoe": (olmoe, "Olmoe"),
    "phi": (phi, "Phi"),
    "phi3": (phi3, "Phi3"),
    "qwen2_moe": (qwen_moe, "Qwen2Moe"),
    "qwen3_moe": (qwen_moe, "Qwen3Moe"),
    "seed_oss": (seed_oss, "SeedOss"),
    "smollm3": (smollm3, "SmolLM3"),
    "stablelm": (stablelm, "StableLm"),
    "starcoder2": (starcoder2, "Starcoder2"),
}
# The classes of transformers that ``architectures`` may name, with the head and without it.
CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),  # the last one is of old files
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXModel"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "opt": ("OPTForCausalLM", "OPTModel"),
    "bloom": ("BloomForCausalLM", "BloomModel"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Model"),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextModel"),
    **{family: _classes(name) for family, (_, name) in _PLAIN.items()},
}
_LLAMA = Family(Decoder, llama.NAMES, llama.from_hf, llama.to_hf)
_QWEN = Family(Decoder, qwen.NAMES, qwen.from_hf, qwen.to_hf)
_GEMMA = Family(Decoder, gemma.NAMES, gemma.from_hf, gemma.to_hf)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gpt_neox": Family(Decoder, neox.NAMES, neox.from_hf, neox.to_hf),
    "gpt2": Family(gpt2.GPT2, gpt2.NAMES, gpt2.from_hf, gpt2.to_hf),
    "opt": Family(opt.OPT, opt.NAMES, opt.from_hf, opt.to_hf),
    "bloom": Family(Decoder, bloom.NAMES, bloom.from_hf, bloom.to_hf),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}
for _family, (_module, _) in _PLAIN.items():
    FAMILIES[_family] = Family(Decoder, _module.NAMES, _module.from_hf, _module.to_hf)
MODELS = tuple(FAMILIES)  # a head is no model by itself, so it is added after this
FAMILIES[HEAD_FAMILY] = Family(
    module=EagleHead,
    names=head_layouts.NAMES,
    from_hf=head_layouts.from_hf,
    to_hf=head_layouts.to_hf,
    complete=head_layouts.complete,
    buffers=head_layouts.buffers,
)


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The :class:`ModelConfig` of a Hugging Face ``config.json``.

    Raises:
      ModelError: it describes another kind of model, the model type, activation, rope kind or
        another switch is not supported, or a value is of a wrong type or out of range; the message
        names it.
    """
    family = config.get("model_type")
    if isinstance(family, str) and family in multimodal.MODEL_TYPES:
        kinds.check_architectures(config, multimodal.classes(family))
        text = from_hf(multimodal.text_config(config))
        return dataclasses.replace(text, skipped_tensors=multimodal.SKIPPED)
    if head_layouts.is_head(config):
        kinds.check_head(config, CLASSES)
        return head_layouts.from_hf(config)
    if not isinstance(family, str) or family not in MODELS:
        raise kinds.unsupported_type(config, MODELS + multimodal.MODEL_TYPES)
    kinds.check_architectures(config, CLASSES[family])
    config = hf_config.without_unused_window(config)
    hf_config.check(config)
    return FAMILIES[family].from_hf(config)


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    return FAMILIES[cfg.family].to_hf(cfg, dtype)
