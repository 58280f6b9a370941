"""Quantized weights: codes of 8 or 4 bits and their scales, in the place of an array.

Products with them are :func:`specjax.models.layers.linear`'s, look-ups
:func:`specjax.models.sharding.look_up`'s; no other module knows that a weight is quantized. How
they are made: :mod:`specjax.models.quantize`.

Axis legend: O outputs (V ids, in a table), I inputs, G groups of inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

_weight = functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("dtype",)
)


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """``dtype`` is what the weight counts as, the one that activations are computed in."""

    codes: Num[Array, "..."]
    scales: Float[Array, "..."]
    dtype: jnp.dtype

    def __getitem__(self, index: types.EllipsisType) -> Quantized:
        """Itself: modules read the value of a parameter as ``param[...]``."""
        return self


@_weight
@dataclasses.dataclass(frozen=True, eq=False)
class PerOutput(Quantized):
    """``codes [O, I]``, ``scales [O]``: ``w[o, i] = codes[o, i] · scales[o]``.

    The scale may stand behind the product's sum.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def groups(self) -> int:
        return 1

    def dense(self, dtype: jnp.dtype) -> Float[Array, "O I"]:
        """The weight that it stands for."""
        return self.codes.astype(dtype) * self.scales[:, None].astype(dtype)

    def by_output(self, function: Callable[[Any], Any]) -> PerOutput:
        """With its outputs rearranged by a function of the first axis."""
        return dataclasses.replace(self, codes=function(self.codes), scales=function(self.scales))


@_weight
@dataclasses.dataclass(frozen=True, eq=False)
class Grouped(Quantized):
    """``codes [I, O]``, ``scales [G, O]``: ``w[o, i] = codes[i, o] · scales[i // (I/G), o]``.

    Inputs first: the product of one group is then a plain one of neighboring codes. With the
    outputs first, TPUs move every code before they multiply.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[::-1]

    @property
    def groups(self) -> int:
        return self.scales.shape[0]

    def by_group(self, dtype: jnp.dtype) -> Num[Array, "G I/G O"]:
        """The codes, one group after the other."""
        return self.codes.reshape(self.groups, -1, self.codes.shape[-1]).astype(dtype)

    def dense(self, dtype: jnp.dtype) -> Float[Array, "O I"]:
        """The weight that it stands for."""
        whole = self.by_group(dtype) * self.scales[:, None].astype(dtype)
        return whole.reshape(self.codes.shape).T

    def by_output(self, function: Callable[[Any], Any]) -> Grouped:
        """With its outputs rearranged by a function of the first axis."""
        codes, scales = function(self.codes.T).T, function(self.scales.T).T
        return dataclasses.replace(self, codes=codes, scales=scales)


def is_quantized(weight: Any) -> bool:
    """Whether a leaf of the params is a quantized weight."""
    return isinstance(weight, Quantized)


def by_output(function: Callable[[Any], Any], weight: Any) -> Any:
    """``function`` of a weight's first axis, be it quantized or an array."""
    return weight.by_output(function) if is_quantized(weight) else function(weight)


def counted_as(dtype: jnp.dtype, params: Any) -> Any:
    """Params whose quantized weights count as ``dtype``, and whose other arrays are of it."""

    def cast(x: Any) -> Any:
        quantized = is_quantized(x)
        return dataclasses.replace(x, dtype=jnp.dtype(dtype)) if quantized else x.astype(dtype)

    return jax.tree.map(cast, params, is_leaf=is_quantized)
