"""How a lossy method's output differs from the target's: KL to the target, exact matches.

Axis legend: P prompts, S cache positions of a row, T tokens of a completion.
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

# These stand in a row in place of a number.
LOSSLESS = "exact"
UNKNOWN = "n/a"


def kl_to_target(
    target: sj.LM, draft: sj.LM | None, prompts: Prompts, result: Result
) -> tuple[np.ndarray, np.ndarray] | str:
    """KL(p‖π) per emitted token, in nats.

    p is the warped target, π the distribution that the token was drawn from. The figure is the
    mean, over a run's own tokens, of the divergence between both distributions after the token's
    prefix. It is no estimate from the tokens' probabilities: the mean of log-probability ratios of
    emitted text is not this divergence.

    - Lossless methods have π = p: ``exact``.
    - Mentored decoding has π in closed form. Both models score the text once more, and every
      token gets the levels that its round solved for. A bonus token is drawn from p and counts 0.
      A token's place in its round is part of the condition; without it the divergence would be
      smaller, because KL is convex.
    - Other lossy methods have no distribution per token at hand: ``n/a``.
    - A head's q depends on its target's states, which no text contains: ``n/a``.

    Returns:
      Sum and number of tokens of each prompt, ``[P]`` both, or one of the texts above.
    """
    case = result.case
    spec = METHODS[case.method]
    if spec.lossless and spec.target_dist == "warped":
        return LOSSLESS
    if case.method != "mentored" or draft.is_head:
        return UNKNOWN
    # A draft that stops early leaves no trace of whether its last token was a bonus.
    gamma = case.options["gamma"]
    if case.options.get("stop") != NEVER_STOPS or gamma == AUTO:
        return UNKNOWN

    draft_sampling = case.sampling if case.options["draft_warp"] else sj.Sampling(1.0)
    sums = np.zeros(len(prompts))
    counts = np.zeros(len(prompts))
    for i, tokens, origin in _completions(result):
        divergences = _token_kl(
            target.mesh,
            target.net,
            draft.net.over(target.net),
            padded_row(prompts[i], tokens),
            case.sampling.arrays(1),
            draft_sampling.arrays(1),
            jnp.float32(case.options["max_kl"]),
        )
        # The token at position i is drawn from the distribution at position i - 1.
        kl = np.asarray(divergences, np.float64)[len(prompts[i]) - 1 :][: len(tokens)]
        sums[i] += kl[was_tested(origin, gamma)].sum()
        counts[i] += len(tokens)
    return sums, counts


def _completions(result: Result) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The prompt's number, the tokens and their origins, of every completion."""
    for run in result.distinct_runs:
        yield from zip(range(len(run.tokens)), run.tokens, run.origins, strict=True)


def was_tested(origin: np.ndarray, gamma: int) -> np.ndarray:
    """Which tokens stand where a draft token was tested; the token after γ accepted is the bonus.

    Args:
      origin: who wrote each token, ``[T]``.
      gamma: the draft length of every round.

    Returns:
      ``[T]`` bool.
    """
    tested = np.ones(len(origin), bool)
    accepted = 0  # in a row, in this round
    for i, writer in enumerate(origin):
        tested[i] = accepted < gamma
        accepted = accepted + 1 if writer == FROM_DRAFT else 0
    return tested


@replicated
def _token_kl(
    target: Net,
    draft: Net,
    row: jax.Array,
    target_warp: Warp,
    draft_warp: Warp,
    max_kl: jax.Array,
) -> jax.Array:
    """KL(p‖π) of mentored decoding's next token after every cache position, ``[S]``.

    One trace per bucket.
    """
    log_p = warp(target.rescore(row), target_warp)[0]
    log_q = warp(draft.rescore(row), draft_warp)[0]
    bound = jnp.broadcast_to(max_kl, log_p.shape[:1])
    return mentored_kl(log_p, log_q, *mentor_levels(log_p, log_q, bound))


def exact_match(task: Mapping[str, Any], text: str) -> float | None:
    """Whether an infilled text equals the task's ``middle``; None for other tasks."""
    if "suffix" in task and isinstance(task.get("middle"), str):
        return exact_matches([text], [task["middle"]])
    return None
