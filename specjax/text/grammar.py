"""Grammars over a tokenizer's tokens: which tokens may follow, and which must.

llguidance computes both on the host. This file is the only one that knows it.

A grammar is a text: ``json``, ``schema:`` and a JSON schema, ``regex:`` and a regular expression,
or ``lark:`` and a grammar in llguidance's form of Lark.

Axis legend: W words of 32 bits, ⌈V/32⌉ of them, V vocabulary.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax._util.errors import OptionError, PairError, one_line
from specjax._util.files import parse_json
from specjax._util.sampling_checks import JSON, LARK, REGEX, SCHEMA
from specjax.text.automaton import MAX_STATES, Automaton, token_automaton
from specjax.text.byte_automaton import byte_automaton
from specjax.text.schema_regex import NoRegex, regex_of_schema
from specjax.text.tokenizer import Tokenizer

# JSON is spaced as Python writes it. With free spacing, a model may write spaces without end. The
# schema's "x-guidance" can say otherwise.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Matcher:
    """One row's place in a grammar. It moves with each token, and back."""

    def __init__(self, matcher: Any, ends: frozenset[int]):
        self._matcher = matcher
        self._ends = ends

    def copy(self) -> Matcher:
        """A matcher at the same place."""
        return Matcher(self._matcher.deep_copy(), self._ends)

    def advance(self, token: int) -> bool:
        """Moves by one token; False, without a move, if it may not follow.

        An end of sequence is no part of the text: nothing is asked after it.
        """
        if token in self._ends:
            return False
        return self._matcher.try_consume_tokens([token]) == 1

    def back(self, count: int) -> None:
        """Takes back the last ``count`` moves."""
        if count:
            self._matcher.rollback(count)

    def fill(self, bits: np.ndarray) -> None:
        """Writes the tokens that may follow into ``bits``, int32 ``[W]``, one bit each.

        A grammar that has become too complex to follow lets the text end.
        """
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            bits[:] = 0
            for end in self._ends:
                bits.view(np.uint32)[end // 32] |= np.uint32(1 << end % 32)

    def forced(self) -> list[int]:
        """The tokens of the only text that may follow, as the tokenizer would split it."""
        return self._matcher.compute_ff_tokens()

    def forced_bytes(self) -> bytes:
        """The only text that may follow, as far as it is known."""
        return self._matcher.compute_ff_bytes()


def make_matcher(
    text: str, tokenizer: Tokenizer | None, vocab: int, eos_ids: Sequence[int]
) -> Matcher:
    """A matcher at the beginning of a grammar's text.

    Raises:
      OptionError: the grammar cannot be read or met, is too large, or llguidance is missing.
      PairError: the model has no tokenizer or no end of sequence, or cannot spell it.
    """
    if tokenizer is None:
        raise PairError("grammar: needs a target with a tokenizer")
    if not eos_ids:
        raise PairError("grammar: the model has no end of sequence, so no text could end")
    return _compiled(text, tokenizer, vocab, tuple(eos_ids)).copy()


@functools.lru_cache(maxsize=16)  # a table has up to 32 MiB
def make_automaton(
    text: str, tokenizer: Tokenizer | None, vocab: int, eos_ids: tuple[int, ...]
) -> Automaton | None:
    """A grammar as a table; None: it is no automaton, or not a small one.

    Raises:
      OptionError, PairError: as :func:`make_matcher`.
    """
    matcher = make_matcher(text, tokenizer, vocab, eos_ids)
    regex = _regex(text)
    if regex is None or tokenizer is None:
        return None
    over_bytes = byte_automaton(regex, MAX_STATES)
    if over_bytes is None:
        return None
    tokens = _bytes_of_tokens(tokenizer, vocab, eos_ids)
    return token_automaton(over_bytes, tokens, eos_ids, matcher)


def _regex(text: str) -> str | None:
    """The regular expression that a grammar is; None: it is another one."""
    if text.startswith(REGEX):
        return text.removeprefix(REGEX)
    if text.startswith(SCHEMA):
        try:
            return regex_of_schema(parse_json(text.removeprefix(SCHEMA).encode()))
        except NoRegex:
            return None
    return None


@functools.lru_cache(maxsize=64)
def _compiled(text: str, tokenizer: Tokenizer, vocab: int, eos_ids: tuple[int, ...]) -> Matcher:
    guide = _llguidance()
    made = guide.LLMatcher(_tokens_of(tokenizer, vocab, eos_ids), _source(guide, text))
    matcher = Matcher(made, frozenset(eos_ids))
    bits = np.zeros(-(-vocab // 32), np.int32)
    matcher.fill(bits)
    if made.is_error():
        raise OptionError(f"grammar: {one_line(made.get_error())}")
    if not bits.any():
        raise PairError("grammar: the tokenizer has no token that may begin it")
    return matcher


@functools.lru_cache(maxsize=8)
def _tokens_of(tokenizer: Tokenizer, vocab: int, eos_ids: tuple[int, ...]) -> Any:
    """The vocabulary as llguidance reads it; a tenth of a second."""
    return _llguidance().LLTokenizer(tokenizer.to_json(), n_vocab=vocab, eos_token=list(eos_ids))


@functools.lru_cache(maxsize=8)
def _bytes_of_tokens(
    tokenizer: Tokenizer, vocab: int, eos_ids: tuple[int, ...]
) -> list[bytes | None]:
    """Each token's bytes; None: it is no text."""
    read = _tokens_of(tokenizer, vocab, eos_ids)
    return [None if read.is_special_token(i) else read.decode_bytes([i]) for i in range(vocab)]


def _source(guide: Any, text: str) -> str:
    """llguidance's own form of a grammar."""
    matcher = guide.LLMatcher
    if text == JSON:
        # Any object, as OpenAI's json_object: not any value.
        return matcher.grammar_from_json_schema({"type": "object"}, defaults=SPACING)
    if text.startswith(REGEX):
        return matcher.grammar_from_regex(text.removeprefix(REGEX))
    if text.startswith(LARK):
        return matcher.grammar_from_lark(text.removeprefix(LARK))
    try:
        schema = parse_json(text.removeprefix(SCHEMA).encode())
        return matcher.grammar_from_json_schema(json.dumps(schema), defaults=SPACING)
    except ValueError as error:
        raise OptionError(f"grammar: the schema is no JSON schema: {one_line(error)}") from None


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise OptionError(
            "grammar: needs the grammar extra: pip install 'specjax[grammar]'"
        ) from None
    return llguidance
