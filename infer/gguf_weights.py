"""A model's weights as a GGUF file, without its tokenizer: what llama.cpp reads as a peer.

The file names no tokenizer, so only token ids can be decoded with it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from specjax._util.errors import ModelError
from specjax.models import ModelConfig, load_pretrained
from specjax.models.gguf.header import gguf_package
from specjax.models.gguf.names import NAMES, ROPE_FACTORS
from specjax.models.gguf.read import load_config
from specjax.models.hf.write import to_tensors
from specjax.models.layers import rope_frequencies

# The families that are written, and what llama.cpp calls their architecture.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# What --quantize calls a form, and what GGUF does: 8 bits, there with a scale for each 32 inputs.
KINDS = {None: "F32", "int8": "Q8_0"}
BLOCK = 32


def write_weights(directory: Path, out: Path, quantize: str | None = None) -> None:
    """Writes the weights of a Hugging Face directory, float32 or in 8 bits, to a GGUF file.

    Args:
      quantize: None: float32. ``int8``: Q8_0; norms, biases and weights with inputs in no whole
        blocks of 32 stay float32.
    Raises:
      ModelError: the directory cannot be read, or a GGUF file of this family says something else
        than its config.
    """
    if quantize not in KINDS:
        raise ModelError(f"quantize={quantize}: a GGUF file is written in float32 or int8 (Q8_0)")
    gguf = gguf_package()
    cfg, params = load_pretrained(directory)
    if cfg.family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{directory}: {cfg.family} is not written as GGUF; written: {known}")

    architecture = ARCHITECTURES[cfg.family]
    writer = gguf.GGUFWriter(os.fspath(out), architecture)
    _add_sizes(writer, cfg)
    for name, tensor in to_tensors(cfg, params, NAMES[architecture]).items():
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            tensor = _paired(tensor, cfg.num_heads if "attn_q." in name else cfg.num_kv_heads)
        _add_tensor(writer, gguf, name, tensor, KINDS[quantize])
    if cfg.rope is not None and cfg.rope.kind == "llama3":
        plain, _ = rope_frequencies(dataclasses.replace(cfg.rope, kind="default"), cfg.head_dim)
        scaled, _ = rope_frequencies(cfg.rope, cfg.head_dim)
        writer.add_tensor(ROPE_FACTORS, (plain / scaled).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _check_same(directory, cfg, load_config(out))


def _add_sizes(writer: Any, cfg: ModelConfig) -> None:
    """The architecture, and that there is no tokenizer."""
    writer.add_context_length(cfg.max_position)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_block_count(cfg.num_layers)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_heads)
    writer.add_head_count_kv(cfg.num_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_dimension_count(cfg.head_dim)
    if cfg.rope is not None:
        writer.add_rope_freq_base(cfg.rope.theta)
    if cfg.sliding_window is not None:
        writer.add_sliding_window(cfg.sliding_window)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_tokenizer_model("none")


def _paired(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Outputs with the two of each rotated pair adjacent, as files of Llamas have them."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: Any, gguf: Any, name: str, tensor: np.ndarray, kind: str) -> None:
    tensor = np.ascontiguousarray(tensor, np.float32)
    if kind == "F32" or tensor.ndim < 2 or tensor.shape[-1] % BLOCK:
        writer.add_tensor(name, tensor)
        return
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(tensor, number), raw_dtype=number)


def _check_same(directory: Path, cfg: ModelConfig, written: ModelConfig) -> None:
    """Checks that the file describes the same model.

    Raises:
      ModelError: a field of the config has no place in the file.
    """
    left_out = ("family", "bos_id", "eos_ids", "pad_id", "adaptive_ids", "skipped_tensors")
    for field in dataclasses.fields(cfg):
        want = getattr(cfg, field.name)
        if field.name not in left_out and not _equal(want, getattr(written, field.name)):
            raise ModelError(f"{directory}: {field.name}={want} is not written as GGUF")


def _equal(want: Any, got: Any) -> bool:
    """Whether two values of a config are equal; floats are float32 in the file."""
    if dataclasses.is_dataclass(want) and type(got) is type(want):
        names = [field.name for field in dataclasses.fields(want)]
        return all(_equal(getattr(want, name), getattr(got, name)) for name in names)
    if isinstance(want, float) and isinstance(got, float):
        return math.isclose(want, got, rel_tol=1e-5)
    return want == got
