"""Quantized weights: codes of 8 or 4 bits and their scales, in the place of an array.

:func:`specjax.models.layers.linear` computes products with them, and
:func:`specjax.models.sharding.look_up` looks rows up; no other module knows that a weight is
quantized. :mod:`specjax.models.quantization` makes them from arrays.
:mod:`specjax.models.hf.quantizers` makes them from what other libraries quantized.

Axis legend: O outputs (V ids, in a table), I inputs, G groups of inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

_register_weight = functools.partial(jax.tree_util.register_dataclass, meta_fields=("dtype",))


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """``dtype`` is the one that activations are computed in: what an array's dtype would be."""

    codes: Num[Array, "..."]
    scales: Float[Array, "..."]
    dtype: jnp.dtype

    def __getitem__(self, index: types.EllipsisType) -> Self:
        """Itself: modules read the value of a parameter as ``param[...]``."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """``(O, I)``, that of the weight as an array."""
        raise NotImplementedError

    def dense(self, dtype: DTypeLike) -> Float[Array, "O I"]:
        """The weight as an array."""
        raise NotImplementedError

    def by_output(self, function: Callable[[Any], Any]) -> Self:
        """A copy with its outputs rearranged; ``function`` gets arrays with the outputs first."""
        raise NotImplementedError

    def joined(self, others: Sequence[Self]) -> Self:
        """Its outputs and then those of others, which have the same form."""
        raise NotImplementedError

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... I"]:
        """The rows of some outputs, in ``dtype``. An id out of range reads the nearest row."""
        raise NotImplementedError

    def part(self, first: Any, count: int) -> Self:
        """The weight of ``count`` outputs from ``first`` on, which may be traced."""
        raise NotImplementedError


@functools.partial(_register_weight, data_fields=("codes", "scales"))
@dataclasses.dataclass(frozen=True, eq=False)
class PerOutput(Quantized):
    """``codes [O, I]``, ``scales [O]``: ``w[o, i] = codes[o, i] · scales[o]``.

    A scale is the same for all inputs, so a product may apply it after its sum.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def groups(self) -> int:
        return 1

    def dense(self, dtype: DTypeLike) -> Float[Array, "O I"]:
        return self.codes.astype(dtype) * self.scales[:, None].astype(dtype)

    def part(self, first: Any, count: int) -> PerOutput:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), self)

    def by_output(self, function: Callable[[Any], Any]) -> PerOutput:
        return dataclasses.replace(self, codes=function(self.codes), scales=function(self.scales))

    def joined(self, others: Sequence[PerOutput]) -> PerOutput:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), self, *others)

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... I"]:
        codes = jnp.take(self.codes, ids, axis=0, mode="clip")
        scales = jnp.take(self.scales, ids, axis=0, mode="clip")
        return (codes.astype(jnp.float32) * scales[..., None]).astype(self.dtype)


