"""A tokenized corpus in memory, and a cache of its tokens on the disk."""

import hashlib
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from specjax._util.errors import InputError
from specjax._util.files import aside
from train.data.corpus import is_held_out
from train.data.encoding import Layout, Plain, TextEncoder, id_type
from train.data.reading import Document

_COUNT_CHUNK = 1 << 20  # tokens that np.bincount converts to int64 at a time


class TokenStream(NamedTuple):
    """Documents one after the other: document i is `tokens[offsets[i]:offsets[i + 1]]`.

    Attributes:
      tokens: the ids of all documents, uint16 or uint32.
      offsets: `[documents + 1]` int64.
    """

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
      valid, valid_offsets: the same of the held-out documents.
      valid_bytes: UTF-8 bytes of the held-out texts (EOS counts no byte).
    """

    train: np.ndarray
    train_offsets: np.ndarray
    valid: np.ndarray
    valid_offsets: np.ndarray
    valid_bytes: int
    weights = (1.0,)
    threads = 0  # rows come from memory: threads would only contend for the interpreter lock

    @property
    def sources(self) -> tuple[TokenStream]:
        return (TokenStream(self.train, self.train_offsets),)

    @property
    def held_out(self) -> TokenStream:
        return TokenStream(self.valid, self.valid_offsets)

    @property
    def fingerprint(self) -> str:
        """A digest that changes with any token and any document boundary."""
        digest = hashlib.sha256()
        for array in (self.train, self.train_offsets, self.valid, self.valid_offsets):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()

    def counts(self, size: int) -> np.ndarray:
        """As :class:`train.data.tokenized.Corpus` says."""
        counts = np.zeros((2, size), np.int64)
        for row, ids in zip(counts, (self.train, self.valid), strict=True):
            # In chunks: bincount makes an int64 copy of its input.
            for begin in range(0, len(ids), _COUNT_CHUNK):
                row += np.bincount(ids[begin : begin + _COUNT_CHUNK], minlength=size)
        return counts


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
      cache_dir: a directory that keeps the tokens. They are read back if documents, tokenizer and
        layout are the same. None: nothing is kept.
      layout: how a document becomes tokens; `Plain` if None.

    Raises:
      InputError: all documents are held out, so that none is left to train on.
    """
    if all(is_held_out(document.name) for document in documents):
        raise InputError(
            f"none of the corpus's {len(documents)} documents is left for training: all of their "
            "names fall into the held-out part; add documents or rename the file"
        )
    layout = layout or Plain()
    if cache_dir is None:
        return _tokenize(documents, tokenizer, layout)

    path = Path(cache_dir) / f"tokens-{_cache_key(documents, tokenizer, layout)}.npz"
    prepared = _read_cache(path)
    # A damaged file counts as missing, and is replaced.
    if prepared is None:
        prepared = _tokenize(documents, tokenizer, layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path) as scratch, scratch.open("wb") as file:
            np.savez(file, **vars(prepared))
    return prepared


def _tokenize(documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout) -> Prepared:
    held_out = [document for document in documents if is_held_out(document.name)]
    training = [document for document in documents if not is_held_out(document.name)]
    train, train_offsets = _encode_all(training, tokenizer, layout)
    valid, valid_offsets = _encode_all(held_out, tokenizer, layout)
    valid_bytes = sum(len(document.text.encode()) for document in held_out)
    return Prepared(train, train_offsets, valid, valid_offsets, valid_bytes)


def _encode_all(
    documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
    """(token stream, offsets) of all documents."""
    # The empty first one is a document of no tokens: its end is the first offset, 0.
    streams = [np.zeros(0, id_type(tokenizer))]
    for _, encoded in TextEncoder(tokenizer.to_str(), layout)(documents):
        streams += encoded
    return np.concatenate(streams), np.cumsum([len(ids) for ids in streams], dtype=np.int64)


def _cache_key(documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout) -> str:
    """Changes with the tokenizer, the layout, a name, a text, or the held-out split."""
    digest = hashlib.sha256(tokenizer.to_str().encode() + layout.fingerprint.encode())
    for document in documents:
        digest.update(f"\0{document.name}\0{is_held_out(document.name)}\0".encode())
        digest.update(hashlib.sha256(document.text.encode()).digest())
    return digest.hexdigest()[:32]


def _read_cache(path: Path) -> Prepared | None:
    """The cached corpus, or None if there is none or the file is damaged."""
    try:
        with np.load(path) as arrays:
            return Prepared(**{**arrays, "valid_bytes": int(arrays["valid_bytes"])})
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
