"""Training over every device of a run: rows split over all, params over some (FSDP).

Arrays get their shardings before the first step, and the compiler derives every collective. The
mesh has two axes. Along ``data`` the devices hold the same params. Along ``fsdp`` each device holds
a share of them, and gathers the params of one layer at a time. Rows of a batch are split over both
axes. The devices may belong to several processes, each of which loads its own rows.

An axis ``sequence`` splits the tokens of a row. Devices along it hold parts of the same rows and
the same params. In each layer they gather the row's keys and values (all-gathered context
parallelism, as in Llama 3, arXiv 2407.21783, §3.3.2); all else of a token is on its own device.

An axis ``model`` splits heads, columns of the MLP and the vocabulary, as decoding does
(:mod:`specjax.models.sharding`). Devices along it have the same rows. They hold and compute parts
of each layer, and sum their partial products twice a layer.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax._util.errors import InputError
from specjax.models import ModelConfig
from specjax.models.placement import put_whole
from specjax.models.sharding import AXIS as MODEL
from specjax.models.sharding import FSDP
from train.config import MeshSection
from train.data.packing import Batch
from train.engine.shares import Shares

AXES = ("data", FSDP)
SEQUENCE = "sequence"


class Placement:
    """The shardings of a run's arrays. Without a mesh everything is on one device."""

    def __init__(self, mesh: Mesh | None = None, shares: Shares | None = None):
        self._mesh = mesh
        self._shares = shares or Shares()

    def of_models(self, *models: ModelConfig) -> Placement:
        """This placement for the params of these models, whose heads it splits if the mesh does.

        Raises:
          InputError: the devices of ``mesh.model`` cannot share one of the models.
        """
        return Placement(self._mesh, self._shares.of_models(*models))

    @property
    def replicated(self) -> NamedSharding | None:
        """The sharding of arrays that every device holds whole; None without a mesh."""
        if self._mesh is None:
            return None
        return NamedSharding(self._mesh, PartitionSpec())

    def shardings(self, tree: Any) -> Any:
        """The shardings of params, gradients or optimizer state; None without a mesh."""
        mesh = self._mesh
        if mesh is None:
            return None
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self._shares.specs(tree))

    def step_shardings(self, params: Any, opt_state: Any) -> tuple | None:
        """The shardings of a step's results (:func:`train.engine.loop.make_step`), or None."""
        if self._mesh is None:
            return None
        # Every device holds the loss, the gradient norm and the extras whole.
        return (*self.shardings((params, opt_state)), *[self.replicated] * 3)

    def row_sharding(self, axis: int) -> NamedSharding | None:
        """The sharding of a batch whose rows are along ``axis``; None without a mesh.

        The tokens are along the next axis.
        """
        if self._mesh is None:
            return None
        tokens = [SEQUENCE] if SEQUENCE in self._mesh.axis_names else []
        return NamedSharding(self._mesh, PartitionSpec(*[None] * axis, AXES, *tokens))

    def place_state(self, tree: Any) -> Any:
        """The tree with :meth:`shardings`; every process passes the same tree."""
        if self._mesh is None:
            # Explicitly: host_memory() may have made the tree on the CPU.
            return jax.device_put(tree, jax.local_devices()[0])
        return jax.tree.map(put_whole, tree, self.shardings(tree))

    def initialize(self, make: Callable[[Any], Any], tree: Any) -> Any:
        """``make(tree)`` for a placed tree; the result has its own :meth:`shardings`."""
        if self._mesh is None:
            # Committed to the device, as params are: a counter that is not would become so in the
            # first step, and the second step would be compiled again.
            return jax.device_put(make(tree), jax.local_devices()[0])
        return jax.jit(make, out_shardings=self.shardings(jax.eval_shape(make, tree)))(tree)

    def place_rows(self, batch: Batch, axis: int) -> dict:
        """The run's batch, of which each process passes its own rows (along ``axis``)."""
        if self._mesh is None:
            return batch
        sharding = self.row_sharding(axis)
        return {
            name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()
        }

    def local_copy(self, tree: Any) -> Any:
        """A whole copy of a placed tree on one device of this process."""
        if self._mesh is None:
            return tree
        return jax.tree.map(lambda x: x.addressable_data(0), jax.device_put(tree, self.replicated))

    def to_host(self, tree: Any) -> Any:
        """The placed tree as numpy arrays; a device holds one leaf at a time whole."""
        return jax.tree.map(lambda x: np.asarray(self.local_copy(x)), tree)


