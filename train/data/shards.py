"""A tokenized corpus on the disk: shards of ArrayRecord, an index, and a manifest.

DIR/plan.json        what is being made of which files; written first
DIR/00000.array_record, …   a record is a document: its ids, uint16 or uint32, little-endian
DIR/parts/00000.npz, …      of each document of a shard: length, digest, MinHash keys
DIR/index.npz        where each training and held-out document lies; duplicates are left out
DIR/manifest.json    sources, tokenizer, layout, counts, what was skipped; written last

A shard is of one source and depends on its files alone, so it is the same whoever makes it and
however often the work was cut off. Each file is written aside and renamed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from specjax._util.errors import InputError, SpecjaxError
from specjax._util.files import aside, write_text
from train.data.corpus import is_held_out
from train.data.near import BANDS, any_known, band_keys
from train.data.packing import Layout, TextEncoder, id_type
from train.data.reading import Document, Intake, TextPiece, read_piece

FORMAT = 1
PLAN, INDEX, MANIFEST, PARTS = "plan.json", "index.npz", "manifest.json", "parts"
LONGEST_DOCUMENT = 1 << 23  # characters: a tokenizer holds a hundred bytes for each in memory
_WRITING = "group_size:1,zstd:1"  # a record is read alone
_READING = "readahead_buffer_size:0,max_parallelism:0"
_BUFFER = 1 << 15  # bytes, of each open shard
_OPEN_SHARDS = 256
_THREADS = 4  # that read ahead while a step runs


@dataclass(frozen=True)
class Recipe:
    """What turns pieces of files into shards; every process that makes them has one."""

    directory: str
    tokenizer: str  # its tokenizer.json
    layout: Layout

    def identity(self) -> dict[str, Any]:
        """What a shard depends on beside its files."""
        return {
            "format": FORMAT,
            "tokenizer": hashlib.sha256(self.tokenizer.encode()).hexdigest(),
            "layout": self.layout.fingerprint,
        }

    @functools.cached_property
    def encoder(self) -> TextEncoder:
        """One for all shards that a process makes."""
        return TextEncoder(self.tokenizer, self.layout)


def shard_path(directory: str | Path, number: int) -> Path:
    return Path(directory) / f"{number:05}.array_record"


def _part_path(directory: str | Path, number: int) -> Path:
    return Path(directory) / PARTS / f"{number:05}.npz"


def make_shard(
    recipe: Recipe, number: int, pieces: Sequence[TextPiece], tell: Callable[[int], None]
) -> None:
    """Tokenizes the pieces into one shard and its part; `tell` hears of the bytes of text done.

    Raises:
      InputError: a file cannot be read, or the shard not be written.
    """
    intake = Intake(strict=False, longest=LONGEST_DOCUMENT)
    path, part = shard_path(recipe.directory, number), _part_path(recipe.directory, number)
    try:
        with aside(path) as scratch:
            arrays = _write_records(scratch, recipe.encoder, pieces, intake, tell)
            note = {"size": scratch.stat().st_size, "sha256": file_digest(scratch)}
        note["skipped"] = intake.skipped
        with aside(part) as scratch, scratch.open("wb") as file:
            np.savez(file, note=np.array(json.dumps(note)), **arrays)
    except SpecjaxError:
        raise
    except (OSError, RuntimeError) as error:  # the latter is ArrayRecord's
        raise unwritable(recipe.directory, error) from None


def unwritable(directory: str | Path, error: Exception) -> InputError:
    said = getattr(error, "strerror", None) or str(error).split(";")[0]
    return InputError(
        f"data.shards={str(directory)!r}: cannot be written ({said}); finished shards stay, and "
        "the same command goes on"
    )


def _write_records(
    path: Path,
    encoder: TextEncoder,
    pieces: Sequence[TextPiece],
    intake: Intake,
    tell: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """Writes the records; returns what the index is made of."""
    from array_record.python.array_record_module import ArrayRecordWriter

    counts = np.zeros((2, encoder.ids), np.int64)  # in training documents, and in held-out ones
    columns = [_NOTHING]
    documents = itertools.chain.from_iterable(read_piece(piece, intake) for piece in pieces)
    writer = ArrayRecordWriter(str(path), _WRITING)
    try:
        for batch, streams in encoder(documents):
            for ids in streams:
                writer.write(ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes())
            columns.append(described := _describe(batch, streams))
            owner = np.repeat(described["held_out"], described["length"])
            ids = np.concatenate(streams)
            splits = (ids[~owner], ids[owner])
            counts += [np.bincount(split, minlength=encoder.ids) for split in splits]
            tell(int(described["bytes"].sum()))
    finally:
        writer.close()
    joined = {name: np.concatenate([column[name] for column in columns]) for name in _NOTHING}
    return joined | {"counts": counts}


def _describe(
    documents: Sequence[Document], streams: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """What the index is made of, a row for each document."""
    texts = [document.text.encode() for document in documents]
    return {
        "length": np.array([len(ids) for ids in streams], np.uint32),
        "bytes": np.array([len(text) for text in texts], np.uint32),
        "held_out": np.array([is_held_out(document.name) for document in documents]),
        "digest": np.array([_digest(text) for text in texts], np.uint64),
        "keys": band_keys(streams),
    }


_NOTHING = {
    "length": np.zeros(0, np.uint32),
    "bytes": np.zeros(0, np.uint32),
    "held_out": np.zeros(0, bool),
    "digest": np.zeros(0, np.uint64),
    "keys": np.zeros((0, BANDS), np.uint64),
}


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def read_part(directory: str | Path, number: int) -> dict[str, Any] | None:
    """A finished shard's part but its MinHash keys; None where one of the two is not whole."""
    try:
        with np.load(_part_path(directory, number)) as arrays:
            part = {name: arrays[name] for name in arrays if name not in ("note", "keys")}
            part |= json.loads(str(arrays["note"]))
        whole = shard_path(directory, number).stat().st_size == part["size"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return part if whole else None


def write_index(directory: str | Path, plan: dict[str, Any], owners: Sequence[int]) -> None:
    """Chooses the documents that count, and writes the index and the manifest.

    Of equal texts the first one stays, a held-out one before any that would be trained on; and of
    the others none that is a near-duplicate of a held-out one. One shard's keys are in memory at a
    time; of each document some 40 bytes, and of a held-out one its keys.

    Args:
      plan: as the manifest names the corpus.
      owners: which source each shard is of.
    """
    parts = [_finished_part(directory, number) for number in range(len(owners))]
    names = ("length", "bytes", "held_out", "digest")
    column = {name: np.concatenate([part[name] for part in parts]) for name in names}
    held_out = column["held_out"]
    first = _first_of_equals(column["digest"], held_out)
    near = first & ~held_out & _near_held_out(directory, parts, first)
    trained, kept = first & ~near & ~held_out, first & held_out
    sizes = [len(part["length"]) for part in parts]
    where = {
        "shard": np.repeat(np.arange(len(parts), dtype=np.uint32), sizes),
        "record": np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes]),
        "length": column["length"],
    }
    arrays = {"counts": sum(part["counts"] for part in parts)}
    for split, chosen in (("train", trained), ("valid", kept)):
        arrays |= {f"{split}_{name}": values[chosen] for name, values in where.items()}
    owner = np.asarray(owners)[arrays["train_shard"]]
    arrays["train_ends"] = np.searchsorted(owner, range(len(plan["sources"])), "right")
    path = Path(directory) / INDEX
    with aside(path) as scratch, scratch.open("wb") as file:
        np.savez(file, **arrays)
    splits = {"train": trained, "held_out": kept}
    sums = {
        name: {
            split: int(column[of][chosen].sum(dtype=np.int64)) for split, chosen in splits.items()
        }
        for name, of in (("tokens", "length"), ("bytes", "bytes"))
    }
    documents = {split: int(chosen.sum()) for split, chosen in splits.items()}
    documents |= {"duplicates": int((~first).sum()), "near_duplicates": int(near.sum())}
    manifest = plan | sums | {"documents": documents, "index": file_digest(path)}
    _write_manifest(directory, manifest, owners, parts)


