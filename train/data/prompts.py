"""Held-out prompts, for what is measured by decoding while a model is trained."""

from __future__ import annotations

import numpy as np

from train.data.packing import Corpus

PROMPT_TOKENS = 64


def held_out_prompts(corpus: Corpus, count: int, within: int) -> tuple[tuple[int, ...], ...]:
    """The first tokens of long enough documents among the first ``within`` held-out tokens."""
    lengths = corpus.held_out.lengths
    begins = np.cumsum(lengths) - lengths
    fitting = np.flatnonzero((lengths > PROMPT_TOKENS) & (begins < within))
    picked = fitting[np.linspace(0, len(fitting) - 1, min(count, len(fitting))).astype(int)]
    heads = [corpus.held_out.read(int(document), 0, PROMPT_TOKENS) for document in picked]
    return tuple(tuple(head.tolist()) for head in heads)
