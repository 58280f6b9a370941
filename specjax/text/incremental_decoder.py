"""Decode token ids as they come, to text that later ids cannot change."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to

_UTF8 = codecs.getincrementaldecoder("utf-8")
_CONTEXT = 8  # ids; a character has four bytes at most, and a decoder looks no further back
_MOST_PENDING = 64  # ids whose text is waited for; that many incomplete bytes are no character


class TokenTexts(Protocol):
    """What the decoder needs of a tokenizer."""

    def decode_whole(self, ids: Sequence[int]) -> str: ...

    def has_text(self, token_id: int) -> bool: ...

    def byte_of(self, token_id: int) -> int | None: ...


class IncrementalDecoder:
    """Decodes a sequence piece by piece; the pieces joined are the text of all its ids.

    New tokens are decoded with the ones before them: decoded alone they could lose a leading space.
    Text is returned as soon as no later token can change it. So a character comes when its last
    byte does, and what follows incomplete bytes does not wait for them to end.

    Tokens of single bytes are decoded here, character by character. The library would decode a run
    of them as a whole, where one bad byte spoils all characters of the run.

    Args:
      context: the ids before the sequence. Their text is not returned.
    """

    def __init__(self, tokenizer: TokenTexts, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # The ids before the pending ones: as many as their text can depend on.
        self._context = self._with_text(context[-_MOST_PENDING:])[-_CONTEXT:]
        self._pending: list[int] = []  # ids whose text has not been returned whole
        self._num_returned = 0  # characters of the pending ids' text
        # Characters of the run of byte tokens that the sequence is in, if it is in one.
        self._utf8 = _UTF8(errors="replace")
        self._utf8.decode(self._trailing_bytes(self._context))
        # Whether the context ends in an incomplete character. Its replacement is not new text.
        self._begun_before = bool(self._utf8.getstate()[0])

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; returns the new text that no later token can change, which may be empty."""
        pieces = []
        for is_byte, group in itertools.groupby(self._with_text(ids), self._is_byte):
            if is_byte:
                pieces.append(self._push_bytes(list(group)))
            else:
                pieces.append(self._end_bytes())
                pieces.append(self._push_words(list(group)))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest of the text, at the end of the sequence."""
        return self._end_words() + self._end_bytes()

    def _push_bytes(self, ids: list[int]) -> str:
        before = self._end_words()
        self._context = (self._context + ids)[-_CONTEXT:]
        return before + self._new_characters(self._utf8.decode(self._trailing_bytes(ids)))

    def _end_bytes(self) -> str:
        """Ends a run of byte tokens: bytes that are left over become a replacement character."""
        return self._new_characters(self._utf8.decode(b"", final=True))

    def _new_characters(self, text: str) -> str:
        """The text without the replacement of a character that began in the context."""
        if text and self._begun_before:
            self._begun_before = False
            return text.removeprefix(REPLACEMENT)
        return text

    def _push_words(self, ids: list[int]) -> str:
        """Adds tokens that are no bytes; how they are grouped does not change what it returns."""
        if not self._pending:
            self._pending = ids
            if not self._pending_text().endswith(REPLACEMENT):
                return self._end_words()
            self._pending = []
        return "".join(map(self._push_word, ids))

    def _push_word(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        # Only the last character can still change: an incomplete one is a single replacement.
        stable = text[: len(text) - text.endswith(REPLACEMENT)]
        if stable == text or len(self._pending) > _MOST_PENDING:
            return self._end_words()
        new_text = stable[self._num_returned :]
        self._num_returned = max(self._num_returned, len(stable))
        return new_text

    def _end_words(self) -> str:
        """Returns the rest of the pending ids' text; they become the context."""
        if not self._pending:
            return ""
        text = self._pending_text()
        if text:
            self._context = self._pending[-_CONTEXT:]
        else:
            # Tokens without text are no context by themselves: the next token would be decoded as
            # the first of a text.
            self._context = (self._context + self._pending)[-_CONTEXT:]
        new_text = text[self._num_returned :]
        self._pending = []
        self._num_returned = 0
        return new_text

    def _pending_text(self) -> str:
        """The text that the pending ids add to the context's."""
        before = self._tokenizer.decode_whole(self._context)
        text = self._tokenizer.decode_whole(self._context + self._pending)
        if not text.startswith(before) and before.endswith(REPLACEMENT):
            before = before[:-1]  # the pending ids complete the context's last character
        return text[len(before) :]

    def _with_text(self, ids: Sequence[int]) -> list[int]:
        """Those of the ids that have text."""
        return [i for i in map(int, ids) if self._tokenizer.has_text(i)]

    def _is_byte(self, token_id: int) -> bool:
        return self._tokenizer.byte_of(token_id) is not None

    def _trailing_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of the byte tokens that the ids end in."""
        run = []
        for token_id in reversed(ids):
            byte = self._tokenizer.byte_of(token_id)
            if byte is None:
                break
            run.append(byte)
        return bytes(reversed(run))
