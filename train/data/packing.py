"""From documents to batches: token streams, packed rows, and a loader that can be restarted.

Axes: `B` rows of a batch, `T` tokens of a row. A row is a slice of the concatenated documents;
`segments` tells the documents in it apart, so that attention can keep to one document.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tokenizers import Encoding, Tokenizer

from specjax._util.errors import InputError
from specjax._util.files import aside
from specjax.runtime.infill import leading_ids
from train.data.corpus import is_held_out
from train.data.reading import Document
from train.data.tokenizer import EOS_ID

IGNORE = -100  # label of a token that has nothing to predict
# Per call of the tokenizer, which holds what it makes of them in memory.
_ENCODED_AT_ONCE, _CHARS_AT_ONCE = 256, 1 << 20  # documents, characters
_ENDLESS = 1 << 48  # rows; grain wants a length
_BATCHES_AHEAD = 4  # that threads read
_COUNTED_AT_ONCE = 1 << 20  # tokens

Batch = dict[str, np.ndarray]
Transform = Callable[[Batch, int], Batch]  # (row, its number in the run) -> row


class Inside(str):
    """A text in the middle of a document: a tokenizer's own leading space is left out."""


class Layout(Protocol):
    """How a document becomes tokens: texts to encode, and ids that stand as they are."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the pieces of any document do; cached tokens depend on it."""
        ...

    def pieces(self, document: Document) -> Sequence[str | int]: ...


class Plain:
    """The text, then EOS."""

    fingerprint = ""

    def pieces(self, document: Document) -> Sequence[str | int]:
        return [document.text, EOS_ID]


