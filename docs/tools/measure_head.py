"""What a head's draft costs a TPU: python docs/tools/measure_head.py [--batch N ...]

It compiles rounds from shapes alone, as measure_tpu.py does: of an EAGLE-3 head for Llama-3-8B
(draft vocabulary 32,000, γ = 4) and of plain decoding. All layers of the target are equal, so it
compiles a few and scales the cycles to all of them. c is a further draft step relative to a plain
one. The cycles are modeled.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from measure_tpu import PARTS, SEARCH_TURNS, abstract, part_of, turns
from shapes import SHAPES
from tpu_cycles import cycles

from infer.abstract_models import lower_rounds, mesh_over
from infer.cli import whole
from specjax.core.floor import COUNTING, SEARCHING
from specjax.draft.model_drafter import DRAFTING
from specjax.models.families.head_config import HeadConfig
from specjax.models.quantization import parse_scheme
from specjax.registry import METHODS
from specjax.runtime.generate import make_engine

GAMMA, DRAFTED, FEW, MORE = 4, 32000, 3, 5


class Round(NamedTuple):
    """Cycles of a round by part: those of one more draft step, and the rest."""

    step: Counter
    rest: Counter


def main(argv: list[str] | None = None) -> None:
    """One row per batch size and part of the round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=whole(1), nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--capacity", "--slots", type=whole(128), default=2048, metavar="N")
    parser.add_argument("--topology", default="v6e:2x2", help="v5e:2x4, v5p:2x2x1, …")
    scheme = "of the head alone: int8, int4:128, …"
    parser.add_argument("--quantize", type=parse_scheme, metavar="SCHEME", help=scheme)
    args = parser.parse_args(argv)
    args.pass_width = args.layers = args.cache_dtype = None
    jax.default_backend = lambda: "tpu"
    columns = ["batch", "round", *PARTS, "all", "c"]
    print(f"| {' | '.join(columns)} |\n| ---: | --- |" + " ---: |" * (len(columns) - 2))
    for rows in args.batch:
        plain = scaled(args, "autoregressive", rows)
        headed = scaled(args, "speculative", rows)
        share = headed.step.total() / plain.rest.total()
        for name, part, c in (
            ("plain step", plain.rest, ""),
            ("draft step", headed.step, f"{share:.3f}"),
            ("all but further draft steps", headed.rest, ""),
        ):
            cells = [f"{part[key] / 1e3:,.0f}" for key in PARTS]
            total = f"{part.total() / 1e3:,.0f}"
            print(f"| {rows} | {name} | {' | '.join(cells)} | {total} | {c} |", flush=True)


def scaled(args: argparse.Namespace, method: str, rows: int) -> Round:
    """The round with all of the target's layers, extrapolated from two shallow targets."""
    few, more = (counted(args, method, rows, layers) for layers in (FEW, MORE))
    times = (SHAPES["llama-3-8b"].num_layers - FEW) / (MORE - FEW)
    rest = {part: few.rest[part] + times * (more.rest[part] - few.rest[part]) for part in PARTS}
    return Round(few.step, Counter(rest))


def counted(args: argparse.Namespace, method: str, rows: int, layers: int) -> Round:
    """Cycles of a compiled round with ``layers`` layers of the target."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
    mesh = mesh_over(devices)
    whole_model = SHAPES["llama-3-8b"]
    unquantised = argparse.Namespace(**{**vars(args), "layers": layers, "quantize": None})
    target = abstract(whole_model, mesh, unquantised)
    ids = np.arange(DRAFTED) * (whole_model.vocab_size // DRAFTED)
    cfg = HeadConfig.of(whole_model, ids, layer_ids=(0, 1, 2), own_embedding=False)
    draft = abstract(cfg, mesh, args) if METHODS[method].needs_draft else None
    options = {"gamma": GAMMA} if draft else {}
    engine = make_engine(target, draft, METHODS[method], options, greedy=False)
    text = lower_rounds(engine, rows, args.capacity, mesh).compile().as_text()

    def of(passes: int) -> Counter:
        """The round's cycles if the draft loop makes ``passes`` turns."""
        counts = {DRAFTING: passes, SEARCHING: SEARCH_TURNS, COUNTING: 0}
        return cycles(text, part_of, functools.partial(turns, counts), loop=True)

    none, one = of(0), of(1)
    return Round(Counter({part: one[part] - none[part] for part in PARTS}), none)


if __name__ == "__main__":
    main(sys.argv[1:])