def host_memory() -> contextlib.AbstractContextManager:
    """Inside, new arrays are in the host's memory, unless JAX_PLATFORMS leaves the CPU out."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def make_placement(
    fsdp: int,
    rows: int,
    devices: Sequence[jax.Device] | None = None,
    sequence: int = 1,
    model: int = 1,
) -> Placement:
    """A placement over all devices of the run.

    Args:
      fsdp: the number of devices that share one copy of the params.
      rows: rows of a batch.
      devices: devices to use instead of the run's own, e.g. those of a topology.
      sequence: the number of devices that each row's tokens are split over.
      model: the number of devices that heads, columns and the vocabulary are split over.

    Raises:
      InputError: ``fsdp`` · ``sequence`` · ``model`` does not divide the devices; the groups of
        devices that share a row do not divide ``rows``, or belong to several processes.
    """
    if devices is None:
        devices = jax.devices()
    count = len(devices)
    _check_division(count, fsdp, rows, sequence, model)
    if count == 1:
        return Placement()
    # Devices of the last axis are neighbors, and those of `model` exchange most.
    sizes = {"data": count // (fsdp * sequence * model), FSDP: fsdp}
    inner = {SEQUENCE: sequence, MODEL: model}
    sizes |= {name: size for name, size in inner.items() if size > 1}
    mesh = _make_mesh(sizes, devices)
    _require_own_rows(mesh, sequence, model)
    return Placement(mesh, Shares(fsdp, model))


def _check_division(count: int, fsdp: int, rows: int, sequence: int, model: int) -> None:
    """Raises InputError if ``count`` devices cannot share the params and rows so."""
    if count % (fsdp * sequence * model):
        asked = f"mesh.fsdp={fsdp}"
        if sequence > 1:
            asked += f" times mesh.sequence={sequence}"
        if model > 1:
            asked += f" times mesh.model={model}"
        raise InputError(f"{asked} does not divide the {count} devices")
    size = sequence * model
    groups = count // size
    if rows % groups:
        whom = f"{groups} groups of {size} devices" if size > 1 else f"{count} devices"
        raise InputError(
            f"optim.batch_size={rows} rows do not divide among {whom}: "
            "raise it, and lower optim.accumulate to match"
        )


def _make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of these axes, whose devices of ``sequence`` and ``model`` are neighbors."""
    # Explicit axes, which jax.make_mesh may default to, would need a sharding in every operation.
    auto = (AxisType.Auto,) * len(sizes)
    return Mesh(_arrange(sizes, devices), tuple(sizes), axis_types=auto)


def _arrange(sizes: dict[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices in an array of this shape.

    JAX's own order follows the links between devices. There may be none of this shape, or one in
    which devices that share a row belong to several processes. If a process has whole groups of
    them, the second order keeps them together, and does not look at the links between processes.
    """
    shape = tuple(sizes.values())
    group = math.prod(sizes.get(name, 1) for name in (SEQUENCE, MODEL))
    with contextlib.suppress(NotImplementedError):
        array = jax.make_mesh(shape, tuple(sizes), devices=devices).devices
        if not _spans_processes(array, group):
            return array

    counts = {*collections.Counter(device.process_index for device in devices).values()}
    groups, rest = divmod(min(counts), group)
    if group == 1 or rest or len(counts) > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    fsdp = math.gcd(groups, sizes[FSDP])
    inside = sizes | {"data": groups // fsdp, FSDP: fsdp}
    between = [sizes[name] // inside[name] for name in sizes]
    return mesh_utils.create_hybrid_device_mesh(
        tuple(inside.values()), between, devices, process_is_granule=True
    )


def _spans_processes(array: np.ndarray, size: int) -> bool:
    """Whether one of the groups of ``size`` neighbors in ``array`` belongs to several processes."""
    groups = array.reshape(-1, size)
    return any(len({device.process_index for device in group}) > 1 for group in groups)


def _require_own_rows(mesh: Mesh, sequence: int, model: int) -> None:
    """Raises InputError if devices that share a row belong to several processes."""
    sizes = {"sequence": sequence, "model": model}
    asked = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size > 1)
    if _spans_processes(mesh.devices, sequence * model):
        raise InputError(
            f"{asked}: devices that share a row belong to several processes, each of which "
            "loads whole rows: lower it to the devices of one process"
        )


def run_placement(section: MeshSection, rows: int) -> Placement:
    """A placement over the devices of this run, as its config says.

    Raises:
      InputError: the config asks for another number of devices; or as :func:`make_placement`, or
        :func:`planned_devices` of a topology, whose plan is part of the summary.
    """
    if section.topology:
        planned_devices(section, rows)
    count = jax.device_count()
    if section.devices not in (0, count):
        raise InputError(
            f"mesh.devices={section.devices}, but the run has {count} devices: start it on a "
            "machine that has them, or set mesh.devices=0 to use all that are there"
        )
    return make_placement(section.fsdp, rows, None, section.sequence, section.model)


def planned_devices(section: MeshSection, rows: int) -> int:
    """The number of devices that ``--dry-run`` plans for, which may not be here.

    Raises:
      InputError: as :func:`make_placement`.
    """
    count = device_count(section)
    _check_division(count, section.fsdp, rows, section.sequence, section.model)
    return count


def device_count(section: MeshSection) -> int:
    """The number of devices: of the topology, or as the config says, or those that are here."""
    if not section.topology:
        return section.devices or jax.device_count()
    _, _, sizes = section.topology.partition(":")
    return math.prod(int(size) for size in sizes.split("x"))
