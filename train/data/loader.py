"""The data loader: endless shuffled batches that can be resumed, and the held-out batches.

Axes: `B` rows of a batch, `T` tokens of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax._util.errors import InputError
from train.data.packing import (
    Batch,
    JoinedRows,
    PackedRows,
    Transform,
    WholeRows,
    pack_row,
    stack,
    without_answers,
)
from train.data.tokenized import Corpus, Documents, train_tokens

_ENDLESS = 1 << 48  # rows; grain requires a length
_PREFETCH_BATCHES = 4


class Loader(Protocol):
    """An endless iterator over batches whose position can be saved as JSON."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict: ...

    def set_state(self, state: dict) -> None: ...


@dataclass(eq=False, repr=False)
class _EndlessRows:
    """Random access to the packed rows of endless epochs; row i is always the same.

    The loader's whole state is therefore a row number.
    """

    documents: Documents
    seq_len: int
    seed: int
    apart: bool  # as of the corpus
    # The latest epoch's number, its rows, and the order in which they are read.
    epoch: tuple[int, PackedRows, np.ndarray] | None = None

    def __post_init__(self):
        # The same in each epoch: it depends on the documents' lengths alone.
        self.per_epoch = len(self._shuffled(0)[0])

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Batch:
        epoch, row = divmod(index, self.per_epoch)
        packed, order = self._shuffled(epoch)
        pieces = packed.pieces(int(order[row]))
        return pack_row(self.documents, pieces, self.seq_len, self.apart)

    def _shuffled(self, epoch: int) -> tuple[PackedRows, np.ndarray]:
        """(the epoch's rows, the order in which they are read)."""
        # Read the attribute once: another thread may set it to the next epoch.
        latest = self.epoch
        if latest is None or latest[0] != epoch:
            lengths = self.documents.lengths
            # Philox takes the pair as its key: one stream of numbers per (seed, epoch).
            bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            rng = np.random.Generator(bits)
            packed = pack(self.documents, rng.permutation(len(lengths)), self.seq_len, self.apart)
            order = np.arange(len(packed))
            if self.apart:  # the rows of the longest conversations come first
                rng.shuffle(order)
            latest = (epoch, packed, order)
            self.epoch = latest
        return latest[1:]


def epoch_tokens(corpus: Corpus, seq_len: int) -> int:
    """Tokens of the rows of one epoch; rows of whole conversations are seldom full."""
    if not corpus.apart:
        return train_tokens(corpus)
    rows = 0
    for documents in corpus.sources:
        rows += len(pack(documents, np.arange(len(documents.lengths)), seq_len, corpus.apart))
    return rows * seq_len


def pack(documents: Documents, order: np.ndarray, seq_len: int, apart: bool) -> PackedRows:
    """The rows of documents in this order."""
    kind = WholeRows if apart else JoinedRows
    return kind.of(documents.lengths, order, seq_len)


def make_loader(
    corpus: Corpus,
    seq_len: int,
    batch_size: int,
    seed: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    transform: Transform | None = None,
    threads: int | None = None,
) -> Loader:
    """Endless batches of packed training rows; the documents are reshuffled in every epoch.

    With several sources, each row comes from one of them, in the ratio of their weights.

    Args:
      corpus: the tokenized corpus.
      seq_len: tokens per row, `T`.
      batch_size: rows per batch of this process, `B`.
      seed: from 0, below 2**64; fixes the order of the documents.
      process_index: this process; it takes every `process_count`-th row.
      process_count: processes that share the rows.
      transform: changes a row; it gets the row's number among all rows of the run.
      threads: that prefetch rows; by default as the corpus says.

    Returns:
      A grain iterator over dicts of int32 `[B, T]` arrays as `pack_row` describes them. Its
      `get_state` and `set_state` (a JSON-able dict) resume exactly where a run stopped.

    Raises:
      InputError: a size is below 1, the seed or process index is out of range, or there are fewer
        rows than processes.
    """
    _require_positive(seq_len=seq_len, batch_size=batch_size, process_count=process_count)
    _require_seed_and_process(seed, process_index, process_count)
    import grain.python as grain  # takes seconds, which only training should pay

    rows = training_rows(corpus, seq_len, seed, process_count)
    if transform:
        rows = rows.map_with_index(lambda number, row: transform(row, number))
    rows = rows.map(without_answers)

    if threads is None:
        threads = corpus.threads
    batches = rows[process_index::process_count].batch(batch_size, drop_remainder=True)
    options = grain.ReadOptions(
        num_threads=threads,
        prefetch_buffer_size=_PREFETCH_BATCHES * bool(threads),
    )
    return iter(batches.to_iter_dataset(options))


