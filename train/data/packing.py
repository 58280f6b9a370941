"""From documents to batches: token streams, packed rows, and a loader that can be restarted.

Axes: `B` rows of a batch, `T` tokens of a row. A row is a slice of the concatenated documents;
`segments` tells the documents in it apart, so that attention can keep to one document.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from specjax.errors import InputError
from specjax.files import aside
from specjax.infill import leading_ids
from train.data.corpus import Document, is_held_out
from train.data.tokenizer import EOS_ID

IGNORE = -100  # label of a token that has nothing to predict
_ENCODED_AT_ONCE = 256  # documents per call of the tokenizer, which holds their offsets in memory
_ENDLESS = 1 << 48  # rows; grain wants a length

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


@dataclass(frozen=True)
class Prepared:
    """The tokenised corpus. Every document ends in EOS, or as its layout says.

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

    @property
    def fingerprint(self) -> str:
        """Changes with any token, and with where a document ends."""
        digest = hashlib.sha256()
        for array in (self.train, self.train_offsets, self.valid, self.valid_offsets):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()


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
    """Tokenises the corpus and splits off the held-out documents.

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
        return _tokenise(documents, tokenizer, layout)
    path = Path(cache_dir) / f"tokens-{_fingerprint(documents, tokenizer, layout)}.npz"
    prepared = _read_cache(path)
    if prepared is None:
        prepared = _tokenise(documents, tokenizer, layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path) as scratch, scratch.open("wb") as file:
            np.savez(file, **vars(prepared))
    return prepared


def _tokenise(documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout) -> Prepared:
    # A copy, so that the caller's tokenizer keeps its own setting.
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a source file is plain text
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    held_out = [document for document in documents if is_held_out(document.name)]
    trained = [document for document in documents if not is_held_out(document.name)]
    train, train_offsets = _encode(trained, tokenizer, dtype, layout)
    valid, valid_offsets = _encode(held_out, tokenizer, dtype, layout)
    valid_bytes = sum(len(document.text.encode()) for document in held_out)
    return Prepared(train, train_offsets, valid, valid_offsets, valid_bytes)


def _encode(
    documents: Sequence[Document], tokenizer: Tokenizer, dtype: type, layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
    """(token stream, offsets) of the documents as `layout` says."""
    streams, lengths = [np.zeros(0, dtype)], [0]
    lead = leading_ids(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    for start in range(0, len(documents), _ENCODED_AT_ONCE):
        laid = [layout.pieces(document) for document in documents[start : start + _ENCODED_AT_ONCE]]
        texts = [piece for pieces in laid for piece in pieces if isinstance(piece, str)]
        padded = ["\n" + text if lead and isinstance(text, Inside) else text for text in texts]
        encoded = iter(tokenizer.encode_batch_fast(padded, add_special_tokens=False))
        for pieces in laid:
            ids: list[int] = []
            for piece in pieces:
                if isinstance(piece, str):
                    skipped = len(lead) if isinstance(piece, Inside) else 0
                    ids += next(encoded).ids[skipped:]
                else:
                    ids.append(piece)
            streams.append(np.asarray(ids, dtype))
            lengths.append(len(ids))
    return np.concatenate(streams), np.cumsum(lengths, dtype=np.int64)


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
    stream: np.ndarray, offsets: np.ndarray, order: np.ndarray, starts: np.ndarray, row: int, T: int
) -> Batch:
    """Row `row` of the documents laid end to end in `order` and cut every `T` tokens.

    Args:
      stream: `[tokens]` token ids.
      offsets: `[documents + 1]` bounds of the documents in `stream`.
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
        document_end = int(offsets[order[place] + 1])
        source = int(offsets[order[place]]) + begin + filled - int(starts[place])
        count = min(document_end - source, end - begin - filled)
        here = slice(filled, filled + count)
        following = stream[source + 1 : min(source + count + 1, document_end)]
        tokens[here] = stream[source : source + count]
        labels[filled : filled + len(following)] = following
        segments[here] = segment
        positions[here] = np.arange(count)
        filled += count
    return {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}


@dataclass(eq=False, repr=False)
class _Rows:
    """Random access to the rows of endless epochs; row i is the same whenever it is asked for."""

    prepared: Prepared
    seq_len: int
    seed: int
    process_index: int
    process_count: int
    transform: Transform | None
    # The latest epoch's number, and the order and starts of its documents.
    epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Batch:
        number = index * self.process_count + self.process_index
        stream, offsets = self.prepared.train, self.prepared.train_offsets
        epoch, place = divmod(number, -(-len(stream) // self.seq_len))
        row = pack_row(stream, offsets, *self._layout(epoch), place, self.seq_len)
        return self.transform(row, number) if self.transform else row

    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order, starts) of the epoch's documents."""
        if self.epoch is None or self.epoch[0] != epoch:
            lengths = np.diff(self.prepared.train_offsets)
            # Philox takes the pair as its key: one stream of numbers per (seed, epoch).
            bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            order = np.random.Generator(bits).permutation(len(lengths))
            self.epoch = (epoch, order, np.concatenate([[0], np.cumsum(lengths[order])]))
        return self.epoch[1:]


def make_loader(
    prepared: Prepared,
    seq_len: int,
    batch_size: int,
    seed: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    transform: Transform | None = None,
) -> Loader:
    """Endless batches of packed training rows, the documents shuffled anew in every epoch.

    Args:
      prepared: the tokenised corpus.
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
      InputError: a size below 1, a seed or a process index out of range.
    """
    _require_positive(seq_len=seq_len, batch_size=batch_size, process_count=process_count)
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}: expected 0 or more, below 2**64")
    if not 0 <= process_index < process_count:
        raise InputError(f"process_index is {process_index}: expected 0 to {process_count - 1}")
    import grain.python as grain  # takes seconds, which only training should pay

    rows = _Rows(prepared, seq_len, seed, process_index, process_count, transform)
    batches = grain.MapDataset.source(rows).batch(batch_size, drop_remainder=True)
    # The tokens are in memory: reading threads would only contend for the interpreter lock.
    in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(batches.to_iter_dataset(in_this_thread))


def valid_batches(
    prepared: Prepared,
    seq_len: int,
    batch_size: int,
    limit: int | None = None,
    transform: Transform | None = None,
) -> list[Batch]:
    """The held-out documents in their order, packed as for training.

    The last batch is filled up with rows of padding (`segments` 0, `labels` IGNORE). The list
    is empty where the corpus has no held-out document.

    Args:
      prepared: the tokenised corpus.
      seq_len: tokens per row, `T`.
      batch_size: rows per batch, `B`.
      limit: at most so many batches; all when None.
      transform: changes a row; it sees the row's number.

    Raises:
      InputError: a size below 1.
    """
    _require_positive(seq_len=seq_len, batch_size=batch_size)
    offsets = prepared.valid_offsets
    order = np.arange(len(offsets) - 1)
    count = -(-len(prepared.valid) // (seq_len * batch_size))
    batches = []
    for batch in range(count if limit is None else min(count, limit)):
        numbers = range(batch * batch_size, (batch + 1) * batch_size)
        rows = [pack_row(prepared.valid, offsets, order, offsets, n, seq_len) for n in numbers]
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
