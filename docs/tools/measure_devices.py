"""Compiles decoding for TPUs, without any: python docs/tools/measure_devices.py [METHOD ...]

Prints the table of devices.md: an 8B target with a 1B draft (the shapes of Llama 3, bfloat16) on
chips of a v5e slice, eight rows of 2048 slots. Needs libtpu, which compiles without a TPU, and no
weights. Memory is what the compiler reserves on each chip, in MB.
"""

import functools
import re
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

import specjax as sj
from specjax import decode
from specjax.generate import make_engine
from specjax.mesh import AXES
from specjax.models import ModelConfig, fuse, param_shapes
from specjax.models.placement import param_specs, split_layers
from specjax.models.sharding import split_config

TOPOLOGY = "v5e:2x4"
MESHES = {"data": 1, "model": 8}, {"data": 2, "model": 4}, {"data": 4, "model": 2}
ROWS, SLOTS, CHUNK = 8, 2048, 128
LLAMA = {"vocab_size": 128256, "num_heads": 32, "num_kv_heads": 8, "max_position": 8192}
TARGET = ModelConfig.llama(
    hidden_size=4096, num_layers=32, intermediate_size=14336, tie_embeddings=False, **LLAMA
)
DRAFT = ModelConfig.llama(hidden_size=2048, num_layers=16, intermediate_size=8192, **LLAMA)


def main(methods: list[str]) -> None:
    """One row per method and mesh."""
    # What a layer looks like is chosen by the backend: the one compiled for, not this machine's.
    jax.default_backend = lambda: "tpu"
    print(
        "| method | data | model | arguments | prefill | rounds | all-reduce | all-gather | "
        "seconds |\n| --- |" + " ---: |" * 8
    )
    for method in methods or ["autoregressive", "speculative"]:
        for axes in MESHES:
            print(row(method, axes), flush=True)


def row(method: str, axes: dict[str, int]) -> str:
    """The table's row of one method on one mesh."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh(tuple(axes.values()), AXES, axis_types=auto, devices=devices)
    began = time.perf_counter()
    prefill, rounds = programs(method, abstract(TARGET, mesh), abstract(DRAFT, mesh))
    seconds = time.perf_counter() - began
    memory = [program.memory_analysis() for program in (prefill, rounds)]
    megabytes = [memory[1].argument_size_in_bytes] + [m.temp_size_in_bytes for m in memory]
    text = rounds.as_text()
    meetings = [
        len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in ("all-reduce", "all-gather")
    ]
    cells = [
        method,
        *axes.values(),
        *(f"{b / 1e6:,.0f}" for b in megabytes),
        *meetings,
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def abstract(cfg: ModelConfig, mesh) -> sj.LM:
    """A split model of shapes alone."""
    count = mesh.shape["model"]

    def layout(params):
        return split_layers(cfg, fuse(params), count)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(cfg))
    fused = jax.eval_shape(layout, shapes)
    params = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        fused,
        param_specs(cfg, fused, count),
    )
    return sj.LM(split_config(cfg, count), params, None, (2,), cfg.vocab_size, "shapes", mesh)


def programs(method: str, target: sj.LM, draft: sj.LM):
    """The compiled prefill and the compiled loop of rounds."""
    spec = sj.method(method)
    engine = make_engine(target, draft if spec.needs_draft else None, spec, {}, greedy=False)
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    inputs = engine.inputs(sj.Sampling(0.8, top_p=0.9), ROWS)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS))
    prefill = decode.prefill_prompts(engine.method, CHUNK, False).lower(
        inputs, shaped((ROWS, SLOTS)), shaped((ROWS,)), shaped((ROWS,)), keys
    )
    compiled = prefill.compile()
    state = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        prefill.out_info,
        compiled.output_shardings,
    )
    loop = decode.run_rounds(engine.method).lower(inputs, state, shaped(()))
    return compiled, loop.compile()


if __name__ == "__main__":
    main(sys.argv[1:])
