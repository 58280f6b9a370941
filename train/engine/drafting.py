"""How well a draft model or a head drafts, measured during training by decoding with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import specjax as sj
from specjax.lm import LM


def measure_drafts(
    target: LM, draft: LM, prompts: Sequence[Sequence[int]], length: int, new_tokens: int
) -> tuple[dict[str, Any], list[int]]:
    """(figures of greedy decoding with chain drafts, the new tokens of the first prompt).

    A chain has ``length`` tokens. The figures, by name:

    ``decode_acceptance`` ``[length]``: the share of rounds whose draft tokens 1..i are all
    accepted; ``decode_tokens_per_round``: 1 + the mean number of accepted draft tokens;
    ``decode_tokens_per_pass``: the same, because a round is one pass of the target.
    """
    out = sj.generate(
        target,
        prompts,
        draft=draft,
        method="speculative",
        options={"gamma": length},
        max_new_tokens=new_tokens,
    )
    # Rounds by their number of accepted tokens; then rounds with at least so many.
    rounds = out.stats["accepted_hist"].sum(0)
    at_least = rounds[::-1].cumsum()[::-1] / max(1, rounds.sum())
    per_round = 1 + float(at_least[1:].sum())
    figures = {
        "decode_acceptance": at_least[1:].tolist(),
        "decode_tokens_per_round": per_round,
        "decode_tokens_per_pass": per_round,
    }
    return figures, out.tokens[0].tolist()
