"""The rows of a Parquet file, a JSON array or JSON lines, gzipped or not.

The first bytes decide which format a file has, not its name.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any

from infer.formats import json_objects
from specjax._util.errors import OptionError
from specjax._util.files import MOST_BYTES, open_file, open_parquet, parse_json, read_file

Row = dict[str, Any]
PARQUET = b"PAR1"
GZIP = b"\x1f\x8b"


def read_rows(path: str) -> Iterator[Row]:
    """The rows in order; empty lines are skipped.

    Raises:
      OptionError: the file cannot be read, or has values that are not objects.
    """
    try:
        with open_file(path) as file:
            magic = file.read(4)
        if magic == PARQUET:
            for batch in open_parquet(path).iter_batches():
                yield from batch.to_pylist()
            return
        data = read_file(path)
        if magic.startswith(GZIP):
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{path}: cannot be read ({reason})") from None

    if data.lstrip()[:1] == b"[":
        yield from _array(path, data)
        return
    for index, row in json_objects(data):
        if isinstance(row, ValueError):
            raise OptionError(f"{path} line {index + 1}: {row}")
        yield row


def _array(path: str, data: bytes) -> list[Row]:
    try:
        rows = parse_json(data)
    except ValueError as error:
        raise OptionError(f"{path} is {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise OptionError(f"{path}: expected a list of objects")
    return rows
