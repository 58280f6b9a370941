"""Our packed rows beside grain's: python docs/tools/measure_packing.py [--documents N]

Both join shuffled documents end to end and cut them into rows (concatenate, then split). It
prints rows a second, the best of three runs. Then it prints what a loader's position needs, and
whether two processes get the rows of one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator

import grain.python as grain
import numpy as np
from grain.experimental import ConcatThenSplitIterDataset

from train.data.in_memory import Prepared
from train.data.loader import make_loader

LENGTH = 512  # tokens of a row
BATCH = 8  # rows
BATCHES = 2000  # that are timed
FAR = 1500  # batches before the position that is restored
EMPTY = np.zeros(0, np.uint16)


def corpus(count: int) -> Prepared:
    """Documents of random ids; their lengths are lognormal, of mean 600."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(2, rng.lognormal(6.0, 0.9, count)).astype(np.int64)
    tokens = rng.integers(2, 50_000, lengths.sum()).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Prepared(
        train=tokens,
        train_offsets=offsets,
        valid=EMPTY,
        valid_offsets=np.zeros(1, np.int64),
        valid_ends=np.zeros(1, np.int64),
        source_names=np.array(["random"]),
        source_tokens=np.array([len(tokens)]),
        near_duplicates=np.array([], np.str_),
    )


class Source:
    """The documents, as grain takes them."""

    def __init__(self, documents: Prepared):
        (self.stream,) = documents.sources

    def __len__(self) -> int:
        return len(self.stream.lengths)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"tokens": self.stream.read(i, 0, int(self.stream.lengths[i])).astype(np.int32)}


def ours(documents: Prepared, process: int = 0, count: int = 1) -> Iterator:
    return make_loader(
        documents, LENGTH, BATCH // count, 0, process_index=process, process_count=count
    )


def grains(documents: Prepared, process: int = 0, count: int = 1) -> Iterator:
    data = grain.MapDataset.source(Source(documents)).shuffle(seed=0).repeat()
    rows = ConcatThenSplitIterDataset(
        data[process::count].to_iter_dataset(grain.ReadOptions(num_threads=0)),
        length_struct={"tokens": LENGTH},
    )
    return iter(rows.batch(BATCH // count, drop_remainder=True))


def rate(make: Callable[[], Iterator]) -> float:
    """Rows a second."""
    best = 0.0
    for _ in range(3):
        batches = make()
        next(batches)
        start = time.perf_counter()
        for _ in itertools.islice(batches, BATCHES):
            pass
        best = max(best, BATCH * BATCHES / (time.perf_counter() - start))
    return best


def rows_of(batches: Iterator) -> np.ndarray:
    return np.concatenate([batch["tokens"] for batch in itertools.islice(batches, 50)])


def describe(name: str, make: Callable[..., Iterator]) -> None:
    print(f"{name}: {rate(make):,.0f} rows a second")
    batches = make()
    for _ in itertools.islice(batches, FAR):
        pass
    state = batches.get_state()
    expected = next(batches)["tokens"]
    size = len(json.dumps(state, default=str))
    again = make()
    start = time.perf_counter()
    again.set_state(state)
    found = next(again)["tokens"]
    seconds = time.perf_counter() - start
    assert np.array_equal(found, expected)
    print(f"  position: {size} bytes of JSON; restored with its first batch in {seconds:.4f} s")
    whole = {row.tobytes() for row in rows_of(make())}
    halves = np.concatenate([rows_of(make(process, 2)) for process in range(2)])
    same = sum(row.tobytes() in whole for row in halves)
    print(f"  of the first {len(halves)} rows of two processes, {same} are those of one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=50_000)
    documents = corpus(parser.parse_args().documents)
    describe("ours", lambda *place: ours(documents, *place))
    describe("grain's", lambda *place: grains(documents, *place))


if __name__ == "__main__":
    main()
