"""Decoding on several devices: rows are split over one mesh axis, a model's heads over the other.

Each program of the loop runs on every device, on its part of the arrays: its rows along ``data``,
its share of the heads along ``model``. No array of the state ever moves between devices, and the
rows of one device never wait for those of another. The devices of ``model`` draw the same tokens,
from shares of the logits (:mod:`specjax.core.vocabulary`) or from whole copies of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, PartitionSpec

from specjax._util.arguments import COUNT, validate_arguments
from specjax._util.errors import OptionError
from specjax._util.platform import compiler_options
from specjax.core.net import Net
from specjax.core.types import Inputs
from specjax.models import KVCache
from specjax.models.placement import adapter_specs, param_specs
from specjax.models.sharding import AXIS as MODEL

DATA = "data"
AXES = (DATA, MODEL)
AXIS_TYPES = (AxisType.Auto,) * len(AXES)
ROWS = PartitionSpec(DATA)
WHOLE = PartitionSpec()
# If a model is whole on each device, so is its cache. The parts along MODEL are then copies.
CACHE = PartitionSpec(DATA, MODEL)


@validate_arguments(data=COUNT, model=COUNT)
def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of the first ``data · model`` devices: rows over ``data``, heads over ``model``.

    If several processes have joined (:func:`jax.distributed.initialize`), each gives an equal
    number of its devices. A model may then span the processes, but rows are not split.

    Raises:
      OptionError: there are fewer devices, or rows would be split over processes.
    """
    wanted = data * model
    num_processes = jax.process_count()
    if num_processes > 1 and data > 1:
        raise _rows_over_processes(data, model, num_processes)

    per_process = -(-wanted // num_processes)  # rounded up
    available = [[] for _ in range(num_processes)]
    for device in jax.devices():
        available[device.process_index].append(device)
    devices = [device for own_devices in available for device in own_devices[:per_process]]

    if len(devices) != wanted:
        counts = " and ".join(str(len(own_devices)) for own_devices in available)
        equal_numbers = ""
        if num_processes > 1:
            equal_numbers = ", as many of each process"
        raise OptionError(
            f"mesh data={data},model={model} needs {wanted} devices{equal_numbers}, and "
            f"there are {counts} ({available[0][0].platform}); ask for fewer"
        )
    return jax.make_mesh((data, model), AXES, axis_types=AXIS_TYPES, devices=devices)


def with_both_axes(mesh: Mesh) -> Mesh:
    """Any mesh with axes ``data`` and ``model`` in the form that :func:`make_mesh` gives.

    Their order does not matter, nor whether they are explicit, as :func:`jax.make_mesh` makes them.
    An axis that is missing has one device, and other axes of one device are dropped.

    Raises:
      OptionError: another axis has several devices, rows would be split over processes, or
        ``jax.set_mesh`` has set another mesh.
    """
    sizes = {name: size for name, size in mesh.shape.items() if name in AXES or size > 1}
    if not set(sizes) <= set(AXES):
        shape = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise OptionError(
            f"mesh {shape}: expected axes named {DATA}, for rows, and {MODEL}, for heads; give "
            f"jax.sharding.Mesh(devices, {AXES}) the devices in such an array"
        )
    if mesh.is_multi_process and sizes.get(DATA, 1) > 1:
        raise _rows_over_processes(sizes[DATA], sizes.get(MODEL, 1), jax.process_count())
    # Axes of one device can be anywhere, so only the order of the others matters.
    in_order = sorted(sizes, key=AXES.index)
    devices = mesh.devices.reshape(tuple(sizes.values()))
    devices = devices.transpose([list(sizes).index(name) for name in in_order])
    shape = [sizes.get(name, 1) for name in AXES]
    usual = Mesh(devices.reshape(shape), AXES, axis_types=AXIS_TYPES)
    check_context(usual)
    return usual


def check_context(mesh: Mesh | None) -> None:
    """Refuses another mesh that ``jax.set_mesh`` has set, in which no operation of ours can run.

    Raises:
      OptionError: there is one.
    """
    context = jax.sharding.get_abstract_mesh()
    if mesh is None or context.empty or context == mesh.abstract_mesh:
        return
    raise OptionError(
        f"jax.set_mesh has set another mesh than the model's, {context.axis_sizes} with axes "
        f"{context.axis_names}: load and decode outside of it, or under jax.set_mesh(model.mesh)"
    )


def _rows_over_processes(data: int, model: int, num_processes: int) -> OptionError:
    return OptionError(
        f"mesh data={data},model={model} of {num_processes} processes: rows cannot be split "
        "over processes that have joined; let each decode its own, and ask for data=1"
    )


def round_up(rows: int, mesh: Mesh) -> int:
    """The next number of rows that splits evenly over the ``data`` axis."""
    return -(-rows // mesh.shape[DATA]) * mesh.shape[DATA]


# --- partition specs ---------------------------------------------------------------------------


def net_specs(net: Net | None) -> Any:
    """The partition specs of a model: its params split over the devices, or whole on each."""
    if net is None or net.config.shards == 1:
        return WHOLE
    specs = param_specs(net.config, net.params, net.config.shards)
    adapters = adapter_specs(net.config, net.adapters) if net.adapters else {}
    return dataclasses.replace(net, params=specs, adapters=adapters)


def input_specs(inputs: Inputs) -> Inputs:
    """The partition specs of ``inputs``."""
    reward = inputs.reward
    grammars = inputs.grammars
    if grammars is not None:
        grammars = jax.tree.map(lambda _: WHOLE, grammars).replace(grammar=ROWS, first=ROWS)
    return inputs.replace(
        target=net_specs(inputs.target),
        draft=net_specs(inputs.draft),
        warp=ROWS,
        eos_ids=WHOLE,
        settings=WHOLE,
        reward=reward._replace(shared=WHOLE, own=ROWS) if reward else WHOLE,
        grammars=grammars,
    )


def specs_of(tree: Any) -> Any:
    """The partition specs of a state: rows over ``data``, caches over both axes, scalars whole."""

    def spec(node):
        if is_cache(node):
            return jax.tree.map(lambda _: CACHE, node)
        if node.ndim == 0:
            return WHOLE
        return ROWS

    return jax.tree.map(spec, tree, is_leaf=is_cache)


def is_cache(node: Any) -> bool:
    """Whether a node of a state's tree is a KV cache."""
    return isinstance(node, KVCache)


# --- programs ----------------------------------------------------------------------------------


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(inputs, ...)``, run on every device of ``inputs.mesh`` on its part of the arrays.

    Without a mesh it is ``function`` itself. With one, the function is traced twice: the first
    trace only finds the shapes of its result. Apart from ``inputs``, arguments and results consist
    of arrays with rows first, KV caches, and scalars. A scalar result is the maximum over all
    devices.
    """

    @functools.wraps(function)
    def run(inputs: Inputs, *args: Any) -> Any:
        if inputs.mesh is None:
            return function(inputs, *args)

        def on_device(*local_args: Any) -> Any:
            return jax.tree.map(_max_over_devices, function(*local_args))

        mapped = functools.partial(
            jax.shard_map,
            on_device,
            mesh=inputs.mesh,
            in_specs=(input_specs(inputs), *map(specs_of, args)),
            check_vma=False,
        )
        # Output specs follow the result's tree, which only a trace can tell.
        result = jax.eval_shape(mapped(out_specs=WHOLE), inputs, *args)
        return mapped(out_specs=specs_of(result))(inputs, *args)

    return run


def program(function: Callable[..., Any], **jit_options: Any) -> Callable[..., Any]:
    """:func:`spread` under ``jax.jit`` with ``jit_options``. Each program of decoding is made so.

    Inside a caller's own jit it becomes a part of that program, with that program's compiler
    options.
    """
    standalone = jax.jit(spread(function), compiler_options=compiler_options(), **jit_options)
    # JAX refuses compiler options in a nested jit.
    nested = jax.jit(spread(function), **jit_options)

    @functools.wraps(standalone)
    def run(*args: Any) -> Any:
        in_trace = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        if in_trace:
            return nested(*args)
        return standalone(*args)

    # Tests and tools count the traces of a program and read what it compiles to. The wrapper takes
    # attributes as every function does, though its type does not say so.
    run.lower = standalone.lower  # pyright: ignore[reportAttributeAccessIssue]
    run._cache_size = standalone._cache_size  # pyright: ignore[reportAttributeAccessIssue]
    return run


def replicated(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(mesh, ...)``, jitted: every device of ``mesh`` (or None) does the same work.

    It is for models that run on few rows outside of the loop. A Net among the arguments is split
    as its params are; all other arrays, and the result, are whole on each device.
    """

    def specs(tree: Any) -> Any:
        def spec(node: Any) -> Any:
            if isinstance(node, Net):
                return net_specs(node)
            return WHOLE

        return jax.tree.map(spec, tree, is_leaf=lambda node: isinstance(node, Net))

    @functools.wraps(function)
    def run(mesh: Mesh | None, *args: Any) -> Any:
        if mesh is None:
            return function(*args)
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=specs(args), out_specs=WHOLE, check_vma=False
        )
        return mapped(*args)

    return jax.jit(run, static_argnums=0)


def _max_over_devices(x: jax.Array) -> jax.Array:
    """A scalar's maximum over the rows' devices; other arrays stay each device's own."""
    if x.ndim == 0:
        return jax.lax.pmax(x, DATA)
    return x
