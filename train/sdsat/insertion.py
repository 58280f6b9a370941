"""SDSAT's adaptive insertion H (arXiv 2403.18647, §2.2), and the row layouts of its losses.

An adaptive token stands in the place of a token that is not known yet, and predicts the token after
it. H replaces windows of the text by adaptive tokens (mixed layout). The isolated layout keeps the
text as it is and appends the windows to it; attention keeps them apart.

Everything is numpy and depends only on (seed, row number), so a resumed run sees the same rows.

Axes: `T` tokens of a row, `A` appended tokens, `W` windows of a row.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax._util.errors import InputError
from train.data.packing import ANSWERS, IGNORE, Batch

# Blocks of the Philox counter. No random stream of a row overlaps another, or the documents' order.
_TRAIN_STREAM = 1
_PROBE_STREAM = 2
PROBE_EVERY = 16  # a held-out row of T tokens gets T // 16 windows
# Room for appended tokens: standard deviations above the mean. Rows that need more drop windows.
_SPARE_DEVIATIONS = 2


@dataclasses.dataclass(frozen=True)
class Insertion:
    """What H inserts.

    Attributes:
      ids: the adaptive id of each place in a window: L times the same id, or L distinct ones.
      special_ids: ids such as EOS that are never replaced; windows end before them.
      rate: the probability that a window starts at a token.
      seed: decides, with the row's number, every random draw.
    """

    ids: tuple[int, ...]
    special_ids: tuple[int, ...] = ()
    rate: float = 0.1
    seed: int = 0

    def __post_init__(self):
        if len(set(self.ids)) not in (1, len(self.ids)):
            expected = f"one repeated id or {len(self.ids)} distinct ones"
            raise InputError(f"adaptive ids {list(self.ids)}: expected {expected}")

    @property
    def window(self) -> int:
        """L, the most tokens of a window."""
        return len(self.ids)

    @property
    def distinct(self) -> bool:
        """Whether each place of a window has its own id."""
        return len(set(self.ids)) > 1

    def ids_at(self, index: np.ndarray) -> np.ndarray:
        """int32 ids of the places `index`, counted from 1.

        With one repeated id, places beyond L are allowed: windows may join.
        """
        if not self.distinct:
            return np.full(index.shape, self.ids[0], np.int32)
        return np.asarray(self.ids, np.int32)[index - 1]


def draw_windows(insertion: Insertion, row: Batch, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) int64 `[W]` of the windows of row `number`, by rising start.

    A window starts at a token with probability `rate`. Its length is uniform in {1, …, L}, but it
    ends before the next document boundary, special token or padding. Windows may overlap. In a
    conversation they stand where an answer is generated.
    """
    # Both draws are made for every token, so they do not depend on the documents in the row.
    rng = _generator(insertion.seed, number, _TRAIN_STREAM)
    tokens = len(row["tokens"])
    starting = rng.random(tokens) < insertion.rate
    lengths = rng.integers(1, insertion.window + 1, tokens)
    room = _room(row, insertion.special_ids)
    starts = np.flatnonzero(starting & (room > 0))
    return starts, np.minimum(lengths, room)[starts]


def mixed_row(insertion: Insertion, row: Batch, number: int) -> Batch:
    """The row, and H applied to it: `mixed` and `index` int32 `[T]`.

    `index` is the place in the window, from 1; 0 where the token is not replaced. With one
    repeated id, overlapping windows join into a longer one. With distinct ids, a window ends where
    the next one starts.
    """
    starts, lengths = draw_windows(insertion, row, number)
    places = np.arange(len(row["tokens"]))
    end = np.zeros_like(places)  # at the start of a window: the place after its last token
    end[starts] = starts + lengths

    if insertion.distinct:
        # The latest start before each place, -1 if there is none.
        window_start = np.full_like(places, -1)
        window_start[starts] = starts
        window_start = np.maximum.accumulate(window_start)
        covered = (window_start >= 0) & (places < end[window_start])
    else:
        covered = places < np.maximum.accumulate(end)
        # A joined window starts where the token before is not covered, or of another document.
        first = covered & ~(np.roll(covered, 1) & _continues(row))
        window_start = np.maximum.accumulate(np.where(first, places, -1))

    index = np.where(covered, places - window_start + 1, 0)
    mixed = np.where(covered, insertion.ids_at(np.maximum(index, 1)), row["tokens"])
    return row | {"mixed": mixed.astype(np.int32), "index": index.astype(np.int32)}


def appended_slots(window: int, rate: float, tokens: int) -> int:
    """A, the tokens appended to a row of `tokens` for its windows, a multiple of 8.

    That is the mean of what the windows need plus two standard deviations.
    """
    mean = tokens * rate * (window + 1) / 2
    square = rate * (window + 1) * (2 * window + 1) / 6  # E[length²] at one token
    deviation = (tokens * (square - (mean / tokens) ** 2)) ** 0.5
    return max(window, int(np.ceil((mean + _SPARE_DEVIATIONS * deviation) / 8)) * 8)


