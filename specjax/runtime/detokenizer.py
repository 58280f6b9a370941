"""A running request's tokens as text: decoded as they come, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.text.incremental_decoder import IncrementalDecoder
from specjax.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one request into text and finds stop strings in it.

    A special token, such as ``</s>``, has no text. Stop strings that name one, alone or beside
    other text, are found in the text with special tokens written out.

    Args:
      tokenizer: of the target; None: there is no text.
      stop: the request's stop strings.
      prompt: the ids of its prompt, which the text continues.

    Attributes:
      text: all text so far, cut before the stop string that ended it.
      count: tokens that the request keeps: none after the one that completes a stop string.
      stopped: whether a stop string ended the request.
      has_stop_strings: whether there are any to find.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: Sequence[str], prompt: Sequence[int] = ()
    ):
        # tokenizers.decoders.DecodeStream does not replace it: it has no flush, so the bytes of a
        # character that is cut off at the end are lost, and it raises on invalid runs of bytes.
        self._decoder = None
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._special: dict[int, str] = {}  # texts of special tokens by id, if stops name any
        self._naming: list[str] = []  # the stop strings that do
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(tokenizer, prompt)
            texts = tokenizer.special_texts if stop else {}
            self._naming = [one for one in stop if any(text in one for text in texts.values())]
            self._special = texts if self._naming else {}
        self._stop = stop
        self.has_stop_strings = bool(stop)
        self.text = ""
        self.count = 0
        self.stopped = False
        # The text with special tokens written out; where they begin in it, and their lengths.
        self._written = ""
        self._inserted: list[tuple[int, int]] = []
        # Characters at the end that may be the beginning of a stop string. One fewer than its
        # length: a whole stop string would have been found.
        self._withheld = max((len(text) - 1 for text in stop), default=0)
        self._num_returned = 0  # characters

    def add(self, tokens: np.ndarray, finished: bool) -> tuple[str, int]:
        """New text that can be shown, and how many of ``tokens`` the request keeps.

        ``finished``: these are the last tokens. Without a tokenizer the text is empty.
        """
        kept = self._decode(tokens)
        self.count += kept

        if finished and self._decoder and not self.stopped:
            self._append(self._decoder.flush())

        end = len(self.text)
        if not finished and not self.stopped:
            end = max(self._num_returned, end - self._withheld)
        new_text = self.text[self._num_returned : end]
        self._num_returned = max(end, self._num_returned)
        return new_text, kept

    def whole_text(self, tokens: np.ndarray) -> str:
        """The text of another continuation of the same prompt, cut before a stop string."""
        other = Detokenizer(self._tokenizer, self._stop, self._prompt)
        other.add(tokens, finished=True)
        return other.text

    def _decode(self, tokens: np.ndarray) -> int:
        """Adds the text of the tokens; returns how many come before the end of a stop string."""
        if self._decoder is None:
            return len(tokens)
        if not self._stop:
            self.text += self._decoder.push(tokens.tolist())
            return len(tokens)

        # Token by token: the one that completes a stop string is the last one that counts.
        for count, token in enumerate(tokens.tolist(), 1):
            special = self._special.get(token, "")
            # Bytes of a character that is not whole yet wait, unless the text ends here.
            is_end = bool(special) and self._ends_with(special)
            self._append(self._decoder.flush() if is_end else self._decoder.push([token]), special)
            if self.stopped:
                return count
        return len(tokens)

    def _append(self, new_text: str, special: str = "") -> None:
        """Adds text, and a special token's after it; cuts before the first stop string, if any."""
        # A stop string can begin in the text before, but not be in it as a whole.
        begin = max(0, len(self.text) - self._withheld)
        self.text += new_text
        places = _places(self._stop, self.text, begin)
        if self._naming:
            places += self._write(new_text, special)
        if places:
            self.text = self.text[: min(places)]
            self.stopped = True

    def _ends_with(self, special: str) -> bool:
        """Whether a stop string is in the written text if a special token follows."""
        begin = max(0, len(self._written) - self._withheld)
        return bool(_places(self._naming, self._written + special, begin))

    def _write(self, new_text: str, special: str) -> list[int]:
        """Adds both to the written text; returns where stop strings of special tokens begin in it.

        The places are those of ``text``, which has no special tokens.
        """
        begin = max(0, len(self._written) - self._withheld)
        self._written += new_text
        if special:
            self._inserted.append((len(self._written), len(special)))
            self._written += special
        return [
            place - sum(min(size, place - at) for at, size in self._inserted if at < place)
            for place in _places(self._naming, self._written, begin)
        ]


def _places(stop: Sequence[str], text: str, begin: int) -> list[int]:
    """Where each stop string that is in the text begins first."""
    return [place for place in (text.find(one, begin) for one in stop) if place >= 0]
