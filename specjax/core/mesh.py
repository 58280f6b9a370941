"""Decoding over several devices: rows over one mesh axis, a model's heads over the other.

A program of the loop runs on every device on its own part, rows of ``data`` and shares of
``model``: no array of the state ever moves between devices, and rows of one device never wait
for those of another. What a rule reads (logits) is the same on all devices of ``model``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from specjax._util.arguments import COUNT, validate_arguments
from specjax._util.errors import OptionError
from specjax.core.net import Net
from specjax.core.types import Inputs
from specjax.models import KVCache
from specjax.models.placement import adapter_specs, param_specs
from specjax.models.sharding import AXIS as MODEL

DATA = "data"
AXES = (DATA, MODEL)
ROWS, WHOLE = PartitionSpec(DATA), PartitionSpec()
# A model that is whole on each device has a cache on each, too: its shares are copies.
CACHE = PartitionSpec(DATA, MODEL)


@validate_arguments(data=COUNT, model=COUNT)
def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """The first ``data · model`` devices: rows over ``data``, heads over ``model``.

    Where processes have joined (:func:`jax.distributed.initialize`) it is the first ones of each:
    a model may span them, and rows then stay whole.

    Raises:
      OptionError: there are fewer devices, or no such number.
    """
    count, wanted = jax.process_count(), data * model
    if count > 1 and data > 1:
        raise OptionError(
            f"mesh data={data},model={model} of {count} processes: rows cannot be split over "
            "processes that have joined; let each decode its own, and ask for data=1"
        )
    own = [[d for d in jax.devices() if d.process_index == process] for process in range(count)]
    devices = [device for each in own for device in each[: -(-wanted // count)]]
    if wanted != len(devices):
        has, kind = " and ".join(str(len(each)) for each in own), own[0][0].platform
        raise OptionError(
            f"mesh data={data},model={model} needs {wanted} devices"
            f"{', as many of each process' * (count > 1)}, and there are {has} ({kind}); ask for "
            "fewer"
        )
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh((data, model), AXES, axis_types=auto, devices=devices)


def round_up(rows: int, mesh: Mesh) -> int:
    """The least number of rows, no smaller, that every device has the same share of."""
    return -(-rows // mesh.shape[DATA]) * mesh.shape[DATA]


def net_specs(net: Net | None) -> Any:
    """Where the params of a model lie: split over the devices, or copied."""
    if net is None or net.config.shards == 1:
        return WHOLE
    specs = param_specs(net.config, net.params, net.config.shards)
    own = adapter_specs(net.config, net.adapters) if net.adapters else {}
    return dataclasses.replace(net, params=specs, adapters=own)


def input_specs(inputs: Inputs) -> Inputs:
    """Where every array of ``inputs`` lies."""
    reward = inputs.reward
    return inputs.replace(
        target=net_specs(inputs.target),
        draft=net_specs(inputs.draft),
        warp=ROWS,
        eos_ids=WHOLE,
        settings=WHOLE,
        reward=reward._replace(shared=WHOLE, own=ROWS) if reward else WHOLE,
    )


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(inputs, ...)`` on every device of ``inputs.mesh``, each on its part.

    Without a mesh it is ``function`` itself. With one it is traced twice, first for the shape of
    its result. Every other argument and every result is made of
    arrays with rows first, caches, and scalars; a scalar result is the largest of all devices.
    """

    @functools.wraps(function)
    def run(inputs: Inputs, *args: Any) -> Any:
        if inputs.mesh is None:
            return function(inputs, *args)
        of_all = functools.partial(
            jax.shard_map,
            lambda *own: jax.tree.map(_largest, function(*own)),
            mesh=inputs.mesh,
            in_specs=(input_specs(inputs), *map(specs_of, args)),
            check_vma=False,
        )
        result = jax.eval_shape(of_all(out_specs=WHOLE), inputs, *args)
        return of_all(out_specs=specs_of(result))(inputs, *args)

    return run


# Results are rounded wherever their dtype says so: XLA would skip that inside of what it fuses, and
# bfloat16 logits depend on the program that computes them.
ROUNDED = {"xla_allow_excess_precision": False}


def program(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """:func:`spread`, jitted, ``how`` being ``jax.jit``'s: each program of decoding is one.

    Called while a caller's own program is traced it is a part of that, which rounds as it says.
    """
    alone = jax.jit(spread(function), compiler_options=ROUNDED, **how)
    part = jax.jit(spread(function), **how)

    @functools.wraps(alone)
    def run(*args: Any) -> Any:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
        return (part if traced else alone)(*args)

    run.lower, run._cache_size = alone.lower, alone._cache_size
    return run


def replicated(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(mesh, ...)``, jitted: every device of ``mesh`` (or None) does the same work.

    Among the arguments are Nets, of which each device has its share; all other arrays, and the
    result, are whole on each. It is for what runs a model beside the loop, on few rows.
    """

    def specs(tree: Any) -> Any:
        def spec(node: Any) -> Any:
            return net_specs(node) if isinstance(node, Net) else WHOLE

        return jax.tree.map(spec, tree, is_leaf=lambda node: isinstance(node, Net))

    @functools.wraps(function)
    def run(mesh: Mesh | None, *args: Any) -> Any:
        if mesh is None:
            return function(*args)
        where = {"mesh": mesh, "in_specs": specs(args), "out_specs": WHOLE, "check_vma": False}
        return jax.shard_map(function, **where)(*args)

    return jax.jit(run, static_argnums=0)


def specs_of(tree: Any) -> Any:
    """Where the arrays of a state lie: rows of ``data`` each, caches of both axes."""

    def spec(node):
        if isinstance(node, KVCache):
            return jax.tree.map(lambda _: CACHE, node)
        return ROWS if node.ndim else WHOLE

    return jax.tree.map(spec, tree, is_leaf=lambda node: isinstance(node, KVCache))


def _largest(x: jax.Array) -> jax.Array:
    return x if x.ndim else jax.lax.pmax(x, DATA)
