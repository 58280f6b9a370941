"""What compilers make of products with quantized weights, relative to bfloat16's.

python docs/tools/measure_products.py [FORM ...] [--device tpu|gpu]

One MLP product of Llama-3-8B's shape, by the rows of the pass. Forms are our schemes, and those of
weights that others quantized and that are kept as they are. For a TPU it prints thousands of
modeled cycles; it needs libtpu (the `tpu` extra). For an H100 it prints kernels, and MB of
temporaries; it needs JAX's CUDA plugin. Neither needs the device, and neither is a measurement.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
from gpu_programs import compile_for_gpu, gpu_devices
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tpu_cycles import cycles

from infer.cli import whole
from specjax._util.platform import compiler_options
from specjax.models.layers import linear
from specjax.models.quantization import parse_scheme, quantize
from specjax.models.quantized import Grouped, PerOutput

SHAPE = (28672, 4096)  # gate and up, [out, in]
DTYPE = jnp.dtype(jnp.bfloat16)
ROWS = {"tpu": [8, 64, 512], "gpu": [1, 8, 32]}


def array(dtype, inputs: int = SHAPE[1]) -> jax.ShapeDtypeStruct:
    """An array with the inputs, or their groups, first."""
    return jax.ShapeDtypeStruct((inputs, SHAPE[0]), dtype)


def groups(codes, size: int, scale, offset=None, order: bool = False) -> Grouped:
    """Codes in groups of ``size`` inputs; scales and offsets have these dtypes."""
    count = SHAPE[1] // size
    offsets = None if offset is None else array(offset, count)
    permutation = jax.ShapeDtypeStruct(SHAPE[1:], jnp.int32) if order else None
    return Grouped(array(codes), array(scale, count), DTYPE, offsets, permutation)


def k_quant(codes, size: int, has_offsets: bool) -> Grouped:
    """GGUF's blocks of 256 inputs: the groups' scales are codes with one more scale."""
    count = SHAPE[1] // size

    def scales() -> Grouped:
        block = array(jnp.float16, SHAPE[1] // 256)
        return Grouped(array(jnp.int8, count), block, jnp.dtype(jnp.float32))

    return Grouped(array(codes), scales(), DTYPE, scales() if has_offsets else None)


# The forms that the readers keep, as they make them.
KEPT = {
    "Q4_0": groups(jnp.int4, 32, jnp.float16),
    "Q4_1": groups(jnp.uint4, 32, jnp.float16, jnp.float16),
    "Q8_0": groups(jnp.int8, 32, jnp.float16),
    "Q4_K": k_quant(jnp.uint4, 32, has_offsets=True),
    "Q6_K": k_quant(jnp.int8, 16, has_offsets=False),
    "awq": groups(jnp.int4, 128, jnp.float16, jnp.float32),
    "gptq-act-order": groups(jnp.int4, 128, jnp.float16, jnp.float32, order=True),
    "fp8-blocks": groups(jnp.float8_e4m3fn, 128, jnp.float32),
    "fp8-channels": PerOutput(
        jax.ShapeDtypeStruct(SHAPE, jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct(SHAPE[:1], jnp.float32),
        DTYPE,
    ),
    "mxfp4": groups(jnp.float4_e2m1fn, 32, jnp.bfloat16),
}
FORMS = ("bfloat16", "int8", "fp8", "int4", "int4:128", *KEPT)


def main() -> None:
    """One row per form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", choices=[[], *FORMS], metavar="FORM")
    parser.add_argument("--device", choices=("tpu", "gpu"), default="tpu")
    parser.add_argument("--rows", type=whole(1), nargs="+", metavar="N")
    parser.add_argument("--topology", default="v6e:2x2", help="of the TPU: v5e:2x4, v5p:2x2x1, …")
    args = parser.parse_args()
    rows = args.rows or ROWS[args.device]
    # The backend compiled for, which layers depend on.
    jax.default_backend = lambda: args.device
    if args.device == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=args.topology)
        device = topology.devices[0]
        heads = [f"{count} rows" for count in rows]
    else:
        device = gpu_devices()[0]
        heads = [f"{count} rows: kernels | MB" for count in rows]
    print(f"| form | {' | '.join(heads)} |")
    print("| --- |" + " ---: |" * " | ".join(heads).count("|") + " ---: |")
    for form in args.forms or FORMS:
        cells = " | ".join(cell(weight_of(form), count, device) for count in rows)
        print(f"| {form} | {cells} |", flush=True)


def weight_of(form: str):
    """The weight's shapes and dtypes."""
    if form in KEPT:
        return KEPT[form]
    plain = jax.ShapeDtypeStruct(SHAPE, DTYPE)
    if form == "bfloat16":
        return plain
    scheme = parse_scheme(form)
    return jax.eval_shape(lambda w: quantize(w, scheme, w.dtype), plain)


def cell(weight, rows: int, device: jax.Device) -> str:
    """What the compiler makes of a product of ``rows``."""
    one = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((rows, SHAPE[1]), DTYPE)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), (x, weight)
    )
    product = jax.jit(lambda x, w: linear(x, w), compiler_options=compiler_options())
    lowered = product.lower(*shapes)
    if device.platform == "tpu":
        modeled = cycles(lowered.compile().as_text(), lambda path, line: "", lambda path: 1)
        return f"{modeled.total() / 1e3:,.0f}"
    made = compile_for_gpu(lowered)
    return f"{made.count.kernels} | {made.temp_bytes / 1e6:.0f}"


if __name__ == "__main__":
    main()
