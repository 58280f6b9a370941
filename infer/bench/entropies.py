"""Entropy of target and draft where a draft token was accepted or rejected (SCD, Figure 2).

Axis legend: R runs, P prompts, S cache positions of a row, T tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from infer.bench.estimates import Row, add_ratio
from infer.bench.text_quality import was_tested
from infer.bench.timed_cases import Result
from infer.rescoring import Prompts, padded_row
from specjax.core import probs
from specjax.core.net import Net
from specjax.core.types import FROM_DRAFT
from specjax.draft.chain import NEVER_STOPS
from specjax.registry import AUTO, METHODS

ACCEPTED = "accepted"
REJECTED = "rejected"  # as in the keys of the report


def add_entropies(
    rows: Sequence[Row],
    target: sj.LM,
    draft: sj.LM | None,
    prompts: Prompts,
    results: Sequence[Result],
) -> None:
    """Adds the mean entropy of target and draft before accepted and before rejected tokens.

    The unit is nats, at temperature 1. The token that replaced a rejected one stands at its
    position. A bonus token was never drafted and does not count. Only rows whose drafts are chains
    of a draft model have the figures: a head's distributions cannot be computed from the text.
    Chains that stop early, or whose length changes from round to round, have none either, because
    their text does not show which token was a bonus.
    """
    for row, result in zip(rows, results, strict=True):
        options = result.case.options
        is_chain = METHODS[result.case.method].drafter == "chain"
        if not is_chain or draft.is_head:
            continue
        if options["stop"] == NEVER_STOPS and options["gamma"] != AUTO:
            nets = {"target": target.net, "draft": draft.net.over(target.net)}
            _add_to_row(row, nets, prompts, result)


def _add_to_row(row: Row, nets: dict[str, Net], prompts: Prompts, result: Result) -> None:
    runs = result.distinct_runs
    masks = [
        [_outcomes(np.asarray(origin), result.case.options["gamma"]) for origin in run.origins]
        for run in runs
    ]
    for name, net in nets.items():
        entropies = []  # by run and prompt, [T] each
        for run in runs:
            pairs = zip(prompts, run.tokens, strict=True)
            entropies.append([_entropies_of_tokens(net, *pair) for pair in pairs])

        for outcome in (ACCEPTED, REJECTED):
            sums = np.zeros((len(runs), len(prompts)))
            counts = np.zeros((len(runs), len(prompts)), int)
            for run in range(len(runs)):
                for prompt in range(len(prompts)):
                    mask = masks[run][prompt][outcome]
                    sums[run, prompt] = entropies[run][prompt][: len(mask)][mask].sum()
                    counts[run, prompt] = mask.sum()
            add_ratio(row, f"{name}_{outcome}", sums, counts)


def _outcomes(origin: np.ndarray, gamma: int) -> dict[str, np.ndarray]:
    """At which tokens a draft token was accepted, and at which one was rejected: ``[T]`` bool."""
    accepted = origin == FROM_DRAFT
    return {ACCEPTED: accepted, REJECTED: was_tested(origin, gamma) & ~accepted}


def _entropies_of_tokens(net: Net, prompt: Sequence[int], tokens: np.ndarray) -> np.ndarray:
    """The entropy of the distribution that each token of a completion was drawn from."""
    values = np.asarray(_entropies(net, padded_row(prompt, tokens)), np.float64)
    # The token at position i is drawn from the distribution at position i - 1.
    return values[len(prompt) - 1 :]


@jax.jit
def _entropies(net: Net, row: jax.Array) -> jax.Array:
    """Entropy of the next token after each cache position, ``[S]``."""
    log_p = probs.log_softmax(net.rescore(row)[0])
    # 0 · log 0 is 0, not NaN.
    return -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), axis=-1)
