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
) -> dict[str, Any]:
    """Figures of greedy speculative decoding with chains of ``steps`` tokens, by name.

    ``decode_acceptance`` ``[steps]``: the share of rounds whose drafts 1..i are all accepted;
    ``decode_tokens_per_round``: 1 + the mean number of accepted drafts. Empty without prompts.
    """
    if not prompts:
        return {}
    models = (sj.from_params(cfg, tree) for cfg, tree in ((target, frozen), (head, params)))
    verifier, draft = models
    out = sj.generate(
        verifier,
        prompts,
        draft=draft,
        method="speculative",
        options={"gamma": steps},
        max_new_tokens=new_tokens,
    )
    rounds = out.stats["accepted_hist"].sum(0)
    reached = rounds[::-1].cumsum()[::-1] / max(1, rounds.sum())
    return {
        "decode_acceptance": reached[1:].tolist(),
        "decode_tokens_per_round": 1 + float(reached[1:].sum()),
    }
