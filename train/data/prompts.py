"""Held-out prompts, for evaluations that decode during training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers

from specjax.text.tokenizer import Tokenizer
from train.data.loader import share
from train.data.tokenized import Corpus, Documents

PROMPT_TOKENS = 64


def held_out_prompts(
    corpus: Corpus, count: int, longest: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The beginnings of up to ``count`` held-out documents.

    Of a text that is :data:`PROMPT_TOKENS` tokens, of a conversation what comes before its first
    answer. Sources share the prompts by their weights. The documents are longer than their prompts
    and are spread evenly over those of their source.

    Args:
      longest: tokens of a prompt; conversations with longer ones are left out. None: no limit.
    """
    if not count:
        return ()
    eligible = []
    for source in corpus.held_out:
        lengths = source.documents.lengths
        long_enough = np.flatnonzero(lengths > (0 if corpus.apart else PROMPT_TOKENS))
        if len(long_enough):
            eligible.append((source, long_enough))
    weights = [source.weight for source, _ in eligible]
    counts = share(weights, [len(numbers) for _, numbers in eligible], count)

    prompts = []
    for (source, numbers), prompts_of_source in zip(eligible, counts, strict=True):
        spread = np.linspace(0, len(numbers) - 1, prompts_of_source).astype(int)
        for document in numbers[spread].tolist():
            end = _prompt_end(source.documents, document)
            if end > 0 and (longest is None or end <= longest):
                prompts.append(tuple(source.documents.read(document, 0, end).tolist()))
    return tuple(prompts)


def _prompt_end(documents: Documents, document: int) -> int:
    """Where the prompt of a document ends; 0: it is too short for one."""
    length = int(documents.lengths[document])
    first = int(documents.trained(document, 0, length).argmax())
    if first:
        return first
    return PROMPT_TOKENS if length > PROMPT_TOKENS else 0


def sample_text(
    tokenizer: tokenizers.Tokenizer, prompts: Sequence[Sequence[int]], written: Sequence[int]
) -> str:
    """The text that was written after the first of some prompts.

    Decoded alone it could lose its first space.
    """
    return Tokenizer(tokenizer).decode_after(prompts[0], written)
