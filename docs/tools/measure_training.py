"""The modeled MFU of an SDSAT training step: python docs/tools/measure_training.py

It compiles the step of `configs/sdsat_codellama_7b.toml` with libtpu (the `tpu` extra), from shapes
alone. The step is that of one chip, without its exchanges with others. Micro-batches have 16,384
clean tokens, in rows of one document each. It is a cost model and no measurement. It counts so:

- XLA's instructions carry the compiler's own cycles, and loops count by their turns.
- Splash attention's kernels carry none. They count as :mod:`tpu_kernels` says: by the compiler's
  schedule of them and the blocks that they visit (of `isolated`'s windows: in a drawn row). A
  chip's cores share the heads.
- Full depth is extrapolated from two shallow copies, part by part.
- MFU is what the model needs (`train.sdsat.operations.useful_operations`) over the cycles, at the
  rate of a plain bfloat16 product of 8,192³ of the same compiler and chip. A run's log counts the
  same: causal attention, backward twice forward, nothing for recomputation.

With ``--attention`` it prints the kernels alone.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from shapes import SHAPES
from tpu_cycles import cycles, products_per_cycle, without_sparse_cores
from tpu_kernels import BACKWARD, FORWARD, PRODUCTS, Kernel, met_of, parse_call, schedules

from infer.cli import whole
from specjax.models.attention import splash, splash_windows
from specjax.models.attention.dense import Isolated
from specjax.models.attention.splash import BLOCKS, SplashBlocks
from specjax.models.attention.splash_windows import SCOPE as WINDOWS
from specjax.models.attention.splash_windows import WINDOW_BLOCKS
from train.config import SDSATConfig, Tuned, from_toml
from train.engine.losses import HEAD
from train.engine.placement import AXES, Placement
from train.sdsat.dryrun import step_parts
from train.sdsat.insertion import Insertion, isolated_row
from train.sdsat.losses import SdsatObjective
from train.sdsat.memory import lowered_step, shallow
from train.sdsat.operations import useful_operations
from train.sdsat.prepare import SdsatSetup
from train.sdsat.trainable import make_tuning

CONFIG, SHAPE = "configs/sdsat_codellama_7b.toml", "codellama-7b"
MICRO_BATCH = 16384  # clean tokens
PARTS = ("products", "attention", "windows", "loss head", "rest")
REMAT = {"false": False, "true": True, "attention": "attention"}


# (kernel's name, whether it is the windows' kernel) → schedule
Kernels = dict[tuple[str, bool], Kernel]


def main(argv: list[str] | None = None) -> None:
    """One row per chip, length and loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", nargs="+", default=["v5p:1x1x1", "v6e:1x1"])
    parser.add_argument("--tokens", type=whole(2048), nargs="+", default=[16384, 4096], metavar="N")
    losses = ["improved", "isolated"]
    parser.add_argument("--loss", nargs="+", choices=losses, default=losses)
    parser.add_argument("--remat", choices=REMAT, help="default: the recipe's")
    depths = "depths that are compiled; default: 2 4"
    parser.add_argument(
        "--layers", type=whole(2), nargs=2, default=[2, 4], metavar="N", help=depths
    )
    parser.add_argument("--attention", action="store_true", help="the kernels alone")
    parser.add_argument("--dump", nargs=2, help=argparse.SUPPRESS)  # compile kernels, and no more
    args = parser.parse_args(argv)
    if args.layers[0] >= args.layers[1]:
        parser.error("--layers: expected the shallower copy first, e.g. 2 4")
    # Attention depends on the backend. It must be the one compiled for, not this machine's.
    jax.default_backend = lambda: "tpu"
    if args.dump:
        return compile_kernels(device_of(args.dump[0]), args.dump[1] == WINDOWS)
    without_sparse_cores()
    print_attention(args) if args.attention else print_steps(args)


def print_steps(args: argparse.Namespace) -> None:
    """Thousands of cycles a clean token, in all and by part."""
    heads = ["chip", "tokens", "loss", "MFU", "of improved", "cycles", *PARTS]
    print(f"| {' | '.join(heads)} |\n| --- | ---: | --- |" + " ---: |" * (len(heads) - 3))
    for topology, tokens in itertools.product(args.topology, args.tokens):
        device, kernels = device_of(topology), kernels_of(topology)
        improved = None
        for loss in args.loss:
            cfg = config(loss, tokens, args.remat)
            count = step_cycles(cfg, device, kernels, args.layers)
            each = count.total() / tokens
            improved = each if loss == "improved" else improved
            share = useful(cfg) / (count.total() * peak_of(device))
            thousands = (each, *(count[part] / tokens for part in PARTS))
            cells = [topology, f"{tokens:,}", loss, f"{share:.3f}"]
            cells += [f"{each / improved:.2f}" if improved else ""]
            cells += [f"{x / 1e3:,.1f}" for x in thousands]
            print(f"| {' | '.join(cells)} |", flush=True)


