"""Read a tokenized corpus from shards: random access to documents, a few shards open at a time."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from specjax._util.errors import InputError
from train.data.corpus import COPY
from train.data.encoding import id_type
from train.data.near_duplicates import NEAR_DUPLICATE
from train.data.shards.files import (
    EVALUATION,
    INDEX,
    MANIFEST,
    DamagedError,
    file_digest,
    read_json,
    require_identity,
    shard_path,
)
from train.data.shards.writing import Recipe
from train.data.tokenized import HeldOutSource, Inventory, weighed

_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # access is random
_READER_BUFFER = 1 << 15  # bytes, of each open shard
_OPEN_SHARDS = 256
_PREFETCH_THREADS = 4  # that read ahead while a step runs


class _Readers:
    """The open shards: those that were read last."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, shard: int, record: int) -> bytes:
        """Raises InputError if the shard cannot be read."""
        try:
            return self._reader(shard).read([record])[0]
        except (OSError, RuntimeError, IndexError, ValueError) as error:  # from ArrayRecord
            path = shard_path(self._directory, shard)
            raise DamagedError(path, str(error).split(";")[0]) from None

    def _reader(self, shard: int) -> Any:
        """The shard's reader, moved to the end of the least recently used list."""
        with self._lock:
            reader = self._open.pop(shard, None)
            if reader is None:
                from array_record.python.array_record_module import ArrayRecordReader

                path = str(shard_path(self._directory, shard))
                reader = ArrayRecordReader(
                    path, _READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER
                )
            self._open[shard] = reader
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
            return reader


@dataclass(eq=False)
class ShardDocuments:
    """Some documents of the shards, as `train.data.tokenized.Documents` says.

    Attributes:
      dtype: of the ids in a record, little-endian.
      shard, record: `[documents]` the shard of each document, and its record there.
      lengths: `[documents]` tokens of each document.
    """

    readers: _Readers
    dtype: np.dtype
    shard: np.ndarray
    record: np.ndarray
    lengths: np.ndarray
    # The latest document, per thread: a long document fills many rows, one after the other.
    _latest: threading.local = field(default_factory=threading.local)

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        return np.frombuffer(self._read(document), self.dtype, self._length(document))[begin:end]

    def trained(self, document: int, begin: int, end: int) -> np.ndarray:
        record = self._read(document)
        ids_end = self._length(document) * self.dtype.itemsize
        if len(record) == ids_end:  # a text
            return np.ones(end - begin, bool)
        return np.frombuffer(record, bool, offset=ids_end)[begin:end]

    def _length(self, document: int) -> int:
        return int(self.lengths[document])

    def _read(self, document: int) -> bytes:
        number, record = getattr(self._latest, "document", (None, b""))
        if number != document:
            record = self.readers.read(int(self.shard[document]), int(self.record[document]))
            self._latest.document = (document, record)
        return record


@dataclass(frozen=True, eq=False)
class Shards:
    """A tokenized corpus in shards, as `train.data.tokenized.Corpus` says."""

    manifest: dict[str, Any]
    sources: tuple[ShardDocuments, ...]
    weights: tuple[float, ...]
    held_out: tuple[HeldOutSource, ...]
    id_counts: np.ndarray
    threads = _PREFETCH_THREADS

    @property
    def inventory(self) -> Inventory:
        """As `Corpus` says."""
        return inventory_of(self.manifest)

    @property
    def apart(self) -> bool:
        """As `Corpus` says."""
        return bool(self.manifest["conversations"])

    @property
    def fingerprint(self) -> str:
        """A digest that changes with any token, and with which documents count."""
        digests = [self.manifest["index"], *[shard["sha256"] for shard in self.manifest["shards"]]]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def counts(self, size: int) -> np.ndarray:
        """As `Corpus` says, but of everything that was tokenized, duplicates included."""
        return np.pad(self.id_counts, ((0, 0), (0, max(0, size - self.id_counts.shape[1]))))


def inventory_of(manifest: dict[str, Any]) -> Inventory:
    """What finished shards are made of, and what was left out."""
    documents = manifest["documents"]
    tokens = manifest["tokens"]
    left_out = dict(manifest["skipped"])
    for reason, count in ((COPY, "duplicates"), (NEAR_DUPLICATE, "near_duplicates")):
        if documents[count]:
            left_out[reason] = {"count": documents[count], "examples": []}
    return Inventory(
        documents=(documents["train"], documents["held_out"]),
        tokens=(tokens["train"], tokens["held_out"]),
        left_out=left_out,
        unevaluated=manifest.get("unevaluated", ()),  # older manifests lack it
        conversations=manifest["conversations"],
    )


