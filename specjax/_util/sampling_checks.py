"""What the settings of a :class:`specjax.Sampling` must be, and the forms of a grammar."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from specjax._util.checks import INT32_MAX, LARGEST, Check

JSON = "json"
SCHEMA = "schema:"
REGEX = "regex:"
LARK = "lark:"
EXPECTED = f"{JSON}, {SCHEMA}SCHEMA, {REGEX}EXPRESSION or {LARK}GRAMMAR"
MAX_LENGTH = 2**20  # characters of a grammar


def check_grammar(text: str) -> str:
    """The text of a grammar, if it has one of the forms; the grammar itself is not read.

    Raises:
      ValueError: it has another form, is too long, or has half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise TypeError
    known = text in ("", JSON) or text.startswith((SCHEMA, REGEX, LARK))
    if not known or len(text) > MAX_LENGTH:
        raise ValueError
    text.encode()  # a grammar's compiler takes UTF-8
    return text


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids as a tuple."""
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError
    return tuple(_ID.convert(token) for token in value)


def _words(value: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of several words."""
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError
    words = tuple(_ids(word) for word in value)
    if not all(words):
        raise ValueError
    return words


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and its bias, from a mapping or from pairs, in the order of ids."""
    pairs: Iterable = value.items() if isinstance(value, Mapping) else value
    return tuple(sorted((_ID.convert(token), _BIAS.convert(bias)) for token, bias in pairs))


def _decay(value: Any) -> tuple[int, float]:
    """The first token that a length decay acts on, and its factor."""
    start, factor = value
    return Check(int, low=0, high=INT32_MAX).convert(start), _ABOVE_0.convert(factor)


_ID = Check(int, low=0, high=INT32_MAX)
_BIAS = Check(float, low=-LARGEST, high=LARGEST)
_ABOVE_0 = Check(float, above=0, high=LARGEST)
_FROM_0 = Check(float, low=0, high=LARGEST)
_SHARE = Check(float, low=0, below=1)
_WHOLE = Check(int, low=0, high=INT32_MAX)
_IDS = Check(_ids, expected="token ids")
CHECKS = {  # of every field of Sampling
    "temperature": Check(float, low=0, high=1e38),  # what float32 holds
    "top_k": _WHOLE,
    "top_p": Check(float, above=0, high=1),
    "min_p": Check(float, low=0, high=1),
    "typical_p": Check(float, above=0, high=1),
    "epsilon_cutoff": _SHARE,
    "eta_cutoff": _SHARE,
    "top_n_sigma": _FROM_0,
    "repetition_penalty": _ABOVE_0,
    "presence_penalty": _BIAS,
    "frequency_penalty": _BIAS,
    "no_repeat_ngram_size": _WHOLE,
    "dry_multiplier": _FROM_0,
    "dry_base": Check(float, low=1, high=LARGEST),
    "dry_allowed_length": _WHOLE,
    "dry_sequence_breakers": _IDS,
    "bad_words": Check(_words, expected="words, each a sequence of token ids"),
    "logit_bias": Check(_bias, expected="a bias per token id, such as {42: -1.5}"),
    "allowed_token_ids": dataclasses.replace(_IDS, optional=True, fits=bool),
    "suppress_tokens": _IDS,
    "min_tokens": _WHOLE,
    "ignore_eos": Check(bool),
    "stop_token_ids": _IDS,
    "grammar": Check(check_grammar, expected=f"a grammar: {EXPECTED}"),
    "exponential_decay_length_penalty": Check(
        _decay,
        expected="a number of tokens and a factor above 0, such as (64, 1.05)",
        optional=True,
    ),
}
