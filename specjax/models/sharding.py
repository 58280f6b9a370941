"""One model over several devices: which axes of its weights are split, and what modules do then.

Heads and MLP columns are split along a mesh axis, and a block sums its partial products twice,
behind attention and behind the MLP (Megatron-LM, arXiv 1909.08053, §3); embedding and head are
split by vocabulary where it divides. Each weight names its axes where it is made; the rules say
here, once, what becomes of an axis. The functions that a module calls run inside ``shard_map``
and do nothing for a model that is whole (``cfg.shards == 1``).

Axis legend: B rows, N tokens, D hidden size, V vocabulary, v a device's share of it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax._util.errors import ModelError
from specjax.models.adapters import OwnRows
from specjax.models.config import ModelConfig
from specjax.models.quantized import PerOutput

AXIS = "model"
RULES = {  # the mesh axis that a weight's axis is split along; None: each device has all of it
    "vocab": AXIS,
    "heads": AXIS,  # of queries, keys or values, each with its whole size
    "columns": AXIS,  # of the MLP
    "hidden": None,
    "embedding": None,  # what a row of the tables holds: the hidden size, or less
    "head": None,  # the inside of one head
    "positions": None,
}


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


def partition(axes: tuple[str, ...], shape: tuple[int, ...], count: int) -> PartitionSpec:
    """Where a weight lies on ``count`` devices; a vocabulary that does not divide stays whole."""
    sizes = zip(axes, shape, strict=True)
    return PartitionSpec(*(None if a == "vocab" and n % count else RULES[a] for a, n in sizes))


def constrain(x: Array, where: NamedSharding | None) -> Array:
    """``x``, told to lie so; None: as the compiler likes."""
    return x if where is None else jax.lax.with_sharding_constraint(x, where)


def psum_shards(x: Float[Array, "..."], shards: int) -> Float[Array, "..."]:
    """The sum of the devices' partial products, on each of them."""
    return x if shards == 1 else jax.lax.psum(x, AXIS)


def own_part(x: Array, shards: int) -> Array:
    """A device's share ``[n / shards, ...]`` of what every device knows whole, ``[n, ...]``."""
    if shards == 1:
        return jnp.asarray(x)
    size = x.shape[0] // shards
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), jax.lax.axis_index(AXIS) * size, size)


def look_up(
    table: Float[Array, "v D"] | PerOutput | OwnRows, ids: Int[Array, "B N"], rows: int
) -> Float[Array, "B N D"]:
    """Rows of a table of ``rows``, of which a device may hold a share.

    Padding ids (out of range by convention) read one, instead of NaN fill.
    """
    if isinstance(table, OwnRows):
        return table.replaced(ids, look_up(table.base, ids, rows))
    held = table.shape[0]
    if held == rows:
        return _rows(table, ids)
    own = jnp.clip(ids, 0, rows - 1) - jax.lax.axis_index(AXIS) * held
    vectors = _rows(table, own)
    here = (own >= 0) & (own < held)
    return jax.lax.psum(jnp.where(here[..., None], vectors, 0), AXIS)


def _rows(table: Float[Array, "v D"] | PerOutput, ids: Int[Array, "B N"]) -> Float[Array, "B N D"]:
    if not isinstance(table, PerOutput):
        return jnp.take(table, ids, axis=0, mode="clip")
    codes, scales = (jnp.take(x, ids, axis=0, mode="clip") for x in (table.codes, table.scales))
    return (codes.astype(jnp.float32) * scales[..., None]).astype(table.dtype)


def gather_logits(logits: Float[Array, "B N v"], vocab: int) -> Float[Array, "B N V"]:
    """The whole vocabulary's logits on every device, from each one's share."""
    if logits.shape[-1] == vocab:
        return logits
    # Gathered along a new first axis: along the vocabulary, TPUs would lay it out with the
    # tokens innermost and pad those to 128.
    shares = jax.lax.all_gather(logits, AXIS)
    return jnp.moveaxis(shares, 0, -2).reshape(*logits.shape[:-1], vocab)
