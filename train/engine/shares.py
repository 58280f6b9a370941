"""Which part of each parameter a device holds, and of what is shaped like it.

Along ``model`` a weight is split by heads, columns or vocabulary, as its axes are named
(:data:`specjax.models.sharding.RULES`). Along ``fsdp`` it is split once more, along any axis.
Optimizer states and gradients have the paths of their params, so they are split as those are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey

from specjax._util.errors import InputError, SplitError
from specjax.models import ModelConfig, sharding
from specjax.models.adapters import DOWN, UP
from specjax.models.forward_pass import param_axes
from specjax.models.sharding import AXIS, FSDP, RULES, VOCABULARY, fsdp_axis, split_config

KEY_HEADS = ("k", "v", "k_norm")  # the modules of attention whose heads are those of keys
WHOLE = "whole"  # an axis that is not split along `model`

Path = tuple[str, ...]  # the keys of a parameter in its tree


@dataclasses.dataclass(frozen=True)
class Shares:
    """How many devices share the params, and along which axes.

    Attributes:
      fsdp: devices that share one copy of the params.
      model: devices that each layer is split over, of which every one has an ``fsdp``'s share.
      axes: the names of the axes of each parameter, by its path.
    """

    fsdp: int = 1
    model: int = 1
    axes: Mapping[Path, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def of_models(self, *models: ModelConfig) -> Shares:
        """These shares for the params of ``models``; the first one decides where paths are equal.

        Raises:
          InputError: so many devices cannot share one of the models.
        """
        if self.model == 1:
            return self
        axes: dict[Path, tuple[str, ...]] = {}
        for model in models:
            require_model_axis(model, self.model)
            axes = _axes_by_path(model, self.model) | axes
        return dataclasses.replace(self, axes=axes)

    def specs(self, tree: Any) -> Any:
        """How arrays, or their shapes, are split: a tree of partition specs."""
        return jax.tree_util.tree_map_with_path(lambda path, x: self._spec(path, x.shape), tree)

    def bytes_per_device(self, tree: Any) -> int:
        """Bytes of one device's share of arrays, or of their shapes."""
        sizes = {FSDP: self.fsdp, AXIS: self.model}

        def share(x: Any, spec: PartitionSpec) -> int:
            devices = math.prod(sizes[name] for name in spec if name)
            return math.prod(x.shape) * x.dtype.itemsize // devices

        return sum(jax.tree.leaves(jax.tree.map(share, tree, self.specs(tree))))

    def _spec(self, path: tuple, shape: tuple[int, ...]) -> PartitionSpec:
        split = self._model_axis(path, shape)
        shared = fsdp_axis(shape, self.fsdp, split)
        mesh_axes = {split: AXIS, shared: FSDP}
        last = max((axis for axis in mesh_axes if axis is not None), default=-1)
        return PartitionSpec(*[mesh_axes.get(axis) for axis in range(last + 1)])

    def _model_axis(self, path: tuple, shape: tuple[int, ...]) -> int | None:
        """The axis of a parameter that ``model`` splits; None: none."""
        if self.model == 1 or math.prod(shape) < sharding.SMALLEST_SHARED:
            return None
        names = self._axes_of(tuple(str(key.key) for key in path if isinstance(key, DictKey)))
        if len(names) != len(shape):  # a factored moment has other axes
            return None
        for axis, (name, size) in enumerate(zip(names, shape, strict=True)):
            if RULES.get(name) == AXIS and size % self.model == 0:
                return axis
        if names[0] == VOCABULARY and shape[-1] % self.model == 0:
            return len(shape) - 1  # stored so; the loss pads the vocabulary and splits that
        return None

    def _axes_of(self, keys: Path) -> tuple[str, ...]:
        """The axes of the parameter whose path ends a longer one, such as an optimizer's."""
        for begin in range(len(keys)):
            if keys[begin:] in self.axes:
                return self.axes[keys[begin:]]
        return ()


def require_model_axis(model: ModelConfig, devices: int) -> None:
    """Raises InputError if so many devices cannot share the layers of ``model`` in training."""
    if devices == 1:
        return
    if model.experts is not None:
        raise InputError(
            f"mesh.model={devices}: training does not split a mixture of experts "
            f"({model.family}): use mesh.fsdp"
        )
    try:
        split_config(model, devices)
    except SplitError as error:
        raise InputError(f"mesh.model={devices}: {error}") from None


def can_share(model: ModelConfig, devices: int) -> bool:
    """Whether so many devices can share the layers of ``model`` in training."""
    try:
        require_model_axis(model, devices)
    except InputError:
        return False
    return True


def _axes_by_path(model: ModelConfig, devices: int) -> dict[Path, tuple[str, ...]]:
    """The names of the axes of a model's params, and of low-rank updates of them, by path."""
    repeated = model.num_kv_heads % devices != 0  # then every device has all key heads
    found: dict[Path, tuple[str, ...]] = {}
    leaves = jax.tree_util.tree_leaves_with_path(
        param_axes(model), is_leaf=lambda node: isinstance(node, tuple)
    )
    for path, axes in leaves:
        keys = tuple(str(key.key) for key in path)
        if repeated and len(keys) > 1 and keys[-2] in KEY_HEADS:
            axes = (WHOLE,) * len(axes)
        found[keys] = axes
        if len(axes) == 2:  # an update's factors: up [out, rank] and down [rank, in]
            found[(*keys[:-1], UP)] = (axes[0], WHOLE)
            found[(*keys[:-1], DOWN)] = (WHOLE, axes[1])
    return found
