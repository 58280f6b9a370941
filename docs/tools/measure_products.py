"""What the TPU compiler expects of products with quantized weights, relative to bfloat16's.

python docs/tools/measure_products.py [SCHEME ...] needs libtpu (the `tpu` extra). It prints
thousands of modeled cycles of one MLP product of Llama-3-8B's shape, by the rows of the pass. This
is a cost model and no measurement.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tpu_cycles import cycles

from infer.cli import whole
from specjax.models.layers import linear
from specjax.models.quantization import parse_scheme, quantize

SHAPE = (28672, 4096)  # gate and up, [out, in]


def main() -> None:
    """One row per scheme."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", default=["int8", "fp8", "int4", "int4:128"])
    parser.add_argument("--rows", type=whole(1), nargs="+", default=[8, 64, 512], metavar="N")
    parser.add_argument("--topology", default="v6e:2x2", help="v5e:2x4, v5p:2x2x1, …")
    args = parser.parse_args()
    jax.default_backend = lambda: "tpu"  # the backend compiled for, which layers depend on
    device = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices[0]
    print(f"| scheme | {' | '.join(f'{rows} rows' for rows in args.rows)} |")
    print("| --- |" + " ---: |" * len(args.rows))
    weight = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    for name in ("bfloat16", *args.schemes):
        made = weight
        if name != "bfloat16":
            scheme = parse_scheme(name)
            made = jax.eval_shape(lambda w, s=scheme: quantize(w, s, w.dtype), weight)
        counts = (f"{cost(made, rows, device) / 1e3:,.0f}" for rows in args.rows)
        print(f"| {name} | {' | '.join(counts)} |", flush=True)


def cost(weight, rows: int, device: jax.Device) -> int:
    """Modeled cycles of a product of ``rows``."""
    one = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((rows, SHAPE[1]), jnp.bfloat16)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), (x, weight)
    )
    text = jax.jit(lambda x, w: linear(x, w)).lower(*shapes).compile().as_text()
    return cycles(text, lambda path, line: "", lambda path: 1).total()


if __name__ == "__main__":
    main()
