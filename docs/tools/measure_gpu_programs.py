"""What XLA makes of decoding for an H100: python docs/tools/measure_gpu_programs.py [METHOD ...]

It compiles the loop of rounds of each method from shapes alone (bfloat16, no weights), and needs no
GPU: only the wheels that CONTRIBUTING names. It prints per method, batch size and way of drawing:

- graph: whether the whole loop is one CUDA graph, so that no round waits for the host;
- kernels and waits for the host in a round; with `--per-layer`, the kernels of one more layer;
- the megabytes of temporaries; the copies of whole caches in the program; sorts in a round.

A loop inside of a round counts one turn (draft loops γ − 1, `--turns`), and a conditional its
longest branch. No times are known: nothing is autotuned without a GPU.

With `--training` it compiles the step of `configs/sdsat_codellama_7b.toml` for rows of so many
tokens, and counts a micro-batch. Loops then count as often as they turn, where that is known;
those that end on data count `--turns`. With `--prefill` it compiles the pass over a chunk of each
row's prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import jax
from gpu_programs import GpuProgram, cache_copies, compile_for_gpu, gpu_devices
from jax.sharding import AxisType, Mesh
from measure_tpu import lower_pass
from measure_training import config, step_setup
from shapes import DRAFTS, SHAPES

import specjax as sj
from infer.abstract_models import SAMPLED, abstract_model, lower_rounds, mesh_over
from infer.cli import mesh_axes, setting, whole
from specjax.models import ModelConfig
from specjax.models.quantization import parse_scheme
from specjax.registry import METHODS
from specjax.rewards import Length, RewardScorer, combine
from specjax.runtime.generate import make_engine
from train.engine.placement import AXES as TRAIN_AXES
from train.engine.placement import Placement
from train.sdsat.dryrun import step_parts
from train.sdsat.memory import lowered_step

DRAWS = {"greedy": sj.Sampling(), "sampled": SAMPLED}
REWARD = Length(8, 64)  # of methods that a reward guides
ADAPTIVE = 8  # adaptive tokens of a target for SDSAT: the last ids of its vocabulary
HEADS = (
    "method",
    "draws",
    "batch",
    "graph",
    "kernels",
    "waits",
    "kernels a layer",
    "temporaries MB",
    "cache copies",
    "sorts",
    "empty conditions",
)


def main(argv: list[str] | None = None) -> None:
    """One row per method, way of drawing and batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=["autoregressive", "speculative"])
    parser.add_argument("--target", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--draws", choices=DRAWS, nargs="+", default=list(DRAWS))
    parser.add_argument("--batch", type=whole(1), nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--capacity", type=whole(128), default=2048, metavar="N")
    parser.add_argument("--layers", type=whole(1), default=2, metavar="N", help="of each model")
    parser.add_argument("--set", type=setting, action="append", default=[], dest="options")
    parser.add_argument("--per-layer", action="store_true", help="compile one more layer, too")
    parser.add_argument("--turns", type=whole(1), default=1, metavar="N", help="of inner loops")
    parser.add_argument("--pass-width", type=whole(1, 128), metavar="N")
    parser.add_argument("--quantize", type=parse_scheme, metavar="SCHEME", help="int8, int4:128, …")
    parser.add_argument("--cache-dtype", choices=["int8"])
    parser.add_argument("--grammars", action="store_true", help="rows have grammars as tables")
    parser.add_argument("--mesh", type=mesh_axes, default={"data": 1, "model": 1})
    parser.add_argument("--prefill", action="store_true", help="a pass over a chunk of prompts")
    parser.add_argument(
        "--training", type=whole(256), nargs="+", metavar="N", help="a step instead"
    )
    args = parser.parse_args(argv)

    # Programs depend on the backend. It must be the one compiled for, not this machine's.
    devices = gpu_devices(args.mesh["data"] * args.mesh["model"])
    jax.default_backend = lambda: "gpu"
    if args.training:
        return print_steps(args, devices[0])
    mesh = mesh_over(devices, **args.mesh)
    if args.prefill:
        return print_prefill(args, mesh)
    print(f"| {' | '.join(HEADS)} |\n| --- | --- |" + " ---: |" * (len(HEADS) - 2))
    for method in args.methods:
        for draws in args.draws:
            for rows in args.batch:
                cells = row(args, mesh, method, draws, rows)
                print(f"| {' | '.join(cells)} |", flush=True)


def print_steps(args: argparse.Namespace, device: jax.Device) -> None:
    """One row per length of a row: what a micro-batch of SDSAT's step runs."""
    heads = ["tokens", "kernels", "waits", "temporaries MB"]
    print(f"| {' | '.join(heads)} |\n|" + " ---: |" * len(heads))
    placement = Placement(Mesh([[device]], TRAIN_AXES, axis_types=(AxisType.Auto,) * 2))
    for tokens in args.training:
        cfg = config("isolated", tokens, None)
        setup = step_setup(cfg, args.layers)
        parts = step_parts(cfg, setup, setup.model, placement.row_sharding(0))
        lowered = lowered_step(parts, placement)
        program = compile_for_gpu(lowered, args.turns, training=True)
        count = program.count
        cells = [f"{tokens:,}", str(count.kernels), str(count.waits)]
        print(f"| {' | '.join(cells)} | {program.temp_bytes / 1e6:,.0f} |", flush=True)


def print_prefill(args: argparse.Namespace, mesh: Mesh) -> None:
    """One row per batch size: what a pass over a chunk of each row's prompt runs."""
    heads = ["batch", "tokens a pass", "kernels", "waits", "temporaries MB"]
    print(f"| {' | '.join(heads)} |\n|" + " ---: |" * len(heads))
    target = abstract_model(SHAPES[args.target], mesh, layers=args.layers)
    engine = make_engine(target, None, METHODS["autoregressive"], {}, greedy=False)
    for rows in args.batch:
        chunk = engine.chunk_size(args.capacity, rows)
        program = compile_for_gpu(lower_pass(engine, rows, args.capacity, chunk), args.turns)
        cells = [rows, chunk, program.count.kernels, program.count.waits]
        cells = " | ".join(map(str, cells))
        print(f"| {cells} | {program.temp_bytes / 1e6:,.0f} |", flush=True)


def row(args: argparse.Namespace, mesh, method: str, draws: str, rows: int) -> list[str]:
    """The table's row of one method."""
    program = compiled(args, mesh, method, draws, rows, args.layers)
    per_layer = ""
    if args.per_layer:
        deeper = compiled(args, mesh, method, draws, rows, args.layers + 1)
        per_layer = str(deeper.count.kernels - program.count.kernels)
    return [
        method,
        draws,
        str(rows),
        "one" if program.one_graph else "no",
        str(program.count.kernels),
        str(program.count.waits),
        per_layer,
        f"{program.temp_bytes / 1e6:.0f}",
        str(cache_copies(program.hlo, cache_shape(args))),
        str(program.count.sorts),
        str(program.count.empty_conditions),
    ]


def compiled(
    args: argparse.Namespace, mesh, method: str, draws: str, rows: int, layers: int
) -> GpuProgram:
    """The compiled rounds of a method whose target has ``layers`` layers."""

    def model(name: str, layers: int) -> sj.LM:
        return abstract_model(
            with_adaptive_ids(SHAPES[name]),
            mesh,
            layers=layers,
            quantize=args.quantize,
            pass_width=args.pass_width,
            cache_dtype=args.cache_dtype,
        )

    spec = METHODS[method]
    target = model(args.target, layers)
    draft = model(DRAFTS[args.target], args.layers) if spec.needs_draft else None
    judge = None
    if spec.needs_reward:
        judge = RewardScorer.bind(combine(REWARD), target, [{}] * rows, guides=True)
    engine = make_engine(target, draft, spec, dict(args.options), draws == "greedy", judge)
    lowered = lower_rounds(engine, rows, args.capacity, mesh, DRAWS[draws], args.grammars)
    return compile_for_gpu(lowered, args.turns)


def with_adaptive_ids(cfg: ModelConfig) -> ModelConfig:
    """The model, with its last ids as adaptive tokens."""
    ids = tuple(range(cfg.vocab_size - ADAPTIVE, cfg.vocab_size))
    return dataclasses.replace(cfg, adaptive_ids=ids)


def cache_shape(args: argparse.Namespace) -> str:
    """A layer's keys in the target's cache, as the compiler writes the shape; … for its rows.

    A row of a search has a cache row for each of its beams.
    """
    cfg = SHAPES[args.target]
    heads = cfg.num_kv_heads // args.mesh["model"]
    dtype = "s8" if args.cache_dtype else "bf16"
    return f"{dtype}[…,{heads},{args.capacity},{cfg.head_dim}]"


if __name__ == "__main__":
    main(sys.argv[1:])
