"""SDSAT's adaptive insertion H (paper §2.2) and the layouts its losses train on.

An adaptive token stands where a token is not known yet and predicts the one after it. H
replaces windows of the input by adaptive tokens; the isolated layout leaves the row as it is
and appends the windows behind it, for attention to keep apart.

Everything is numpy and a function of (seed, row number): a resumed run sees the same rows.

Axes: `T` tokens of a row, `A` appended slots, `W` windows of a row.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax._util.errors import InputError
from train.data.packing import IGNORE, Batch

# Philox counter blocks, so that no stream of a row overlaps another, nor the documents' order.
_TRAIN_STREAM, _PROBE_STREAM = 1, 2
PROBE_EVERY = 16  # one held-out window for so many tokens of a row
_SPARE_DEVIATIONS = 2  # appended slots beyond the mean; rows that need more drop windows


@dataclasses.dataclass(frozen=True)
class Insertion:
    """What H inserts.

    Attributes:
      ids: the adaptive ids by their place in a window: L times the same one, or L distinct.
      special_ids: ids that are never replaced and that no window crosses, such as EOS.
      rate: probability that a window starts at a token.
      seed: fixes, with the row's number, every draw.
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
        """L, the longest window."""
        return len(self.ids)

    @property
    def distinct(self) -> bool:
        """Whether every place of a window has an id of its own."""
        return len(set(self.ids)) > 1

    def ids_at(self, index: np.ndarray) -> np.ndarray:
        """int32 ids of the places `index`, counted from 1; a repeated id has no last place."""
        if not self.distinct:
            return np.full(index.shape, self.ids[0], np.int32)
        return np.asarray(self.ids, np.int32)[index - 1]


