"""Whether a fixed order of partial sums makes bfloat16 on a mesh one device's.

python docs/tools/measure_sums.py MODEL [--prompts 40] [--sums device float32 ordered]

MODEL is a directory whose heads four devices can share, such as `infer.convert demo --heads 8`
writes. Parts of standard library files are continued greedily with ``model`` = 1, 2 and 4 simulated
devices. A line has how many rows differ from one device's. Partial sums of the products whose
inputs are split are

- ``device``: rounded on each device, as the library does;
- ``float32``: added in float32, and rounded once;
- ``ordered``: of a quarter of the inputs each, on one device, too, and added in float32 as a tree,
  so in the same order on any number of devices.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import multiprocessing
import os
import sys
import textwrap
from typing import Any

KINDS = ("device", "float32", "ordered")
DEVICES = (1, 2, 4)
BLOCKS = max(DEVICES)
FLAGS = f"--xla_force_host_platform_device_count={BLOCKS}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["SPECJAX_CPU_KERNELS"] = "0"  # which one device alone would use

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import specjax as sj  # noqa: E402
from specjax.models import layers, sharding  # noqa: E402

SOURCES = (argparse, ast, inspect, textwrap)


def main() -> None:
    """A line for each kind of sums and number of devices. Each kind has a process of its own.

    Layers and programs are kept within a process, so another kind would not be seen there.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--sums", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    print("| sums | devices | rows that differ |\n| --- | ---: | ---: |", flush=True)
    spawn = multiprocessing.get_context("spawn")
    for sums in args.sums:
        process = spawn.Process(target=print_rows, args=(args, sums))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


def print_rows(args: argparse.Namespace, sums: str) -> None:
    """The lines of one kind of sums."""
    prompts = []
    for text in map(inspect.getsource, SOURCES):
        prompts += [text[i : i + 200] for i in range(1000, len(text), len(text) // 12)]
    prompts = prompts[: args.prompts]
    if sums != "device":
        replace_sums(sums)
    expected = None
    for count in DEVICES:
        found = rows(args.model, count, prompts, args.new_tokens)
        expected = expected or found
        differ = sum(row != one for row, one in zip(found, expected, strict=True))
        print(f"| {sums} | {count} | {differ} of {len(prompts)} |", flush=True)


def rows(model: str, count: int, prompts: list[str], new_tokens: int) -> list[list[int]]:
    """The greedy tokens of each prompt on so many devices."""
    mesh = sj.make_mesh(model=count) if count > 1 else None
    target = sj.load(model, dtype="bfloat16", mesh=mesh)
    out = sj.generate(target, prompts, batch_size=8, max_new_tokens=new_tokens)
    return [row.tolist() for row in out.tokens]


def replace_sums(sums: str) -> None:
    """Lets all layers sum so, whose inputs a mesh would split; layers must be made after it."""
    begin = layers.Linear.__init__
    plain = layers.Linear.__call__

    def initialize(self: Any, shape: tuple, axes: tuple, bias: bool, shards: int, *rest: Any):
        begin(self, shape, axes, bias, shards, *rest)
        self.splits_inputs = sharding.RULES[axes[1]] is not None
        self.devices = shards

    def multiply(self: Any, x: jax.Array) -> jax.Array:
        if not self.splits_inputs:
            return plain(self, x)
        own = BLOCKS // self.devices if sums == "ordered" else 1
        blocks = zip(jnp.split(x, own, -1), jnp.split(self.weight[...], own, -1), strict=True)
        y = in_order([layers._matmul(*block, jnp.float32) for block in blocks])
        if self.devices > 1:
            y = in_order(list(jax.lax.all_gather(y, sharding.AXIS)))
        y = y.astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]

    layers.Linear.__init__ = initialize
    layers.Linear.__call__ = multiply


def in_order(parts: list[jax.Array]) -> jax.Array:
    """The sum of the parts: of neighbors, then of neighbors of these, and so on."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


if __name__ == "__main__":
    main()
