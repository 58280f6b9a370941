"""One model split over several devices: which axes of its weights, and what modules do then.

Attention heads and MLP columns are split along a mesh axis. A block sums its partial products
twice, after attention and after the MLP (Megatron-LM, arXiv 1909.08053, §3). Embedding and head are
split by vocabulary, padded to a multiple of the devices. Each weight names its axes where it is
created; :data:`RULES` says what becomes of each axis. The functions that a module calls run inside
``shard_map``, and do nothing for a model that is not split (``cfg.shards == 1``).

Axis legend: B rows, N tokens, D hidden size, V vocabulary, v a device's share of it.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax._util.errors import SplitError
from specjax.models.adapters import ReplacedRows
from specjax.models.config import ModelConfig
from specjax.models.quantized import Quantized

AXIS = "model"
FSDP = "fsdp"  # of a mesh for training: devices along it have different rows, and share the params
# Smaller arrays are not split along FSDP: to gather them costs more than a share saves.
SMALLEST_SHARED = 1 << 12  # elements
PARTIAL_SUMS = "partial sums"  # the scope of sums over devices in a compiled program
EXPERTS = "experts"  # the first axis of the weights of experts, each of which has one of its own
VOCABULARY = "vocab"  # the first axis of tables: embedding and head
RULES = {  # the mesh axis that a weight's axis is split along; None: each device has all of it
    VOCABULARY: AXIS,
    "heads": AXIS,  # of queries, keys or values, each with its whole size
    "columns": AXIS,  # of the MLP
    "hidden": None,
    "embedding": None,  # of a row of the tables: the hidden size, or less
    "head": None,  # the entries of one head
    EXPERTS: AXIS,
    "expert_columns": None,
    "router": None,
    "latent": None,
    "positions": None,
    "logits": None,  # what is added to the logits of the whole vocabulary
}


def split_config(cfg: ModelConfig, count: int) -> ModelConfig:
    """The config of one device's share: heads and MLP columns are counted per device.

    If there are fewer key heads than devices, several devices have the same one.

    Raises:
      SplitError: ``count`` does not divide the heads or the columns.
    """
    fits = {
        "num_heads": cfg.num_heads % count == 0,
        "num_kv_heads": cfg.num_kv_heads % count == 0 or count % cfg.num_kv_heads == 0,
        "intermediate_size": cfg.intermediate_size % count == 0,
    }
    experts = cfg.experts
    if experts is not None and (experts.count % count or experts.shared_size % count):
        shared = f", and {experts.shared_size} columns of a shared one," * bool(experts.shared_size)
        raise SplitError(
            f"{experts.count} experts{shared} cannot be split over {AXIS}={count} devices; choose "
            "a number that divides them"
        )
    if cfg.qk_norm in ("heads", "all") and cfg.num_kv_heads % count:
        fits["num_kv_heads"] = False  # their norm's weights have no copies
    for name, fit in fits.items():
        if not fit:
            raise SplitError(
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
    """How a weight is split over ``count`` devices.

    A table whose rows ``count`` does not divide is not split: on a mesh they are padded before.
    """
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        if axis == VOCABULARY and size % count:
            spec.append(None)
        else:
            spec.append(RULES[axis])
    return PartitionSpec(*spec)


def constrain(x: Array, where: NamedSharding | None) -> Array:
    """``x`` with this sharding; None: the compiler's choice."""
    if where is None:
        return x
    return jax.lax.with_sharding_constraint(x, where)


def splits_tokens(rows: NamedSharding | None) -> bool:
    """Whether the sharding of a batch ``[B, T]`` splits the tokens of a row, too."""
    return rows is not None and len(rows.spec) > 1 and rows.spec[1] is not None


def model_devices(rows: NamedSharding | None) -> int:
    """The devices of a batch's mesh that share each copy of a model's heads and columns."""
    return 1 if rows is None else rows.mesh.shape.get(AXIS, 1)


def head_axis(rows: NamedSharding) -> str | None:
    """The mesh axis that heads are split over in training; None: each device has all of them."""
    return AXIS if model_devices(rows) > 1 else None