def _near_held_out(
    directory: str | Path, parts: Sequence[dict[str, Any]], first: np.ndarray
) -> np.ndarray:
    """`[documents]` whether each is a near-duplicate of a held-out one, itself included."""
    bounds = np.cumsum([0, *[len(part["length"]) for part in parts]])
    known = [np.zeros(0, np.uint64)]
    for number, part in enumerate(parts):
        kept = part["held_out"] & first[bounds[number] : bounds[number + 1]]
        known.append(_keys(directory, number)[kept].ravel())
    known = np.unique(np.concatenate(known))
    return np.concatenate([any_known(_keys(directory, i), known) for i in range(len(parts))])


def _write_manifest(
    directory: str | Path,
    manifest: dict[str, Any],
    owners: Sequence[int],
    parts: Sequence[dict[str, Any]],
) -> None:
    intake = Intake()
    for part in (manifest, *parts):
        intake.merge(part["skipped"])
    shards = [
        {
            "file": shard_path("", number).name,
            "source": manifest["sources"][owner]["name"],
            "documents": len(part["length"]),
            "bytes": part["size"],
            "sha256": part["sha256"],
        }
        for number, (owner, part) in enumerate(zip(owners, parts, strict=True))
    ]
    whole = manifest | {"skipped": intake.skipped, "shards": shards}
    write_text(Path(directory) / MANIFEST, json.dumps(whole, indent=1) + "\n")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, which is not held in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_of_equals(digests: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """`[documents]` whether a text has not been before, held-out ones being before all others."""
    order = np.lexsort((~held_out, digests))  # stable: equals stay in their order
    new = np.ones(len(digests), bool)
    new[1:] = digests[order[1:]] != digests[order[:-1]]
    first = np.zeros(len(digests), bool)
    first[order[new]] = True
    return first


def _finished_part(directory: str | Path, number: int) -> dict[str, Any]:
    part = read_part(directory, number)
    if part is None:
        raise InputError(f"{shard_path(directory, number)} is gone: start again")
    return part


def _keys(directory: str | Path, number: int) -> np.ndarray:
    with np.load(_part_path(directory, number)) as arrays:
        return arrays["keys"]


class _Readers:
    """The open shards: the latest ones that were read."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, shard: int, record: int) -> bytes:
        """Raises InputError where the shard cannot be read."""
        try:
            return self._reader(shard).read([record])[0]
        except (OSError, RuntimeError, IndexError, ValueError) as error:  # ArrayRecord's
            path = shard_path(self._directory, shard)
            raise DamagedError(path, str(error).split(";")[0]) from None

    def _reader(self, shard: int) -> Any:
        with self._lock:
            reader = self._open.pop(shard, None)
            if reader is None:
                from array_record.python.array_record_module import ArrayRecordReader

                path = str(shard_path(self._directory, shard))
                reader = ArrayRecordReader(path, _READING, file_reader_buffer_size=_BUFFER)
            self._open[shard] = reader
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
            return reader


class DamagedError(InputError):
    """A file of the shards is not what the manifest says."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path} is damaged ({why}): python -m train.tokens makes it anew")


