"""The text part of checkpoints of images and text: its config, and what is left out by name.

A model of text alone is read. Its positions rise by one in every part of a multimodal rope, which
is then the plain one. It is saved as the text family's own checkpoint.
"""

from __future__ import annotations

from typing import Any

from specjax._util.checks import OBJECT, require
from specjax._util.errors import ModelError
from specjax.models.hf import config as hf_config

# For each model_type: the class of transformers, the text part's model_type where the config has
# none, and our name of the family where it has another.
_CLASSES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_DEFAULT_TEXT = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}
_TEXT_FAMILY = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# The sizes that transformers takes where a text part says nothing, by its model_type. Published
# configs of Gemma 3 and LLaVA hold only what differs from them.
_DEFAULT_SIZES = {
    "gemma3_text": (262208, 2304, 9216, 26, 8),
    "llama": (32000, 4096, 11008, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
}
MODEL_TYPES = tuple(_CLASSES)
# What the config of the whole says of the text part, where that does not say it itself.
_SHARED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "quantization_config",
    "adaptive_ids",
)
_OTHER_PARTS = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.")
SKIPPED = (*_OTHER_PARTS, *(f"model.{name}" for name in _OTHER_PARTS))


def classes(model_type: str) -> tuple[str, ...]:
    """The classes that ``architectures`` may name."""
    return (_CLASSES[model_type],)


def text_config(config: hf_config.Config) -> hf_config.Config:
    """The ``config.json`` that the text part would have by itself.

    Raises:
      ModelError: its ``text_config`` is no object.
    """
    if config.get("text_config") is not None:
        require("config.json: ", "text_config", config["text_config"], OBJECT, ModelError)
    # Older configs of Qwen have no text_config: they are flat.
    inner = config.get("text_config") or config
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    text = shared | {name: value for name, value in inner.items() if value is not None}
    family = text.get("model_type", _DEFAULT_TEXT[config["model_type"]])
    if isinstance(family, str):
        sizes = _DEFAULT_SIZES.get(family)
        if sizes is not None:
            defaults: hf_config.Config = dict(zip(_SIZES, sizes, strict=True))
            text = defaults | text
        family = _TEXT_FAMILY.get(family, family)
    if not isinstance(family, str) or family in MODEL_TYPES:
        raise ModelError("config.json: text_config is missing, or names no model of text")
    text["model_type"] = family
    if config.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True
    for name in ("sliding_window", "attention_chunk_size"):  # null means none there
        if name in inner:
            text[name] = inner[name]
    for name in ("rope_scaling", "rope_parameters"):
        if type(text.get(name)) is dict:
            text[name] = _plain_rope(text[name])
    text.pop("architectures", None)
    return text


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """A rope's settings without those of images."""
    dropped = ("mrope_section", "mrope_interleaved")
    plain = {name: value for name, value in rope.items() if name not in dropped}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain
