"""Fill-in-the-middle prompts with a model's own sentinel tokens (arXiv 2207.14255).

``PRE prefix SUF suffix MID`` or, the other way about, ``PRE SUF suffix MID prefix``: after both the
model writes the middle and its end token. The table of sentinels serves training as well as
decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from specjax._util.errors import PairError
from specjax.lm import LM

# prefix, suffix, middle, end of the middle
STYLES = (
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # CodeLlama
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_eot|>"),  # the demo's
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),  # StarCoder
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),  # Qwen-Coder
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),  # CodeGemma
    # DeepSeek-Coder writes a hole where others open the suffix, and ends before the middle.
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>"),
)


PSM, SPM = "psm", "spm"  # the orders of a prompt: prefix-suffix-middle, suffix-prefix-middle


class Vocabulary(Protocol):
    """What both our tokenizer and the tokenizers library's know."""

    def token_to_id(self, token: str) -> int | None: ...


@dataclasses.dataclass(frozen=True)
class Sentinels:
    """Ids of the tokens around the parts of a rearranged document."""

    prefix: int
    suffix: int
    middle: int
    end: int


def find_sentinels(tokenizer: Vocabulary) -> Sentinels | None:
    """The tokenizer's own sentinel tokens; None where it lacks one."""
    for names in STYLES:
        ids = [tokenizer.token_to_id(name) for name in names]
        if None not in ids:
            return Sentinels(*ids)
    return None


def leading_ids(encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of a line break where ``encode`` puts a space before a text, else none.

    SentencePiece models do; a line break of one token takes that space upon itself, and
    what follows it is encoded as in the middle of a document (as CodeLlama's own code does).
    ``encode`` adds no special tokens.
    """
    once, twice = encode("\n"), encode("\n\n")
    return once if len(once) == 2 and twice == [*once, once[1]] else []


def sentinels_of(target: LM) -> Sentinels:
    """The model's sentinels.

    Raises:
      PairError: the model has no tokenizer, or its tokenizer no sentinels.
    """
    sentinels = find_sentinels(target.tokenizer) if target.tokenizer else None
    if sentinels is None:
        raise PairError(
            f"target {target.source} has no fill-in-the-middle tokens: give a prompt "
            "without suffix, or take a model that has them (CodeLlama, StarCoder, "
            "DeepSeek-Coder, Qwen-Coder)"
        )
    return sentinels


def infill_prompt(target: LM, prefix: str, suffix: str, order: str = PSM) -> list[int]:
    """Token ids of the prompt for the text between ``prefix`` and ``suffix``, in ``order``.

    BOS comes first where the tokenizer's template puts it; the suffix has no leading space of
    the tokenizer's own. Either text may be empty.

    Raises:
      PairError: the model has no sentinels.
    """
    marks, tokenizer = sentinels_of(target), target.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    lead = leading_ids(encode)
    after = encode("\n" + suffix)[len(lead) :] if lead else encode(suffix)
    bos = [i for i in tokenizer.encode("")[:1] if i == target.config.bos_id]
    if order == SPM:
        return [*bos, marks.prefix, marks.suffix, *after, marks.middle, *encode(prefix)]
    return [*bos, marks.prefix, *encode(prefix), marks.suffix, *after, marks.middle]


def ending_middles(target: LM) -> LM:
    """The model, whose completions end at the sentinel that closes a middle, too.

    Raises:
      PairError: the model has no sentinels.
    """
    end = sentinels_of(target).end
    return dataclasses.replace(target, eos_ids=tuple(dict.fromkeys((*target.eos_ids, end))))


def exact_matches(texts: Sequence[str], middles: Sequence[str]) -> float:
    """The share of ``texts`` that equal their middle, surrounding white space aside."""
    hits = [a.strip() == b.strip() for a, b in zip(texts, middles, strict=True)]
    return sum(hits) / len(hits)
