"""Held-out prompts, for what is measured by decoding while a model is trained."""

from __future__ import annotations

import numpy as np

from train.data.packing import Prepared

PROMPT_TOKENS = 64


def held_out_prompts(data: Prepared, count: int, within: int) -> tuple[tuple[int, ...], ...]:
    """The first tokens of long enough documents among the first ``within`` held-out tokens."""
    begins, ends = data.valid_offsets[:-1], data.valid_offsets[1:]
    fitting = begins[(ends - begins > PROMPT_TOKENS) & (begins < within)]
    picked = fitting[np.linspace(0, len(fitting) - 1, min(count, len(fitting))).astype(int)]
    return tuple(tuple(data.valid[at : at + PROMPT_TOKENS].tolist()) for at in picked)
