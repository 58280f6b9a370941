"""Rates from counters, the cost model of speculative decoding, and measures of texts.

Everything is plain numpy on the host.

Symbols:

- λ: acceptance rate, the probability that a tested token is accepted.
- γ: draft length.
- c: time of a draft step, divided by the time of a target step.
- v(T): time of a target pass over T tokens, divided by the time of one over a single token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np


def ratio(numerator: float, denominator: float) -> float | None:
    """``numerator / denominator``, or None where the denominator is 0: nothing was counted."""
    return float(numerator) / float(denominator) if denominator else None


# Each rate is the ratio of two counters. Plain decoding has block efficiency 1 and draft length 0.
RATES = {
    "acceptance_rate": ("accepted", "tested"),
    "accept_rate_per_draft": ("accepted", "drafted"),
    "draft_length": ("drafted", "rounds"),
    "block_efficiency": ("emitted", "rounds"),
    "tokens_per_target_call": ("emitted", "target_calls"),
}


def rates(counters: Mapping[str, float]) -> dict[str, float | None]:
    """The :data:`RATES`, from the counters of one row or their sums over a job's rows.

    A rate is None if its denominator is 0.
    """
    values = {}
    for name, (numerator, denominator) in RATES.items():
        values[name] = ratio(counters[numerator], counters[denominator])
    return values


def speeds(
    counters: Mapping[str, float], prefill_s: float, first_token_s: float, decode_s: float
) -> dict[str, float | None]:
    """The times and speeds of one row.

    ``tokens_per_second`` is emitted tokens / decode time, without prefill.
    ``time_per_output_token_s`` is the TPOT of serving benchmarks, (total time − time to first
    token) / (emitted − 1). The first round's other tokens arrive with its first one. They are
    counted but take no time, so the value is somewhat too low.

    Args:
      counters: with ``emitted``.
      prefill_s, decode_s: seconds of the two phases.
      first_token_s: seconds from the row's start to its first token.
    """
    after_first_s = max(prefill_s + decode_s - first_token_s, 0.0)
    return {
        "tokens_per_second": ratio(counters["emitted"], decode_s),
        "time_to_first_token_s": first_token_s,
        "time_per_output_token_s": ratio(after_first_s, counters["emitted"] - 1),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
    }


def expected_block_efficiency(acceptance: float, gamma: int) -> float:
    """Tokens per round, ``(1 − λ^{γ+1}) / (1 − λ)``: Leviathan et al. 2023, equation (1)."""
    if acceptance >= 1:
        return gamma + 1.0
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def expected_speedup(acceptance: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Wall-clock gain over plain decoding: block efficiency over ``cγ + v``.

    Leviathan et al. 2023, Theorem 3.8, with the measured cost ``v = v(γ + 1)`` of a
    verification pass in place of 1.
    """
    return expected_block_efficiency(acceptance, gamma) / (c * gamma + v)


def expected_scd_speedup(acceptance: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Speedup of speculative contrastive decoding, as the paper counts it (SCD, Theorem 5.1).

    The paper computes the bonus token's amateur logits only if the whole draft is accepted.
    """
    cost = v + c * gamma + c * acceptance**gamma
    return expected_block_efficiency(acceptance, gamma) / cost


def expected_scored_speedup(acceptance: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Speedup of contrastive decoding with an amateur that scores all γ + 1 positions per round.

    specjax's contrastive decoding works like this.
    """
    return expected_block_efficiency(acceptance, gamma) / (v + c * (gamma + 1))


def expected_self_draft_speedup(tokens: float, passes: Sequence[float]) -> float:
    """Speedup of a target that drafts for itself: tokens per round over ``Σ v`` of its passes.

    With j drafts accepted per round, SDSAT's two-step method emits 2 + j tokens in two passes over
    k + 1 tokens each. Its single-pass method emits 1 + j tokens in one pass over (k + 1)².

    Args:
      tokens: per round.
      passes: v of each pass of a round.
    """
    return tokens / sum(passes)


def diversity(outputs: Sequence[Sequence[int]]) -> float | None:
    """The mean over outputs of ``Π_{n=2..4} (unique n-grams / n-grams)``, of token ids.

    Outputs with fewer than 4 tokens are skipped; None if all are.
    """
    values = []
    for output in outputs:
        tokens = [int(token) for token in output]
        if len(tokens) < 4:
            continue
        value = 1.0
        for n in (2, 3, 4):
            ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
            value *= len(set(ngrams)) / len(ngrams)
        values.append(value)
    return float(np.mean(values)) if values else None


def perplexity(log_probs: Sequence[float] | np.ndarray) -> float | None:
    """exp of the mean negative log-probability (nats); None for no tokens."""
    if len(log_probs) == 0:
        return None
    return float(np.exp(-np.mean(np.asarray(log_probs, np.float64))))


def rouge_l(text: str, references: Sequence[str]) -> float | None:
    """ROUGE-L (Lin 2004): F1 of the longest common subsequence of words, for the best reference.

    If the subsequence has LCS words, precision is LCS / words of the text and recall is LCS / words
    of the reference. F1 is 2·LCS / (words of both). A word is a run of letters, digits and
    underscores of any script. Case is ignored, and nothing is stemmed. None without references.
    """
    if not references:
        return None
    words = _words(text)
    return max(_f1(words, _words(reference)) for reference in references)


def _words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"\w+", text.casefold())


def _f1(a: Sequence[str], b: Sequence[str]) -> float:
    """F1 of the longest common subsequence; 0 where one of the two is empty."""
    if not a or not b:
        return 0.0
    return 2 * common_subsequence(a, b) / (len(a) + len(b))


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence; O(|a|·|b|) time, O(|b|) memory."""
    # row[j]: the length for the part of a so far and the first j entries of b.
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            above = row[j]
            row[j] = diagonal + 1 if x == y else max(above, row[j - 1])
            diagonal = above
    return row[-1]
