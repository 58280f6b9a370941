"""What reading and writing a checkpoint share: file names, dtypes, each parameter's place."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_map_with_path

from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES
from specjax.models.forward_pass import param_shapes
from specjax.models.hf.names import Names, Stored

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DELTA = "delta.json"  # of a directory that holds adapters only
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class ParameterPlace(NamedTuple):
    """Where a checkpoint keeps one parameter, and the parameter's own shape."""

    stored: Stored
    shape: tuple[int, ...]


def parameter_places(cfg: ModelConfig, names: Names | None = None) -> dict:
    """The :class:`ParameterPlace` of each parameter: a nested dict like the params.

    ``names`` are those of another format; None: the family's own.
    """
    names = names or FAMILIES[cfg.family].names

    def place(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> ParameterPlace:
        keys = tuple(entry.key for entry in path)
        return ParameterPlace(names.stored(keys, cfg), shape.shape)

    return tree_map_with_path(place, param_shapes(cfg))


def leaves_of(places: dict) -> list[ParameterPlace]:
    """The leaves of :func:`parameter_places`, in the order of the params' leaves."""
    return jax.tree.leaves(places, is_leaf=is_place)


def is_place(node: object) -> bool:
    """Whether a node of the tree is a leaf: a tuple would otherwise be an inner node."""
    return isinstance(node, ParameterPlace)
