"""Cases timed over prompts.

Everything is warmed up first, so no time holds a compilation. Repeats of the cases are
interleaved: a machine that slows down slows all of them, and ratios of one repeat stay fair.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

import specjax as sj
from infer.bench.cases import Case
from infer.bench.energy import Meter
from infer.bench.rescoring import Prompts
from infer.timing import batch_seconds


@dataclasses.dataclass
class Result:
    """What a case gave: one entry per repeat, counters summed over prompts."""

    case: Case
    tokens_per_second: list[float]  # decoding alone
    whole_tokens_per_second: list[float]  # prefill included: what a peer is held against
    first_token_s: list[float]
    counters: dict[str, int]
    tokens: list[np.ndarray]
    origins: list[np.ndarray] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)
    joules: list[float] = dataclasses.field(default_factory=list)  # prefill included
    accepted_hist: list[int] = dataclasses.field(default_factory=list)  # rounds by accepted drafts

    @property
    def speed(self) -> float:
        return statistics.median(self.tokens_per_second)


def measure(
    target: sj.LM,
    draft: sj.LM | None,
    prompts: Prompts,
    cases: Sequence[Case],
    budget: int,
    repeats: int,
    between: Callable[[int], None] = lambda repeat: None,
    meter: Meter | None = None,
) -> list[Result]:
    """All cases over all prompts, ``repeats`` times in turn.

    ``between(repeat)`` runs once per repeat: a peer's turn. ``meter`` reads the energy.
    """
    results = []
    for case in cases:
        warm = run_case(target, draft, prompts, case, budget)  # compiles every bucket
        counters = {n: int(v.sum()) for n, v in warm.stats.items() if v.ndim == 1}
        result = Result(case, [], [], [], counters, warm.tokens, warm.origins, warm.text)
        result.accepted_hist = warm.stats["accepted_hist"].sum(0).tolist()
        results.append(result)
    for repeat in range(repeats):
        for result in results:
            before = meter.joules() if meter else 0.0
            out = run_case(target, draft, prompts, result.case, budget)
            if meter:
                result.joules.append(meter.joules() - before)
            prefill, decoding = batch_seconds(out)
            tokens = float(out.lengths.sum())
            result.tokens_per_second.append(tokens / decoding)
            result.whole_tokens_per_second.append(tokens / (prefill + decoding))
            result.first_token_s.append(float(np.median(out.first_token_seconds)))
        between(repeat)
    return results


def run_case(
    target: sj.LM, draft: sj.LM | None, prompts: Prompts, case: Case, budget: int
) -> sj.Generation:
    """Every prompt once. Prompts go in batches of the case's size."""
    return sj.generate(
        target,
        prompts,
        method=case.method,
        draft=draft,
        options=case.options,
        sampling=case.sampling,
        max_new_tokens=budget,
        batch_size=case.batch_size,
    )