def read_manifest(
    directory: str | Path, recipe: Recipe, sources: Sequence[str], evaluation: Sequence[str] = ()
) -> dict[str, Any]:
    """The manifest of finished shards; the arguments are those of `open_shards`.

    Raises:
      InputError: there is no manifest; or tokenizer, layout or sources differ; or a shard has
        another size.
    """
    path = Path(directory) / MANIFEST
    if not os.path.exists(path):  # a name that is too long counts as missing
        raise InputError(f"{path} is missing: python -m train.tokens makes it")
    manifest = read_json(path)
    require_identity(directory, manifest, recipe.identity())

    held_out = [source["name"] for source in manifest["sources"] if source.get(EVALUATION)]
    names = [source["name"] for source in manifest["sources"] if not source.get(EVALUATION)]
    for keys, made, asked in (
        ("data.corpora and data.files name", names, list(sources)),
        ("data.eval names", held_out, list(evaluation)),
    ):
        if made != asked:
            raise InputError(
                f"data.shards={str(directory)!r} holds {', '.join(made) or 'nothing'}, and {keys} "
                f"{', '.join(asked) or 'nothing'}: name the same, or another data.shards"
            )
    _require_complete(directory, manifest)
    return manifest


def _require_complete(directory: str | Path, manifest: dict[str, Any]) -> None:
    """Raises DamagedError if the index or a shard is not as the manifest says."""
    index = Path(directory) / INDEX
    if not index.exists() or file_digest(index) != manifest["index"]:
        raise DamagedError(index, "it is missing, or another one")

    # Sizes alone: the digests of all shards would take as long as reading them.
    for number, shard in enumerate(manifest["shards"]):
        file = shard_path(directory, number)
        size = file.stat().st_size if file.exists() else 0
        if size != shard["bytes"]:
            raise DamagedError(file, f"{size} of its {shard['bytes']} bytes are there")


def open_shards(
    directory: str | Path,
    recipe: Recipe,
    sources: Sequence[str],
    weights: Sequence[float] = (),
    evaluation: Sequence[str] = (),
) -> Shards:
    """Opens finished shards as a corpus.

    Args:
      sources: names of the corpora and files that the shards must be made of.
      weights: the sampling weight of each source, in rows. (): the documents of all sources are
        shuffled as one source.
      evaluation: names of the files that are only evaluated.

    Raises:
      InputError: as `read_manifest`; or a source, or the whole corpus, has nothing to train on.
    """
    home = Path(directory)
    manifest = read_manifest(directory, recipe, sources, evaluation)
    with np.load(home / INDEX) as arrays:
        index = dict(arrays)
    readers = _Readers(home)
    dtype = np.dtype(id_type(Tokenizer.from_str(recipe.tokenizer))).newbyteorder("<")

    def documents(split: str, begin: int, end: int) -> ShardDocuments:
        columns = [index[f"{split}_{name}"][begin:end] for name in ("shard", "record", "length")]
        return ShardDocuments(readers, dtype, *columns)

    by_source = list(itertools.pairwise([0, *index["train_ends"].tolist()]))[: len(sources)]
    if weights:
        names = list(sources)
        bounds = by_source
        shares = list(weights)
    else:
        names = ["the corpus"]
        bounds = [(0, by_source[-1][1])]
        shares = [float(index["train_length"][a:b].sum(dtype=np.int64)) for a, b in by_source]
    for (begin, end), name in zip(bounds, names, strict=True):
        if begin == end:
            raise InputError(
                f"nothing of {name} is left for training: its documents are held out or copies of "
                "those that are; add documents, or rename the file"
            )

    held_out = []
    held_out_bounds = itertools.pairwise([0, *index["valid_ends"].tolist()])
    all_sources = [*sources, *evaluation]
    all_shares = [*shares, *[0.0] * len(evaluation)]
    for (begin, end), name, share in zip(held_out_bounds, all_sources, all_shares, strict=True):
        if end > begin:
            held_out.append(HeldOutSource(name, documents("valid", begin, end), share))

    return Shards(
        manifest=manifest,
        sources=tuple(documents("train", begin, end) for begin, end in bounds),
        weights=tuple(weights) or (1.0,),
        held_out=tuple(weighed(held_out)),
        id_counts=index["counts"],
    )
