"""A running request's tokens as text: decoded as they come, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.text.incremental_decoder import IncrementalDecoder
from specjax.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one request into text and finds stop strings in it.

    A stop string that is a special token, such as ``</s>``, has no text. Its id ends the request.

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
        self._stop_ids: set[int] = set()
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(tokenizer, prompt)
            ids = [tokenizer.special_token(text) for text in stop]
            self._stop_ids = {i for i in ids if i is not None}
        self._stop = stop
        self.has_stop_strings = bool(stop)
        self.text = ""
        self.count = 0
        self.stopped = False
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
            if token in self._stop_ids:
                self.stopped = True
                self._append(self._decoder.flush())
                return count
            self._append(self._decoder.push([token]))
            if self.stopped:
                return count
        return len(tokens)

    def _append(self, new_text: str) -> None:
        """Adds text; cuts it before the first stop string, and notes that there is one."""
        # A stop string can begin in the text before, but not be in it as a whole.
        begin = max(0, len(self.text) - self._withheld)
        self.text += new_text
        positions = [self.text.find(text, begin) for text in self._stop]
        positions = [position for position in positions if position >= 0]
        if positions:
            self.text = self.text[: min(positions)]
            self.stopped = True