@dataclass(eq=False)
class ShardDocuments:
    """Some documents of the shards, as `train.data.packing.Documents` says."""

    readers: _Readers
    dtype: np.dtype
    shard: np.ndarray
    record: np.ndarray
    lengths: np.ndarray
    # A long document fills many rows, one after the other.
    _latest: threading.local = field(default_factory=threading.local)

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        latest = getattr(self._latest, "ids", (None, None))
        if latest[0] != document:
            record = self.readers.read(int(self.shard[document]), int(self.record[document]))
            latest = self._latest.ids = (document, np.frombuffer(record, self.dtype))
        return latest[1][begin:end]


@dataclass(frozen=True, eq=False)
class Shards:
    """A tokenized corpus in shards, as `train.data.packing.Corpus` says."""

    manifest: dict[str, Any]
    sources: tuple[ShardDocuments, ...]
    weights: tuple[float, ...]
    held_out: ShardDocuments
    id_counts: np.ndarray
    threads = _THREADS

    @property
    def valid_bytes(self) -> int:
        return self.manifest["bytes"]["held_out"]

    @property
    def fingerprint(self) -> str:
        """Changes with any token, and with which documents count."""
        made = [self.manifest["index"], *[shard["sha256"] for shard in self.manifest["shards"]]]
        return hashlib.sha256("".join(made).encode()).hexdigest()

    def counts(self, size: int) -> np.ndarray:
        """As `Corpus` says, of all that was tokenized: duplicates of a document count, too."""
        return np.pad(self.id_counts, ((0, 0), (0, max(0, size - self.id_counts.shape[1]))))