def draw_windows(insertion: Insertion, row: Batch, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) int64 `[W]` of the windows of row `number`, by rising start.

    A window starts at a token with probability `rate`, is U{1..L} long, and stops before the
    next document, special token or padding. They may overlap.
    """
    rng = _generator(insertion.seed, number, _TRAIN_STREAM)
    count = len(row["tokens"])
    starting = rng.random(count) < insertion.rate
    lengths = rng.integers(1, insertion.window + 1, count)
    room = _room(row, insertion.special_ids)
    starts = np.flatnonzero(starting & (room > 0))
    return starts, np.minimum(lengths, room)[starts]


def mixed_row(insertion: Insertion, row: Batch, number: int) -> Batch:
    """The row, and H applied to it: `mixed` and `index` int32 `[T]`, 0 where not replaced.

    With one repeated id, overlapping windows are one longer window. With distinct ids a start
    truncates the window before it. `index` counts the adaptive tokens of a window from 1.
    """
    starts, lengths = draw_windows(insertion, row, number)
    places = np.arange(len(row["tokens"]))
    reach, began = np.zeros_like(places), np.full_like(places, -1)
    reach[starts], began[starts] = starts + lengths, starts
    if insertion.distinct:
        began = np.maximum.accumulate(began)
        covered = (began >= 0) & (places < reach[began])
    else:
        covered = places < np.maximum.accumulate(reach)
        fresh = covered & ~(np.roll(covered, 1) & _joined(row))
        began = np.maximum.accumulate(np.where(fresh, places, -1))
    index = np.where(covered, places - began + 1, 0)
    mixed = np.where(covered, insertion.ids_at(np.maximum(index, 1)), row["tokens"])
    return row | {"mixed": mixed.astype(np.int32), "index": index.astype(np.int32)}


def appended_slots(window: int, rate: float, tokens: int) -> int:
    """A, the slots behind a row of `tokens` for its windows: their mean and two deviations."""
    mean = tokens * rate * (window + 1) / 2
    square = rate * (window + 1) * (2 * window + 1) / 6  # E[length²] at one token
    deviation = (tokens * (square - (mean / tokens) ** 2)) ** 0.5
    return max(window, int(np.ceil((mean + _SPARE_DEVIATIONS * deviation) / 8)) * 8)


def isolated_row(insertion: Insertion, row: Batch, number: int) -> Batch:
    """The clean row, then its windows; see :func:`append_windows`.

    Windows beyond the appended slots are dropped at random, so that none is favored.
    """
    starts, lengths = draw_windows(insertion, row, number)
    slots = appended_slots(insertion.window, insertion.rate, len(row["tokens"]))
    if lengths.sum() > slots:
        rng = _generator(insertion.seed, number, _TRAIN_STREAM, skip=1)
        order = rng.permutation(len(starts))
        kept = np.sort(order[np.cumsum(lengths[order]) <= slots])
        starts, lengths = starts[kept], lengths[kept]
    return append_windows(row, starts, lengths, slots, insertion)


def probe_row(insertion: Insertion, row: Batch, number: int, length: int) -> Batch:
    """The clean row and up to T/16 whole windows of `length`, for measuring; no other rule.

    The appended part reads as `[W, length]`; windows that do not fit are padding.
    """
    count = max(1, len(row["tokens"]) // PROBE_EVERY)
    fitting = np.flatnonzero(_room(row, insertion.special_ids) >= length)
    rng = _generator(insertion.seed, number, _PROBE_STREAM)
    starts = np.sort(rng.permutation(fitting)[:count])
    return append_windows(row, starts, np.full_like(starts, length), count * length, insertion)


def append_windows(
    row: Batch, starts: np.ndarray, lengths: np.ndarray, slots: int, insertion: Insertion
) -> Batch:
    """The isolated layout: the clean row once, then the tokens of its windows.

    Token i of the window at row place s stands at the position of place s+i−1, where it
    predicts what that place predicts.

    Returns:
      int32 arrays. `[T + A]`: `tokens`, `labels`, `segments`, `positions` as `pack_row`;
      `windows`, 0 for the clean row, else the window's number from 1; `starts`, the position
      at which the window starts; `index`, the place in the window from 1, 0 in the clean row.
      `[A]`: `sources`, the row's place with the same label. Unused slots have segment 0.
    """
    window = np.repeat(np.arange(1, len(starts) + 1), lengths)
    used = len(window)
    index = np.arange(used) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    sources = np.repeat(starts, lengths) + index - 1

    def behind(clean: np.ndarray, values: np.ndarray, fill: int = 0) -> np.ndarray:
        return np.concatenate([clean, values, np.full(slots - used, fill)]).astype(np.int32)

    none = np.zeros(len(row["tokens"]), np.int32)
    return {
        "tokens": behind(row["tokens"], insertion.ids_at(index)),
        "labels": behind(row["labels"], row["labels"][sources], IGNORE),
        "segments": behind(row["segments"], row["segments"][sources]),
        "positions": behind(row["positions"], row["positions"][sources]),
        "windows": behind(none, window),
        "starts": behind(none, np.repeat(row["positions"][starts], lengths)),
        "index": behind(none, index),
        "sources": behind(none[:0], sources),
    }


def _joined(row: Batch) -> np.ndarray:
    """bool `[T]`: the token continues the document of the one before it."""
    segments = row["segments"]
    joined = np.zeros(len(segments), bool)
    joined[1:] = segments[1:] == segments[:-1]
    return joined


def _room(row: Batch, special: tuple[int, ...]) -> np.ndarray:
    """int64 `[T]`: tokens from here to the next special token, document, or padding."""
    count = len(row["tokens"])
    closed = (row["segments"] == 0) | np.isin(row["tokens"], special)
    places = np.arange(count)
    stops = np.where(closed | ~_joined(row), places, count)
    following = np.append(np.minimum.accumulate(stops[::-1])[::-1][1:], count)
    return np.where(closed, 0, following - places)


def _generator(seed: int, number: int, stream: int, skip: int = 0) -> np.random.Generator:
    """Philox keyed by (seed, row), 2**128 numbers from any other stream of the same pair."""
    key, counter = (np.array(x, np.uint64) for x in ((seed, number), (0, 0, skip, stream)))
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
