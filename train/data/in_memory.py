"""A tokenized corpus in memory, and a cache of its tokens on the disk."""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from specjax._util.errors import InputError
from specjax._util.files import aside
from train.data.corpus import is_evaluated
from train.data.encoding import Layout, Plain, TextEncoder, id_type
from train.data.near_duplicates import BANDS, NEAR_DUPLICATE, any_known, band_keys, compared_tokens
from train.data.reading import EXAMPLES, Document
from train.data.tokenized import HeldOutSource, Inventory, Skipped, weighed, without_held_out

_CACHE_FORMAT = 4
_COUNT_CHUNK = 1 << 20  # tokens that np.bincount converts to int64 at a time
_no_mask = functools.partial(np.zeros, 0, bool)
_no_conversations = functools.partial(np.zeros, (), np.int64)


class TokenStream(NamedTuple):
    """Documents one after the other: document i is `tokens[offsets[i]:offsets[i + 1]]`.

    Attributes:
      tokens: the ids of all documents, uint16 or uint32.
      offsets: `[documents + 1]` int64.
      mask: bool, whether each token is trained; empty: all of them are.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray = np.zeros(0, bool)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        first = self.offsets[document]
        return self.tokens[first + begin : first + end]

    def trained(self, document: int, begin: int, end: int) -> np.ndarray:
        if not len(self.mask):
            return np.ones(end - begin, bool)
        first = self.offsets[document]
        return self.mask[first + begin : first + end]


@dataclass(frozen=True)
class Prepared:
    """The tokenized corpus in memory. Every document ends in EOS, or as its layout says.

    Attributes:
      train: token ids of the training documents, one after the other, uint16 or uint32.
      train_offsets: `[documents + 1]` int64; document i is `train[offsets[i]:offsets[i + 1]]`.
      valid, valid_offsets: the same of the held-out documents, source by source.
      valid_ends: `[sources]` where each source's held-out documents end.
      source_names: `[sources]` their names.
      source_tokens: `[sources]` tokens to train on.
      train_mask, valid_mask: bool, whether each token is trained; empty: all are, as of texts.
      conversations: `[]` int, how many documents are conversations.
      near_duplicates: names of documents that are left out, because a held-out one is much alike.
      skipped: what was left out before, by reason.
    """

    train: np.ndarray
    train_offsets: np.ndarray
    valid: np.ndarray
    valid_offsets: np.ndarray
    valid_ends: np.ndarray
    source_names: np.ndarray
    source_tokens: np.ndarray
    near_duplicates: np.ndarray
    train_mask: np.ndarray = field(default_factory=_no_mask)
    valid_mask: np.ndarray = field(default_factory=_no_mask)
    conversations: np.ndarray = field(default_factory=_no_conversations)
    skipped: Skipped = field(default_factory=dict, compare=False)
    weights = (1.0,)
    threads = 0  # rows come from memory: threads would only contend for the interpreter lock

    @property
    def sources(self) -> tuple[TokenStream]:
        return (TokenStream(self.train, self.train_offsets, self.train_mask),)

    @property
    def held_out(self) -> list[HeldOutSource]:
        sources = []
        begin = 0
        for name, end, tokens in zip(
            self.source_names.tolist(),
            self.valid_ends.tolist(),
            self.source_tokens.tolist(),
            strict=True,
        ):
            if end > begin:
                offsets = self.valid_offsets[begin : end + 1]
                documents = TokenStream(self.valid, offsets, self.valid_mask)
                sources.append(HeldOutSource(name, documents, float(tokens)))
            begin = end
        return weighed(sources)

    @property
    def inventory(self) -> Inventory:
        """As :class:`train.data.tokenized.Corpus` says."""
        left_out = dict(self.skipped)
        count = len(self.near_duplicates)
        if count:
            examples = self.near_duplicates[:EXAMPLES].tolist()
            left_out[NEAR_DUPLICATE] = {"count": count, "examples": examples}
        return Inventory(
            documents=(len(self.train_offsets) - 1, len(self.valid_offsets) - 1),
            tokens=(len(self.train), len(self.valid)),
            left_out=left_out,
            unevaluated=without_held_out(
                self.source_names.tolist(), self.source_tokens, self.valid_ends
            ),
            conversations=int(self.conversations),
        )

    @property
    def apart(self) -> bool:
        """As :class:`train.data.tokenized.Corpus` says."""
        return bool(self.conversations)

    @property
    def fingerprint(self) -> str:
        """A digest that changes with any token and any document boundary."""
        digest = hashlib.sha256()
        arrays = [self.train, self.train_offsets, self.valid, self.valid_offsets]
        for array in (*arrays, self.train_mask, self.valid_mask):
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
    skipped: Skipped | None = None,
) -> Prepared:
    """Tokenizes the corpus and splits off the held-out documents.

    Training documents that are near-duplicates of a held-out one are left out.

    Args:
      documents: as `load_corpus` returns them.
      cache_dir: a directory that keeps the tokens. They are read back if documents, tokenizer and
        layout are the same. None: nothing is kept.
      layout: how a document becomes tokens; `Plain` if None.
      skipped: what was left out before, for the inventory.

    Raises:
      InputError: all documents are held out, so that none is left to train on.
    """
    if all(map(is_evaluated, documents)):
        raise InputError(
            f"none of the corpus's {len(documents)} documents is left for training: all of their "
            "names fall into the held-out part; add documents or rename the file"
        )
    layout = layout or Plain()
    skipped = skipped or {}
    if cache_dir is None:
        return _tokenize(documents, tokenizer, layout, skipped)

    path = Path(cache_dir) / f"tokens-{_cache_key(documents, tokenizer, layout)}.npz"
    prepared = _read_cache(path, skipped)
    # A damaged file counts as missing, and is replaced.
    if prepared is None:
        prepared = _tokenize(documents, tokenizer, layout, skipped)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: value for name, value in vars(prepared).items() if name != "skipped"}
        with aside(path) as scratch, scratch.open("wb") as file:
            np.savez(file, **arrays)
    return prepared


class _Encoded(NamedTuple):
    """Tokenized documents."""

    documents: list[Document]
    streams: list[np.ndarray]  # the token ids of each
    keys: np.ndarray  # [documents, BANDS] the keys that near-duplicates share

    def chosen(self, mask: np.ndarray) -> _Encoded:
        """Those where the mask is true."""
        return _Encoded(
            list(itertools.compress(self.documents, mask)),
            list(itertools.compress(self.streams, mask)),
            self.keys[mask],
        )

    def joined(self, dtype: type) -> tuple[np.ndarray, np.ndarray]:
        """(token stream, offsets) of all documents."""
        # The empty first one is a document of no tokens: its end is the first offset, 0.
        streams = [np.zeros(0, dtype), *self.streams]
        return np.concatenate(streams), np.cumsum([len(ids) for ids in streams], dtype=np.int64)

    def mask(self, conversations: bool) -> np.ndarray:
        """Whether each token of all documents is trained; empty without ``conversations``."""
        masks = [np.zeros(0, bool)]
        if conversations:
            for document, ids in zip(self.documents, self.streams, strict=True):
                masks.append(np.ones(len(ids), bool) if document.mask is None else document.mask)
        return np.concatenate(masks)


def _tokenize(
    documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout, skipped: Skipped
) -> Prepared:
    names = list(dict.fromkeys(document.source for document in documents))
    encoder = TextEncoder(tokenizer.to_str(), layout)
    training = _encode_all([d for d in documents if not is_evaluated(d)], encoder)
    # Source by source; within one in the order of names.
    held_out = _encode_all(
        sorted(filter(is_evaluated, documents), key=lambda d: names.index(d.source)),
        encoder,
    )
    near = any_known(training.keys, np.unique(held_out.keys))
    left_out = [document.name for document in training.chosen(near).documents]
    training = training.chosen(~near)
    if not training.documents:
        raise InputError(
            "nothing of the corpus is left for training: what is not held out is much like what "
            "is; add documents"
        )

    dtype = id_type(tokenizer)
    train, train_offsets = training.joined(dtype)
    valid, valid_offsets = held_out.joined(dtype)
    tokens = collections.Counter()
    for document, ids in zip(training.documents, training.streams, strict=True):
        tokens[document.source] += len(ids)
    kept = [*training.documents, *held_out.documents]
    conversations = sum(document.ids is not None for document in kept)
    held_out_counts = collections.Counter(document.source for document in held_out.documents)
    return Prepared(
        train,
        train_offsets,
        valid,
        valid_offsets,
        valid_ends=np.cumsum([held_out_counts[name] for name in names]),
        source_names=np.array(names),
        source_tokens=np.array([tokens[name] for name in names]),
        near_duplicates=np.array(left_out, dtype=np.str_),
        train_mask=training.mask(conversations > 0),
        valid_mask=held_out.mask(conversations > 0),
        conversations=np.array(conversations),
        skipped=skipped,
    )


def _encode_all(documents: Sequence[Document], encoder: TextEncoder) -> _Encoded:
    streams: list[np.ndarray] = []
    keys = [np.zeros((0, BANDS), np.uint64)]
    for batch, encoded in encoder(documents):
        streams += encoded
        masks = [document.mask for document in batch]
        keys.append(band_keys(list(map(compared_tokens, encoded, masks))))
    return _Encoded(list(documents), streams, np.concatenate(keys))


def _cache_key(documents: Sequence[Document], tokenizer: Tokenizer, layout: Layout) -> str:
    """Changes with the tokenizer, the layout, a name, a text, or the held-out split."""
    digest = hashlib.sha256(f"{_CACHE_FORMAT}{tokenizer.to_str()}{layout.fingerprint}".encode())
    for document in documents:
        about = (document.name, document.source, is_evaluated(document))
        digest.update(repr(about).encode())
        digest.update(hashlib.sha256(document.text.encode()).digest())
        if document.ids is not None:
            digest.update(document.ids.tobytes() + document.mask.tobytes())
    return digest.hexdigest()[:32]


def _read_cache(path: Path, skipped: Skipped) -> Prepared | None:
    """The cached corpus, or None if there is none or the file is damaged."""
    try:
        with np.load(path) as arrays:
            return Prepared(**arrays, skipped=skipped)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
