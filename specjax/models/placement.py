"""Params on a mesh: where each lies, and the order of what is split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from specjax.models.config import ModelConfig
from specjax.models.forward import param_axes
from specjax.models.sharding import AXIS, partition, split_config


def param_specs(cfg: ModelConfig, params: dict, count: int) -> dict:
    """Where each parameter in the inference layout lies: a tree of partition specs.

    ``params`` may be a part of the tree.
    """
    axes = param_axes(cfg, fused=True)
    alike = dict.fromkeys(params.get("layers", ()), axes["layers"]["0"])
    axes = {name: alike if name == "layers" else axes[name] for name in params}
    return jax.tree.map(lambda x, names: partition(names, x.shape, count), params, axes)


def place(cfg: ModelConfig, params: dict, mesh: Mesh, split: bool) -> dict:
    """Params in the inference layout on a mesh, each device with its share or a whole copy.

    ``params`` may be a part of the tree, ``cfg`` is the whole model's.

    Raises:
      ModelError: the model cannot be split.
    """
    if not split:
        return jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    count = mesh.shape[AXIS]
    split_config(cfg, count)  # refuses what does not divide
    if "layers" in params:
        params = split_layers(cfg, params, count)
    specs = param_specs(cfg, params, count)
    return jax.device_put(params, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))


def split_layers(cfg: ModelConfig, params: dict, count: int) -> dict:
    """Params whose joined products (q, k, v; gate, up) stand device by device, not part by part."""
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

    attention, mlp = block["attention"], block["mlp"]
    attention = attention | {"qkv": jax.tree.map(qkv, attention["qkv"])}
    if "gate_up" in mlp:
        mlp = mlp | {"gate_up": jax.tree.map(lambda x: join(*jnp.split(x, 2)), mlp["gate_up"])}
    return block | {"attention": attention, "mlp": mlp}
