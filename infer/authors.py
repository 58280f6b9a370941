"""Who wrote each character of a completion as it streams: the draft, or the target."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from specjax.core.types import FROM_TARGET
from specjax.runtime.output import Piece
from specjax.text.incremental_decoder import IncrementalDecoder
from specjax.text.tokenizer import Tokenizer

Run = tuple[str, int]  # text, and FROM_DRAFT or FROM_TARGET


class Authors:
    """Tracks the authors of one row's text.

    Text can lag behind tokens: what may be the beginning of a stop string is not shown yet.

    Args:
      prompt: the ids before the row's own.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._pending: list[int] = []  # authors of characters that are decoded but not shown yet

    def runs(self, piece: Piece) -> list[Run]:
        """The piece's text, split where the author changes."""
        for token, origin in zip(piece.tokens, piece.origins, strict=True):
            characters = self._decoder.push([token])
            self._pending += [int(origin)] * len(characters)
        if piece.finish_reason:
            # What remains are bytes of an incomplete character.
            self._pending += [FROM_TARGET] * len(self._decoder.flush())

        authors = self._pending[: len(piece.text)]
        del self._pending[: len(piece.text)]
        runs = []
        for author, pairs in groupby(zip(piece.text, authors, strict=True), key=itemgetter(1)):
            text = "".join(character for character, _ in pairs)
            runs.append((text, author))
        return runs
