"""Large arrays that are put together on the host, with little memory beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

ALIGNMENT = 64  # bytes: the start of an array that a CPU device takes over
PIECE_BYTES = 1 << 21  # of float32 rows that are read at a time


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array with entries of any value, which :func:`on_device` need not copy on a CPU."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def on_device(array: np.ndarray) -> jax.Array:
    """An array on the device. A CPU takes over its memory, so nothing may write to it any more."""
    return jax.device_put(array, may_alias=True)


def in_pieces(read_piece: Callable[[int, int], Any], shape: tuple[int, ...]) -> Any:
    """A large table, put together from pieces of rows, in the form that it will have.

    Read at once, the file's form of a table and its float32 copy would exist beside it. In a small
    model a table is half of all weights.

    Args:
      read_piece: gives rows ``first`` to ``last`` as on the device: an array, or a quantized
        weight whose arrays all have the rows first.
      shape: of the table, ``[rows, size]``.
    """
    rows = shape[0]
    step = max(1, PIECE_BYTES // (4 * shape[1]))
    if rows <= step:
        return read_piece(0, rows)
    table: Any = None
    for first in range(0, rows, step):
        last = min(first + step, rows)
        piece = jax.tree.map(np.asarray, read_piece(first, last))
        if table is None:
            table = jax.tree.map(lambda x: aligned((rows, *x.shape[1:]), x.dtype), piece)
        for whole, part in zip(jax.tree.leaves(table), jax.tree.leaves(piece), strict=True):
            whole[first:last] = part
    return jax.tree.map(on_device, table)
