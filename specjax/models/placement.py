"""Params on a mesh: where each lies, and the order of what is split."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from specjax._util.errors import ModelError
from specjax.models.adapters import DOWN
from specjax.models.config import ModelConfig
from specjax.models.forward_pass import param_axes, part_axes
from specjax.models.quantized import Grouped, PerOutput, by_output, is_quantized
from specjax.models.sharding import AXIS, RULES, partition, split_config


def param_specs(cfg: ModelConfig, params: dict, count: int) -> dict:
    """Where each parameter in the inference layout lies: a tree of partition specs.

    ``params`` may be a part of the tree.
    """

    def spec(x: Any, names: tuple[str, ...]) -> Any:
        whole = partition(names, x.shape, count)
        if isinstance(x, PerOutput):
            return dataclasses.replace(x, codes=whole, scales=PartitionSpec(whole[0]))
        if not isinstance(x, Grouped):
            return whole
        if whole[1] and x.groups % count:
            raise ModelError(
                f"{x.groups} groups of {x.shape[1] // x.groups} inputs ({names[1]}) cannot be "
                f"split over {AXIS}={count} devices; choose int4:GROUP so that they can, or int8"
            )
        turned = PartitionSpec(*whole[::-1])
        return dataclasses.replace(x, codes=turned, scales=turned)

    return jax.tree.map(spec, params, part_axes(cfg, params), is_leaf=is_quantized)


def place(cfg: ModelConfig, params: dict, mesh: Mesh, split: bool) -> dict:
    """Params in the inference layout on a mesh, each device with its share or a whole copy.

    ``params`` may be a part of the tree, ``cfg`` is the whole model's.

    Raises:
      ModelError: the model cannot be split.
    """
    if not split:
        return put(params, NamedSharding(mesh, PartitionSpec()))
    count = mesh.shape[AXIS]
    split_config(cfg, count)  # refuses what does not divide
    if "layers" in params:
        params = split_layers(cfg, params, count)
    specs = param_specs(cfg, params, count)
    return put(params, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))


def put(tree: Any, where: Any) -> Any:
    """``jax.device_put`` that takes devices of other processes, too, which have the same tree.

    ``where`` is a sharding, or a tree of them.
    """
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(where)):
        return jax.device_put(tree, where)
    return jax.tree.map(
        lambda sharding, part: jax.tree.map(lambda x: put_whole(x, sharding), part), where, tree
    )


def put_whole(x: Array, sharding: NamedSharding) -> Array:
    """An array that every process has whole, where the sharding says; always a copy."""
    whole = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: whole[index])


def adapter_specs(cfg: ModelConfig, adapters: dict) -> dict:
    """Where each adapter in the inference layout lies: split as its weight, the rank never."""
    axes = param_axes(cfg, fused=True)["layers"]["0"]

    def pair(part: str, name: str) -> dict:
        outputs, inputs = (RULES[axis] for axis in axes[part][name]["weight"])
        return {"down": PartitionSpec(None, inputs), "up": PartitionSpec(outputs, None)}

    layers = {
        i: {part: {name: pair(part, name) for name in own} for part, own in block.items()}
        for i, block in adapters["layers"].items()
    }
    return {"embed": PartitionSpec(), "layers": layers}


def place_adapters(cfg: ModelConfig, adapters: dict, mesh: Mesh, split: bool) -> dict:
    """Adapters in the inference layout on a mesh, as :func:`place`; there may be none."""
    if not adapters or not split:
        return put(adapters, NamedSharding(mesh, PartitionSpec()))
    adapters, specs = split_layers(cfg, adapters, mesh.shape[AXIS]), adapter_specs(cfg, adapters)
    return put(adapters, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))


def split_layers(cfg: ModelConfig, params: dict, count: int) -> dict:
    """Params whose joined products (q, k, v; gate, up) stand device by device, not part by part.

    Adapters likewise.
    """
    layers = {i: _by_device(cfg, block, count) for i, block in params["layers"].items()}
    return params | {"layers": layers}


def _by_device(cfg: ModelConfig, block: dict, count: int) -> dict:
    queries, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    copies = max(count // cfg.num_kv_heads, 1)

    def repeated(x: Array) -> Array:
        heads = x.reshape(cfg.num_kv_heads, cfg.head_dim, *x.shape[1:])
        return jnp.repeat(heads, copies, axis=0).reshape(-1, *x.shape[1:])

    def join(*parts: Array) -> Array:
        shares = [part.reshape(count, -1, *part.shape[1:]) for part in parts]
        joined = jnp.concatenate(shares, axis=1)
        return joined.reshape(-1, *joined.shape[2:])

    def qkv(x: Array) -> Array:
        q, k, v = jnp.split(x, [queries, queries + keys])
        return join(q, repeated(k), repeated(v))

    joined = {"qkv": qkv, "gate_up": lambda x: join(*jnp.split(x, 2))}

    def rearranged(name: str, module: Any) -> Any:
        if name not in joined:
            return module
        # All that a product has begins with its outputs, but an adapter's way down.
        function = functools.partial(by_output, joined[name])
        return {key: x if key == DOWN else function(x) for key, x in module.items()}

    return {
        part: {name: rearranged(name, module) for name, module in modules.items()}
        for part, modules in block.items()
    }
