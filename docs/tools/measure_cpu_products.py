"""The products of one decoding pass on a CPU, alone: python docs/tools/measure_cpu_products.py

The weights are random and have SmolLM2-135M's shapes. The table has milliseconds of all products
of a pass over one token, and what more tokens cost relative to it. Widths are measured by turns,
and the lower quartile counts. With `SPECJAX_CPU_KERNELS=0` these
are XLA's products, else our kernel's.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.layers import linear
from specjax.models.quantization import parse_scheme, quantize

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # of a layer, [out, in]
HEAD = (49152, 576)
WIDTHS = (1, 2, 4, 8, 16)


def main() -> None:
    """One row per form of the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--turns", type=int, default=25)
    args = parser.parse_args()
    for form in args.forms:
        times = measured(form, args.layers, args.turns)
        ratios = " | ".join(f"{seconds / times[0]:.2f}" for seconds in times[1:])
        print(f"| {form} | {times[0] * 1e3:.1f} | {ratios} |", flush=True)


def measured(form: str, layers: int, turns: int) -> list[float]:
    """Seconds of the products of a pass, by its tokens."""
    random = np.random.default_rng(0)
    dtype = jnp.bfloat16 if form == "bfloat16" else jnp.float32

    def weight(shape):
        made = jnp.asarray(random.standard_normal(shape, dtype=np.float32), dtype)
        return (
            made if form in ("float32", "bfloat16") else quantize(made, parse_scheme(form), dtype)
        )

    stack = [[weight(shape) for shape in SHAPES] for _ in range(layers)]
    head = weight(HEAD)
    inputs = [jnp.ones((width, HEAD[1]), dtype) for width in WIDTHS]
    times = [[] for _ in WIDTHS]
    for turn in range(turns + 1):
        for x, taken in zip(inputs, times, strict=True):
            begin = time.perf_counter()
            products(x, stack, head).block_until_ready()
            if turn:  # the first one compiles
                taken.append(time.perf_counter() - begin)
    return [float(np.quantile(taken, 0.25)) for taken in times]


@jax.jit
def products(x, stack, head):
    """Every product depends on the one before."""
    for qkv, out, gate_up, down in stack:
        x = linear(linear(x, qkv)[:, : x.shape[1]], out)
        x = linear(linear(x, gate_up)[:, : down.shape[1]], down)
        x = x / jnp.abs(x).max()
    return linear(x, head)


if __name__ == "__main__":
    main()
