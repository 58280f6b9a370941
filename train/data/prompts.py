"""Held-out prompts, for evaluations that decode during training."""

from __future__ import annotations

import numpy as np

from train.data.tokenized import Corpus

PROMPT_TOKENS = 64


def held_out_prompts(corpus: Corpus, count: int, within: int) -> tuple[tuple[int, ...], ...]:
    """The first :data:`PROMPT_TOKENS` tokens of up to ``count`` held-out documents.

    The documents are longer than a prompt, begin in the first ``within`` held-out tokens, and are
    spread evenly over them.
    """
    lengths = corpus.held_out.lengths
    begins = np.cumsum(lengths) - lengths
    eligible = np.flatnonzero((lengths > PROMPT_TOKENS) & (begins < within))
    spread = np.linspace(0, len(eligible) - 1, min(count, len(eligible))).astype(int)
    prompts = []
    for document in eligible[spread]:
        tokens = corpus.held_out.read(int(document), 0, PROMPT_TOKENS)
        prompts.append(tuple(tokens.tolist()))
    return tuple(prompts)
