"""What the TPU compiler makes of an SDSAT step: python docs/tools/measure_training.py

Compiles the step of `configs/sdsat_codellama_7b.toml` for one chip of a topology from shapes alone,
with few layers: one row a micro-batch, which is one document. MFU is the step's useful operations
(causal attention, no recomputation) over its cycles and the rate of a plain product of 8,192³.

All cycles are modelled. XLA's instructions carry the compiler's own figure. A Pallas kernel has
none: of that we count the instruction bundles that the compiler scheduled for a block, one a
cycle, times the blocks met; waiting for memory is not in it. A loop that ends on data turns as
often as a drawn row's windows take.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from shapes import SHAPES
from tpu_cycles import cycles, products_per_cycle

from infer.cli import whole
from specjax.models import ModelConfig, param_shapes
from specjax.models.attention import Isolated
from specjax.models.flash import PART, WHOLE, block_size, blocks_of
from specjax.models.splash import BLOCK, WIDE, splash_attention
from train.config import SDSATConfig, Tuned, from_toml
from train.engine.placement import AXES, Placement
from train.sdsat.dryrun import step_parts
from train.sdsat.insertion import Insertion, isolated_row
from train.sdsat.losses import Objective
from train.sdsat.memory import compiled_step, shallow
from train.sdsat.setup import Setup
from train.sdsat.trainable import make_tuning

CONFIG = "configs/sdsat_codellama_7b.toml"
PARTS = ("products", "attention", "optimizer and rest")
FWD, BWD = "splash_mha_fwd", "splash_mha_dkv"
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
# JAX cannot read the text of a program in which sparse cores gather.
FLAGS = "--xla_tpu_enable_offloading_{}_to_sparsecore=false"


class Bundles(NamedTuple):
    """Of one kernel: a turn's, those of a block met, and those of a block of results."""

    turn: int
    met: int
    ends: int


def main(argv: list[str] | None = None) -> None:
    """One row per topology, length and loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", nargs="+", default=["v5p:2x2x1", "v6e:2x2"])
    parser.add_argument("--tokens", type=whole(2048), nargs="+", default=[16384, 4096])
    parser.add_argument("--loss", nargs="+", default=["improved", "isolated"])
    parser.add_argument("--remat", choices=["false", "true", "attention"], default="attention")
    parser.add_argument("--layers", type=whole(1), default=2)
    parser.add_argument("--kernels", help=argparse.SUPPRESS)  # compile these alone, for their dump
    args = parser.parse_args(argv)
    os.environ.setdefault("LIBTPU_INIT_ARGS", f"{FLAGS.format('gather')} {FLAGS.format('scatter')}")
    # The way through attention is chosen by the backend: the one compiled for.
    jax.default_backend = lambda: "tpu"
    if args.kernels:
        return compile_kernels(device_of(args.kernels))
    heads = ["chip", "tokens", "loss", "MFU", "cycles a clean token", *PARTS, "scratch GiB"]
    print(f"| {' | '.join(heads)} |\n| --- | ---: | --- |" + " ---: |" * (len(heads) - 3))
    for topology in args.topology:
        kernels = bundles_of(topology)
        for tokens in args.tokens:
            for loss in args.loss:
                cells = row(args, topology, tokens, loss, kernels)
                print(f"| {' | '.join(cells)} |", flush=True)


def row(
    args: argparse.Namespace, topology: str, tokens: int, loss: str, kernels: dict[str, Bundles]
) -> list[str]:
    """The table's row of one step; cycles a clean token, in all and by part."""
    device = device_of(topology)
    model = shallow(SHAPES["codellama-7b"], args.layers)
    how = [f"sdsat.loss={loss}", f"data.seq_len={tokens}", "optim.batch_size=1", "mesh.fsdp=1"]
    cfg = from_toml(SDSATConfig, CONFIG, how)
    section, remat = cfg.sdsat, {"false": False, "true": True}.get(args.remat, args.remat)
    ids = (model.vocab_size - 1,) * section.window
    insertion = Insertion(ids, rate=section.start_rate)
    objective = Objective(loss, section.window, dtype="bfloat16", remat=remat)
    tuning = make_tuning(Tuned(), ids, 0)
    setup = Setup(None, None, model, 0, insertion, None, objective, tuning)
    placement = Placement(Mesh([[device]], AXES, axis_types=(AxisType.Auto,) * 2))
    step = compiled_step(step_parts(cfg, setup, model), placement)
    turns = window_turns(insertion, tokens) if loss == "isolated" else {}
    calls = functools.partial(kernel_cycles, kernels, tokens, model.num_heads)
    count = cycles(
        step.as_text(),
        part_of,
        lambda path: next((n for name, n in turns.items() if name in path), 1),
        calls=lambda line: calls(line) / device.num_cores,
    )
    clean = cfg.optim.accumulate * tokens
    mfu = useful(model, loss, tokens, insertion) * cfg.optim.accumulate
    mfu /= count.total() * products_per_cycle(device, 8192, (8192, 8192))
    each = [f"{count[part] / clean:,.0f}" for part in PARTS]
    scratch = step.memory_analysis().temp_size_in_bytes / 2**30
    whole_step = f"{count.total() / clean:,.0f}"
    return [topology, f"{tokens:,}", loss, f"{mfu:.2f}", whole_step, *each, f"{scratch:.1f}"]


