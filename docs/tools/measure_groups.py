"""What the grouped products of a mixture's training cost on a TPU, over plain products.

python docs/tools/measure_groups.py [--target qwen3-30b-a3b] [--tokens 16384] [--topology v6e:2x2]

A row has one product of an expert's layer, of its values or of one of its gradients: the cycles of
the kernel, those of a plain product of as many rows with one weight, and plain over grouped. Both
are models of libtpu's compiler (the `tpu` extra) and no measurement. The kernel's cycles are, for
each tile that it visits, its bundles or the time of what it reads and writes, whichever is longer.
Rows choose experts by chance, so groups meet within tiles. XLA's own grouped product carries no
cycles that mean anything.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from shapes import SHAPES
from tpu_cycles import bytes_per_cycle, cycles, without_sparse_cores
from tpu_kernels import regions_of

from infer.cli import whole
from specjax.models import grouped_products as groups

WAYS = ("values", "gradient of rows", "gradient of weights")
KERNELS = {"values": "gmm", "gradient of rows": "gmm", "gradient of weights": "tgmm"}


class Product(NamedTuple):
    """Rows in groups, and the sizes of each group's weight."""

    rows: int
    groups: int
    inputs: int
    outputs: int

    def shapes(self, device: jax.Device) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Rows, weights, results and group sizes."""
        shaped = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
        return (
            shaped((self.rows, self.inputs), jnp.bfloat16),
            shaped((self.groups, self.outputs, self.inputs), jnp.bfloat16),
            shaped((self.rows, self.outputs), jnp.bfloat16),
            shaped((self.groups,), jnp.int32),
        )

    def visits(self) -> int:
        """Pairs of a tile of rows and a group that has some of them."""
        chosen = np.random.default_rng(0).integers(0, self.groups, self.rows)
        ends = np.bincount(chosen, minlength=self.groups).cumsum()
        starts = np.concatenate([[0], ends[:-1]])
        tiles = -(-ends // groups.ROWS) - starts // groups.ROWS
        return int(tiles[ends > starts].sum())


def main() -> None:
    """A row for each product."""
    parser = argparse.ArgumentParser(description=__doc__)
    mixtures = [name for name, cfg in SHAPES.items() if cfg.experts]
    parser.add_argument("--target", choices=mixtures, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=whole(1), default=16384, metavar="N")
    parser.add_argument("--topology", default="v6e:2x2")
    parser.add_argument("--dump", nargs=2, help=argparse.SUPPRESS)  # compile one kernel
    args = parser.parse_args()
    without_sparse_cores()
    cfg = SHAPES[args.target]
    rows = args.tokens * cfg.experts.active
    sizes = {"gate, up": (cfg.hidden_size, cfg.experts.size)}
    sizes["down"] = sizes["gate, up"][::-1]
    products = {name: Product(rows, cfg.experts.count, *size) for name, size in sizes.items()}
    if args.dump:
        layer, way = args.dump
        return compile_kernel(products[layer], way, chip(args.topology))
    script = [__file__, "--target", args.target, "--tokens", str(args.tokens)]
    script += ["--topology", args.topology, "--dump"]
    schedules = {
        (layer, way): regions_of([*script, layer, way], KERNELS[way])
        for layer in products
        for way in WAYS
    }
    device = chip(args.topology)
    print("| layer | product | grouped | plain | plain over grouped |")
    print("| --- | --- | ---: | ---: | ---: |")
    total = np.zeros(2)
    for (layer, way), schedule in schedules.items():
        rate = bytes_per_cycle(device)
        grouped = kernel_cycles(products[layer], way, schedule, rate)
        plain = plain_cycles(products[layer], way, device)
        total += np.array([grouped, plain]) * (1 if layer == "down" else 2)
        print_row(layer, way, grouped, plain)
    print_row("all three", "all", *total)


def print_row(layer: str, way: str, grouped: float, plain: float) -> None:
    cells = [layer, way, f"{grouped / 1e3:,.0f}", f"{plain / 1e3:,.0f}", f"{plain / grouped:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def chip(topology: str) -> jax.Device:
    """One of a topology."""
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def kernel_cycles(
    product: Product, way: str, schedule: tuple[int, list[int]], rate: float
) -> float:
    """Cycles of the kernel, at ``rate`` bytes per cycle."""
    inputs, outputs = product.inputs, product.outputs
    if way == "gradient of rows":
        inputs, outputs = outputs, inputs
    is_weight = way == "gradient of weights"
    tile_in = groups.tile(inputs, groups.OUTPUTS if is_weight else groups.INPUTS)
    tile_out = groups.tile(outputs, groups.OUTPUTS)
    blocks = -(-inputs // tile_in) * -(-outputs // tile_out)  # of a weight
    turn, regions = schedule
    # Each group begins and ends a sum of its weight's gradient; the longest region multiplies.
    ends = sum(regions) - max(regions) if is_weight else 0
    turn += sum(regions) - ends
    moved = 2 * groups.ROWS * (tile_in + tile_out)  # bytes of one turn, without the weight
    weights = 2 * product.groups * product.inputs * product.outputs
    turns = product.visits() * max(turn, moved / rate)
    return blocks * (turns + product.groups * ends) + weights / rate


def plain_cycles(product: Product, way: str, device: jax.Device) -> int:
    """Cycles of XLA's product with one weight for all rows."""
    x, weights, y, _ = product.shapes(device)
    weight = jax.ShapeDtypeStruct(weights.shape[1:], weights.dtype, sharding=weights.sharding)
    equation, operands = {
        "values": ("si,oi->so", (x, weight)),
        "gradient of rows": ("so,oi->si", (y, weight)),
        "gradient of weights": ("so,si->oi", (y, x)),
    }[way]
    compiled = jax.jit(functools.partial(jnp.einsum, equation)).lower(*operands).compile()
    return cycles(compiled.as_text(), lambda path, line: "", lambda path: 1).total()


def compile_kernel(product: Product, way: str, device: jax.Device) -> None:
    """Compiles the kernel of a product alone."""
    x, weights, y, sizes = product.shapes(device)

    def run(x, weights, y, sizes):
        if way == "values":
            return groups.product_by_kernels(x, weights, sizes)
        of = 0 if way == "gradient of rows" else 1
        product = functools.partial(groups.product_by_kernels, sizes=sizes)
        return jax.vjp(product, x, weights)[1](y)[of]

    jax.jit(run).lower(x, weights, y, sizes).compile()


if __name__ == "__main__":
    sys.exit(main())
