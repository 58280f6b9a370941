"""What the TPU compiler makes of decoding: python docs/tools/measure_tpu.py [METHOD ...]

It compiles the round of each method for a topology with libtpu (the `tpu` extra), from shapes alone
(bfloat16, no weights). It prints, per round:

- modeled cycles by part, relative to streaming the weights and the cache's positions once through
  the matrix unit;
- the memory of one chip: weights, caches and all other state, and what the loop takes besides;
- the exchanges between chips: in the program, and in a round those that draw tokens, with the KB
  that they bring each chip. With ``--gather`` every chip has all logits, as methods need that
  read whole distributions.

The cycles are the compiler's cost model and no measurement. A loop over blocks of a cache counts as
many turns as the rows' lengths take (``--held``, by the target's heads). Of a mixture as many
experts count as one token of each row wakes by chance. Our kernel that runs them costs the stream
of their weights, or its bundles if they take longer.

With ``--prefill`` it instead compiles the average pass over prompts of ``--capacity`` tokens,
relative to what its operations take in plain products. :mod:`tpu_kernels` counts the attention's
kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from shapes import DRAFTS, SHAPES
from tpu_cycles import (
    EXCHANGES,
    bytes_per_cycle,
    cycles,
    exchanged,
    products_per_cycle,
    without_sparse_cores,
)
from tpu_kernels import FORWARD, Kernel, parse_call, schedules, turn_bundles

import specjax as sj
from infer.abstract_models import SAMPLED, abstract_model, lower_rounds, mesh_over
from infer.cli import mesh_axes, setting, whole
from specjax.core.floor import COUNTING, SEARCHING
from specjax.draft.model_drafter import DRAFTING
from specjax.models import ModelConfig, expert_kernel
from specjax.models.attention import splash_chunk
from specjax.models.attention.long_cache import (
    MASKED_SHARED,
    MASKED_SINGLE,
    ROW_BY_ROW,
    UNMASKED_SHARED,
    UNMASKED_SINGLE,
    choose_blocks,
    reads_whole,
    shared_blocks,
)
from specjax.models.cache import row_bytes
from specjax.models.experts import distinct_experts
from specjax.models.quantization import active_bytes, parse_scheme
from specjax.models.sharding import PARTIAL_SUMS
from specjax.registry import METHODS
from specjax.runtime.generate import make_engine

PARTS = ("weights", "attention", "draw and rule", "exchanges", "rest")
SEARCH_TURNS = 4  # passes over the vocabulary that top-p's search takes for bfloat16 logits

PENALIZED = dataclasses.replace(
    SAMPLED, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
)


def main(argv: list[str] | None = None) -> None:
    """One row per method and batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["autoregressive", "speculative"])
    parser.add_argument("--target", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--batch", type=whole(1), nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--capacity", "--slots", type=whole(128), default=2048, metavar="N")
    held = "positions that rows hold, one for all or one for each; default: all"
    parser.add_argument("--held", type=whole(1), nargs="+", metavar="N", help=held)
    parser.add_argument("--prefill", action="store_true", help="passes over prompts instead")
    parser.add_argument("--layers", type=whole(1), metavar="N", help="fewer layers compile faster")
    parser.add_argument("--set", type=setting, action="append", default=[], dest="options")
    parser.add_argument("--pass-width", type=whole(1, 128), metavar="N")
    parser.add_argument("--quantize", type=parse_scheme, metavar="SCHEME", help="int8, int4:128, …")
    parser.add_argument("--cache-dtype", choices=["int8"])
    parser.add_argument("--topology", default="v6e:2x2", help="v5e:2x4, v5p:2x2x1, …")
    parser.add_argument("--gather", action="store_true", help="all logits on every chip")
    parser.add_argument("--grammars", action="store_true", help="rows have grammars as tables")
    parser.add_argument("--penalties", action="store_true", help="rows have penalties for tokens")
    parser.add_argument("--mesh", type=mesh_axes, default={"data": 1, "model": 1})
    parser.add_argument("--dump", type=int, nargs=3, help=argparse.SUPPRESS)  # compile a kernel
    parser.add_argument("--dump-experts", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    drafting = [name for name in args.methods if METHODS[name].needs_draft]
    if drafting and args.target not in DRAFTS:
        parser.error(f"--target {args.target} has no usual draft for {drafting[0]}")
    # Layers depend on the backend. It must be the one compiled for, not this machine's.
    jax.default_backend = lambda: "tpu"
    if args.dump:
        return compile_kernel(args.topology, *args.dump)
    if args.dump_experts:
        return compile_expert_kernel(args.topology, SHAPES[args.target])
    if SHAPES[args.target].experts:
        without_sparse_cores()
        expert_bundles(args.topology, args.target)  # before libtpu starts here: it runs once
    if args.prefill:
        if math.prod(args.mesh.values()) > 1:
            parser.error("--prefill counts one chip: leave --mesh out")
        without_sparse_cores()
        return print_prefill(args)
    memory = ["arguments MB", "scratch MB"]
    heads = [
        "method",
        "batch",
        "limit",
        *PARTS,
        "over the limit",
        *memory,
        *EXCHANGES[:2],
        "to draw",
        "KB to draw",
        "seconds",
    ]
    print(f"| {' | '.join(heads)} |\n| --- |" + " ---: |" * (len(heads) - 1))
    for method in args.methods:
        for rows in args.batch:
            print(f"| {' | '.join(row(args, method, rows))} |", flush=True)


def row(args: argparse.Namespace, method: str, rows: int) -> list[str]:
    """The table's row of one method at one batch size; cycles in thousands."""
    mesh = mesh_of(args)
    target = abstract(SHAPES[args.target], mesh, args)
    draft = (
        abstract(SHAPES[DRAFTS[args.target]], mesh, args) if METHODS[method].needs_draft else None
    )
    engine = make_engine(target, draft, METHODS[method], dict(args.options), greedy=False)
    if args.gather:
        rule = dataclasses.replace(engine.method.rule, splits_vocabulary=False)
        method_with_gather = dataclasses.replace(engine.method, rule=rule)
        engine = dataclasses.replace(engine, method=method_with_gather)
    began = time.perf_counter()
    sampling = PENALIZED if args.penalties else SAMPLED
    lowered = lower_rounds(engine, rows, args.capacity, mesh, sampling, args.grammars)
    compiled = lowered.compile()
    seconds, text = time.perf_counter() - began, compiled.as_text()
    passes = getattr(getattr(engine.method, "drafter", None), "gamma", 0)
    counts = blocks_read(
        target, rows, args, args.held or [args.capacity], target.net.padded_width(rows)
    )
    counts |= {DRAFTING: max(passes - 1, 1), SEARCHING: SEARCH_TURNS, COUNTING: 0}
    count = functools.partial(turns, counts)
    calls = functools.partial(expert_cycles, args, rows, bytes_per_cycle(mesh.devices.flat[0]))
    counted = cycles(text, part_of, count, loop=True, calls=calls)
    drawing = exchanged(text, count, without=PARTIAL_SUMS, loop=True)
    streamed = held(target, rows, args) + (passes * held(draft, rows, args) if draft else 0)
    limit = streamed / bytes_per_cycle(mesh.devices.flat[0])
    memory = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    exchanges = [len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in EXCHANGES[:2]]
    return [
        method,
        str(rows),
        f"{limit / 1e3:,.0f}",
        *(f"{counted[part] / 1e3:,.0f}" for part in PARTS),
        f"{counted.total() / limit:.2f}",
        *(f"{size / 1e6:,.0f}" for size in sizes),
        *map(str, exchanges),
        str(drawing.count),
        f"{drawing.bytes / 1e3:,.1f}",
        f"{seconds:.0f}",
    ]


def expert_cycles(args: argparse.Namespace, rows: int, rate: float, line: str) -> float:
    """Cycles of a call of the experts' kernel; 0 of any other call."""
    if expert_kernel.NAME not in line:
        return 0
    cfg = SHAPES[args.target]
    sizes = cfg.experts.size, cfg.hidden_size
    tile = expert_kernel.tile_columns(sizes[0], 2 * sizes[1])
    stream = 3 * tile * 2 * sizes[1] / rate
    turn = max(stream, expert_bundles(args.topology, args.target))
    # The first tile is read while nothing is computed.
    return stream + distinct_experts(cfg.experts, rows) * sizes[0] / tile * turn


@functools.cache
def expert_bundles(topology: str, target: str) -> int:
    arguments = ["autoregressive", "--topology", topology, "--target", target, "--dump-experts"]
    script = [__file__, *arguments]
    return turn_bundles(script, expert_kernel.NAME)


def compile_expert_kernel(topology: str, cfg: ModelConfig) -> None:
    """Compiles the kernel of a mixture's experts."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    count, columns, hidden = cfg.experts.count, cfg.experts.size, cfg.hidden_size
    rows = shaped((count, columns, hidden), jnp.bfloat16)
    across = shaped((count, hidden, columns), jnp.bfloat16)
    x = shaped((count, expert_kernel.TOKENS, hidden), jnp.bfloat16)
    whole = shaped((count,), jnp.int32), shaped((), jnp.int32)
    run = functools.partial(expert_kernel.run_experts, combine=lambda gate, up: gate * up)
    jax.jit(run).lower(rows, rows, across, x, *whole).compile()


def mesh_of(args: argparse.Namespace) -> jax.sharding.Mesh:
    """The topology's first chips."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
    return mesh_over(devices, **args.mesh)


def print_prefill(args: argparse.Namespace) -> None:
    """One row per batch size: a pass of the middle of the prompt, in thousands of cycles."""
    mesh = mesh_of(args)
    target, device = abstract(SHAPES[args.target], mesh, args), mesh.devices.flat[0]
    heads = ["batch", "tokens a pass", "plain products", *PARTS, "over them", "scratch MB"]
    print(f"| {' | '.join(heads)} |\n|" + " ---: |" * len(heads))
    cfg = target.config
    layers = cfg.num_layers - 1  # prefill needs only keys and values of the last layer
    sizes = layers * sum(x.size for x in jax.tree.leaves(target.params["layers"]["0"]))
    seen = 2 * layers * cfg.num_heads * cfg.head_dim * args.capacity // 2
    for rows in args.batch:
        engine = make_engine(target, None, METHODS["autoregressive"], {}, greedy=False)
        chunk = engine.chunk_size(args.capacity, rows)
        compiled = lower_pass(engine, rows, args.capacity, chunk).compile()
        middle = [args.capacity // 2 + chunk // 2]  # positions that an average pass reads
        count = functools.partial(turns, blocks_read(target, rows, args, middle, chunk))
        rate = products_per_cycle(device)
        calls = functools.partial(kernel_cycles, args, rate / device.num_cores)
        counted = cycles(compiled.as_text(), part_of, count, calls=calls)
        plain = rows * chunk * (sizes + seen) / rate
        figures = [plain, *(counted[part] for part in PARTS)]
        cells = [str(rows), str(chunk), *(f"{x / 1e3:,.0f}" for x in figures)]
        scratch = compiled.memory_analysis().temp_size_in_bytes / 1e6
        cells += [f"{counted.total() / plain:.2f}", f"{scratch:,.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def kernel_cycles(args: argparse.Namespace, rate: float, line: str) -> float:
    """Cycles of a kernel's call, for a row's pass over the middle of its prompt."""
    call = parse_call(line)
    if call is None:
        return 0
    sizes = SHAPES[args.target].head_dim, args.capacity, call.tokens
    kernel = prefill_kernel(args.topology, *sizes)
    positions = args.capacity // 2 + np.arange(call.tokens, dtype=np.int32)
    met = splash_chunk.chunk_blocks(jnp.asarray(positions)[None], args.capacity, None, call.blocks)
    return call.cycles(kernel, np.asarray(met[0]), rate)


@functools.cache
def prefill_kernel(topology: str, *sizes: int) -> Kernel:
    return schedules([__file__, "--topology", topology, "--dump", *map(str, sizes)])[FORWARD]


def compile_kernel(topology: str, size: int, capacity: int, tokens: int) -> None:
    """Compiles the attention of one row's pass. Two heads do: the kernel's grid has the rest."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(devices[0]))
    q = shaped((1, tokens, 2, size), jnp.bfloat16)
    k = shaped((1, 2, capacity, size), jnp.bfloat16)
    jax.jit(splash_chunk.chunk_attention).lower(q, k, k, shaped((1, tokens), jnp.int32)).compile()


def lower_pass(engine, rows: int, capacity: int, chunk: int) -> jax.stages.Lowered:
    """A pass over a chunk of each row's prompt."""
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    net = engine.inputs(sj.Sampling(), rows).target
    cache = jax.eval_shape(lambda net: net.cache(rows, capacity), net)
    prefill_chunk = jax.jit(lambda net, *pieces: net.prefill_chunk(*pieces), donate_argnums=1)
    return prefill_chunk.lower(net, cache, shaped((rows, chunk)), shaped((rows,)))


def blocks_read(model: sj.LM, rows: int, args, held: list[int], n: int) -> dict[str, int]:
    """Turns of the loops over blocks of a cache, for passes of ``n`` tokens a row.

    Loops of layers of a sliding window, which are shorter, count as much as the others.
    """
    queries = model.config.num_heads * n  # of one device
    if reads_whole(rows * queries, args.capacity):
        return {}
    together, block = choose_blocks(rows, queries, args.capacity)
    end = -(-np.resize(np.array(held), rows) // block)
    shared = int(shared_blocks(jnp.asarray(end))) if together else int(end.max())
    whole = 0 * end if model.config.sliding_window else (np.resize(held, rows) - n + 1) // block
    seen = min(shared, int(whole.min()))
    turns = {UNMASKED_SHARED: seen, MASKED_SHARED: shared - seen}
    if not together:
        return turns | {ROW_BY_ROW: rows}
    own, alone = (int(np.maximum(last - shared, 0).sum()) for last in (whole, end))
    return turns | {UNMASKED_SINGLE: own, MASKED_SINGLE: alone - own}


def part_of(path: str, instruction: str) -> str:
    """The part of a round that an instruction belongs to, by its innermost known scope."""
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


def turns(counts: dict[str, int], path: str) -> int:
    """Turns of a loop whose end depends on data, by its innermost known scope."""
    return next((counts[step] for step in reversed(path.split("/")) if step in counts), 1)


def held(model: sj.LM, rows: int, args: argparse.Namespace) -> float:
    """Bytes that a pass must read on one chip: weights and used cache positions.

    The embedding counts only if the head is tied to it. Of a mixture's experts those count that one
    token of each row wakes.
    """
    cfg, chips = model.config, args.mesh["model"]
    weights = active_bytes(cfg, rows, jnp.bfloat16, args.quantize)
    if not cfg.tie_embeddings:
        table = jax.tree.leaves(model.params["embed"])
        weights -= sum(x.size * x.dtype.itemsize for x in table) / chips
    share = rows // args.mesh["data"]
    dtype = args.cache_dtype or jnp.bfloat16
    each = np.resize(np.array(args.held or [args.capacity]), share)
    return weights + sum(row_bytes(cfg, int(capacity), dtype) for capacity in each)


def abstract(cfg: ModelConfig, mesh: jax.sharding.Mesh, args: argparse.Namespace) -> sj.LM:
    """A model of shapes only, as the arguments ask for it."""
    return abstract_model(
        cfg,
        mesh,
        layers=args.layers,
        quantize=args.quantize,
        pass_width=args.pass_width,
        cache_dtype=args.cache_dtype,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
