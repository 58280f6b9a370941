"""Training over the devices of one process: rows split over all, params over some (FSDP).

Arrays are placed once; the compiler derives every collective from where they lie. The mesh
has two axes: ``data``, along which devices hold equal params, and ``fsdp``, along which each
holds a share and gathers what a layer needs. Rows of a batch are split over both.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.data import Batch
from train.errors import InputError

AXES = ("data", "fsdp")
# Below this many elements a share costs more to gather than it saves.
SMALLEST_SHARED = 1 << 12


class Placement:
    """Where a run's arrays lie. Without a mesh: wherever jax puts them."""

    def __init__(self, mesh: Mesh | None = None):
        self._mesh = mesh

    def shardings(self, tree: Any) -> Any:
        """Of params, gradients or optimiser state, leaf by leaf; None without a mesh."""
        if self._mesh is None:
            return None
        share = self._mesh.shape["fsdp"]
        return jax.tree.map(lambda x: NamedSharding(self._mesh, shared_axis(x.shape, share)), tree)

    def state(self, tree: Any) -> Any:
        """The tree as :meth:`shardings` says."""
        return tree if self._mesh is None else jax.device_put(tree, self.shardings(tree))

    def rows(self, batch: Batch, axis: int) -> dict:
        """A batch, its rows (along ``axis``) split over all devices."""
        if self._mesh is None:
            return batch
        return jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec(*[None] * axis, AXES)))


def make_placement(fsdp: int, rows: int) -> Placement:
    """Over all local devices; ``fsdp`` of them share one copy of the params.

    Raises:
      InputError: the devices do not divide into copies, or the ``rows`` of a batch into devices.
    """
    count = jax.local_device_count()
    if count % fsdp:
        raise InputError(f"mesh.fsdp={fsdp} does not divide the {count} devices")
    if rows % count:
        raise InputError(f"optim.batch_size={rows} rows do not divide among {count} devices: "
                         "raise it, and lower optim.accumulate to match")  # fmt: skip
    if count == 1:
        return Placement()
    shape = (count // fsdp, fsdp)
    return Placement(jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES)))


def shared_axis(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Splits the longest axis that divides by ``devices``; small arrays stay whole."""
    fitting = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if devices == 1 or not fitting or math.prod(shape) < SMALLEST_SHARED:
        return PartitionSpec()
    longest = max(fitting, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * longest, "fsdp")