@functools.partial(_register_weight, data_fields=("codes", "scales", "offsets", "order"))
@dataclasses.dataclass(frozen=True, eq=False)
class Grouped(Quantized):
    """``w[o, i] = codes[i, o] · scales[g, o] + offsets[g, o]``, ``g = i // (I/G)``.

    The shapes are ``codes [I, O]`` and ``scales [G, O]``. Inputs come first: the product of one
    group is then a plain one of adjacent codes. With the outputs first, TPUs would transpose all
    codes before they multiply.

    Attributes:
      scales: an array, or a weight of groups itself (codes ``[G, O]``): blocks of groups then have
        one more scale, as in GGUF's K-quants. Offsets may be one, too.
      offsets: ``[G, O]``; None: they are zero. A zero point z is the offset ``-z · scale``.
      order: int32 ``[I]``, a permutation: row i of the codes is of input ``order[i]``. None: the
        inputs are in their own order. Codes are stored in another one where a group's inputs are
        not adjacent (the act-order of GPTQ, arXiv 2210.17323).
    """

    scales: Float[Array, "G O"] | Grouped
    offsets: Float[Array, "G O"] | Grouped | None = None
    order: Int[Array, "I"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[::-1]

    @property
    def groups(self) -> int:
        scales = self.scales
        return scales.codes.shape[0] if isinstance(scales, Grouped) else scales.shape[0]

    def group_scales(self) -> Float[Array, "G O"]:
        """The scales as an array; those that are codes themselves as float32."""
        return _as_array(self.scales)

    def group_offsets(self) -> Float[Array, "G O"] | None:
        """The offsets as an array, as :meth:`group_scales`; None if there are none."""
        return None if self.offsets is None else _as_array(self.offsets)

    def by_group(self, dtype: DTypeLike) -> Num[Array, "G I/G O"]:
        """The codes with an axis of groups."""
        codes = self.codes
        if codes.dtype == jnp.uint4:
            codes = codes.astype(jnp.int8)  # XLA for GPUs then stores less of the converted codes
        return codes.reshape(self.groups, -1, codes.shape[-1]).astype(dtype)

    def dense(self, dtype: DTypeLike) -> Float[Array, "O I"]:
        weight = self.dense_in_order(dtype)
        if self.order is None:
            return weight
        return jnp.zeros_like(weight).at[:, self.order].set(weight)

    def dense_in_order(self, dtype: DTypeLike) -> Float[Array, "O I"]:
        """:meth:`dense` with its inputs in the order of the codes."""
        # Scales may have more digits than `dtype`: bfloat16 would round them.
        scales = self.group_scales()
        offsets = self.group_offsets()
        wide = jnp.promote_types(dtype, scales.dtype)
        grouped = self.by_group(wide) * scales[:, None].astype(wide)
        if offsets is not None:
            wide = jnp.promote_types(wide, offsets.dtype)
            grouped = grouped.astype(wide) + offsets[:, None].astype(wide)
        return grouped.reshape(self.codes.shape).T.astype(dtype)

    def by_output(self, function: Callable[[Any], Any]) -> Grouped:
        return self._map(lambda x: function(x.T).T)

    def joined(self, others: Sequence[Grouped]) -> Grouped:
        return self._map(lambda *leaves: jnp.concatenate(leaves, axis=1), *others)

    def _map(self, function: Callable[..., Any], *others: Grouped) -> Grouped:
        """A copy with ``function`` of every array, which has the outputs last, except the order."""
        unordered = [dataclasses.replace(weight, order=None) for weight in (self, *others)]
        return dataclasses.replace(jax.tree.map(function, *unordered), order=self.order)

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... I"]:
        # Not `by_output`: that would transpose all codes for a few of them.
        taken = self._map(lambda x: jnp.take(x, ids.reshape(-1), axis=1, mode="clip"))
        rows = taken.dense(jnp.float32).astype(self.dtype)
        return rows.reshape(*ids.shape, rows.shape[-1])

    def part(self, first: Any, count: int) -> Grouped:
        return self._map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count, axis=1))

    def split_evenly(self, count: int) -> bool:
        """Whether ``count`` devices can share the inputs, and none shares a group."""
        return all(leaf.shape[0] % count == 0 for leaf in jax.tree.leaves(self))

    def cut(self, count: int) -> Grouped:
        """The same weight with ``count`` groups in the place of each."""

        def repeat(scales: Any) -> Any:
            return jnp.repeat(scales, count, axis=0)

        offsets = None if self.offsets is None else repeat(self.group_offsets())
        return dataclasses.replace(self, scales=repeat(self.group_scales()), offsets=offsets)

    def in_groups(self, groups: int) -> Grouped:
        """The same weight with int8 codes, more groups, and float32 scales and offsets."""
        repeats = groups // self.groups
        scales = jnp.repeat(self.group_scales().astype(jnp.float32), repeats, axis=0)
        offsets = self.group_offsets()
        if offsets is None:
            offsets = jnp.zeros_like(scales)
        else:
            offsets = jnp.repeat(offsets.astype(jnp.float32), repeats, axis=0)
        codes = self.codes.astype(jnp.int8)
        return dataclasses.replace(self, codes=codes, scales=scales, offsets=offsets)


