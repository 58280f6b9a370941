"""The experts' gated MLPs on a TPU for few tokens, by a Pallas kernel.

XLA's grouped product reads weights in tiles of 128 × 128, and takes several times as long as their
stream. Here the weights of a block's expert come in large tiles, the next one while one is used.
The grid ends with the last block that is needed.

There are no gradients. Axis legend: n blocks, b tokens of a block, D hidden size, E experts, F
columns of an expert, f columns of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

NAME = "run_experts"  # of the kernel, in a compiled program
LANES = 128
TOKENS = 16  # of a block: as many rows as a tile of bfloat16 has
TILE_BYTES = 2**20  # of one weight's tile; six of them are in the core's memory


def supports_experts(gate: Array) -> bool:
    """Whether the kernel can run experts whose gates have these weights ``[E, F, D]``."""
    return all(size % LANES == 0 for size in gate.shape[1:])


def run_experts(
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
    x: Float[Array, "n b D"],
    experts: Int[Array, "n"],
    needed: Int[Array, ""],
    combine: Callable[[Array, Array], Array],
    interpret: bool = False,
) -> Float[Array, "n b D"]:
    """Each block's ``down · combine(gate · x, up · x)`` with its expert's weights.

    Args:
      experts: of each block.
      needed: how many blocks are run, at least 1. The results of the others are any numbers.
      interpret: run in Python, on any device.
    """
    _, tokens, hidden = x.shape
    columns = gate.shape[1]
    tile = tile_columns(columns, hidden * gate.dtype.itemsize)
    rows = pl.BlockSpec((1, tile, hidden), lambda block, part, experts: (experts[block], part, 0))
    across = pl.BlockSpec((1, hidden, tile), lambda block, part, experts: (experts[block], 0, part))
    own = pl.BlockSpec((1, tokens, hidden), lambda block, part, experts: (block, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, combine=combine),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(needed, columns // tile),
            in_specs=[own, rows, rows, across],
            out_specs=own,
            scratch_shapes=[pltpu.VMEM((tokens, hidden), jnp.float32)],
        ),
        name=NAME,
        interpret=interpret,
    )(experts, x, gate, up, down)


def tile_columns(columns: int, row_bytes: int) -> int:
    """The most columns that divide all of them and make a tile of at most ``TILE_BYTES``."""
    fitting = [
        tile
        for tile in range(LANES, columns + 1, LANES)
        if columns % tile == 0 and tile * row_bytes <= TILE_BYTES
    ]
    return max(fitting, default=LANES)


def _kernel(experts_ref, x_ref, gate_ref, up_ref, down_ref, out_ref, sum_ref, *, combine):
    """A tile of one block: the sum over its columns grows from tile to tile."""
    del experts_ref  # the blocks' places are made of it
    part = pl.program_id(1)
    x = x_ref[0]
    gate = _product(x, gate_ref[0]).astype(x.dtype)
    up = _product(x, up_ref[0]).astype(x.dtype)
    result = _product(combine(gate, up), down_ref[0])

    @pl.when(part == 0)
    def _first():
        sum_ref[...] = result

    @pl.when(part > 0)
    def _further():
        sum_ref[...] += result

    @pl.when(part == pl.num_programs(1) - 1)
    def _last():
        out_ref[0] = sum_ref[...].astype(out_ref.dtype)


def _product(x: Float[Array, "b i"], weight: Float[Array, "o i"]) -> Float[Array, "b o"]:
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
