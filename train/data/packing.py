"""Packing: documents become rows of equal length.

Texts are joined end to end and cut. Conversations are never cut: whole ones are put into rows by
best fit (:mod:`train.data.best_fit`).

Axes: `B` rows of a batch, `T` tokens of a row. `segments` numbers the documents in a row, so that
attention stays within a document and the loss ignores what a document's last token would predict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from train.data.best_fit import best_fit
from train.data.tokenized import Documents

IGNORE = -100  # label of a token that predicts nothing, or what is not trained; the loss masks it
# Of a row that holds conversations: 1 at their trained tokens. No step gets it: labels have it all.
ANSWERS = "answers"

Batch = dict[str, np.ndarray]
Transform = Callable[[Batch, int], Batch]  # (row, its number in the run) -> row


class Fragment(NamedTuple):
    """Tokens `begin` to before `end` of a document, in a row of their own positions."""

    document: int
    begin: int
    end: int


class PackedRows(Protocol):
    """The rows of documents in one order."""

    def __len__(self) -> int: ...

    def pieces(self, row: int) -> list[Fragment]:
        """The pieces that a row is made of, in order."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedRows:
    """Documents joined end to end, and cut every `T` tokens. The last row may be shorter.

    Attributes:
      order: `[documents]` their order.
      starts: `[documents + 1]` where each document of `order` starts in the joined text.
    """

    order: np.ndarray
    starts: np.ndarray
    T: int

    @classmethod
    def of(cls, lengths: np.ndarray, order: np.ndarray, T: int) -> JoinedRows:
        starts = np.zeros(len(order) + 1, np.int64)
        np.cumsum(lengths[order], out=starts[1:])
        return cls(order, starts, T)

    def __len__(self) -> int:
        return -(-int(self.starts[-1]) // self.T)

    def pieces(self, row: int) -> list[Fragment]:
        begin = row * self.T
        end = min((row + 1) * self.T, int(self.starts[-1]))
        place = int(np.searchsorted(self.starts, begin, side="right")) - 1
        pieces = []
        while begin < end:
            start = int(self.starts[place])
            stop = min(int(self.starts[place + 1]), end)
            pieces.append(Fragment(int(self.order[place]), begin - start, stop - start))
            begin = stop
            place += 1
        return pieces


@dataclasses.dataclass(frozen=True, eq=False)
class WholeRows:
    """Whole documents in rows of `T` tokens, by best fit; only texts longer than a row are cut.

    Attributes:
      documents, begins, ends: `[pieces]` what each piece is of its document, row by row.
      rows: `[rows + 1]` where each row starts among the pieces.
    """

    documents: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, order: np.ndarray, T: int) -> WholeRows:
        lengths = lengths.astype(np.int64)  # shards count in uint32, whose negatives are large
        counts = -(-lengths[order] // T)  # pieces of each document
        documents = np.repeat(order, counts)
        begins = T * (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts))
        ends = np.minimum(begins + T, lengths[documents])
        row_of = best_fit(ends - begins, T)
        by_row = np.argsort(row_of, kind="stable")
        rows = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
        return cls(documents[by_row], begins[by_row], ends[by_row], rows)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def pieces(self, row: int) -> list[Fragment]:
        places = range(int(self.rows[row]), int(self.rows[row + 1]))
        return [
            Fragment(int(self.documents[i]), int(self.begins[i]), int(self.ends[i])) for i in places
        ]


def pack_row(
    documents: Documents, pieces: Sequence[Fragment], T: int, apart: bool = False
) -> Batch:
    """A row of pieces of documents, one after the other.

    Args:
      documents: their tokens.
      T: tokens per row.
      apart: whether some documents are conversations, of which only answers are trained.

    Returns:
      int32 arrays `[T]`: `tokens`; `labels`, the next token of the same document, which may
      lie in the next row, or `IGNORE` if there is none, or it is not trained; `segments`, 1 for the
      row's first piece, 2 for the next, 0 for padding; `positions`, from 0 in every segment. With
      `apart` also `answers`, see `ANSWERS`.
    """
    tokens = np.zeros(T, np.int32)
    labels = np.full(T, IGNORE, np.int32)
    segments = np.zeros(T, np.int32)
    positions = np.zeros(T, np.int32)
    answers = np.zeros(T, np.int32)

    filled = 0
    for segment, (document, begin, end) in enumerate(pieces, start=1):
        count = end - begin
        # One token more, if the document has it: the label of the last token.
        stop = min(end + 1, int(documents.lengths[document]))
        ids = documents.read(document, begin, stop)
        here = slice(filled, filled + count)
        tokens[here] = ids[:count]
        labels[filled : filled + len(ids) - 1] = ids[1:]
        if apart:
            trained = documents.trained(document, begin, stop)
            answers[here] = trained[:count]
            labels[filled : filled + len(ids) - 1][~trained[1:]] = IGNORE
        segments[here] = segment
        positions[here] = np.arange(count)
        filled += count
    row = {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}
    return row | {ANSWERS: answers} if apart else row


def without_answers(row: Batch) -> Batch:
    """The row without what only its layout reads."""
    return {name: x for name, x in row.items() if name != ANSWERS}


def stack(rows: Sequence[Batch]) -> Batch:
    """Arrays of equal shapes, name by name, stacked along a new first axis."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
