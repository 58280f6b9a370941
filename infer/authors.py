"""Who wrote each character of a completion as it streams: the draft, or the target."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from specjax.core.types import FROM_TARGET
from specjax.runtime.output import Piece
from specjax.text.tokenizer import IncrementalDecoder, Tokenizer

Run = tuple[str, int]  # text, and FROM_DRAFT or FROM_TARGET


class Authors:
    """Follows one row. Its text may lag behind its tokens: it can begin a stop string."""

    def __init__(self, tokenizer: Tokenizer):
        self._decoder = IncrementalDecoder(tokenizer)
        self._pending: list[int] = []  # of characters that are decoded but not shown yet

    def runs(self, piece: Piece) -> list[Run]:
        """The piece's text in runs of one author each."""
        for token, origin in zip(piece.tokens, piece.origins, strict=True):
            self._pending += [int(origin)] * len(self._decoder.push([token]))
        if piece.finish_reason:
            self._pending += [FROM_TARGET] * len(self._decoder.flush())
        authors = self._pending[: len(piece.text)]
        del self._pending[: len(piece.text)]
        return [
            ("".join(character for character, _ in run), author)
            for author, run in groupby(zip(piece.text, authors, strict=True), key=itemgetter(1))
        ]
