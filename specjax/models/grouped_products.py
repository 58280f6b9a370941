"""Products of rows that are sorted by group, each group with a weight of its own.

XLA's grouped product for TPUs has tiles of 128 × 128, and reads the rows once for each of them.
There JAX's kernels (``megablox``) run instead, with large tiles. A tile of rows in which groups
meet is computed once for each of them.

Axis legend: S rows, I inputs, O outputs, E groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

from specjax._util.platform import platform

LANES = 128
# Rows of a tile. With more, groups of some hundred rows would meet in too many of the tiles.
ROWS = 256
# The largest tile of a weight, in inputs and outputs. Two of it and of the rows are in the core's
# memory, beside a float32 tile of sums. The gradient of a weight is summed in a tile of outputs by
# outputs.
INPUTS = 2048
OUTPUTS = 1024


def grouped_product(
    x: Float[Array, "S I"], weight: Float[Array, "E O I"], sizes: Int[Array, "E"]
) -> Float[Array, "S O"]:
    """``x @ weight[group].T`` for the rows of each group; 0 for the rows after the last group.

    Args:
      x: rows in the order of their groups.
      sizes: int32, how many rows each group has.
    """
    fits_lanes = all(size % LANES == 0 for size in weight.shape[1:])
    if platform().grouped_kernels and fits_lanes:
        return product_by_kernels(x, weight, sizes)
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    return jax.lax.ragged_dot_general(x, weight, sizes, numbers)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product_by_kernels(
    x: Float[Array, "S I"],
    weight: Float[Array, "E O I"],
    sizes: Int[Array, "E"],
    interpret: bool = False,
) -> Float[Array, "S O"]:
    """:func:`grouped_product` by kernels for TPUs; :data:`LANES` divides inputs and outputs.

    ``interpret``: run them in Python, on any device.
    """
    return _multiply(x, weight, sizes, True, interpret)


def _forward(x: Array, weight: Array, sizes: Array, interpret: bool):
    return product_by_kernels(x, weight, sizes, interpret), (x, weight, sizes)


def _backward(interpret: bool, kept: tuple[Array, Array, Array], y: Float[Array, "S O"]):
    x, weight, sizes = kept
    count, outputs, inputs = weight.shape
    gradient = tgmm(
        _padded(y).T,
        _padded(x),
        _with_rest(sizes, len(x)),
        weight.dtype,
        (ROWS, tile(outputs, OUTPUTS), tile(inputs, OUTPUTS)),
        num_actual_groups=count,
        interpret=interpret,
    )
    return _multiply(y, weight, sizes, False, interpret), gradient, None


product_by_kernels.defvjp(_forward, _backward)


def _multiply(
    x: Array, weight: Array, sizes: Int[Array, "E"], transposed: bool, interpret: bool
) -> Array:
    """Each row with the weight of its group, or with its transpose."""
    _, outputs, inputs = weight.shape
    if not transposed:
        inputs, outputs = outputs, inputs
    y = gmm(
        _padded(x),
        weight,
        _with_rest(sizes, len(x)),
        x.dtype,
        (ROWS, tile(inputs, INPUTS), tile(outputs, OUTPUTS)),
        transpose_rhs=transposed,
        interpret=interpret,
    )
    return y[: len(x)]


def _padded(x: Float[Array, "S _"]) -> Float[Array, "T _"]:
    """``x`` with rows of zeros, so that tiles divide it."""
    return jnp.pad(x, ((0, -len(x) % ROWS), (0, 0)))


def _with_rest(sizes: Int[Array, "E"], rows: int) -> Int[Array, "E+1"]:
    """The sizes, and how many of the padded rows are in no group; those are not computed."""
    rest = rows + -rows % ROWS - sizes.sum()
    return jnp.append(sizes, rest).astype(jnp.int32)


def tile(size: int, limit: int) -> int:
    """The size of equal tiles of at most ``limit``; the last one may reach beyond ``size``."""
    count = -(-size // limit)
    return -(-size // (count * LANES)) * LANES
