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

    def by_output(self, function: Callable[[Any], Any]) -> PerOutput:
        return dataclasses.replace(self, codes=function(self.codes), scales=function(self.scales))

    def joined(self, others: Sequence[PerOutput]) -> PerOutput:
        codes = jnp.concatenate([weight.codes for weight in (self, *others)])
        scales = jnp.concatenate([weight.scales for weight in (self, *others)])
        return dataclasses.replace(self, codes=codes, scales=scales)

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
      offsets: ``[G, O]``; None: they are zero. A zero point z is the offset ``-z · scale``.
      order: int32 ``[I]``, a permutation: row i of the codes is of input ``order[i]``. None: the
        inputs are in their own order. Codes are stored in another one where a group's inputs are
        not adjacent (the act-order of GPTQ, arXiv 2210.17323).
    """

    offsets: Float[Array, "G O"] | None = None
    order: Int[Array, "I"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[::-1]

    @property
    def groups(self) -> int:
        return self.scales.shape[0]

    def by_group(self, dtype: DTypeLike) -> Num[Array, "G I/G O"]:
        """The codes with an axis of groups."""
        return self.codes.reshape(self.groups, -1, self.codes.shape[-1]).astype(dtype)

    def dense(self, dtype: DTypeLike) -> Float[Array, "O I"]:
        weight = self.dense_in_order(dtype)
        if self.order is None:
            return weight
        return jnp.zeros_like(weight).at[:, self.order].set(weight)

    def dense_in_order(self, dtype: DTypeLike) -> Float[Array, "O I"]:
        """:meth:`dense` with its inputs in the order of the codes."""
        # Scales may have more digits than `dtype`: bfloat16 would round them.
        wide = jnp.promote_types(dtype, self.scales.dtype)
        grouped = self.by_group(wide) * self.scales[:, None].astype(wide)
        if self.offsets is not None:
            wide = jnp.promote_types(wide, self.offsets.dtype)
            grouped = grouped.astype(wide) + self.offsets[:, None].astype(wide)
        return grouped.reshape(self.codes.shape).T.astype(dtype)

    def by_output(self, function: Callable[[Any], Any]) -> Grouped:
        return self._map([self], lambda leaves: function(leaves[0].T).T)

    def joined(self, others: Sequence[Grouped]) -> Grouped:
        return self._map([self, *others], lambda leaves: jnp.concatenate(leaves, axis=1))

    def _map(self, weights: Sequence[Grouped], function: Callable[[list[Any]], Any]) -> Grouped:
        """A copy with ``function`` of all ``weights``' codes, of their scales, of their offsets."""
        offsets = None
        if self.offsets is not None:
            offsets = function([weight.offsets for weight in weights])
        return dataclasses.replace(
            self,
            codes=function([weight.codes for weight in weights]),
            scales=function([weight.scales for weight in weights]),
            offsets=offsets,
        )

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... I"]:
        def columns(leaves: list[Any]) -> Any:
            return jnp.take(leaves[0], ids.reshape(-1), axis=1, mode="clip")

        taken = self._map([self], columns)
        rows = taken.dense(jnp.float32).astype(self.dtype)
        return rows.reshape(*ids.shape, rows.shape[-1])


def is_quantized(weight: Any) -> bool:
    """Whether a leaf of the params is a quantized weight."""
    return isinstance(weight, Quantized)


def by_output(function: Callable[[Any], Any], weight: Any) -> Any:
    """A weight with ``function`` applied along its outputs; it may be quantized or an array."""
    if is_quantized(weight):
        return weight.by_output(function)
    return function(weight)


def join(weights: Sequence[Any]) -> Any:
    """Weights, or biases, one after the other along their outputs.

    Quantized weights of different forms have no common one: the result is then an array.
    """
    first = weights[0]
    if not any(map(is_quantized, weights)):
        return jnp.concatenate(weights)
    if all(have_same_form(first, other) for other in weights[1:]):
        return first.joined(weights[1:])
    dtype = jnp.result_type(*(weight.dtype for weight in weights))
    dense = [weight.dense(dtype) if is_quantized(weight) else weight for weight in weights]
    return jnp.concatenate(dense)


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
    same_offsets = (first.offsets is None) == (other.offsets is None)
    same_codes = first.codes.dtype == other.codes.dtype and first.groups == other.groups
    return same_codes and same_offsets and same_order


def cast_params(dtype: DTypeLike, params: Any) -> Any:
    """Params in ``dtype``: arrays are cast, quantized weights are computed in it."""

    def cast(x: Any) -> Any:
        if is_quantized(x):
            return dataclasses.replace(x, dtype=jnp.dtype(dtype))
        return x.astype(dtype)

    return jax.tree.map(cast, params, is_leaf=is_quantized)