def _as_array(scales: Float[Array, "G O"] | Grouped) -> Float[Array, "G O"]:
    if isinstance(scales, Grouped):
        return scales.dense_in_order(jnp.float32).T
    return scales


@functools.partial(_register_weight, data_fields=("parts",))
@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """Weights of the same inputs, one after the other along their outputs, in forms that differ.

    A file may keep v in more bits than q and k. A part may be an array.
    """

    parts: tuple[Any, ...]
    dtype: jnp.dtype

    def __getitem__(self, index: types.EllipsisType) -> Self:
        """Itself, as of every quantized weight."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dense(self, dtype: DTypeLike) -> Float[Array, "O I"]:
        """The weight as an array."""
        return jnp.concatenate([_dense(part, dtype) for part in self.parts])

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... I"]:
        """The rows of some outputs, as of every quantized weight."""
        return jnp.take(self.dense(self.dtype), ids, axis=0, mode="clip")

    def by_output(self, function: Callable[..., Any]) -> Any:
        """A copy with its outputs rearranged, in the one form that all parts fit.

        That is int8 codes with the finest groups of any part; an array if a part has no groups.
        """
        parts = self.parts
        if not all(isinstance(part, Grouped) and part.order is None for part in parts):
            return function(self.dense(self.dtype))
        groups = math.lcm(*(part.groups for part in parts))
        return by_output(function, join([part.in_groups(groups) for part in parts]))


def is_quantized(weight: Any) -> bool:
    """Whether a leaf of the params is a quantized weight."""
    return isinstance(weight, Quantized | Joined)


def by_output(function: Callable[[Any], Any], weight: Any) -> Any:
    """A weight with ``function`` applied along its outputs; it may be quantized or an array."""
    if is_quantized(weight):
        return weight.by_output(function)
    return function(weight)


def join(weights: Sequence[Any]) -> Any:
    """Weights, or biases, one after the other along their outputs.

    Weights of different forms stay apart in a :class:`Joined`.
    """
    first = weights[0]
    if not any(map(is_quantized, weights)):
        return jnp.concatenate(weights)
    if all(have_same_form(first, other) for other in weights[1:]):
        return first.joined(weights[1:])
    dtype = jnp.result_type(*(weight.dtype for weight in weights))
    return Joined(tuple(weights), jnp.dtype(dtype))


def _dense(weight: Any, dtype: DTypeLike) -> Float[Array, "O I"]:
    """A weight as an array; it may be one already."""
    return weight.dense(dtype) if is_quantized(weight) else weight.astype(dtype)


def have_same_form(first: Any, other: Any) -> bool:
    """Whether two weights differ only in their outputs, so that :func:`join` keeps their codes."""
    if type(first) is not type(other):
        return False
    if not is_quantized(first):
        return True
    if not isinstance(first, Grouped):
        return first.codes.dtype == other.codes.dtype
    same_order = first.order is None and other.order is None
    if first.order is not None and other.order is not None:
        same_order = np.array_equal(first.order, other.order)
    return same_order and _form(first) == _form(other)


def _form(weight: Grouped) -> tuple[Any, ...]:
    """Structure, dtypes and numbers of groups of a weight and of its scales."""
    unordered = dataclasses.replace(weight, order=None)
    leaves = jax.tree.leaves(unordered)
    return (
        jax.tree.structure(unordered),
        tuple(leaf.dtype for leaf in leaves),
        tuple(leaf.shape[0] for leaf in leaves),
    )


def cast_params(dtype: DTypeLike, params: Any) -> Any:
    """Params in ``dtype``: arrays are cast, quantized weights are computed in it."""

    def cast(x: Any) -> Any:
        if is_quantized(x):
            x = dataclasses.replace(x, dtype=jnp.dtype(dtype))
            if isinstance(x, Joined):
                x = dataclasses.replace(x, parts=cast_params(dtype, x.parts))
            return x
        return x.astype(dtype)

    return jax.tree.map(cast, params, is_leaf=is_quantized)
