"""How a checkpoint stores quantized params: the name and the form of every tensor.

A tensor is named by its path in the inference layout, ``layers.0.attention.qkv.weight.codes``.
int8 codes are stored as they are, fp8 codes as their bytes. Two int4 codes share a byte along the
first axis: the code of an even row is in the low half. config.json names the scheme:
``"quantization_config": {"quant_method": "specjax", "version": 1, "scheme": "int4:64"}``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from specjax.models.blocks import fuse_layer
from specjax.models.config import ModelConfig
from specjax.models.forward_pass import param_shapes
from specjax.models.quantization import Scheme, quantize_params


class Form(NamedTuple):
    """The name of a stored tensor, and the shape and dtype of its param."""

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype


def is_form(node: object) -> bool:
    """Whether a node of a tree is a leaf: a tuple would otherwise be an inner node."""
    return isinstance(node, Form)


def forms(cfg: ModelConfig, scheme: Scheme) -> dict:
    """Every tensor's form: a tree like the params of the whole model, fused and quantized.

    Everything except the codes is float32; int4's scales are bfloat16.

    Raises:
      ModelError: the scheme's groups do not divide the inputs of a weight.
    """
    shapes = param_shapes(cfg)

    def quantized(tree: dict) -> dict:
        layers = {i: fuse_layer(layer) for i, layer in tree["layers"].items()}
        return quantize_params(cfg, tree | {"layers": layers}, scheme, jnp.dtype(jnp.float32))

    def form(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Form:
        return Form(_name(path), shape.shape, shape.dtype)

    # Of layers with the same shapes one is evaluated and repeated.
    first = {cfg.layer(int(i)): i for i in reversed(shapes["layers"])}
    distinct = {i: shapes["layers"][i] for i in first.values()}
    evaluated = jax.eval_shape(quantized, shapes | {"layers": distinct})
    layers = {i: evaluated["layers"][first[cfg.layer(int(i))]] for i in shapes["layers"]}
    return tree_map_with_path(form, evaluated | {"layers": layers})


def to_stored(params: dict) -> dict[str, np.ndarray]:
    """The tensors of quantized params in the inference layout."""
    return {_name(path): _stored(np.asarray(leaf)) for path, leaf in tree_leaves_with_path(params)}


def stored_shape(form: Form) -> tuple[int, ...]:
    """The shape of a tensor in the file."""
    if form.dtype != jnp.int4:
        return form.shape
    *experts, inputs, outputs = form.shape  # see `Grouped`
    return *experts, inputs // 2, outputs


def stored_dtype(form: Form) -> str:
    """safetensors' name of a tensor's dtype in the file."""
    names = {"int8": "I8", "float32": "F32", "bfloat16": "BF16"}
    return names.get(form.dtype.name, "U8")


def from_stored(value: np.ndarray, form: Form) -> np.ndarray:
    """The param, from the tensor in the file."""
    if form.dtype != jnp.int4:
        return value.view(form.dtype)
    signed = value.view(np.int8)
    # Shifting a signed byte to the right repeats its sign bit, so negative codes stay negative.
    low = signed << 4 >> 4
    high = signed >> 4
    return np.stack([low, high], axis=-2).reshape(form.shape).astype(form.dtype)


def _stored(value: np.ndarray) -> np.ndarray:
    """The tensor in the file, from the param."""
    if value.dtype == jnp.int4:
        *experts, inputs, outputs = value.shape
        pairs = value.astype(np.uint8).reshape(*experts, inputs // 2, 2, outputs)
        return (pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)
    if value.dtype == jnp.float8_e4m3fn:
        return value.view(np.uint8)
    return value


def _name(path: tuple[Any, ...]) -> str:
    """The path of a leaf, its keys and attributes joined by dots."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