def training_rows(corpus: Corpus, seq_len: int, seed: int, process_count: int = 1) -> Any:
    """Random access to the packed training rows of all processes: a grain `MapDataset`.

    The arguments are those of `make_loader`, and so are the errors.
    """
    import grain.python as grain

    sources = [_EndlessRows(documents, seq_len, seed, corpus.apart) for documents in corpus.sources]
    _require_rows(sources, seq_len, process_count)
    datasets = [grain.MapDataset.source(rows) for rows in sources]
    return grain.MapDataset.mix(datasets, [*corpus.weights])


class ValidBatch(NamedTuple):
    """Held-out rows of one source.

    Attributes:
      rows: int32 `[B, T]` arrays, as of a training batch; or a function that reads them.
      source: the source's name.
      weight: the source's share of training, relative to the others.
    """

    rows: Batch | Callable[[], Batch]
    source: str = ""
    weight: float = 1.0


def valid_batches(
    corpus: Corpus,
    seq_len: int,
    batch_size: int,
    limit: int | None = None,
    transform: Transform | None = None,
) -> list[ValidBatch]:
    """Held-out rows, packed as for training: a fixed sample, spread evenly over all documents.

    Each batch has rows of one source. Sources share the batches by their weights, and each one
    that has held-out documents gets a batch at least. The last batch of a source is filled up with
    rows of padding (`segments` 0, `labels` IGNORE). The list is empty if the corpus has no held-out
    document.

    Args:
      corpus: the tokenized corpus.
      seq_len: tokens per row, `T`.
      batch_size: rows per batch, `B`.
      limit: at most this many batches, or one for each source if that is more; all if None.
      transform: changes a row; it gets the row's number in the list.

    Raises:
      InputError: a size is below 1.
    """
    _require_positive(seq_len=seq_len, batch_size=batch_size)
    if limit == 0:
        return []
    packed = []
    for source in corpus.held_out:
        order = np.arange(len(source.documents.lengths))
        packed.append(pack(source.documents, order, seq_len, corpus.apart))
    most = [-(-len(rows) // batch_size) for rows in packed]
    counts = most if limit is None else share([s.weight for s in corpus.held_out], most, limit)

    batches = []
    for source, rows_of_source, count in zip(corpus.held_out, packed, counts, strict=True):
        numbers = _spread(len(rows_of_source), count * batch_size)
        rows = []
        for number in numbers:
            # Beyond the last row there is padding.
            pieces = rows_of_source.pieces(number) if number < len(rows_of_source) else []
            rows.append(pack_row(source.documents, pieces, seq_len, corpus.apart))
        for first in range(0, len(rows), batch_size):
            batch = rows[first : first + batch_size]
            if transform:
                number = len(batches) * batch_size
                batch = [transform(row, number + i) for i, row in enumerate(batch)]
            batch = [without_answers(row) for row in batch]
            batches.append(ValidBatch(stack(batch), source.name, source.weight))
    return batches


def _spread(available: int, count: int) -> list[int]:
    """`count` row numbers, spread evenly over those `available`.

    If there are fewer rows, all of them in order, then numbers beyond the last one.
    """
    if count < available:
        # The middles of `count` equal parts.
        return [(2 * i + 1) * available // (2 * count) for i in range(count)]
    return list(range(count))


def share(weights: Sequence[float], most: Sequence[int], total: int) -> list[int]:
    """Divides `total` by the weights: at least 1 for each, and at most `most[i]`.

    What remains goes, one at a time, to the one that lacks most in proportion to its weight.
    """
    counts = [1] * len(weights)
    while sum(counts) < total:
        open_ones = [i for i in range(len(weights)) if counts[i] < most[i]]
        if not open_ones:
            break
        counts[max(open_ones, key=lambda i: weights[i] / (counts[i] + 0.5))] += 1
    return counts


def _require_rows(sources: list[_EndlessRows], seq_len: int, process_count: int) -> None:
    count = sum(rows.per_epoch for rows in sources)
    if count < process_count:
        raise InputError(
            f"the corpus has {count} rows of {seq_len} tokens, fewer than the {process_count} "
            "processes that share them: lower data.seq_len, or add documents"
        )


def _require_seed_and_process(seed: int, process_index: int, process_count: int) -> None:
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}: expected 0 or more, below 2**64")
    if not 0 <= process_index < process_count:
        raise InputError(f"process_index is {process_index}: expected 0 to {process_count - 1}")


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}: expected at least 1")
