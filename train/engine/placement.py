"""Training over every device of a run: rows split over all, params over some (FSDP).

Arrays are placed once; the compiler derives every collective from where they lie. The mesh
has two axes: ``data``, along which devices hold equal params, and ``fsdp``, along which each
holds a share and gathers what a layer needs. Rows of a batch are split over both. The devices
may belong to several processes, each of which brings its own rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax._util.errors import InputError
from specjax.models.placement import put_whole
from train.config import MeshSection
from train.data.packing import Batch

AXES = ("data", "fsdp")
# Below this many elements a share costs more to gather than it saves.
SMALLEST_SHARED = 1 << 12


class Placement:
    """Where a run's arrays lie. Without a mesh: wherever jax puts them."""

    def __init__(self, mesh: Mesh | None = None):
        self._mesh = mesh

    @property
    def replicated(self) -> NamedSharding | None:
        """Of what every device holds whole; None without a mesh."""
        return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

    def shardings(self, tree: Any) -> Any:
        """Of params, gradients or optimizer state, leaf by leaf; None without a mesh."""
        if self._mesh is None:
            return None
        share = self._mesh.shape["fsdp"]
        return jax.tree.map(lambda x: NamedSharding(self._mesh, shared_axis(x.shape, share)), tree)

    def of_step(self, params: Any, opt_state: Any) -> tuple | None:
        """Of what :func:`train.engine.loop.make_step` returns; None without a mesh."""
        if self._mesh is None:
            return None
        return (*self.shardings((params, opt_state)), *[self.replicated] * 3)

    def row_sharding(self, axis: int) -> NamedSharding | None:
        """Of a batch whose rows lie along ``axis``; None without a mesh."""
        if self._mesh is None:
            return None
        return NamedSharding(self._mesh, PartitionSpec(*[None] * axis, AXES))

    def state(self, tree: Any) -> Any:
        """The tree as :meth:`shardings` says; every process holds the same one."""
        if self._mesh is None:
            return jax.device_put(tree, jax.local_devices()[0])
        return jax.tree.map(put_whole, tree, self.shardings(tree))

    def made(self, make: Callable[[Any], Any], tree: Any) -> Any:
        """``make(tree)`` for a placed tree, itself placed as :meth:`shardings` says."""
        if self._mesh is None:
            return make(tree)
        return jax.jit(make, out_shardings=self.shardings(jax.eval_shape(make, tree)))(tree)

    def rows(self, batch: Batch, axis: int) -> dict:
        """This process's rows (along ``axis``) as its share of the run's batch."""
        if self._mesh is None:
            return batch
        where = self.row_sharding(axis)
        return {k: jax.make_array_from_process_local_data(where, x) for k, x in batch.items()}

    def local(self, tree: Any) -> Any:
        """A whole copy of a placed tree on one device of this process."""
        if self._mesh is None:
            return tree
        return jax.tree.map(lambda x: x.addressable_data(0), jax.device_put(tree, self.replicated))

    def host(self, tree: Any) -> Any:
        """The placed tree as numpy arrays; one leaf at a time is whole on a device."""
        return jax.tree.map(lambda x: np.asarray(self.local(x)), tree)


def host_memory() -> contextlib.AbstractContextManager:
    """Inside, new arrays lie in the host's memory, unless JAX_PLATFORMS leaves the CPU out."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def make_placement(fsdp: int, rows: int, devices: Sequence[jax.Device] | None = None) -> Placement:
    """Over all devices of the run; ``fsdp`` of them share one copy of the params.

    Args:
      devices: what to take instead of the run's own devices, e.g. those of a topology.
    Raises:
      InputError: the devices do not divide into copies, or the ``rows`` of a batch into devices.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    if count % fsdp:
        raise InputError(f"mesh.fsdp={fsdp} does not divide the {count} devices")
    if rows % count:
        raise InputError(
            f"optim.batch_size={rows} rows do not divide among {count} devices: "
            "raise it, and lower optim.accumulate to match"
        )
    if count == 1:
        return Placement()
    auto = (AxisType.Auto,) * len(AXES)
    return Placement(jax.make_mesh((count // fsdp, fsdp), AXES, axis_types=auto, devices=devices))


def run_placement(section: MeshSection, rows: int) -> Placement:
    """Over the devices of this run, as its config says.

    Raises:
      InputError: it says another number of them; or as :func:`make_placement`.
    """
    wanted, there = section.devices, jax.device_count()
    if wanted not in (0, there):
        raise InputError(
            f"mesh.devices={wanted}, but the run has {there} devices: start it where "
            "they are, or set mesh.devices=0 to take what there is"
        )
    return make_placement(section.fsdp, rows)


def shared_axis(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Splits the longest axis that divides by ``devices``; small arrays stay whole."""
    fitting = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if devices == 1 or not fitting or math.prod(shape) < SMALLEST_SHARED:
        return PartitionSpec()
    longest = max(fitting, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * longest, "fsdp")
