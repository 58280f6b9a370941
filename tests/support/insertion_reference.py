"""Adaptive insertion as in SDSAT (arXiv 2403.18647, §2.2), token by token, and test rows."""

from __future__ import annotations

import numpy as np

from train.data.in_memory import TokenStream
from train.data.packing import JoinedRows, pack_row

EOS, ID = 0, 90


def some_row(seed, T=96, documents=6, padding=False):
    """A packed row of documents that end in EOS."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, documents)
    stream = rng.integers(1, 60, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    stream[offsets[1:] - 1] = EOS
    row = int(offsets[-1]) // T if padding else 0
    joined = JoinedRows.of(lengths, np.arange(documents), T)
    pieces = joined.pieces(row) if row < len(joined) else []
    return pack_row(TokenStream(stream, offsets), pieces, T)


def slow_windows(insertion, row, number):
    """The windows of adaptive tokens, token by token, from the same random draws."""
    count = len(row["tokens"])
    key, counter = np.array([insertion.seed, number], np.uint64), np.array([0, 0, 0, 1], np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
    chance, lengths = rng.random(count), rng.integers(1, insertion.window + 1, count)
    windows = []
    for start in range(count):
        if chance[start] >= insertion.rate:
            continue
        places = []
        for place in range(start, min(count, start + lengths[start])):
            same = row["segments"][place] == row["segments"][start] != 0
            if not same or row["tokens"][place] in insertion.special_ids:
                break
            places.append(place)
        if places:
            windows.append(places)
    return windows


def slow_mixed(insertion, row, windows):
    mixed, index = row["tokens"].copy(), np.zeros(len(row["tokens"]), int)
    for number, places in enumerate(windows):
        later = {window[0] for window in windows[number + 1 :]}
        for i, place in enumerate(places, start=1):
            if insertion.distinct and place in later:
                break
            mixed[place] = insertion.ids[i - 1] if insertion.distinct else insertion.ids[0]
            index[place] = i
    if not insertion.distinct:
        for place in range(len(index)):
            if index[place]:
                joined = place and row["segments"][place] == row["segments"][place - 1]
                index[place] = 1 + (index[place - 1] if joined else 0)
    return mixed, index
