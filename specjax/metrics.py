"""Counters to rates, and the cost model of speculative decoding. Plain numpy, host side.

Symbols: λ acceptance rate per tested token, γ draft length, c draft step time over target step
time, v(T) time of a target pass over T tokens over one of a single token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np


def ratio(above: float, below: float) -> float | None:
    """``above / below``, or None where nothing was counted."""
    return float(above) / float(below) if below else None


# Rates by the counters they are ratios of. λ is the acceptance rate; plain decoding's block
# efficiency is 1, its draft length 0.
RATES = {
    "acceptance_rate": ("accepted", "tested"),
    "accept_rate_per_draft": ("accepted", "drafted"),
    "draft_length": ("drafted", "rounds"),
    "block_efficiency": ("emitted", "rounds"),
    "tokens_per_target_call": ("emitted", "target_calls"),
}


def rates(counters: Mapping[str, float]) -> dict[str, float | None]:
    """The derived :data:`RATES` of one row's (or one job's summed) counters."""
    return {name: ratio(counters[a], counters[b]) for name, (a, b) in RATES.items()}


def speeds(
    counters: Mapping[str, float], prefill_s: float, first_token_s: float, decode_s: float
) -> dict[str, float | None]:
    """One row's times and speeds, from seconds since its turn came.

    tokens_per_second = emitted / decode time, prefill excluded; time_per_output_token_s is the
    mean gap after the first token, (whole time − time to first token) / (emitted − 1): the
    TPOT of serving benchmarks, pessimistic by one round, whose tokens arrive together.
    """
    after = max(prefill_s + decode_s - first_token_s, 0.0)
    return {
        "tokens_per_second": ratio(counters["emitted"], decode_s),
        "time_to_first_token_s": first_token_s,
        "time_per_output_token_s": ratio(after, counters["emitted"] - 1),
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
    """Of speculative contrastive decoding as the paper counts it (SCD, Theorem 5.1).

    The bonus token's amateur logits are paid for only when the whole draft is accepted.
    """
    cost = v + c * gamma + c * acceptance**gamma
    return expected_block_efficiency(acceptance, gamma) / cost


def expected_scored_speedup(acceptance: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Of a loop whose amateur scores all γ + 1 positions in every round, as ours does."""
    return expected_block_efficiency(acceptance, gamma) / (v + c * (gamma + 1))


def expected_self_draft_speedup(tokens: float, passes: Sequence[float]) -> float:
    """Of a target that drafts for itself: tokens per round over ``Σ v`` of the round's passes.

    SDSAT's two steps take 2 + j tokens in two passes of k + 1, its single pass 1 + j in one of
    (k + 1)², with j drafts accepted per round.
    """
    return tokens / sum(passes)


def diversity(outputs: Sequence[Sequence[int]]) -> float | None:
    """``Π_{n=2..4} unique n-grams / n-grams`` per output of token ids, averaged.

    Outputs of under 4 tokens are skipped; None where all are.
    """
    values = []
    for output in outputs:
        tokens = [int(token) for token in output]
        if len(tokens) < 4:
            continue
        value = 1.0
        for n in (2, 3, 4):
            grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
            value *= len(set(grams)) / len(grams)
        values.append(value)
    return float(np.mean(values)) if values else None


def perplexity(log_probs: Sequence[float] | np.ndarray) -> float | None:
    """exp of the mean negative log-probability (nats); None for no tokens."""
    if len(log_probs) == 0:
        return None
    return float(np.exp(-np.mean(np.asarray(log_probs, np.float64))))


def rouge_l(text: str, references: Sequence[str]) -> float | None:
    """ROUGE-L (Lin 2004): the F1 of the longest common subsequence of words; best reference.

    With LCS words in common, precision is LCS / words of the text, recall LCS / words of the
    reference, F1 = 2·LCS / (words of both). A word is a run of letters, digits and underscores of
    any script, upper and lower case alike; nothing is stemmed. None without references.
    """
    if not references:
        return None
    words = _words(text)
    return max(_f_measure(words, _words(reference)) for reference in references)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _f_measure(a: Sequence[str], b: Sequence[str]) -> float:
    return 2 * common_subsequence(a, b) / (len(a) + len(b)) if a and b else 0.0


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence; O(|a|·|b|) time, one row of memory."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            above = row[j]
            row[j] = diagonal + 1 if x == y else max(above, row[j - 1])
            diagonal = above
    return row[-1]
