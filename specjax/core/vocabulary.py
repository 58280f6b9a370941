"""Reductions over the vocabulary, of which each device may have only a share.

A model that is split over devices has a share of the logits on each. A round that is traced inside
:func:`split_over` leaves them there. Arrays with a vocabulary axis are then shares, and the
functions below add the exchange between devices to what they do on one: a few numbers per row.
Everywhere else the axis is whole and nothing is added. Each share has as many ids as the others,
in the order of the devices. Ids that only pad the last one have logit −inf.

Code that may run in such a round reduces the vocabulary only by this module and
:mod:`specjax.core.probs`.

Axis legend: v ids of a device's share, V vocabulary (v, where it is whole), ``...`` leading axes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.sharding import AXIS

# What JAX keeps compiled depends on it, as on a function's arguments.
_shares = jax.make_user_context(default_value=1)
_ACROSS = {jnp.sum: jax.lax.psum, jnp.max: jax.lax.pmax, jnp.min: jax.lax.pmin}


def split_over(count: int) -> AbstractContextManager:
    """A context for tracing: each of ``count`` devices has a share of the vocabulary.

    The devices are those of the mesh axis ``model``, inside ``shard_map``. 1: it is whole.
    """
    return _shares(count)


def is_split() -> bool:
    """Whether devices have shares, in what is being traced."""
    return _shares.value > 1


def share_size(vocab: int) -> int:
    """v of a vocabulary of ``vocab`` ids."""
    return -(-vocab // _shares.value)  # rounded up


def size(width: int) -> int:
    """The ids that all devices have together, padding included, by v."""
    return width * _shares.value


def ids(width: int) -> Int[Array, "v"]:
    """The ids of this device's share."""
    if not is_split():
        return jnp.arange(width)
    return jnp.arange(width) + first_id(width)


def first_id(width: int) -> Int[Array, ""] | int:
    """The first of them."""
    return own_number() * width


def own_number() -> Int[Array, ""] | int:
    """Which share this device has, counted from 0."""
    return jax.lax.axis_index(AXIS) if is_split() else 0


def own_share(x: Float[Array, "... V"]) -> Float[Array, "... v"]:
    """This device's share of what all devices have whole; 0 at ids that pad it."""
    width = share_size(x.shape[-1])
    padding = [(0, 0)] * (x.ndim - 1) + [(0, size(width) - x.shape[-1])]
    return jax.lax.dynamic_slice_in_dim(jnp.pad(x, padding), first_id(width), width, axis=-1)


# --- reductions --------------------------------------------------------------------------------


def across(reduce: Callable[..., Array], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """What each device has reduced by ``jnp.sum``, ``jnp.max`` or ``jnp.min``, for all of them."""
    if not is_split():
        return x
    return _ACROSS[reduce](x, AXIS)


def total(x: Float[Array, "... v"], keepdims: bool = False) -> Float[Array, "..."]:
    """The sum over the vocabulary."""
    return across(jnp.sum, jnp.sum(x, axis=-1, keepdims=keepdims))


def largest(x: Float[Array, "... v"], keepdims: bool = False) -> Float[Array, "..."]:
    """The largest value."""
    return across(jnp.max, jnp.max(x, axis=-1, keepdims=keepdims))


def least(x: Float[Array, "... v"], keepdims: bool = False) -> Float[Array, "..."]:
    """The least value. Padding counts: mask it, as all ids of logit −inf."""
    return across(jnp.min, jnp.min(x, axis=-1, keepdims=keepdims))


def argmax(x: Float[Array, "... v"]) -> Int[Array, "..."]:
    """The id of the largest value, the lowest on a tie."""
    own = jnp.argmax(x, axis=-1)
    if not is_split():
        return own
    device = jnp.argmax(gathered(jnp.max(x, axis=-1)), axis=0)
    return from_device(own + first_id(x.shape[-1]), device)


def top_k(x: Float[Array, "... v"], count: int, local: Callable[..., tuple[Array, Array]]):
    """The ``count`` largest values, in order, and their ids: the largest of each share's largest.

    ``local(x, count)`` finds those of one share, as ``jax.lax.top_k``.
    """
    if not is_split():
        return local(x, count)
    values, index = local(x, min(count, x.shape[-1]))
    values = _joined(values)
    found = _joined(index + first_id(x.shape[-1]))
    values, chosen = local(values, count)
    return values, jnp.take_along_axis(found, chosen, axis=-1)


def gathered(x: Float[Array, "..."]) -> Float[Array, "n ..."]:
    """``x`` of each of the n devices."""
    return jax.lax.all_gather(x, AXIS)


def from_device(x: Int[Array, "..."], device: Int[Array, "..."]) -> Int[Array, "..."]:
    """For each entry, the ``x`` of its ``device``."""
    return across(jnp.sum, jnp.where(device == own_number(), x, 0))


def _joined(x: Array) -> Array:
    """The last axes of all devices, one after the other."""
    return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)
