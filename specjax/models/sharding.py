"""One model over several devices: the share of each parameter that a device holds.

Heads and MLP columns are split along a mesh axis, and a block sums its partial products twice,
behind attention and behind the MLP (Megatron-LM, arXiv 1909.08053, §3); embedding and head are
split by vocabulary where it divides. The functions that a module calls run inside ``shard_map``
and do nothing for a model that is whole (``cfg.shards == 1``).

Axis legend: B rows, N tokens, D hidden size, V vocabulary, v a device's share of it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax.errors import ModelError
from specjax.models.config import ModelConfig

AXIS = "model"
ROW_WISE = {"qkv", "gate_up", "up"}  # split along what they give
COLUMN_WISE = {"out", "down"}  # split along what they read: their products are partial sums
TABLES = ("embed", "head")


def split_config(cfg: ModelConfig, count: int) -> ModelConfig:
    """A device's share of a whole model: heads and MLP columns are counted per device.

    Where there are fewer key heads than devices, several devices hold the same one.

    Raises:
      ModelError: heads or columns do not divide.
    """
    fits = {
        "num_heads": cfg.num_heads % count == 0,
        "num_kv_heads": cfg.num_kv_heads % count == 0 or count % cfg.num_kv_heads == 0,
        "intermediate_size": cfg.intermediate_size % count == 0,
    }
    for name, fit in fits.items():
        if not fit:
            raise ModelError(
                f"{name}={getattr(cfg, name)} cannot be split over {AXIS}={count} "
                "devices; choose a number that divides it"
            )
    return dataclasses.replace(
        cfg,
        num_heads=cfg.num_heads // count,
        num_kv_heads=max(cfg.num_kv_heads // count, 1),
        intermediate_size=cfg.intermediate_size // count,
        shards=count,
    )


def param_specs(params: dict, count: int) -> dict:
    """Where each parameter of a whole model lies: a tree of partition specs."""

    def spec(path, leaf) -> PartitionSpec:
        names = [key.key for key in path]
        if names[0] in TABLES:
            return PartitionSpec(AXIS) if leaf.shape[0] % count == 0 else PartitionSpec()
        if ROW_WISE & set(names):
            return PartitionSpec(AXIS)
        if COLUMN_WISE & set(names) and names[-1] == "weight":
            return PartitionSpec(None, AXIS)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


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
    specs = param_specs(params, count)
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


def total(x: Float[Array, "..."], shards: int) -> Float[Array, "..."]:
    """The sum of the devices' partial products, on each of them."""
    return x if shards == 1 else jax.lax.psum(x, AXIS)


def own_part(x: Array, shards: int) -> Array:
    """A device's share ``[n / shards, ...]`` of what every device knows whole, ``[n, ...]``."""
    if shards == 1:
        return jnp.asarray(x)
    size = x.shape[0] // shards
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), jax.lax.axis_index(AXIS) * size, size)


def look_up(table: Float[Array, "v D"], ids: Int[Array, "B N"], rows: int) -> Float[Array, "B N D"]:
    """Rows of a table of ``rows``, of which a device may hold a share.

    Padding ids (out of range by convention) read one, instead of NaN fill.
    """
    held = table.shape[0]
    if held == rows:
        return jnp.take(table, ids, axis=0, mode="clip")
    own = jnp.clip(ids, 0, rows - 1) - jax.lax.axis_index(AXIS) * held
    found = jnp.take(table, own, axis=0, mode="clip")
    here = (own >= 0) & (own < held)
    return jax.lax.psum(jnp.where(here[..., None], found, 0), AXIS)


def gather_logits(logits: Float[Array, "B N v"], vocab: int) -> Float[Array, "B N V"]:
    """The whole vocabulary's logits on every device, from each one's share."""
    if logits.shape[-1] == vocab:
        return logits
    # Gathered along a new first axis: along the vocabulary, TPUs would lay it out with the
    # tokens innermost and pad those to 128.
    shares = jax.lax.all_gather(logits, AXIS)
    return jnp.moveaxis(shares, 0, -2).reshape(*logits.shape[:-1], vocab)
