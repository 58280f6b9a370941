"""Saves models as Hugging Face directories: config.json and safetensors.

Each file is written beside its place and then renamed, config.json last. So a directory with a
config is complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from specjax._util.files import aside, write_text
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES, MODELS, to_hf
from specjax.models.hf import codes
from specjax.models.hf.config import QUANT_METHOD
from specjax.models.hf.layout import DTYPES, WEIGHTS, leaves_of, parameter_places
from specjax.models.hf.names import Names, Stored
from specjax.models.quantization import Scheme


def save_pretrained(
    directory: str | Path,
    cfg: ModelConfig,
    params: dict,
    tokenizer_json: str | None = None,
    dtype: str = "float32",
) -> None:
    """Writes a directory that transformers loads unchanged.

    Args:
      params: plain ones, not in the inference layout.
      tokenizer_json: the text of a ``tokenizer.json``; None: the directory gets none.
      dtype: of the saved weights: ``float32``, ``bfloat16`` or ``float16``.
    Raises:
      OSError: a file cannot be written.
      ValueError: a parameter has another shape than ``cfg`` says.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = to_tensors(cfg, jax.tree.map(lambda x: x.astype(DTYPES[dtype]), params))
    save_tensors(directory / WEIGHTS, tensors)
    if tokenizer_json is not None:
        write_text(directory / "tokenizer.json", tokenizer_json)
        named = {"tokenizer_class": "PreTrainedTokenizerFast"} | _eos(cfg, tokenizer_json)
        _write_json(directory / "tokenizer_config.json", named)
    _write_json(directory / "config.json", to_hf(cfg, dtype))


def _eos(cfg: ModelConfig, tokenizer_json: str) -> dict[str, str]:
    """The entry of a tokenizer_config.json that names EOS, if the model has one."""
    if not cfg.eos_ids:
        return {}
    token = Tokenizer.from_str(tokenizer_json).id_to_token(cfg.eos_ids[0])
    return {} if token is None else {"eos_token": token}


def save_quantized(
    directory: Path, cfg: ModelConfig, config: dict, params: dict, scheme: Scheme
) -> None:
    """Writes quantized params, in the form that :mod:`specjax.models.hf.codes` describes.

    Args:
      cfg: the config as loading the unquantized checkpoint gives it.
      config: that checkpoint's config.json. Whether the head is the embedding follows from
        ``cfg``, because config.json may be wrong about it.
      params: quantized, in the inference layout; what is not quantized is float32.
    Raises:
      OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = codes.to_stored(params) | FAMILIES[cfg.family].buffers(cfg)
    save_tensors(directory / WEIGHTS, tensors)
    entry = {"quant_method": QUANT_METHOD, "version": 1, "scheme": str(scheme)}
    changed: dict[str, Any] = {"quantization_config": entry}
    if "head" in params and cfg.family in MODELS:
        changed["tie_word_embeddings"] = False
    _write_json(directory / "config.json", config | changed)


def to_tensors(cfg: ModelConfig, params: dict, names: Names | None = None) -> dict[str, np.ndarray]:
    """The checkpoint's tensors, from plain (not fused) params.

    ``names`` are those of another format; None: the family's own, with its buffers.

    Raises:
      ValueError: a parameter has another shape than the config says.
    """
    tensors: dict[str, np.ndarray] = {}
    places = leaves_of(parameter_places(cfg, names))
    for place, leaf in zip(places, jax.tree.leaves(params), strict=True):
        stored = place.stored
        value = np.asarray(leaf)
        if value.shape != place.shape:  # such as a table of a mesh, whose rows are padded
            raise ValueError(
                f"{stored.name} has the shape {value.shape}, and the config's is {place.shape}: "
                "save params that are loaded without a mesh"
            )
        if stored == Stored(stored.name):
            # Stored as it is: a copy here would be a second copy of the model.
            tensors[stored.name] = value
            continue
        # A parameter may be several tensors (of experts). Several parameters may share one (q, k
        # and v), which the first of them makes.
        parts = value if stored.count else [value]
        for name, part in zip(stored.names, parts, strict=True):
            if name not in tensors:
                tensors[name] = np.empty(stored.shape(place.shape), value.dtype)
            stored.put(tensors[name], part)
    return tensors if names else tensors | FAMILIES[cfg.family].buffers(cfg)


def save_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file.

    Raises:
      OSError: it cannot be written; nothing is left behind.
    """
    try:
        with aside(path) as scratch:
            save_file(tensors, scratch, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None


def _write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
