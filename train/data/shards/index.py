"""The index and the manifest of finished shards: which documents count, and where they lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax._util.errors import InputError
from specjax._util.files import aside, write_text
from train.data.near_duplicates import any_known
from train.data.reading import Intake
from train.data.shards.files import (
    INDEX,
    MANIFEST,
    file_digest,
    read_keys,
    read_part,
    shard_path,
)
from train.data.tokenized import without_held_out


def write_index(directory: str | Path, plan: dict[str, Any], owners: Sequence[int]) -> None:
    """Removes duplicates, and writes the index and the manifest.

    Of equal texts the first stays, but a held-out text stays before any training text. A training
    document that is a near-duplicate of a held-out one is left out. Memory: one shard's keys at a
    time, about 40 bytes for each document, and the keys of held-out documents.

    Args:
      plan: how the manifest describes the corpus.
      owners: the number of each shard's source.
    """
    parts = [_finished_part(directory, number) for number in range(len(owners))]
    names = ("length", "bytes", "held_out", "digest", "conversation")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}

    held_out = columns["held_out"]
    first = _first_of_equals(columns["digest"], held_out)
    near = first & ~held_out & _near_held_out(directory, parts, first)
    splits = {"train": first & ~near & ~held_out, "held_out": first & held_out}

    path = Path(directory) / INDEX
    arrays = _index_arrays(parts, columns["length"], splits)
    # Shards are in the order of their sources, and so are the documents.
    for split in ("train", "valid"):
        source = np.asarray(owners)[arrays[f"{split}_shard"]]
        arrays[f"{split}_ends"] = np.searchsorted(source, range(len(plan["sources"])), "right")
    with aside(path) as scratch, scratch.open("wb") as file:
        np.savez(file, **arrays)

    documents = {split: int(chosen.sum()) for split, chosen in splits.items()}
    documents["duplicates"] = int((~first).sum())
    documents["near_duplicates"] = int(near.sum())
    conversations = columns["conversation"] & (splits["train"] | splits["held_out"])
    manifest = plan | {
        "conversations": int(conversations.sum()),
        "tokens": _sums(columns["length"], splits),
        "bytes": _sums(columns["bytes"], splits),
        "documents": documents,
        "unevaluated": without_held_out(
            [source["name"] for source in plan["sources"]],
            np.diff(arrays["train_ends"], prepend=0),
            arrays["valid_ends"],
        ),
        "index": file_digest(path),
    }
    _write_manifest(directory, manifest, owners, parts)


def _index_arrays(
    parts: Sequence[dict[str, Any]], lengths: np.ndarray, splits: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The arrays of index.npz but where each source ends: id counts, and each split's documents."""
    sizes = [len(part["length"]) for part in parts]
    columns = {
        "shard": np.repeat(np.arange(len(parts), dtype=np.uint32), sizes),
        "record": np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes]),
        "length": lengths,
    }
    arrays = {"counts": sum(part["counts"] for part in parts)}
    for prefix, split in (("train", "train"), ("valid", "held_out")):
        for name, values in columns.items():
            arrays[f"{prefix}_{name}"] = values[splits[split]]
    return arrays


def _sums(column: np.ndarray, splits: dict[str, np.ndarray]) -> dict[str, int]:
    """The sum of a column over the documents of each split."""
    return {split: int(column[chosen].sum(dtype=np.int64)) for split, chosen in splits.items()}


def _first_of_equals(digests: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """bool `[documents]`: the first of equal texts, where held-out documents come before others."""
    # Sorted by text, then held-out ones first. The sort is stable, so equals stay in their order.
    order = np.lexsort((~held_out, digests))
    new = np.ones(len(digests), bool)
    new[1:] = digests[order[1:]] != digests[order[:-1]]
    first = np.zeros(len(digests), bool)
    first[order[new]] = True
    return first


def _near_held_out(
    directory: str | Path, parts: Sequence[dict[str, Any]], first: np.ndarray
) -> np.ndarray:
    """bool `[documents]`: near-duplicates of a held-out document, including itself."""
    bounds = np.cumsum([0, *[len(part["length"]) for part in parts]])
    held_out_keys = [np.zeros(0, np.uint64)]
    for number, part in enumerate(parts):
        chosen = part["held_out"] & first[bounds[number] : bounds[number + 1]]
        held_out_keys.append(read_keys(directory, number)[chosen].ravel())

    # A second pass over the keys: those of all shards may not fit in memory.
    known = np.unique(np.concatenate(held_out_keys))
    return np.concatenate([any_known(read_keys(directory, i), known) for i in range(len(parts))])


def _write_manifest(
    directory: str | Path,
    manifest: dict[str, Any],
    owners: Sequence[int],
    parts: Sequence[dict[str, Any]],
) -> None:
    intake = Intake()
    for part in (manifest, *parts):
        intake.merge(part["skipped"])

    shards = []
    for number, (owner, part) in enumerate(zip(owners, parts, strict=True)):
        shard = {
            "file": shard_path("", number).name,
            "source": manifest["sources"][owner]["name"],
            "documents": len(part["length"]),
            "bytes": part["size"],
            "sha256": part["sha256"],
        }
        shards.append(shard)
    content = manifest | {"skipped": intake.skipped, "shards": shards}
    write_text(Path(directory) / MANIFEST, json.dumps(content, indent=1) + "\n")


def _finished_part(directory: str | Path, number: int) -> dict[str, Any]:
    part = read_part(directory, number)
    if part is None:
        raise InputError(f"{shard_path(directory, number)} is missing: start again")
    return part
