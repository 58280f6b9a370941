"""Quantized params in a checkpoint: the name and the form of every tensor.

A tensor is called by its place in the inference layout, ``layers.0.attention.qkv.weight.codes``.
Codes: int8 as they are; fp8 as its bytes; int4 two to a byte, the code of an even place in the low
half. The scheme stands in config.json: ``"quantization_config": {"quant_method": "specjax",
"version": 1, "scheme": "int4:64"}``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from specjax.models.blocks import fuse_layer
from specjax.models.config import ModelConfig
from specjax.models.forward_pass import param_shapes
from specjax.models.quantization import Scheme, quantize_params

Form = tuple[str, tuple[int, ...], jnp.dtype]  # a tensor's name, the shape and dtype of its param


def forms(cfg: ModelConfig, scheme: Scheme) -> dict:
    """Every tensor's form: a tree like the params of the whole model, fused and quantized.

    What is no code is float32, int4's scales bfloat16.

    Raises:
      ModelError: the scheme's groups do not divide the inputs of a weight.
    """
    shapes = param_shapes(cfg)

    def quantized(tree: dict) -> dict:
        fused = tree | {"layers": {"0": fuse_layer(tree["layers"]["0"])}}
        return quantize_params(cfg, fused, scheme, jnp.dtype(jnp.float32))

    # Layers are alike: one is made.
    tree = jax.eval_shape(quantized, shapes | {"layers": {"0": shapes["layers"]["0"]}})
    whole = tree | {"layers": dict.fromkeys(shapes["layers"], tree["layers"]["0"])}
    return tree_map_with_path(lambda path, x: (_name(path), x.shape, x.dtype), whole)


def to_stored(params: dict) -> dict[str, np.ndarray]:
    """The tensors of quantized params in the inference layout."""
    return {_name(path): _stored(np.asarray(leaf)) for path, leaf in tree_leaves_with_path(params)}


def stored_shape(form: Form) -> tuple[int, ...]:
    """The shape of a tensor in the file."""
    _, shape, dtype = form
    return (shape[0] // 2, *shape[1:]) if dtype == jnp.int4 else shape


def stored_dtype(form: Form) -> str:
    """safetensors' name of a tensor's dtype in the file."""
    names = {"int8": "I8", "float32": "F32", "bfloat16": "BF16"}
    return names.get(form[2].name, "U8")


def from_stored(value: np.ndarray, form: Form) -> np.ndarray:
    """A param, of the tensor in the file."""
    _, shape, dtype = form
    if dtype == jnp.int4:
        signed = value.view(np.int8)
        pairs = np.stack([signed << 4 >> 4, signed >> 4], axis=1)
        return pairs.reshape(shape).astype(dtype)
    return value.view(dtype)


def _stored(value: np.ndarray) -> np.ndarray:
    if value.dtype == jnp.int4:
        pairs = value.astype(np.uint8).reshape(-1, 2, *value.shape[1:])
        return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    return value.view(np.uint8) if value.dtype == jnp.float8_e4m3fn else value


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
