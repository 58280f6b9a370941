"""Which products the kernel for CPUs computes, and the call.

The kernel is for decoding. A derivative is that of XLA's product, and so is its value. A product
that is mapped over (``vmap``) is XLA's, too.

Axis legend: i inputs, o outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax._util.platform import CPU_KERNELS_VARIABLE, platform
from specjax.models.cpu_kernels.building import kernels
from specjax.models.quantized import Grouped, PerOutput, is_quantized

LEAST_ENTRIES = 1 << 16  # of a weight: with a smaller one a call costs what it saves
ACTIVATIONS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
FACTORS = (*ACTIVATIONS, jnp.dtype(jnp.float16))  # scales and offsets
FOUR_BITS = (jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4))
INT8 = jnp.dtype(jnp.int8)

Weight = Array | PerOutput | Grouped


def problem() -> str | None:
    """Why XLA computes all products, in a few words; None: the kernel computes narrow ones."""
    if not platform().kernel_rows:
        return f"{CPU_KERNELS_VARIABLE} is 0, or there are several devices, or no CPU"
    return kernels().problem


def supports(x: Float[Array, "... i"], weight: Any) -> bool:
    """Whether the kernel computes this product: few rows, a known form, a large weight."""
    rows = math.prod(x.shape[:-1])
    if not 0 < rows <= platform().kernel_rows or x.dtype not in ACTIVATIONS:
        return False
    if math.prod(weight.shape) < LEAST_ENTRIES or not _has_known_form(weight, x.dtype):
        return False
    return bool(kernels().names)


def _has_known_form(weight: Any, dtype: jnp.dtype) -> bool:
    if isinstance(weight, PerOutput):
        return weight.codes.dtype == INT8 and weight.scales.dtype == jnp.float32
    if isinstance(weight, Grouped):
        # Two codes of 4 bits share a byte, so that an output must not start within one.
        halves_fit = weight.codes.dtype in FOUR_BITS and weight.shape[0] % 2 == 0
        factors = (weight.scales, weight.offsets)
        return (weight.codes.dtype == INT8 or halves_fit) and all(map(_are_factors, factors))
    return not is_quantized(weight) and weight.ndim == 2 and weight.dtype == dtype


def _are_factors(factors: Any) -> bool:
    """Whether the kernel reads these scales or offsets; None: there are none."""
    if isinstance(factors, Grouped):
        plain = factors.offsets is None and factors.order is None
        nested = isinstance(factors.scales, Grouped)
        return plain and not nested and factors.codes.dtype == INT8 and _are_factors(factors.scales)
    return factors is None or factors.dtype in FACTORS


def kernel_product(
    by_xla: Callable[[Array, Weight], Array],
) -> Callable[[Float[Array, "... i"], Weight], Float[Array, "... o"]]:
    """A function that computes ``x @ weight.T`` by the kernel.

    The weight is used as float32, and sums are float32. A row's bits do not depend on the number
    of rows. To be made once: JAX keeps what it has traced of each such function.

    Args:
      by_xla: the same product without the kernel, for derivatives and ``vmap``.
    """

    @jax.custom_batching.custom_vmap
    def by_kernel(x: Array, weight: Weight) -> Array:
        return _call(x, weight)

    @by_kernel.def_vmap
    def _(axis_size: int, are_mapped: Any, x: Array, weight: Weight) -> tuple[Array, bool]:
        axes = jax.tree.map(lambda mapped: 0 if mapped else None, are_mapped)
        return jax.vmap(by_xla, tuple(axes), axis_size=axis_size)(x, weight), True

    @jax.custom_jvp
    def product(x: Array, weight: Weight) -> Array:
        return by_kernel(x, weight)

    product.defjvp(lambda primals, tangents: jax.jvp(by_xla, primals, tangents))
    return product


def _call(x: Float[Array, "... i"], weight: Weight) -> Float[Array, "... o"]:
    result = jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[0]), x.dtype)
    names = kernels().names
    if not isinstance(weight, Grouped):
        arrays = jax.tree.leaves(weight)  # the codes before their scales
        return jax.ffi.ffi_call(names["dense"], result)(x, *arrays)
    if weight.order is not None:
        x = jnp.take(x, weight.order, axis=-1, mode="clip")
    factors = jax.tree.leaves((weight.scales, weight.offsets))
    call = jax.ffi.ffi_call(names["grouped"], result)
    return call(
        x,
        weight.codes,
        *factors,
        nested_scales=isinstance(weight.scales, Grouped),
        nested_offsets=isinstance(weight.offsets, Grouped),
    )