def print_attention(args: argparse.Namespace) -> None:
    """One row per kernel: its bundles, and what one head of a causal row visits.

    Cycles are in thousands, and relative to the kernel's products as plain products.
    """
    heads = ["chip", "tokens", "kernel", "turn", "met", "ends", "turns", "blocks", "rows"]
    heads += ["cycles", "over plain products"]
    print(f"| {' | '.join(heads)} |\n| --- | ---: | --- |" + " ---: |" * (len(heads) - 3))
    for topology, tokens in itertools.product(args.topology, args.tokens):
        device, kernels = device_of(topology), kernels_of(topology, (False,))
        rate = peak_of(device) / device.num_cores
        for name, products in PRODUCTS.items():
            block, wide = met_blocks(BLOCKS, name, tokens)
            met = met_of(name, causal_table(name, tokens, block, wide))
            spent = met.cycles(kernels[name, False], products * 128 * block * wide / rate)
            plain = products * 128 * tokens * (tokens + 1) / 2 / rate
            cells = [topology, f"{tokens:,}", name, *map(str, (*kernels[name, False], *met))]
            cells += [f"{spent / 1e3:,.0f}", f"{spent / plain:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def config(loss: str, tokens: int, remat: str | None) -> SDSATConfig:
    """The recipe's config, for one chip."""
    own = [f"sdsat.loss={loss}", f"data.seq_len={tokens}", "mesh.fsdp=1", "mesh.devices=1"]
    own += [f"optim.batch_size={max(1, MICRO_BATCH // tokens)}"]
    own += [f"model.remat={remat}"] if remat else []
    return from_toml(SDSATConfig, CONFIG, own)


def step_setup(cfg: SDSATConfig, layers: int | None = None) -> SdsatSetup:
    """The recipe's setup for the published shape: one repeated adaptive id, with a new row."""
    model = SHAPES[SHAPE]
    ids = (model.vocab_size,) * cfg.sdsat.window
    model = dataclasses.replace(model, vocab_size=model.vocab_size + 1, adaptive_ids=ids)
    how = cfg.model.compute_dtype, cfg.model.remat, cfg.model.scan
    return SdsatSetup(
        start=None,
        tokenizer=None,
        model=shallow(model, layers) if layers else model,
        new_rows=1,
        insertion=Insertion(ids, rate=cfg.sdsat.start_rate),
        layout=None,
        chats=None,
        objective=SdsatObjective(cfg.sdsat.loss, cfg.sdsat.window, 0.0, cfg.sdsat.weight, *how),
        tuning=make_tuning(Tuned(), ids, 0),
    )


def useful(cfg: SDSATConfig) -> float:
    """Multiplications that one row needs, forward and backward."""
    return useful_operations(cfg, step_setup(cfg).model) * cfg.data.seq_len / 2


def step_cycles(
    cfg: SDSATConfig, device: jax.Device, kernels: Kernels, depths: list[int]
) -> collections.Counter:
    """Cycles of the step per row, by part, extrapolated to the model's depth."""
    low, high = (depth_cycles(cfg, device, kernels, layers) for layers in depths)
    steps = (SHAPES[SHAPE].num_layers - depths[0]) / (depths[1] - depths[0])
    each = {part: low[part] + steps * (high[part] - low[part]) for part in PARTS}
    rows = cfg.optim.batch_size * cfg.optim.accumulate
    return collections.Counter({part: x / rows for part, x in each.items()})


def depth_cycles(
    cfg: SDSATConfig, device: jax.Device, kernels: Kernels, layers: int
) -> collections.Counter:
    """Cycles of the step by part, for a copy with ``layers`` layers."""
    setup, cores = step_setup(cfg, layers), device.num_cores
    placement = Placement(Mesh([[device]], AXES, axis_types=(AxisType.Auto,) * 2))
    parts = step_parts(cfg, setup, setup.model, placement.row_sharding(0))
    text = lowered_step(parts, placement).compile().as_text()
    drawn = drawn_tables(setup.insertion, cfg.data.seq_len)

    def calls(line: str) -> float:
        return kernel_cycles(kernels, drawn, peak_of(device) / cores, line) / cores

    return cycles(text, part_of, unknown_turns, calls=calls)


def unknown_turns(path: str) -> int:
    """Exits with an error: no loop of these steps may end on data."""
    sys.exit(f"a loop of unknown turns ({path}): rows so long go another way through attention")


def device_of(topology: str) -> jax.Device:
    """The topology's first chip; all its cores together are one device."""
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    except Exception as error:  # whatever libtpu raises
        first = str(error).strip().splitlines()[0]
        sys.exit(f"--topology {topology}: libtpu does not know it ({first}); write e.g. v6e:1x1")


@functools.cache
def peak_of(device: jax.Device) -> float:
    """Multiplications per cycle of a plain product."""
    return products_per_cycle(device, 8192, (8192, 8192))


def part_of(path: str, instruction: str) -> str:
    """The part of the step that an instruction belongs to, by its named scopes."""
    steps = set(re.split(r"[/()]", path))
    if WINDOWS in steps:
        return "windows"
    if any("splash" in step for step in steps):
        return "attention"
    if HEAD in steps:
        return "loss head"
    return "products" if "weights" in steps else "rest"


def windows_mask(insertion: Insertion, tokens: int) -> Isolated:
    return Isolated(clean=tokens, longest=insertion.window)


@functools.cache
def drawn_tables(insertion: Insertion, tokens: int) -> dict[str, np.ndarray]:
    """Tables of the blocks that the windows of a random row visit; the row is one document."""
    one = np.ones(tokens, np.int32)
    blank = {"tokens": 0 * one, "labels": one, "segments": one, "positions": np.arange(tokens)}
    drawn = isolated_row(insertion, blank, 0)
    names = {"segment": "segments", "position": "positions", "windows": "windows"}
    meta = {name: drawn[ours][None] for name, ours in (names | {"starts": "starts"}).items()}
    found = splash_windows.make_window_tables(windows_mask(insertion, tokens), meta)
    return {FORWARD: np.asarray(found.forward[0]), BACKWARD: np.asarray(found.backward[0])}


def kernel_cycles(kernels: Kernels, drawn: dict[str, np.ndarray], rate: float, line: str) -> float:
    """Cycles of a kernel's call on one core that does ``rate`` multiplications a cycle."""
    call = parse_call(line)
    if call is None:
        return 0
    windows = f"/{WINDOWS}/" in line
    if call.blocks != met_blocks(WINDOW_BLOCKS if windows else BLOCKS, call.name):
        sys.exit(f"blocks of {call.blocks}: rows of such a length are not scheduled here")
    causal = call.name, call.tokens, *call.blocks
    table = drawn[call.name] if windows else causal_table(*causal)
    return call.cycles(kernels[call.name, windows], table, rate)


@functools.cache
def causal_table(name: str, tokens: int, block: int, wide: int) -> np.ndarray:
    """The causal kernel's table of blocks, made by splash attention itself."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

    mask = masks.MultiHeadMask([masks.CausalMask((tokens, tokens))])
    if name == BACKWARD:
        info, _ = infos.process_mask_dkv(mask, (block, wide), shrink_grid=False)
    else:
        info, _ = infos.process_mask(mask, (block, wide))
    return np.asarray(info.block_mask)[0]


def met_blocks(blocks: SplashBlocks, name: str, tokens: int = 0) -> tuple[int, int]:
    """(queries, keys) of the blocks that a kernel visits, for ``tokens`` keys."""
    return blocks.queries, blocks.wide(tokens) if name == BACKWARD else blocks.keys


@functools.cache
def kernels_of(topology: str, windows: tuple[bool, ...] = (False, True)) -> Kernels:
    """The compiler's schedules of the kernels."""
    kinds = {
        kind: [__file__, "--dump", topology, WINDOWS if kind else "causal"] for kind in windows
    }
    return {(n, kind): x for kind in windows for n, x in schedules(kinds[kind]).items()}


def compile_kernels(device: jax.Device, windows: bool) -> None:
    """Compiles attention of a short row with two heads, forward and backward."""
    one, clean = SingleDeviceSharding(device), 2 * BLOCKS.backward
    mask = Isolated(clean=clean, longest=5)
    count = clean + BLOCKS.backward if windows else clean
    names = ("segment", "position", "windows", "starts")
    meta = {n: jax.ShapeDtypeStruct((1, count), jnp.int32, sharding=one) for n in names}

    def total(q, k, v, meta):
        if windows:
            told = splash_windows.make_window_tables(mask, meta)
            out = splash_windows.window_attention(q, k, v, meta["segment"], told, mask=mask)
        else:
            out = splash.splash_attention(q, k, v, meta["segment"])
        return out.astype(jnp.float32).sum()

    shapes = (1, count - clean if windows else count, 2, 128), *((1, 2, count, 128),) * 2
    qkv = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=one) for shape in shapes)
    jax.jit(jax.grad(total, (0, 1, 2))).lower(*qkv, meta).compile()


if __name__ == "__main__":
    main(sys.argv[1:])
