"""Writes GGUF files as llama.cpp's converter does, with the gguf package and its table of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.models import from_hf
from specjax.models.hf.layout import leaves_of, parameter_places
from support import variants

ARCHITECTURES = {"gemma3_text": "gemma3", "gpt_neox": "gptneox", "mistral": "llama"}
# Letters, a space, and the first two letters as one token.
TOKENS = [*(chr(33 + i) for i in range(59)), "Ġ", '!"']


def tensors_of(config: dict[str, Any], std: float = 0.3) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face checkpoint with this config, by name."""
    places = leaves_of(parameter_places(from_hf(config)))
    shapes = {place.stored.name: place.stored.shape(place.shape) for place in places}
    return {name: variants.weights(name, shape, std=std) for name, shape in shapes.items()}


def write(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, str] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    keys: dict[str, Any] | None = None,
    tokens: list[str] = TOKENS,
) -> Path:
    """Writes a file.

    Args:
      config: a ``config.json``, and ``tensors`` the checkpoint's.
      kinds: the type of some tensors, by the end of their name in the file, such as ``Q4_0``.
      extra: further tensors, by their name in the file.
      keys: further metadata, texts or lists.
    """
    cfg = from_hf(config)
    architecture = ARCHITECTURES.get(cfg.family, cfg.family)
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config, cfg)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if cfg.pad_id is not None:
        writer.add_pad_token_id(cfg.pad_id)
    for key, value in (keys or {}).items():
        add = writer.add_array if isinstance(value, list) else writer.add_string
        add(key, value)

    arch = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, cfg.num_layers)
    converted = {}
    for name, value in tensors.items():
        in_table = name.removeprefix("transformer.") if architecture == "bloom" else name
        in_file = names.get_name(in_table, try_suffixes=(".weight", ".bias"))
        assert in_file, name
        converted[in_file] = _as_stored(architecture, cfg, name, in_file, value)
    for name, value in (converted | (extra or {})).items():
        _add(writer, name, value, kinds or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: np.ndarray, kinds: dict[str, str]) -> None:
    kind = next((kind for end, kind in kinds.items() if name.endswith(end)), None)
    if kind is None or value.ndim < 2:
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
        return
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, blocks(kind, value), raw_dtype=number)


def blocks(kind: str, value: np.ndarray) -> np.ndarray:
    """Bytes ``[outputs, bytes]`` of a kind: quantized where gguf can, else random ones."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(np.ascontiguousarray(value, np.float32), number)
    except NotImplementedError:
        size, width = gguf.GGML_QUANT_SIZES[number]
        rng = np.random.default_rng(len(kind) + value.shape[0])
        data = rng.integers(0, 256, (value.shape[0], value.shape[1] // size, width), dtype=np.uint8)
        scales = {"Q6_K": (208,)}.get(kind, (0, 2))
        for start in scales:  # finite and small: the highest bits of float16's exponent are clear
            data[..., start + 1] &= 0xA3
        return data.reshape(value.shape[0], -1)


def _as_stored(architecture: str, cfg: Any, name: str, in_file: str, x: np.ndarray) -> np.ndarray:
    """A tensor as the converter writes it."""
    if architecture == "llama" and (".attn_q." in in_file or ".attn_k." in in_file):
        heads = cfg.num_heads if ".attn_q." in in_file else cfg.num_kv_heads
        return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return x + 1
    if architecture == "gpt2" and x.ndim == 2 and in_file.startswith("blk."):
        return x.T
    if architecture in ("gptneox", "bloom") and ".attn_qkv." in in_file:
        return x.reshape(cfg.num_heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
    return x


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], cfg: Any) -> None:
    writer.add_context_length(config.get("max_position_embeddings", cfg.max_position))
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_block_count(cfg.num_layers)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_heads)
    writer.add_head_count_kv(cfg.num_kv_heads)
    if cfg.norm == "layer":
        writer.add_layer_norm_eps(cfg.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(cfg.norm_eps)
        writer.add_key_length(cfg.head_dim)
        writer.add_value_length(cfg.head_dim)
    if cfg.rope is not None:
        writer.add_rope_freq_base(cfg.rope.theta)
        writer.add_rope_dimension_count(cfg.rotary_dim or cfg.head_dim)
        if cfg.rope.kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(cfg.rope.kind))
            writer.add_rope_scaling_factor(cfg.rope.factor)
            if cfg.rope.original_max_position:
                writer.add_rope_scaling_orig_ctx_len(cfg.rope.original_max_position)
    if cfg.family == "gpt_neox":
        writer.add_parallel_residual(cfg.parallel_residual)
    if cfg.sliding_window is not None:
        writer.add_sliding_window(cfg.sliding_window)
    if cfg.sliding_layers is not None and cfg.family == "gemma3_text":
        writer.add_sliding_window_pattern(list(cfg.sliding_layers))
    if cfg.attention_softcap:
        writer.add_attn_logit_softcapping(cfg.attention_softcap)
    if cfg.logit_softcap:
        writer.add_final_logit_softcapping(cfg.logit_softcap)