def device_of(topology: str) -> jax.Device:
    """The topology's first chip."""
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def part_of(path: str, instruction: str) -> str:
    """What an instruction is for, by the scope that it stands in."""
    if "attention" in path and ("splash" in path or WHOLE in path or PART in path):
        return "attention"
    return "products" if "dot_general" in path else "optimizer and rest"


def useful(model: ModelConfig, loss: str, tokens: int, insertion: Insertion) -> float:
    """Multiplications of a row, forward and twice that backward."""
    blocks = param_shapes(model)["layers"]
    weights = sum(x.size for x in jax.tree.leaves(blocks) if x.ndim == 2)
    drawn = row_of(insertion, tokens)
    pairs, isolated = tokens * (tokens + 1) / 2, loss == "isolated"
    behind = int((drawn["windows"] > 0).sum()) if isolated else tokens
    pairs += int((drawn["starts"] + drawn["index"]).sum()) if isolated else pairs
    seen = 2 * model.num_layers * model.num_heads * model.head_dim * pairs
    labels = tokens + (behind if isolated else len(np.unique(drawn["sources"])))
    head = labels * model.vocab_size * model.hidden_size
    return 3 * ((tokens + behind) * weights + seen + head)


@functools.cache
def row_of(insertion: Insertion, tokens: int) -> dict:
    """One document that fills the row, and its windows."""
    one = np.ones(tokens, np.int32)
    blank = {"tokens": 0 * one, "labels": one, "segments": one, "positions": np.arange(tokens)}
    return isolated_row(insertion, blank, 0)


def window_turns(insertion: Insertion, tokens: int) -> dict[str, float]:
    """How many blocks of keys a block of window tokens meets, whole and in part, on the average."""
    drawn = row_of(insertion, tokens)
    names = {"segments": "segment", "positions": "position"}
    names |= {name: name for name in ("windows", "starts")}
    key = {ours: drawn[name][None] for name, ours in names.items()}
    query = {name: x[:, tokens:] for name, x in key.items()}
    found = blocks_of(Isolated(clean=tokens), query, key, block_size(1, 1))
    kinds = found.whole, found.seen - found.whole
    return {name: float(n.mean()) for name, n in zip((WHOLE, PART), kinds, strict=True)}


def kernel_cycles(kernels: dict[str, Bundles], tokens: int, heads: int, line: str) -> float:
    """Of a call of the kernel: the blocks of a causal row, and its turns with nothing to do."""
    name = next((name for name in kernels if name in line), None)
    if name is None:
        return 0
    rows = int(re.search(r"bf16\[(\d+),2,", line).group(1))
    wide = WIDE if name == BWD else BLOCK
    wide = wide if tokens % wide == 0 else BLOCK
    queries, keys = -(-tokens // BLOCK), -(-tokens // wide)
    met = sum(-(-(i + 1) * BLOCK // wide) for i in range(queries))
    ends = keys if name == BWD else queries
    one = kernels[name]
    return rows * heads * (queries * keys * one.turn + met * one.met + ends * one.ends)


def bundles_of(topology: str) -> dict[str, Bundles]:
    """The compiler's schedules of the forward and the backward kernel, in another process."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"LIBTPU_INIT_ARGS": DUMP.format(folder)}
        command = [sys.executable, __file__, "--kernels", topology]
        subprocess.run(command, env=env, check=True, capture_output=True)
        found = [x for x in Path(folder).glob("*final_bundles.txt") if "schedule" not in x.name]
        texts = {n: x.read_text() for n in (FWD, BWD) for x in found if n in x.name}
    return {name: parse(text) for name, text in texts.items()}


def compile_kernels(device: jax.Device) -> None:
    """Attention of a short row, forward and backward."""
    one, shape = SingleDeviceSharding(device), (1, 2 * WIDE, 2, 128)
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=one)
    k = jax.ShapeDtypeStruct((1, 2, 2 * WIDE, 128), jnp.bfloat16, sharding=one)
    segments = jax.ShapeDtypeStruct((1, 2 * WIDE), jnp.int32, sharding=one)

    def total(q, k, v, segments):
        return splash_attention(q, k, v, segments).astype(jnp.float32).sum()

    jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, k, segments).compile()


def parse(schedule: str) -> Bundles:
    """A kernel's loop body is a row of regions, each skipped by one branch: the longest meets a
    block, the next two begin and end a result."""
    marks = [0]
    for line in schedule.splitlines():
        place = re.match(r"\s*(0x[0-9a-f]+)\s+(LB|PF)?", line)
        if place and (place.group(2) or "sbr.rel" in line):
            marks.append(int(place.group(1), 16))
    *ends, met = sorted(b - a for a, b in itertools.pairwise(marks))[-3:]
    return Bundles(marks[-1] - met - sum(ends), met, sum(ends))


if __name__ == "__main__":
    main(sys.argv[1:])