def read_manifest(directory: str | Path, recipe: Recipe, sources: Sequence[str]) -> dict[str, Any]:
    """The manifest of finished shards.

    Raises:
      InputError: there is none, or of another tokenizer, layout or sources; or a shard is cut off.
    """
    path = Path(directory) / MANIFEST
    if not path.exists():
        raise InputError(f"{path} is missing: python -m train.tokens makes it")
    manifest = read_json(path)
    require_identity(directory, manifest, recipe.identity())
    names = [source["name"] for source in manifest["sources"]]
    if names != list(sources):
        raise InputError(
            f"data.shards={str(directory)!r} holds {', '.join(names)}, and data.corpora and "
            f"data.files name {', '.join(sources)}: name the same, or another data.shards"
        )
    index = Path(directory) / INDEX
    if not index.exists() or file_digest(index) != manifest["index"]:
        raise DamagedError(index, "it is gone, or another one")
    for number, shard in enumerate(manifest["shards"]):
        file = shard_path(directory, number)
        there = file.stat().st_size if file.exists() else 0
        if there != shard["bytes"]:
            raise DamagedError(file, f"{there} of its {shard['bytes']} bytes are there")
    return manifest


def read_json(path: Path) -> dict[str, Any]:
    """A plan or a manifest; raises DamagedError where it is none."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = None
    if not isinstance(said, dict):
        raise DamagedError(path, "it is no JSON object")
    return said


def require_identity(directory: str | Path, made: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises InputError where shards were made of, or with, something else."""
    for name, value in now.items():
        if made.get(name) != value:
            what = "other files" if name == "sources" else f"another {name}"
            raise InputError(
                f"data.shards={str(directory)!r} was made with {what} than now: choose another "
                "directory, or remove this one"
            )


def open_shards(
    directory: str | Path, recipe: Recipe, sources: Sequence[str], weights: Sequence[float] = ()
) -> Shards:
    """Finished shards as a corpus.

    Args:
      sources: names of the corpora and files that they must be of.
      weights: how many rows each source gives, relative to the others'; () is all documents of all
        sources in one order.

    Raises:
      InputError: as `read_manifest`; or a source, or all, have nothing to train on.
    """
    home = Path(directory)
    manifest = read_manifest(directory, recipe, sources)
    with np.load(home / INDEX) as arrays:
        index = dict(arrays)
    readers, dtype = _Readers(home), id_type(Tokenizer.from_str(recipe.tokenizer))

    def documents(name: str, begin: int, end: int) -> ShardDocuments:
        part = (index[f"{name}_{column}"][begin:end] for column in ("shard", "record", "length"))
        return ShardDocuments(readers, np.dtype(dtype).newbyteorder("<"), *part)

    ends = index["train_ends"].tolist()
    bounds = list(itertools.pairwise([0, *ends])) if weights else [(0, ends[-1])]
    for (begin, end), name in zip(bounds, sources if weights else ["the corpus"], strict=True):
        if begin == end:
            raise InputError(
                f"nothing of {name} is left for training: its documents are held out or copies of "
                "those that are; add documents, or rename the file"
            )
    return Shards(
        manifest,
        tuple(documents("train", begin, end) for begin, end in bounds),
        tuple(weights) or (1.0,),
        documents("valid", 0, len(index["valid_length"])),
        index["counts"],
    )
