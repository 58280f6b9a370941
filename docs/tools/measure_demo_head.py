"""The embedded head beside the embedded draft: python docs/tools/measure_demo_head.py

It decodes held-out functions greedily and at temperature 0.8 with top-p 0.9, batch 1. Everything
is compiled before it is timed. The cases take turns within each repeat. Speeds are ratios within
one repeat, without prefill, and ± is that of infer.bench. It prints a table, and c of both drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax as sj
from infer.loading import use_compilation_cache
from infer.timing import costs, row_seconds
from infer.uncertainty import Estimate, ratio, speed_ratio
from specjax._util.files import markdown_table
from specjax.demo.heldout import held_out_functions
from specjax.metrics import RATES
from specjax.registry import MethodSpec, compose, method
from specjax.runtime import warmup
from specjax.runtime.engine import Request
from specjax.runtime.generate import PREFIXES, in_turn, make_engine

RATE, TOKENS = "acceptance_rate", "tokens_per_target_call"
COLUMNS = (
    *("draft", "method", "options", "tokens per pass", "acceptance λ", "first draft accepted"),
    *("speed over plain", "over the draft's chain"),
)
PLAIN, BASE = 0, 1  # indices of the cases that the last two columns divide by


class Case(NamedTuple):
    """A line of the table: the draft's name, the method, and its options."""

    draft: str
    spec: MethodSpec
    options: Mapping[str, Any]


def cases(sampled: bool) -> list[Case]:
    """Plain decoding, chains and a drawn tree of both drafts, and the head's dynamic tree."""
    tree, shape = compose("tree", "specinfer" if sampled else "match"), {"branching": (2, 2, 1, 1)}
    grown = {"tree": "dynamic", "budget": 10, "depth": 4, "width": 3}
    found = [Case("", method("autoregressive"), {})]
    for draft in ("demo-draft", "demo-head"):
        found += [Case(draft, method("speculative"), {"gamma": gamma}) for gamma in (3, 5)]
        found += [Case(draft, tree, shape)]
    return [*found, Case("demo-head", compose("head", "match"), grown)]


def measured(models, prompts, sampling, args, found: list[Case]) -> list[list[sj.Generation]]:
    """Each case's generations, one per repeat."""
    for request_id in found:
        engine = make_engine(
            models["demo"],
            models.get(request_id.draft),
            request_id.spec,
            request_id.options,
            not sampling.temperature,
        )
        rows = [Request(np.array(p), args.max_new_tokens, jax.random.key(0)) for p in prompts]
        warmup.warm_up(engine, 1, sampling, in_turn(rows), PREFIXES)
    runs: list[list[sj.Generation]] = [[] for _ in found]
    for seed in range(args.repeats):
        for request_id, own in zip(found, runs, strict=True):
            out = sj.generate(
                models["demo"],
                prompts,
                method=request_id.spec,
                draft=models.get(request_id.draft),
                options=request_id.options,
                max_new_tokens=args.max_new_tokens,
                sampling=sampling,
                batch_size=1,
                seed=seed,
            )
            own.append(out)
    return runs


def row(request_id: Case, runs: list[sj.Generation], plain, base) -> list[str]:
    """A line of the table, compared with the generations ``plain`` and ``base``."""
    counts = {name: sum(run.stats[name] for run in runs) for name in runs[0].stats}
    figures = [ratio(*(counts[name] for name in RATES[rate])) for rate in (TOKENS, RATE)]
    hist = counts["accepted_hist"]
    figures += [ratio(hist[:, 1:].sum(1), hist.sum(1))]
    own = speed(runs)
    figures += [
        (None, None) if other is runs else speed_ratio(own, speed(other)) for other in (plain, base)
    ]
    options = " ".join(f"{name}={value}" for name, value in request_id.options.items())
    return [request_id.draft, f"`{request_id.spec.name}`", options, *map(said, figures)]


def speed(runs: list[sj.Generation]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds, ``[repeats, prompts]``."""
    return np.array([run.lengths for run in runs]), np.array([row_seconds(run, 1) for run in runs])


def said(estimate: Estimate) -> str:
    """``0.85 ± 0.02``; nothing where there is no figure."""
    value, half_width = estimate
    return "" if value is None else f"{value:.2f} ± {half_width:.2f}"


def main() -> None:
    """Measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    use_compilation_cache()
    models = {name: sj.load(name) for name in ("demo", "demo-draft", "demo-head")}
    functions, _ = held_out_functions(args.num_prompts)
    prompts = [models["demo"].tokenizer.encode(function.prompt) for function in functions]
    for name in ("demo-draft", "demo-head"):
        print(f"c of {name}: {costs(models['demo'], models[name], (1,))[1]:.2f}", flush=True)
    for sampling in (sj.Sampling(), sj.Sampling(0.8, top_p=0.9)):
        found = cases(sampling.temperature > 0)
        runs = measured(models, prompts, sampling, args, found)
        rows = [
            row(request_id, own, runs[PLAIN], runs[BASE])
            for request_id, own in zip(found, runs, strict=True)
        ]
        name = "sampled" if sampling.temperature else "greedy"
        print(f"\n{name}\n\n{markdown_table(COLUMNS, rows)}", flush=True)


if __name__ == "__main__":
    main()
