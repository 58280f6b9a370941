"""Write one shard: tokenize its documents, and note what the index needs to know of each."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax._util.errors import SpecjaxError
from specjax._util.files import aside
from train.data.chats import ChatFormat
from train.data.corpus import is_evaluated
from train.data.encoding import Layout, TextEncoder
from train.data.near_duplicates import BANDS, band_keys, compared_tokens
from train.data.reading import Document, Intake, TextPiece, read_piece
from train.data.shards.files import FORMAT, cannot_write, file_digest, part_path, shard_path

LONGEST_DOCUMENT = 1 << 23  # characters; a tokenizer needs about a hundred bytes for each
_WRITER_OPTIONS = "group_size:1,zstd:1"  # one record per group: records are read one at a time


@dataclass(frozen=True)
class Recipe:
    """What turns pieces of files into shards. Every process that makes shards has a copy."""

    directory: str
    tokenizer: str  # its tokenizer.json
    layout: Layout
    min_chars: int  # of a document
    chats: ChatFormat | None = None  # turns conversations into tokens

    def identity(self) -> dict[str, Any]:
        """What a shard depends on besides its files."""
        return {
            "format": FORMAT,
            "tokenizer": hashlib.sha256(self.tokenizer.encode()).hexdigest(),
            "layout": self.layout.fingerprint,
            "min_chars": self.min_chars,
            "chat template or row length": self.chats.fingerprint if self.chats else None,
        }

    @functools.cached_property
    def encoder(self) -> TextEncoder:
        """One encoder for all shards of a process."""
        return TextEncoder(self.tokenizer, self.layout)


def make_shard(
    recipe: Recipe, number: int, pieces: Sequence[TextPiece], report: Callable[[int], None]
) -> None:
    """Tokenizes the pieces into one shard and its part, the arrays that the index is made of.

    Args:
      report: called with the bytes of text of each finished batch.

    Raises:
      InputError: a file cannot be read, or the shard cannot be written.
    """
    intake = Intake(
        strict=False, shortest=recipe.min_chars, longest=LONGEST_DOCUMENT, chats=recipe.chats
    )
    path = shard_path(recipe.directory, number)
    part = part_path(recipe.directory, number)
    try:
        with aside(path) as scratch:
            arrays = _write_records(scratch, recipe.encoder, pieces, intake, report)
            note = {"size": scratch.stat().st_size, "sha256": file_digest(scratch)}
        note["skipped"] = intake.skipped
        # The part comes last: a shard with a part is complete.
        with aside(part) as scratch, scratch.open("wb") as file:
            np.savez(file, note=np.array(json.dumps(note)), **arrays)
    except SpecjaxError:
        raise
    except (OSError, RuntimeError) as error:  # ArrayRecord raises RuntimeError
        raise cannot_write(recipe.directory, error) from None


def _write_records(
    path: Path,
    encoder: TextEncoder,
    pieces: Sequence[TextPiece],
    intake: Intake,
    report: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """Writes one record per document; returns the arrays of the shard's part."""
    from array_record.python.array_record_module import ArrayRecordWriter

    counts = np.zeros((2, encoder.vocab_size), np.int64)  # in training and in held-out documents
    tables = [_NO_DOCUMENTS]
    documents = itertools.chain.from_iterable(read_piece(piece, intake) for piece in pieces)
    writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
    try:
        for batch, streams in encoder(documents):
            for document, ids in zip(batch, streams, strict=True):
                writer.write(_record(document, ids))
            table = _describe(batch, streams)
            tables.append(table)
            counts += _count_ids(streams, table["held_out"], encoder.vocab_size)
            report(int(table["bytes"].sum()))
    finally:
        writer.close()

    columns = {name: np.concatenate([table[name] for table in tables]) for name in _NO_DOCUMENTS}
    return columns | {"counts": counts}


def _record(document: Document, ids: np.ndarray) -> bytes:
    """The ids, little-endian; behind those of a conversation, its mask: a byte for each."""
    record = ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes()
    return record if document.mask is None else record + document.mask.tobytes()


def _count_ids(streams: Sequence[np.ndarray], held_out: np.ndarray, size: int) -> np.ndarray:
    """`[2, size]` how often each id occurs in the training and in the held-out documents."""
    ids = np.concatenate(streams)
    is_held_out_id = np.repeat(held_out, [len(stream) for stream in streams])
    training = np.bincount(ids[~is_held_out_id], minlength=size)
    return np.stack([training, np.bincount(ids[is_held_out_id], minlength=size)])


def _describe(
    documents: Sequence[Document], streams: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """What the index is made of, one row per document."""
    texts = [document.text.encode() for document in documents]
    masks = [document.mask for document in documents]
    return {
        "length": np.array([len(ids) for ids in streams], np.uint32),
        "bytes": np.array([len(text) for text in texts], np.uint32),
        "held_out": np.array([is_evaluated(document) for document in documents]),
        "digest": np.array([_text_digest(text) for text in texts], np.uint64),
        "conversation": np.array([document.ids is not None for document in documents]),
        "keys": band_keys(list(map(compared_tokens, streams, masks))),
    }


# A table as _describe makes it, of no documents: gives the columns of an empty shard their types.
_NO_DOCUMENTS = {
    "length": np.zeros(0, np.uint32),
    "bytes": np.zeros(0, np.uint32),
    "held_out": np.zeros(0, bool),
    "digest": np.zeros(0, np.uint64),
    "conversation": np.zeros(0, bool),
    "keys": np.zeros((0, BANDS), np.uint64),
}


def _text_digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
