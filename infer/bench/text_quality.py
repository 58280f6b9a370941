"""What a lossy method's output is worth: KL to the target, ROUGE-L, exact matches.

Axis legend: P prompts, S cache positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from infer.bench.timed_cases import Result
from infer.rescoring import Prompts, padded_row
from specjax.core.mesh import replicated
from specjax.core.net import Net
from specjax.core.types import FROM_DRAFT, Warp
from specjax.core.warp import warp
from specjax.draft.chain import NEVER_STOPS
from specjax.registry import AUTO, METHODS
from specjax.runtime.infill import exact_matches
from specjax.verify.mentored_decoding import mentor_levels, mentored_kl

LOSSLESS, UNKNOWN = "exact", "n/a"  # what stands in place of a number


def kl_to_target(
    target: sj.LM, draft: sj.LM | None, prompts: Prompts, result: Result
) -> tuple[np.ndarray, np.ndarray] | str:
    """KL(p‖π) per emitted token, nats: p the warped target, π the law the token was drawn from.

    As each prompt's sum and its number of tokens, ``[P]`` both. It is the mean over a run's own
    tokens of the divergences between the two *laws* after each token's prefix, no estimate from
    the tokens' probabilities (the mean of log p ratios of emitted text is not this divergence).
    Lossless methods have π = p: ``exact``. Mentored
    decoding's π is known in closed form: both models score the text once more, every token
    gets the levels that its round solved for, and a bonus token, drawn from p, counts 0. A
    token's place in its round is part of what is conditioned on; without it the divergence is
    smaller (KL is convex). Other lossy methods have no law per token at hand, and a head's
    follows from its target's states, which no text holds: ``n/a``.
    """
    case, spec = result.case, METHODS[result.case.method]
    if spec.lossless and spec.target_dist == "warped":
        return LOSSLESS
    # A draft that stops early leaves no trace of whether its last token was a bonus.
    ragged = case.options.get("stop") != NEVER_STOPS or case.options["gamma"] == AUTO
    if case.method != "mentored" or ragged or draft.is_head:
        return UNKNOWN
    drafting = case.sampling if case.options["draft_warp"] else sj.Sampling(1.0)
    sums, counts = np.zeros(len(prompts)), np.zeros(len(prompts))
    for i, tokens, origin in _completions(result):
        divergences = _token_kl(
            target.mesh,
            target.net,
            draft.net.over(target.net),
            padded_row(prompts[i], tokens),
            case.sampling.arrays(1),
            drafting.arrays(1),
            jnp.float32(case.options["max_kl"]),
        )
        kl = np.asarray(divergences, np.float64)[len(prompts[i]) - 1 :][: len(tokens)]
        sums[i] += kl[was_tested(origin, case.options["gamma"])].sum()
        counts[i] += len(tokens)
    return sums, counts


def _completions(result: Result) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each prompt's number with the tokens and origins of each of its completions."""
    for run in result.drawn:
        yield from zip(range(len(run.tokens)), run.tokens, run.origins, strict=True)


def was_tested(origin: np.ndarray, gamma: int) -> np.ndarray:
    """Bool per token: drawn at a draft position. A token after γ accepted ones is the bonus."""
    tested, accepted = np.ones(len(origin), bool), 0
    for i, writer in enumerate(origin):
        tested[i] = accepted < gamma
        accepted = accepted + 1 if writer == FROM_DRAFT else 0
    return tested


@replicated
def _token_kl(
    target: Net, draft: Net, row: jax.Array, settings: Warp, drafting: Warp, max_kl: jax.Array
) -> jax.Array:
    """KL(p‖π) of mentored decoding's next token after every cache position ``[S]``; one trace per
    bucket."""
    log_p, log_q = warp(target.rescore(row), settings)[0], warp(draft.rescore(row), drafting)[0]
    bound = jnp.broadcast_to(max_kl, log_p.shape[:1])
    return mentored_kl(log_p, log_q, *mentor_levels(log_p, log_q, bound))


def exact_match(task: Mapping[str, Any], text: str) -> float | None:
    """Whether an infilled text is the task's ``middle``; None of another task."""
    if "suffix" in task and isinstance(task.get("middle"), str):
        return exact_matches([text], [task["middle"]])
    return None
