"""How sure the models were where a drafted token was accepted or refused (SCD, Figure 2).

Axis legend: R runs, P prompts, S cache positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from infer.bench.rows import Row, put_ratio
from infer.bench.text_quality import was_tested
from infer.bench.timed_cases import Result
from infer.rescoring import Prompts, padded_row
from specjax.core import probs
from specjax.core.net import Net
from specjax.core.types import FROM_DRAFT
from specjax.draft.chain import NEVER_STOPS
from specjax.registry import METHODS


def add_entropies(
    rows: Sequence[Row],
    target: sj.LM,
    draft: sj.LM | None,
    prompts: Prompts,
    results: Sequence[Result],
) -> None:
    """Adds to rows of chains of a draft model the mean entropy, in nats, of target and draft at
    temperature 1 before accepted tokens and before refused ones; a head's laws no text tells.

    Where a token was refused stands what was emitted in its place; a bonus was never drafted and
    does not count. A draft that stops early leaves no trace of which it was, so none is counted.
    """
    for row, result in zip(rows, results, strict=True):
        spec, options = METHODS[result.case.method], result.case.options
        if spec.drafter != "chain" or options["stop"] != NEVER_STOPS or draft.is_head:
            continue
        nets = {"target": target.net, "draft": draft.net.over(target.net)}
        sums = {(name, kept): [] for name in nets for kept in (True, False)}
        counts = {kept: [] for kept in (True, False)}
        for run in result.drawn:
            places = [
                {True: origin == FROM_DRAFT, False: was_tested(origin, options["gamma"])}
                for origin in map(np.asarray, run.origins)
            ]
            for place in places:
                place[False] &= ~place[True]
            for kept in counts:
                counts[kept].append([place[kept].sum() for place in places])
            for name, net in nets.items():
                values = [
                    np.asarray(_entropies(net, padded_row(prompt, tokens)), np.float64)
                    for prompt, tokens in zip(prompts, run.tokens, strict=True)
                ]
                values = [v[len(p) - 1 :] for v, p in zip(values, prompts, strict=True)]
                for kept in counts:
                    each = zip(values, places, strict=True)
                    total = [v[: len(at[kept])][at[kept]].sum() for v, at in each]
                    sums[name, kept].append(total)
        for (name, kept), values in sums.items():
            key = f"{name}_{'accepted' if kept else 'refused'}"
            put_ratio(row, key, np.array(values), np.array(counts[kept]))


@jax.jit
def _entropies(net: Net, row: jax.Array) -> jax.Array:
    """Of the law of what follows each cache position, ``[S]``."""
    log_p = probs.log_softmax(net.rescore(row)[0])
    return -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), axis=-1)
