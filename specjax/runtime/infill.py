"""Fill-in-the-middle prompts with a model's own sentinel tokens (arXiv 2207.14255).

A prompt is ``PRE prefix SUF suffix MID`` (order ``psm``), or ``PRE SUF suffix MID prefix`` (order
``spm``). After either, the model writes the middle and its end token. Training uses the same table
of sentinels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from specjax._util.errors import OptionError, PairError
from specjax.lm import LM

# prefix, suffix, middle, end of the middle
STYLES = (
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # CodeLlama
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_eot|>"),  # the demo's
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),  # StarCoder
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),  # Qwen-Coder
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),  # CodeGemma
    # DeepSeek-Coder marks the hole before the suffix, and the end before the middle.
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>"),
)

PSM = "psm"  # order of a prompt: prefix, suffix, middle
SPM = "spm"  # suffix, prefix, middle


class Vocabulary(Protocol):
    """What our tokenizer and that of the tokenizers library have in common."""

    def token_to_id(self, token: str) -> int | None: ...


@dataclasses.dataclass(frozen=True)
class Sentinels:
    """Ids of the tokens around the parts of a rearranged document."""

    prefix: int
    suffix: int
    middle: int
    end: int


def find_sentinels(tokenizer: Vocabulary) -> Sentinels | None:
    """The sentinels of the first style whose four tokens the tokenizer has; None if none."""
    for names in STYLES:
        ids = [tokenizer.token_to_id(name) for name in names]
        known_ids = [token_id for token_id in ids if token_id is not None]
        if len(known_ids) == len(names):
            return Sentinels(*known_ids)
    return None


def leading_ids(encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of a line break if ``encode`` puts a space before every text; [] otherwise.

    SentencePiece models do. Put a line break before a text and drop these ids: what is left is
    encoded as in the middle of a document, without that space. CodeLlama's own code does the same.
    ``encode`` adds no special tokens.
    """
    one_break = encode("\n")
    two_breaks = encode("\n\n")
    # [space, break], and [space, break, break]: a break is one token.
    if len(one_break) == 2 and two_breaks == [*one_break, one_break[1]]:
        return one_break
    return []


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
    """Token ids of the prompt for the text between ``prefix`` and ``suffix``.

    ``order`` is ``psm`` or ``spm``. BOS comes first if the tokenizer's template puts it there. The
    suffix gets no leading space from the tokenizer. Either text may be empty.

    Raises:
      PairError: the model has no sentinels.
    """
    sentinels = sentinels_of(target)
    tokenizer = target.tokenizer
    assert tokenizer is not None, "sentinels_of raises without a tokenizer"

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    lead = leading_ids(encode)
    suffix_ids = encode("\n" + suffix)[len(lead) :] if lead else encode(suffix)
    begin = [i for i in tokenizer.encode("")[:1] if i == target.config.bos_id]
    begin.append(sentinels.prefix)
    if order == SPM:
        return [*begin, sentinels.suffix, *suffix_ids, sentinels.middle, *encode(prefix)]
    return [*begin, *encode(prefix), sentinels.suffix, *suffix_ids, sentinels.middle]


def ending_middles(target: LM) -> LM:
    """A copy of the model whose completions also end at the sentinel that closes a middle.

    Raises:
      PairError: the model has no sentinels.
    """
    end = sentinels_of(target).end
    return dataclasses.replace(target, eos_ids=tuple(dict.fromkeys((*target.eos_ids, end))))


def exact_matches(texts: Sequence[str], middles: Sequence[str]) -> float:
    """The share of ``texts`` that equal their middle, apart from white space around them.

    From 0 to 1.

    Raises:
      OptionError: there is no text, or there are not as many middles as texts.
    """
    if not texts or len(texts) != len(middles):
        raise OptionError(
            f"{len(texts)} texts and {len(middles)} middles: expected at least one text, and a "
            "middle for each"
        )
    pairs = zip(texts, middles, strict=True)
    matches = [text.strip() == middle.strip() for text, middle in pairs]
    return sum(matches) / len(matches)