def isolated_row(insertion: Insertion, row: Batch, number: int) -> Batch:
    """The clean row, then its windows; see :func:`append_windows`.

    Windows that do not fit are dropped at random, so that no place of the row is favored.
    """
    starts, lengths = draw_windows(insertion, row, number)
    slots = appended_slots(insertion.window, insertion.rate, len(row["tokens"]))
    if lengths.sum() > slots:
        rng = _generator(insertion.seed, number, _TRAIN_STREAM, skip=1)
        order = rng.permutation(len(starts))
        kept = np.sort(order[np.cumsum(lengths[order]) <= slots])
        starts = starts[kept]
        lengths = lengths[kept]
    return append_windows(row, starts, lengths, slots, insertion)


def probe_row(insertion: Insertion, row: Batch, number: int, length: int) -> Batch:
    """The clean row and up to T/16 complete windows of `length`, for the held-out loss.

    The appended part has the shape `[W, length]`; unused windows are padding.
    """
    slots = probe_slots(len(row["tokens"]), length)
    possible = np.flatnonzero(_room(row, insertion.special_ids) >= length)
    rng = _generator(insertion.seed, number, _PROBE_STREAM)
    starts = np.sort(rng.permutation(possible)[: slots // length])
    return append_windows(row, starts, np.full_like(starts, length), slots, insertion)


def probe_slots(tokens: int, length: int) -> int:
    """The tokens appended to a held-out row of ``tokens`` for its windows of ``length``."""
    return max(1, tokens // PROBE_EVERY) * length


def append_windows(
    row: Batch, starts: np.ndarray, lengths: np.ndarray, slots: int, insertion: Insertion
) -> Batch:
    """The isolated layout: the clean row, then the tokens of its windows.

    Token i of the window at place s has the position of place s+i−1, and predicts what that place
    predicts.

    Args:
      starts, lengths: `[W]` the windows, as `draw_windows` gives them.
      slots: A, tokens to append; those that the windows do not need are padding.

    Returns:
      int32 arrays. `[T + A]`: `tokens`, `labels`, `segments`, `positions` as `pack_row`;
      `windows`, 0 for the clean row, else the window's number from 1; `starts`, the position
      at which the window starts; `index`, the place in the window from 1, 0 in the clean row.
      `[A]`: `sources`, the row's place with the same label. Padding has segment 0.
    """
    window = np.repeat(np.arange(1, len(starts) + 1), lengths)
    used = len(window)
    index = np.arange(used) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    sources = np.repeat(starts, lengths) + index - 1

    def appended(clean: np.ndarray, values: np.ndarray, fill: int = 0) -> np.ndarray:
        return np.concatenate([clean, values, np.full(slots - used, fill)]).astype(np.int32)

    zeros = np.zeros(len(row["tokens"]), np.int32)
    return {
        "tokens": appended(row["tokens"], insertion.ids_at(index)),
        "labels": appended(row["labels"], row["labels"][sources], IGNORE),
        "segments": appended(row["segments"], row["segments"][sources]),
        "positions": appended(row["positions"], row["positions"][sources]),
        "windows": appended(zeros, window),
        "starts": appended(zeros, np.repeat(row["positions"][starts], lengths)),
        "index": appended(zeros, index),
        "sources": appended(zeros[:0], sources),
    }


def _continues(row: Batch) -> np.ndarray:
    """bool `[T]`: the token is of the same document as the one before it."""
    segments = row["segments"]
    continues = np.zeros(len(segments), bool)
    continues[1:] = segments[1:] == segments[:-1]
    return continues


def _room(row: Batch, special: tuple[int, ...]) -> np.ndarray:
    """int64 `[T]`: tokens from here to the next special token, document boundary or padding.

    Of a conversation, only the tokens of answers count.
    """
    tokens = len(row["tokens"])
    closed = (row["segments"] == 0) | np.isin(row["tokens"], special)
    if ANSWERS in row:
        closed |= row[ANSWERS] == 0
    places = np.arange(tokens)
    # The next stop after each place: a minimum from the right, shifted by one.
    stops = np.where(closed | ~_continues(row), places, tokens)
    next_stop = np.append(np.minimum.accumulate(stops[::-1])[::-1][1:], tokens)
    return np.where(closed, 0, next_stop - places)


def _generator(seed: int, number: int, stream: int, skip: int = 0) -> np.random.Generator:
    """Philox keyed by (seed, row), 2**128 numbers from any other stream of the same pair."""
    key = np.array((seed, number), np.uint64)
    counter = np.array((0, 0, skip, stream), np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
