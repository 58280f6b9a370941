"""One safetensors file, read tensor by tensor with ordinary reads.

``safetensors.safe_open`` maps the file into memory. The pages that were read stay in the process,
so after loading a whole checkpoint would be in memory beside the model. It also cannot read 8-bit
floats into NumPy arrays. So it only checks the file here: header, names, sizes.

The format: 8 bytes with the header's length, little-endian, the header in JSON, the tensors' bytes
(github.com/huggingface/safetensors).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import ml_dtypes
import numpy as np
from safetensors import safe_open

from specjax._util.files import open_file

LENGTH_BYTES = 8
FLOAT_DTYPES = ("F32", "BF16", "F16")  # names of the dtypes that weights may have
# By safetensors' name; packed dtypes of less than a byte are not read.
DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


class TensorHeader:
    """A tensor whose rows can be read: ``header[first:last]``."""

    def __init__(self, file: io.BufferedReader, entry: dict, start: int):
        self._file = file
        self._entry = entry
        self._start = start + entry["data_offsets"][0]

    def get_shape(self) -> list[int]:
        return self._entry["shape"]

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        return self._entry["dtype"]

    def __getitem__(self, rows: slice) -> np.ndarray:
        shape = self.get_shape()
        first, last, _ = rows.indices(shape[0])
        row = math.prod(shape[1:])
        return self._read(first * row, [max(last - first, 0), *shape[1:]])

    def whole(self) -> np.ndarray:
        """All of it."""
        return self._read(0, self.get_shape())

    def _read(self, skipped: int, shape: list[int]) -> np.ndarray:
        """An array of this shape, from the values after the ``skipped`` ones.

        Raises:
          ValueError: its dtype is not read, or the file has become shorter.
        """
        if self.get_dtype() not in DTYPES:
            raise ValueError(f"dtype {self.get_dtype()} is not read")
        values = np.empty(shape, DTYPES[self.get_dtype()])
        self._file.seek(self._start + skipped * values.itemsize)
        memory = values.reshape(-1).view(np.uint8).data
        while memory:
            read = self._file.readinto(memory)
            if not read:
                raise ValueError("the file ends early")
            memory = memory[read:]
        return values


class SafetensorsFile:
    """An open file; it has what loading uses of ``safetensors.safe_open``.

    Raises:
      SafetensorError, OSError: it cannot be read.
    """

    def __init__(self, path: Path):
        with safe_open(path, framework="np"):
            pass  # its header is complete and its tensors lie inside of the file
        self._file = cast(io.BufferedReader, open_file(path))
        length = int.from_bytes(self._file.read(LENGTH_BYTES), "little")
        self._entries = json.loads(self._file.read(length))
        self._entries.pop("__metadata__", None)
        self._start = LENGTH_BYTES + length

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def get_slice(self, name: str) -> TensorHeader:
        return TensorHeader(self._file, self._entries[name], self._start)

    def get_tensor(self, name: str) -> np.ndarray:
        return self.get_slice(name).whole()
