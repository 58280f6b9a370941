"""Params on a mesh: the sharding of each, and the row order of joined products.

A joined product (q, k, v; gate, up) has its parts one after the other. To split it by rows, each
device's share of every part must be adjacent, so the rows are reordered first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from specjax._util.errors import SplitError
from specjax.models.adapters import DOWN
from specjax.models.config import ModelConfig
from specjax.models.forward_pass import param_axes, param_shapes, part_axes
from specjax.models.quantization import StoredForm
from specjax.models.quantized import Grouped, PerOutput, by_output, is_quantized
from specjax.models.sharding import AXIS, EXPERTS, RULES, VOCABULARY, partition, split_config


def param_specs(cfg: ModelConfig, params: dict, count: int) -> dict:
    """How each parameter in the inference layout is split: a tree of partition specs.

    ``params`` may be a part of the tree.

    Raises:
      SplitError: groups of a quantized weight would be shared by devices, or its inputs are in an
        order that no split follows.
    """

    def spec(x: Any, axes: tuple[str, ...]) -> Any:
        whole = partition(axes, x.shape, count)
        if is_quantized(x) and axes[0] == EXPERTS:
            return jax.tree.map(lambda _: PartitionSpec(whole[0]), x)
        if isinstance(x, PerOutput):
            return dataclasses.replace(x, codes=whole, scales=PartitionSpec(whole[0]))
        if not isinstance(x, Grouped):
            return whole
        if whole[1] and not x.split_evenly(count):
            raise _groups_are_shared(x.groups, x.shape[1], axes, count)
        if whole[1] and x.order is not None:
            raise SplitError(
                f"a weight with act-order ({axes[1]}) cannot be split over {AXIS}={count} devices: "
                "its groups have inputs of all of them; keep it whole (split=False, "
                "--mesh data=N), or take a checkpoint without act-order"
            )
        # The codes are [I, O], scales and offsets [G, O]: the axes are swapped.
        transposed = PartitionSpec(*whole[::-1])
        specs = jax.tree.map(lambda _: transposed, dataclasses.replace(x, order=None))
        return dataclasses.replace(specs, order=None if x.order is None else PartitionSpec())

    return jax.tree.map(spec, params, part_axes(cfg, params), is_leaf=is_quantized)


def check_split(cfg: ModelConfig, count: int, form: StoredForm | None = None) -> None:
    """Checks that ``count`` devices can share a model whose weights are stored in this form.

    It needs no weights. What a file alone shows, such as act-order, is found when it loads.

    Raises:
      SplitError: they cannot.
    """
    split_config(cfg, count)
    if form is None:
        return

    def check(leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> None:
        own_form = form.for_axes(axes)
        if own_form is None or not own_form.group or axes[0] == EXPERTS or not RULES[axes[1]]:
            return
        inputs = leaf.shape[1]
        groups = inputs // own_form.group
        # A single group becomes one per device (`cut_single_groups`).
        if groups != 1 and groups % count:
            raise _groups_are_shared(groups, inputs, axes, count)

    jax.tree.map(check, param_shapes(cfg), param_axes(cfg))


def _groups_are_shared(groups: int, inputs: int, axes: tuple[str, ...], count: int) -> SplitError:
    return SplitError(
        f"{groups} groups of {inputs // groups} inputs ({axes[1]}) cannot be split over "
        f"{AXIS}={count} devices; choose int4:GROUP so that they can, or int8, or keep it whole "
        "(split=False, --mesh data=N)"
    )


def place(cfg: ModelConfig, params: dict, mesh: Mesh, split: bool) -> dict:
    """Params in the inference layout on a mesh: each device gets its share, or a whole copy.

    ``params`` may be a part of the tree; ``cfg`` is the whole model's.

    Raises:
      SplitError: the model cannot be split.
    """
    if not split:
        return put(params, NamedSharding(mesh, PartitionSpec()))
    count = mesh.shape[AXIS]
    split_config(cfg, count)  # raises if it cannot be split
    if "layers" in params:
        params = split_layers(cfg, params, count)
    params = cut_single_groups(cfg, pad_vocabulary(cfg, params, count), count)
    specs = param_specs(cfg, params, count)
    return put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def pad_vocabulary(cfg: ModelConfig, params: dict, count: int) -> dict:
    """Params whose tables have rows of zeros at the end, so that ``count`` divides their rows.

    Only the params of a mesh have them. :func:`specjax.models.sharding.gather_logits` drops their
    logits, and :func:`specjax.models.sharding.look_up` never reads them.
    """

    def pad(x: Any, axes: tuple[str, ...]) -> Any:
        missing = -x.shape[0] % count
        if axes[0] != VOCABULARY or not missing:
            return x
        return by_output(lambda rows: jnp.pad(rows, ((0, missing), *[(0, 0)] * (rows.ndim - 1))), x)

    return jax.tree.map(pad, params, part_axes(cfg, params), is_leaf=is_quantized)


def cut_single_groups(cfg: ModelConfig, params: dict, count: int) -> dict:
    """Params whose weights with one group have one per device, where their inputs are split."""

    def cut(x: Any, axes: tuple[str, ...]) -> Any:
        if not isinstance(x, Grouped) or axes[0] == EXPERTS:
            return x
        if x.groups == 1 and RULES[axes[1]] and x.shape[1] % count == 0:
            return x.cut(count)
        return x

    return jax.tree.map(cut, params, part_axes(cfg, params), is_leaf=is_quantized)


def put(tree: Any, where: Any) -> Any:
    """``jax.device_put`` that also works over several processes, each of which has all of ``tree``.

    ``where`` is a sharding, or a tree of them.
    """
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(where)):
        return jax.device_put(tree, where)

    def put_part(sharding: NamedSharding, part: Any) -> Any:
        return jax.tree.map(lambda x: put_whole(x, sharding), part)

    return jax.tree.map(put_part, where, tree)


def put_whole(x: Array, sharding: NamedSharding) -> Array:
    """An array that every process has whole, sharded over all of them; always a copy."""
    whole = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: whole[index])


def adapter_specs(cfg: ModelConfig, adapters: dict) -> dict:
    """How each adapter in the inference layout is split: as its weight is.

    The axis of the rank is never split.
    """
    axes = param_axes(cfg, fused=True)["layers"]["0"]

    def pair(part: str, name: str) -> dict:
        outputs, inputs = (RULES[axis] for axis in axes[part][name]["weight"])
        return {"down": PartitionSpec(None, inputs), "up": PartitionSpec(outputs, None)}

    layers = {}
    for i, block in adapters["layers"].items():
        layers[i] = {part: {name: pair(part, name) for name in block[part]} for part in block}
    return {"embed": PartitionSpec(), "layers": layers}


def place_adapters(cfg: ModelConfig, adapters: dict, mesh: Mesh, split: bool) -> dict:
    """Adapters in the inference layout on a mesh, as :func:`place`; the tree may be empty."""
    if not adapters or not split:
        return put(adapters, NamedSharding(mesh, PartitionSpec()))
    adapters = split_layers(cfg, adapters, mesh.shape[AXIS])
    specs = adapter_specs(cfg, adapters)
    return put(adapters, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def split_layers(cfg: ModelConfig, params: dict, count: int) -> dict:
    """Params, or adapters, whose joined products are ordered device by device, not part by part."""
    layers = {i: _order_by_device(cfg, block, count) for i, block in params["layers"].items()}
    return params | {"layers": layers}


def _order_by_device(cfg: ModelConfig, block: dict, count: int) -> dict:
    """:func:`split_layers` of one layer."""
    orders = _row_orders(cfg, count)

    def reorder(name: str, module: Any) -> Any:
        if name not in orders:
            return module
        # Every leaf has an axis of outputs, except an adapter's factor `down`.
        reordered = {key: by_output(orders[name], x) for key, x in module.items() if key != DOWN}
        return module | reordered

    return {
        part: {name: reorder(name, module) for name, module in modules.items()}
        for part, modules in block.items()
    }


def _row_orders(cfg: ModelConfig, count: int) -> dict[str, Callable[[Array], Array]]:
    """For each joined product, the function that orders the rows of a leaf by device."""
    queries = cfg.num_heads * cfg.head_dim
    keys = cfg.num_kv_heads * cfg.head_dim
    # With fewer key heads than devices, several devices get a copy of the same one.
    copies = max(count // cfg.num_kv_heads, 1)

    def repeat_heads(x: Array) -> Array:
        heads = x.reshape(cfg.num_kv_heads, cfg.head_dim, *x.shape[1:])
        return jnp.repeat(heads, copies, axis=0).reshape(-1, *x.shape[1:])

    def interleave(*parts: Array) -> Array:
        shares = [part.reshape(count, -1, *part.shape[1:]) for part in parts]
        joined = jnp.concatenate(shares, axis=1)
        return joined.reshape(-1, *joined.shape[2:])

    def order_qkv(x: Array) -> Array:
        q, k, v = jnp.split(x, [queries, queries + keys])
        return interleave(q, repeat_heads(k), repeat_heads(v))

    def order_gate_up(x: Array) -> Array:
        gate, up = jnp.split(x, 2)
        return interleave(gate, up)

    return {"qkv": order_qkv, "gate_up": order_gate_up}
