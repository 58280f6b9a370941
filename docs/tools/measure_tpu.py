"""What the TPU compiler makes of decoding: python docs/tools/measure_tpu.py [METHOD ...]

Compiles the round of each method for a topology, from shapes alone (bfloat16, no weights), with
libtpu (the `tpu` extra). Per round: modelled cycles by part, over what it costs to stream the
weights and the slots of the cache once through the matrix unit; the exchanges between chips and
the memory of one. The cycles are the compiler's cost model and no measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from shapes import DRAFTS, SHAPES
from tpu_cycles import EXCHANGES, bytes_per_cycle, cycles

import specjax as sj
from infer.cli import mesh_axes, setting, whole
from specjax import decode
from specjax.draft.feeding import DRAFTING
from specjax.generate import make_engine
from specjax.mesh import AXES, specs_of
from specjax.methods import METHODS
from specjax.models import ModelConfig, fuse, param_shapes
from specjax.models.placement import param_specs, split_layers
from specjax.models.quantize import param_bytes, parse_scheme, quantize_params
from specjax.models.sharding import split_config
from specjax.warp import SEARCHING

PARTS = ("weights", "attention", "draw and rule", "exchanges", "rest")
SEARCH_TURNS = 4  # passes over the vocabulary that top-p's search takes for bfloat16 logits


def main(argv: list[str] | None = None) -> None:
    """One row per method and batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["autoregressive", "speculative"])
    parser.add_argument("--target", choices=DRAFTS, default="llama-3-8b")
    parser.add_argument("--batch", type=whole(1), nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--slots", type=whole(128), default=2048, metavar="N")
    parser.add_argument("--layers", type=whole(1), metavar="N", help="fewer layers compile faster")
    parser.add_argument("--set", type=setting, action="append", default=[], dest="options")
    parser.add_argument("--pass-width", type=whole(1, 128), metavar="N")
    parser.add_argument("--quantize", type=parse_scheme, metavar="SCHEME", help="int8, int4:128, …")
    parser.add_argument("--topology", default="v6e:2x2", help="v5e:2x4, v5p:2x2x1, …")
    parser.add_argument("--mesh", type=mesh_axes, default={"data": 1, "model": 1})
    args = parser.parse_args(argv)
    # What a layer looks like is chosen by the backend: the one compiled for, not this machine's.
    jax.default_backend = lambda: "tpu"
    heads = ["method", "batch", "limit", *PARTS, "over the limit", "MB", *EXCHANGES[:2], "seconds"]
    print(f"| {' | '.join(heads)} |\n| --- |" + " ---: |" * (len(heads) - 1))
    for method in args.methods:
        for rows in args.batch:
            print(f"| {' | '.join(row(args, method, rows))} |", flush=True)


def row(args: argparse.Namespace, method: str, rows: int) -> list[str]:
    """The table's row of one method at one batch size; cycles in thousands."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    chips = args.mesh["data"] * args.mesh["model"]
    shape = tuple(args.mesh.values())
    mesh = jax.make_mesh(shape, AXES, axis_types=auto, devices=devices[:chips])
    target = abstract(SHAPES[args.target], mesh, args)
    draft = (
        abstract(SHAPES[DRAFTS[args.target]], mesh, args) if METHODS[method].needs_draft else None
    )
    engine = make_engine(target, draft, METHODS[method], dict(args.options), greedy=False)
    began = time.perf_counter()
    compiled = compile_rounds(engine, rows, args.slots, mesh)
    seconds, text = time.perf_counter() - began, compiled.as_text()
    passes = getattr(getattr(engine.method, "drafter", None), "gamma", 0)
    counted = cycles(text, part_of, functools.partial(turns, max(passes - 1, 1)), loop=True)
    streamed = held(target, rows, args) + (passes * held(draft, rows, args) if draft else 0)
    limit = streamed / bytes_per_cycle(devices[0])
    memory = compiled.memory_analysis()
    megabytes = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e6
    exchanges = [len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in EXCHANGES[:2]]
    return [
        method,
        str(rows),
        f"{limit / 1e3:,.0f}",
        *(f"{counted[part] / 1e3:,.0f}" for part in PARTS),
        f"{counted.total() / limit:.2f}",
        f"{megabytes:,.0f}",
        *map(str, exchanges),
        f"{seconds:.0f}",
    ]


def part_of(path: str, instruction: str) -> str:
    """Which part of a round an instruction belongs to, by the innermost scope that says so."""
    if any(f" {kind}" in instruction for kind in EXCHANGES):
        return "exchanges"
    named = [PART_OF_SCOPE[step] for step in path.split("/") if step in PART_OF_SCOPE]
    return named[-1] if named else "rest"


PART_OF_SCOPE = {
    "weights": "weights",
    "attention": "attention",
    "draw": "draw and rule",
    "rule": "draw and rule",
}


def turns(drafting: int, path: str) -> int:
    """Turns of a loop that ends on data: the draft's further passes, or a search's."""
    steps = path.split("/")
    if SEARCHING in steps:
        return SEARCH_TURNS
    return drafting if DRAFTING in steps else 1


def held(model: sj.LM, rows: int, args: argparse.Namespace) -> float:
    """Bytes of one chip that a pass has to read: weights, of which the embedding only if tied,
    and the cache's slots."""
    cfg, chips = model.config, args.mesh["model"]
    weights = param_bytes(cfg, jnp.bfloat16, args.quantize)
    if not cfg.tie_embeddings:
        table = jax.tree.leaves(model.params["embed"])
        weights -= sum(x.size * x.dtype.itemsize for x in table) / chips
    share = rows // args.mesh["data"]
    slots = 2 * cfg.num_layers * share * cfg.num_kv_heads * args.slots * cfg.head_dim
    return weights + 2 * slots


def abstract(cfg: ModelConfig, mesh: jax.sharding.Mesh, args: argparse.Namespace) -> sj.LM:
    """A split model of shapes alone."""
    count = mesh.shape["model"]
    if args.layers:
        slides = cfg.sliding_layers and cfg.sliding_layers[: args.layers]
        layers = min(cfg.num_layers, args.layers)
        cfg = dataclasses.replace(cfg, num_layers=layers, sliding_layers=slides)

    def layout(params):
        params = fuse(params)
        if args.quantize:
            params = quantize_params(cfg, params, args.quantize, jnp.dtype(jnp.bfloat16))
        return split_layers(cfg, params, count)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(cfg))
    fused = jax.eval_shape(layout, shapes)
    params = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        fused,
        param_specs(cfg, fused, count),
    )
    width = sj.lm.resolve_pass_width(args.pass_width)
    config = split_config(cfg, count)
    return sj.LM(config, params, None, (2,), cfg.vocab_size, "shapes", mesh, width)


def compile_rounds(engine, rows: int, slots: int, mesh) -> jax.stages.Compiled:
    """The compiled loop of rounds."""
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    inputs = engine.inputs(sj.Sampling(0.8, top_p=0.9), rows)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    prefill = decode.prefill_prompts(engine.method, 128, False)
    filled = jax.eval_shape(
        prefill, inputs, shaped((rows, slots)), shaped((rows,)), shaped((rows,)), keys
    )
    state = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        filled,
        specs_of(filled),
    )
    return decode.run_rounds(engine.method).lower(inputs, state, shaped(())).compile()


if __name__ == "__main__":
    main(sys.argv[1:])
