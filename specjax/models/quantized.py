"""Quantized weights: codes of 8 or 4 bits and their scales, in the place of an array.

:func:`specjax.models.layers.linear` computes products with them, and
:func:`specjax.models.sharding.look_up` looks rows up; no other module knows that a weight is
quantized. :mod:`specjax.models.quantization` makes them.

Axis legend: O outputs (V ids, in a table), I inputs, G groups of inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

_register_weight = functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("dtype",)
)


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

    def by_output(self, function: Callable[[Any], Any]) -> Quantized:
        """A copy with its outputs rearranged; ``function`` gets arrays with the outputs first."""
        raise NotImplementedError


@_register_weight
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


@_register_weight
@dataclasses.dataclass(frozen=True, eq=False)
class Grouped(Quantized):
    """``codes [I, O]``, ``scales [G, O]``: ``w[o, i] = codes[i, o] · scales[i // (I/G), o]``.

    Inputs come first: the product of one group is then a plain one of adjacent codes. With the
    outputs first, TPUs would transpose all codes before they multiply.
    """

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
        grouped = self.by_group(dtype) * self.scales[:, None].astype(dtype)
        return grouped.reshape(self.codes.shape).T

    def by_output(self, function: Callable[[Any], Any]) -> Grouped:
        codes = function(self.codes.T).T
        scales = function(self.scales.T).T
        return dataclasses.replace(self, codes=codes, scales=scales)


def is_quantized(weight: Any) -> bool:
    """Whether a leaf of the params is a quantized weight."""
    return isinstance(weight, Quantized)


def by_output(function: Callable[[Any], Any], weight: Any) -> Any:
    """A weight with ``function`` applied along its outputs; it may be quantized or an array."""
    if is_quantized(weight):
        return weight.by_output(function)
    return function(weight)


def cast_params(dtype: DTypeLike, params: Any) -> Any:
    """Params in ``dtype``: arrays are cast, quantized weights are computed in it."""

    def cast(x: Any) -> Any:
        if is_quantized(x):
            return dataclasses.replace(x, dtype=jnp.dtype(dtype))
        return x.astype(dtype)

    return jax.tree.map(cast, params, is_leaf=is_quantized)
