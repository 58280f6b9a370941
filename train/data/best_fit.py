"""Best fit: pieces of different lengths are put into rows of equal length, and none is cut.

Longest pieces first, each into the row with the least room that still holds it (best-fit
decreasing; Johnson et al. 1974). It uses at most 11/9 of the rows of the best packing.
"""

from __future__ import annotations

import numpy as np


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """`[pieces]` int64 the row of each piece, from 0; a row's pieces have `room` tokens at most.

    Equal lengths keep their order: pieces in another order get other rows, and the rows have the
    same lengths.

    Args:
      lengths: `[pieces]` from 1 to `room`.
    """
    row_of = np.zeros(len(lengths), np.int64)
    open_rows: dict[int, list[int]] = {}  # by the room that is left
    rooms = 0  # bit i is set if a row with i tokens of room is open
    count = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            # The lowest bit is the least room that holds the piece.
            left = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[left].pop()
            if not open_rows[left]:
                rooms &= ~(1 << left)
        else:
            left = room
            row = count
            count += 1
        row_of[piece] = row
        rest = left - length
        if rest:
            open_rows.setdefault(rest, []).append(row)
            rooms |= 1 << rest
    return row_of
