"""A digest of a model's files: two directories with equal digests hold the same model.

Small files are read whole. Of weights the size and evenly spaced blocks are read, which takes a
few milliseconds for any size. Training or quantizing changes all blocks. A change of a few bytes
between the blocks, with the same size, is not noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from specjax._util.errors import ModelError, errors_as
from specjax._util.files import open_file

BLOCKS = 64  # of a file of weights
BLOCK_BYTES = 1 << 14
WHOLE_BYTES = 1 << 26  # smaller files are read whole


def directory_digest(directory: Path, patterns: Sequence[str]) -> str:
    """SHA-256 of the directory's files that match a pattern, as hex digits; names count, too.

    Raises:
      ModelError: a file cannot be read.
    """
    paths = {path for pattern in patterns for path in directory.glob(pattern)}
    digest = hashlib.sha256()
    for path in sorted(paths):
        with errors_as(f"{path}: cannot be read", ModelError):
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            _add_content(digest, path)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a model that is one file, as hex digits.

    Raises:
      ModelError: it cannot be read.
    """
    digest = hashlib.sha256()
    with errors_as(f"{path}: cannot be read", ModelError):
        digest.update(f"{path.stat().st_size}\0".encode())
        _add_content(digest, path)
    return digest.hexdigest()


def _add_content(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with open_file(path) as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return
        for number in range(BLOCKS):
            file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
