"""Packing: documents are joined end to end and cut into rows of equal length.

Axes: `B` rows of a batch, `T` tokens of a row. `segments` numbers the documents in a row, so that
attention stays within a document and the loss ignores what a document's last token would predict.
"""

from collections.abc import Callable, Sequence

import numpy as np

from train.data.tokenized import Documents

IGNORE = -100  # label of a token that predicts nothing; the loss masks it

Batch = dict[str, np.ndarray]
Transform = Callable[[Batch, int], Batch]  # (row, its number in the run) -> row


def pack_row(
    documents: Documents, order: np.ndarray, starts: np.ndarray, row: int, T: int
) -> Batch:
    """Row number `row` of the documents joined in `order` and cut every `T` tokens.

    Args:
      documents: their tokens.
      order: `[documents]` the documents' order in this epoch.
      starts: `[documents + 1]` where each document of `order` starts in the epoch's text.
      row: number of the row, from 0.
      T: tokens per row.

    Returns:
      int32 arrays `[T]`: `tokens`; `labels`, the next token of the same document, which may
      lie in the next row, else `IGNORE`; `segments`, 1 for the row's first document, 2 for the
      next, 0 for padding; `positions`, from 0 in every segment. A document that is cut goes on
      in the next row at position 0.
    """
    tokens = np.zeros(T, np.int32)
    labels = np.full(T, IGNORE, np.int32)
    segments = np.zeros(T, np.int32)
    positions = np.zeros(T, np.int32)

    # Places in the epoch's text; the last row of an epoch may be shorter.
    begin = row * T
    end = min((row + 1) * T, int(starts[-1]))
    place = int(np.searchsorted(starts, begin, side="right")) - 1

    filled = 0
    segment = 0
    while begin + filled < end:
        segment += 1
        start = int(starts[place])
        stop = int(starts[place + 1])
        skipped = begin + filled - start  # tokens of the document that earlier rows hold
        count = min(stop - start - skipped, end - begin - filled)

        # One token more, if the document has it: the label of the last token.
        ids = documents.read(int(order[place]), skipped, min(skipped + count + 1, stop - start))
        here = slice(filled, filled + count)
        tokens[here] = ids[:count]
        labels[filled : filled + len(ids) - 1] = ids[1:]
        segments[here] = segment
        positions[here] = np.arange(count)

        filled += count
        place += 1
    return {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}


def stack(rows: Sequence[Batch]) -> Batch:
    """Arrays of equal shapes, name by name, stacked along a new first axis."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
