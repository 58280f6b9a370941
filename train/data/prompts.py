"""Held-out prompts, for evaluations that decode during training."""

from __future__ import annotations

import numpy as np

from train.data.loader import share
from train.data.tokenized import Corpus

PROMPT_TOKENS = 64


def held_out_prompts(corpus: Corpus, count: int) -> tuple[tuple[int, ...], ...]:
    """The first :data:`PROMPT_TOKENS` tokens of up to ``count`` held-out documents.

    Sources share the prompts by their weights. The documents are longer than a prompt and are
    spread evenly over those of their source.
    """
    if not count:
        return ()
    eligible = []
    for source in corpus.held_out:
        long_enough = np.flatnonzero(source.documents.lengths > PROMPT_TOKENS)
        if len(long_enough):
            eligible.append((source, long_enough))
    weights = [source.weight for source, _ in eligible]
    counts = share(weights, [len(numbers) for _, numbers in eligible], count)

    prompts = []
    for (source, numbers), prompts_of_source in zip(eligible, counts, strict=True):
        spread = np.linspace(0, len(numbers) - 1, prompts_of_source).astype(int)
        for document in numbers[spread]:
            tokens = source.documents.read(int(document), 0, PROMPT_TOKENS)
            prompts.append(tuple(tokens.tolist()))
    return tuple(prompts)
