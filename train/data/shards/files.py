"""The files of a directory of shards: their names, how they are read, and when they are damaged."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from specjax._util.errors import InputError

FORMAT = 4
PLAN = "plan.json"
INDEX = "index.npz"
MANIFEST = "manifest.json"
SOURCES = "sources.jsonl"
PARTS = "parts"
EVALUATION = "evaluation"  # key of a source in plan and manifest: whether it is only evaluated


class DamagedError(InputError):
    """A file of the shards is not what the manifest says."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} is damaged ({reason}): python -m train.tokens makes it anew")


def shard_path(directory: str | Path, number: int) -> Path:
    return Path(directory) / f"{number:05}.array_record"


def part_path(directory: str | Path, number: int) -> Path:
    return Path(directory) / PARTS / f"{number:05}.npz"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A plan or a manifest; raises DamagedError if it is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise DamagedError(path, "it is not a JSON object")
    return content


def read_part(directory: str | Path, number: int) -> dict[str, Any] | None:
    """A finished shard's part without its MinHash keys; None if shard or part is incomplete."""
    try:
        with np.load(part_path(directory, number)) as arrays:
            part = {name: arrays[name] for name in arrays if name not in ("note", "keys")}
            part |= json.loads(str(arrays["note"]))
        complete = shard_path(directory, number).stat().st_size == part["size"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return part if complete else None


def read_keys(directory: str | Path, number: int) -> np.ndarray:
    """`[documents, BANDS]` the MinHash keys of a shard's documents."""
    with np.load(part_path(directory, number)) as arrays:
        return arrays["keys"]


def require_identity(directory: str | Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises InputError if the shards were made of other files, or with another tokenizer etc."""
    for name, value in now.items():
        if before.get(name) != value:
            what = "other files" if name == "sources" else f"another {name}"
            raise InputError(
                f"data.shards={str(directory)!r} was made with {what} than now: choose another "
                "directory, or remove this one"
            )


def cannot_write(directory: str | Path, error: Exception) -> InputError:
    """The error of a directory in which shards cannot be written."""
    # ArrayRecord's errors go on with a stack trace after a semicolon.
    reason = getattr(error, "strerror", None) or str(error).split(";")[0]
    return InputError(
        f"data.shards={str(directory)!r}: cannot be written ({reason}); finished shards stay, and "
        "the same command goes on"
    )
