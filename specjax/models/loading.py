"""Loads a model from what a path names: a Hugging Face directory, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from specjax.models.config import ModelConfig
from specjax.models.gguf import read as gguf
from specjax.models.gguf.header import is_gguf
from specjax.models.hf import read as hf
from specjax.models.hf.quantizers.settings import Quantizer
from specjax.models.hf.read import PlacePart


def load_config(path: Path) -> ModelConfig:
    """The architecture of a model.

    Raises:
      ModelError: the path names no model, or one that is not supported.
    """
    if is_gguf(path):
        return gguf.load_config(path)
    return hf.load_config(path)


def has_others_codes(path: Path) -> bool:
    """Whether another library quantized the weights.

    Raises:
      ModelError: as :func:`load_config`.
    """
    return is_gguf(path) or isinstance(hf.stored_form(path), Quantizer)


def load_params(
    path: Path,
    dtype: jnp.dtype,
    pickles: bool = False,
    place_part: PlacePart | None = None,
    quantize: str | None = None,
) -> tuple[ModelConfig, dict]:
    """A model's config and params, in the inference layout.

    Arguments and errors are those of :func:`specjax.models.hf.read.load_pretrained` and
    :func:`specjax.models.gguf.read.load_gguf`.
    """
    if is_gguf(path):
        return gguf.load_gguf(path, dtype, True, place_part, quantize)
    return hf.load_pretrained(path, dtype, True, pickles, place_part, quantize)
