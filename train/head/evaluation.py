"""How well a head drafts, measured during training by decoding with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import specjax as sj
from specjax.models import ModelConfig
from specjax.models.families.head_config import HeadConfig


def measure_decoding(
    target: ModelConfig,
    frozen: dict,
    head: HeadConfig,
    params: dict,
    prompts: Sequence[Sequence[int]],
    steps: int,
    new_tokens: int,
) -> tuple[dict[str, Any], list[int]]:
    """(figures of greedy decoding with chain drafts, the new tokens of the first prompt).

    A chain has ``steps`` tokens. The figures, by name:

    ``decode_acceptance`` ``[steps]``: the share of rounds whose draft tokens 1..i are all accepted;
    ``decode_tokens_per_round``: 1 + the mean number of accepted draft tokens.
    """
    verifier = sj.from_params(target, frozen)
    draft = sj.from_params(head, params)
    out = sj.generate(
        verifier,
        prompts,
        draft=draft,
        method="speculative",
        options={"gamma": steps},
        max_new_tokens=new_tokens,
    )
    # Rounds by their number of accepted tokens; then rounds with at least so many.
    rounds = out.stats["accepted_hist"].sum(0)
    at_least = rounds[::-1].cumsum()[::-1] / max(1, rounds.sum())
    figures = {
        "decode_acceptance": at_least[1:].tolist(),
        "decode_tokens_per_round": 1 + float(at_least[1:].sum()),
    }
    return figures, out.tokens[0].tolist()