class Documents(Protocol):
    """Tokenized documents, any part of which can be read at any time.

    Attributes:
      lengths: `[documents]` tokens of each.
    """

    @property
    def lengths(self) -> np.ndarray: ...

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` to before `end` of a document."""
        ...


class Corpus(Protocol):
    """A tokenized corpus: `Prepared` in memory, or `train.data.shards.Shards` on the disk.

    Attributes:
      sources: what is trained on.
      weights: how many rows come from each source, relative to the others'.
      held_out: what is not.
      valid_bytes: UTF-8 bytes of the held-out texts (EOS counts no byte).
      fingerprint: changes with any token, and with where a document ends.
      threads: that read ahead.
    """

    valid_bytes: int

    @property
    def sources(self) -> Sequence[Documents]: ...

    @property
    def weights(self) -> Sequence[float]: ...

    @property
    def held_out(self) -> Documents: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def counts(self, size: int) -> np.ndarray:
        """`[2, size]` how often each id below `size` is trained on, and held out."""
        ...


class TokenStream(NamedTuple):
    """Documents in memory, one after the other: i is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        first = self.offsets[document]
        return self.tokens[first + begin : first + end]


@dataclass(frozen=True)
class Prepared:
    """The tokenized corpus in memory. Every document ends in EOS, or as its layout says.

    Attributes:
      train: token ids of the training documents, one after the other, uint16 or uint32.
      train_offsets: `[documents + 1]` int64; document i is `train[offsets[i]:offsets[i + 1]]`.
      valid: token ids of the held-out documents.
      valid_offsets: their bounds, as above.
      valid_bytes: UTF-8 bytes of the held-out texts (EOS counts no byte).
    """

    train: np.ndarray
    train_offsets: np.ndarray
    valid: np.ndarray
    valid_offsets: np.ndarray
    valid_bytes: int
    weights = (1.0,)
    threads = 0  # they would only contend for the interpreter lock

    @property
    def sources(self) -> tuple[TokenStream]:
        return (TokenStream(self.train, self.train_offsets),)

    @property
    def held_out(self) -> TokenStream:
        return TokenStream(self.valid, self.valid_offsets)

    @property
    def fingerprint(self) -> str:
        """Changes with any token, and with where a document ends."""
        digest = hashlib.sha256()
        for array in (self.train, self.train_offsets, self.valid, self.valid_offsets):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()

    def counts(self, size: int) -> np.ndarray:
        """As :class:`Corpus` says."""
        counts = np.zeros((2, size), np.int64)
        for row, ids in zip(counts, (self.train, self.valid), strict=True):
            for begin in range(0, len(ids), _COUNTED_AT_ONCE):  # as int64, inside numpy
                row += np.bincount(ids[begin : begin + _COUNTED_AT_ONCE], minlength=size)
        return counts


def train_tokens(corpus: Corpus) -> int:
    """Tokens of one epoch over all sources."""
    return sum(int(source.lengths.sum()) for source in corpus.sources)


def held_out_tokens(corpus: Corpus) -> int:
    """Tokens that are never trained on."""
    return int(corpus.held_out.lengths.sum())


class Loader(Protocol):
    """An endless iterator over batches whose position can be saved as JSON."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict: ...

    def set_state(self, state: dict) -> None: ...


def prepare(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike | None = None,
    layout: Layout | None = None,
) -> Prepared:
    """Tokenizes the corpus and splits off the held-out documents.

    Args:
      documents: as `load_corpus` returns them.
      tokenizer: a tokenizer whose id 0 ends a document.
      cache_dir: keep the result there and read it back when neither the documents nor the
        tokenizer have changed; nothing is kept when None.
      layout: how a document becomes tokens; `Plain` when None.

    Raises:
      InputError: every document is held out, so that none is left to train on.
    """
    if all(is_held_out(document.name) for document in documents):
        raise InputError(
            f"none of the corpus's {len(documents)} documents is left for training: the names "
            "of all of them fall into the held-out part; add documents or rename the file"
        )
    layout = layout or Plain()
    if cache_dir is None:
        return _tokenize(documents, tokenizer, layout)
    path = Path(cache_dir) / f"tokens-{_fingerprint(documents, tokenizer, layout)}.npz"
    prepared = _read_cache(path)
    if prepared is None:
        prepared = _tokenize(documents, tokenizer, layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path) as scratch, scratch.open("wb") as file:
            np.savez(file, **vars(prepared))
    return prepared


def _tokenize(documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout) -> Prepared:
    held_out = [document for document in documents if is_held_out(document.name)]
    trained = [document for document in documents if not is_held_out(document.name)]
    train, train_offsets = _join(trained, tokenizer, layout)
    valid, valid_offsets = _join(held_out, tokenizer, layout)
    valid_bytes = sum(len(document.text.encode()) for document in held_out)
    return Prepared(train, train_offsets, valid, valid_offsets, valid_bytes)


def _join(
    documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
    """(token stream, offsets) of the documents as `layout` says."""
    streams = [np.zeros(0, id_type(tokenizer))]
    for _, encoded in TextEncoder(tokenizer.to_str(), layout)(documents):
        streams += encoded
    return np.concatenate(streams), np.cumsum([len(ids) for ids in streams], dtype=np.int64)


def id_type(tokenizer: Tokenizer) -> type:
    """What holds any of its ids: uint16, or uint32."""
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


class TextEncoder:
    """Documents into tokens as a layout says, by a tokenizer of its own.

    Who encodes often keeps one: a tokenizer was measured a quarter slower in a process where three
    others had been used and freed; the small pieces of memory that it takes then lie scattered.
    """

    def __init__(self, tokenizer: str, layout: Layout):
        self._tokenizer, self._layout = Tokenizer.from_str(tokenizer), layout
        # "<|endoftext|>" in a source file is plain text.
        self._tokenizer.encode_special_tokens = True
        self._dtype = id_type(self._tokenizer)
        encode = self._tokenizer.encode
        self._lead = len(leading_ids(lambda text: encode(text, add_special_tokens=False).ids))
        self.ids = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def __call__(
        self, documents: Iterable[Document]
    ) -> Iterator[tuple[list[Document], list[np.ndarray]]]:
        """Some of the documents at a time, and the tokens of each."""
        for batch in _batches(documents):
            laid = [self._layout.pieces(document) for document in batch]
            texts = [piece for pieces in laid for piece in pieces if isinstance(piece, str)]
            texts = [self._padded(text) for text in texts]
            encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            yield batch, [self._joined(pieces, encoded) for pieces in laid]

    def _padded(self, text: str) -> str:
        return "\n" + text if self._lead and isinstance(text, Inside) else text

    def _joined(self, pieces: Sequence[str | int], encoded: Iterator[Encoding]) -> np.ndarray:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids += next(encoded).ids[self._lead if isinstance(piece, Inside) else 0 :]
            else:
                ids.append(piece)
        return np.asarray(ids, self._dtype)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if len(batch) == _ENCODED_AT_ONCE or chars >= _CHARS_AT_ONCE:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _fingerprint(documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout) -> str:
    """Changes with the tokenizer, the layout, a name, a text, or the held-out split."""
    digest = hashlib.sha256(tokenizer.to_str().encode() + layout.fingerprint.encode())
    for document in documents:
        digest.update(f"\0{document.name}\0{is_held_out(document.name)}\0".encode())
        digest.update(hashlib.sha256(document.text.encode()).digest())
    return digest.hexdigest()[:32]


def _read_cache(path: Path) -> Prepared | None:
    """The cached corpus, or None where there is none or the file is damaged."""
    try:
        with np.load(path) as arrays:
            return Prepared(**{**arrays, "valid_bytes": int(arrays["valid_bytes"])})
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def pack_row(
    documents: Documents, order: np.ndarray, starts: np.ndarray, row: int, T: int
) -> Batch:
    """Row `row` of the documents laid end to end in `order` and cut every `T` tokens.

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
    tokens, segments, positions = (np.zeros(T, np.int32) for _ in range(3))
    labels = np.full(T, IGNORE, np.int32)
    begin, end = row * T, min((row + 1) * T, int(starts[-1]))
    first = int(np.searchsorted(starts, begin, side="right")) - 1
    filled, segment = 0, 0
    while begin + filled < end:
        place = first + segment
        segment += 1
        start, stop = int(starts[place]), int(starts[place + 1])
        inside = begin + filled - start
        count = min(stop - start - inside, end - begin - filled)
        here = slice(filled, filled + count)
        # With the token that the last one predicts, where there is one.
        ids = documents.read(int(order[place]), inside, min(inside + count + 1, stop - start))
        tokens[here] = ids[:count]
        labels[filled : filled + len(ids) - 1] = ids[1:]
        segments[here] = segment
        positions[here] = np.arange(count)
        filled += count
    return {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}


@dataclass(eq=False, repr=False)
class _Rows:
    """Random access to the rows of endless epochs; row i is the same whenever it is asked for."""

    documents: Documents
    seq_len: int
    seed: int
    # The latest epoch's number, and the order and starts of its documents.
    epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def __post_init__(self):
        self.per_epoch = -(-int(self.documents.lengths.sum()) // self.seq_len)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Batch:
        epoch, place = divmod(index, self.per_epoch)
        return pack_row(self.documents, *self._layout(epoch), place, self.seq_len)

    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order, starts) of the epoch's documents."""
        latest = self.epoch  # another thread may be at the next epoch
        if latest is None or latest[0] != epoch:
            lengths = self.documents.lengths
            # Philox takes the pair as its key: one stream of numbers per (seed, epoch).
            bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            order = np.random.Generator(bits).permutation(len(lengths))
            starts = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths[order], out=starts[1:])
            self.epoch = latest = (epoch, order, starts)
        return latest[1:]


def make_loader(
    corpus: Corpus,
    seq_len: int,
    batch_size: int,
    seed: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    transform: Transform | None = None,
) -> Loader:
    """Endless batches of packed training rows, the documents shuffled anew in every epoch.

    Of several sources each row is of one of them, in turns that their weights decide.

    Args:
      corpus: the tokenized corpus.
      seq_len: tokens per row, `T`.
      batch_size: rows per batch of this process, `B`.
      seed: from 0, below 2**64; fixes the order of the documents.
      process_index: this process; it takes every `process_count`-th row.
      process_count: processes that share the rows.
      transform: changes a row; it sees the row's number among all rows of the run.

    Returns:
      A grain iterator over dicts of int32 `[B, T]` arrays as `pack_row` describes them, with
      `get_state` and `set_state` (a JSON-able dict) to go on exactly where a run had stopped.

    Raises:
      InputError: a size below 1, a seed or a process index out of range, or fewer rows than
        processes.
    """
    _require_positive(seq_len=seq_len, batch_size=batch_size, process_count=process_count)
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}: expected 0 or more, below 2**64")
    if not 0 <= process_index < process_count:
        raise InputError(f"process_index is {process_index}: expected 0 to {process_count - 1}")
    import grain.python as grain  # takes seconds, which only training should pay

    sources = [_Rows(documents, seq_len, seed) for documents in corpus.sources]
    there = sum(rows.per_epoch for rows in sources)
    if there < process_count:
        raise InputError(
            f"the corpus has {there} rows of {seq_len} tokens, fewer than the {process_count} "
            "processes that share them: lower data.seq_len, or add documents"
        )
    rows = grain.MapDataset.mix(
        [grain.MapDataset.source(rows) for rows in sources], [*corpus.weights]
    )
    if transform:
        rows = rows.map_with_index(lambda number, row: transform(row, number))
    batches = rows[process_index::process_count].batch(batch_size, drop_remainder=True)
    ahead = grain.ReadOptions(
        num_threads=corpus.threads, prefetch_buffer_size=_BATCHES_AHEAD * bool(corpus.threads)
    )
    return iter(batches.to_iter_dataset(ahead))


def valid_batches(
    corpus: Corpus,
    seq_len: int,
    batch_size: int,
    limit: int | None = None,
    transform: Transform | None = None,
) -> list[Batch]:
    """The held-out documents in their order, packed as for training.

    The last batch is filled up with rows of padding (`segments` 0, `labels` IGNORE). The list
    is empty where the corpus has no held-out document.

    Args:
      corpus: the tokenized corpus.
      seq_len: tokens per row, `T`.
      batch_size: rows per batch, `B`.
      limit: at most so many batches; all when None.
      transform: changes a row; it sees the row's number.

    Raises:
      InputError: a size below 1.
    """
    _require_positive(seq_len=seq_len, batch_size=batch_size)
    documents = corpus.held_out
    starts = np.concatenate([[0], np.cumsum(documents.lengths, dtype=np.int64)])
    order = np.arange(len(starts) - 1)
    count = -(-int(starts[-1]) // (seq_len * batch_size))
    batches = []
    for batch in range(count if limit is None else min(count, limit)):
        numbers = range(batch * batch_size, (batch + 1) * batch_size)
        rows = [pack_row(documents, order, starts, n, seq_len) for n in numbers]
        if transform:
            rows = [transform(row, n) for n, row in zip(numbers, rows, strict=True)]
        batches.append(stack(rows))
    return batches


def stack(rows: Sequence[Batch]) -> Batch:
    """Arrays of equal shapes, name by name, along a new first axis."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}: expected at least 1")