def repeat_heads(x: Float[Array, "B N K E"], count: int) -> Float[Array, "B N k E"]:
    """Keys or values of which ``count`` devices can have equal shares: copied if they are fewer."""
    heads = x.shape[2]
    return x if heads % count == 0 else jnp.repeat(x, count // heads, axis=2)


def split_by_heads(
    x: Float[Array, "B N H E"], rows: NamedSharding | None, whole: bool = False
) -> Float[Array, "B N h E"]:
    """Queries, keys or values in training: rows as ``rows`` says, heads over :data:`AXIS`.

    ``whole``: of its rows a device has every token, as attention needs keys and values. If there
    are fewer heads than devices, several devices get the same one.
    """
    if rows is None or not (splits_tokens(rows) or model_devices(rows) > 1):
        return x
    x = repeat_heads(x, model_devices(rows))
    spec = rows.spec[0], None if whole or len(rows.spec) < 2 else rows.spec[1], head_axis(rows)
    return constrain(x, NamedSharding(rows.mesh, PartitionSpec(*spec)))


def between_blocks(rows: NamedSharding | None, tokens: int) -> NamedSharding | None:
    """The sharding of ``[B, N, D]`` between two blocks: devices of a model share the tokens, too.

    Otherwise each would store the same for the backward pass. A block gathers its tokens, and its
    last sum gives each device its own alone (sequence parallelism, Korthikanti et al. 2022, arXiv
    2205.05198, §4.2.2). Within a block, norms and residuals are still on all of them. Tokens that
    do not divide stay whole.
    """
    devices = model_devices(rows)
    if rows is None or devices == 1:
        return rows
    own = rows.spec[1] if splits_tokens(rows) else None
    if tokens % (devices * (rows.mesh.shape[own] if own else 1)):
        return rows
    return NamedSharding(rows.mesh, PartitionSpec(rows.spec[0], (own, AXIS) if own else AXIS))


def axes_of(rows: NamedSharding) -> tuple[str, ...]:
    """The mesh axes that a batch is split over."""
    names: list[str] = []
    for entry in rows.spec:
        names += [entry] if isinstance(entry, str) else entry or ()
    return tuple(names)


@jax.named_scope(PARTIAL_SUMS)
def psum_shards(x: Float[Array, "..."], shards: int) -> Float[Array, "..."]:
    """The sum of the devices' partial products, on every device."""
    if shards == 1:
        return x
    return jax.lax.psum(x, AXIS)


def own_part(x: Array | np.ndarray, shards: int) -> Array:
    """This device's share ``[n / shards, ...]`` of an array ``[n, ...]`` that all devices have."""
    if shards == 1:
        return jnp.asarray(x)
    size = x.shape[0] // shards
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), jax.lax.axis_index(AXIS) * size, size)


def own_entries(x: Array | np.ndarray, shards: int) -> Array | np.ndarray:
    """:func:`own_part` of an array ``[V]`` with an entry per id, padded as the tables are."""
    if shards == 1:
        return x
    return own_part(jnp.pad(x, (0, -x.shape[0] % shards)), shards)


@jax.named_scope(PARTIAL_SUMS)
def look_up(
    table: Float[Array, "v D"] | Quantized | ReplacedRows, ids: Int[Array, "B N"], rows: int
) -> Float[Array, "B N D"]:
    """The vectors of ``ids`` from a table of ``rows`` rows, of which a device may have a share.

    Padding ids are out of range. They read the nearest row, where ``take`` would fill in NaN.
    """
    if isinstance(table, ReplacedRows):
        return table.replace_vectors(ids, look_up(table.base, ids, rows))
    share = table.shape[0]
    if share == rows:
        return _take_rows(table, ids)
    # Each id is in one device's share; the others contribute zeros to the sum.
    local_ids = jnp.clip(ids, 0, rows - 1) - jax.lax.axis_index(AXIS) * share
    vectors = _take_rows(table, local_ids)
    is_local = (local_ids >= 0) & (local_ids < share)
    return jax.lax.psum(jnp.where(is_local[..., None], vectors, 0), AXIS)


def look_up_split(
    table: Float[Array, "V D"] | ReplacedRows,
    ids: Int[Array, "B N"],
    count: int,
    rows: NamedSharding | None,
) -> Float[Array, "B N D"]:
    """:func:`look_up` of whole arrays, of which each device computes its part (training).

    Args:
      count: V, the rows of the table.
      rows: the sharding of ``ids``; None: on one device.
    """
    if isinstance(table, ReplacedRows):
        return table.replace_vectors(ids, look_up_split(table.base, ids, count, rows))
    if rows is None or model_devices(rows) == 1:
        return look_up(table, ids, count)
    own_ids = PartitionSpec(*rows.spec)
    table = split_vocabulary(table, rows)
    columns = fsdp_axis(table.shape, rows.mesh.shape.get(FSDP, 1), split=0)
    run = jax.shard_map(
        lambda share, ids: look_up(gather_shares(share, columns), ids, count),
        mesh=rows.mesh,
        in_specs=(PartitionSpec(AXIS, FSDP if columns else None), own_ids),
        out_specs=own_ids,
    )
    return run(table, ids)


def fsdp_axis(shape: tuple[int, ...], devices: int, split: int | None = None) -> int | None:
    """The axis of a parameter that FSDP splits: the longest one that ``devices`` divides.

    It is another one than ``split``. None: the parameter is whole on each device.
    """
    if devices == 1 or math.prod(shape) < SMALLEST_SHARED:
        return None
    divisible = [i for i, size in enumerate(shape) if size % devices == 0 and i != split]
    return max(divisible, key=lambda axis: shape[axis], default=None)


def share_spec(axis: int | None) -> PartitionSpec:
    """The sharding of a parameter whose ``axis`` FSDP splits; None: it is whole."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, FSDP)


def gather_shares(x: Array, axis: int | None) -> Array:
    """A parameter from each device's share along FSDP; its gradient is reduced to shares."""
    return x if axis is None else jax.lax.all_gather(x, FSDP, axis=axis, tiled=True)


def split_vocabulary(
    table: Float[Array, "V ..."], rows: NamedSharding | None
) -> Float[Array, "v ..."]:
    """A whole table, or one value per id, with each device's share of the ids on it (training).

    Zeros pad it to a multiple of the devices. Without a mesh that splits models it stays as it is.
    """
    devices = model_devices(rows)
    if rows is None or devices == 1:
        return table
    pad = -table.shape[0] % devices
    if pad:
        # Stored along another axis, so it has to be whole once.
        table = constrain(table, NamedSharding(rows.mesh, PartitionSpec()))
        table = jnp.pad(table, ((0, pad), *[(0, 0)] * (table.ndim - 1)))
    columns = fsdp_axis(table.shape, rows.mesh.shape.get(FSDP, 1), split=0)
    spec = (AXIS, FSDP) if columns else (AXIS,)
    return constrain(table, NamedSharding(rows.mesh, PartitionSpec(*spec)))


def _take_rows(
    table: Float[Array, "v D"] | Quantized, ids: Int[Array, "B N"]
) -> Float[Array, "B N D"]:
    if isinstance(table, Quantized):
        return table.take(ids)
    return jnp.take(table, ids, axis=0, mode="clip")


def gather_logits(logits: Float[Array, "B N v"], vocab: int) -> Float[Array, "B N V"]:
    """The logits of the whole vocabulary on every device, from each device's share.

    Those of rows that only pad the table are dropped, so no token of them can be drawn.
    """
    if logits.shape[-1] == vocab:
        return logits
    # Gathered along a new first axis: along the vocabulary, TPUs would choose a layout with the
    # tokens innermost, and pad those to 128.
    shares = jax.lax.all_gather(logits, AXIS)
    return jnp.moveaxis(shares, 0, -2).reshape(*logits.shape[:-1], -1)[..., :vocab]
