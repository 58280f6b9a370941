"""Reads the header of a GGUF file: its metadata, and where each tensor is.

The ``gguf`` package has a reader, too. It takes 12 s for a vocabulary of 262,144 tokens, and a
wrong count in a damaged file makes it allocate without end. Here each length is compared with the
bytes that are left before anything is read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from specjax._util.checks import format_value
from specjax._util.errors import ModelError, errors_as
from specjax._util.files import open_file

ENDING = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 1 << 20
MAX_KEYS = 1 << 16
MAX_NAME = 1 << 16  # bytes of a key or a tensor's name
MAX_HEADER = 1 << 28  # bytes; a vocabulary of 262,144 tokens and its merges have about 2^23
MAX_DIMS = 4
_ALIGNMENT = 32
_TEXT = 8
_ARRAY = 9
# The format's number of each type of value with a fixed size, and NumPy's name of it.
_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


class Tensor(NamedTuple):
    """Where a tensor is: ``shape`` with the outputs first, ``offset`` and ``size`` in bytes."""

    shape: tuple[int, ...]
    kind: str  # the name of its type, such as Q4_K
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The metadata of a file by key, and its tensors by name. Arrays of texts are lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether a path names a GGUF file: by its ending, or by its first bytes if it is a file."""
    if os.fspath(path).lower().endswith(ENDING):
        return not os.path.isdir(path)
    if not os.path.isfile(path):
        return False
    try:
        with open_file(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """The header of a file; no tensor is read.

    Raises:
      ModelError: the file cannot be read or is damaged, a tensor has an unknown type, or the gguf
        package is not installed.
    """
    try:
        file = open_file(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    with file, errors_as(f"{path}: not a readable GGUF file"):
        source = _Source(file, os.fstat(file.fileno()).st_size)
        if source.take(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = source.number("<u4")
        if version not in VERSIONS:
            raise ValueError(f"version {version}; supported: {', '.join(map(str, VERSIONS))}")
        package = gguf_package()
        tensor_count = source.count(MAX_TENSORS, "tensors")
        key_count = source.count(MAX_KEYS, "keys of metadata")
        metadata = _read_metadata(source, key_count)
        tensors = _read_tensors(source, tensor_count, metadata, package)
    return Header(path, metadata, tensors)


def gguf_package() -> Any:
    """The gguf package, an extra: its types of tensors, and the functions that dequantize them.

    Raises:
      ModelError: it is not installed; the message says how to install it.
    """
    try:
        import gguf
    except ImportError:
        raise ModelError(
            'reading a GGUF file needs the gguf package: pip install "specjax[gguf]"'
        ) from None
    return gguf


class _Source:
    """A file that is read from its start; every length is checked first."""

    def __init__(self, file: BinaryIO, size: int):
        self._file = file
        self.size = size
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next bytes.

        Raises:
          ValueError: the file, or what a header may have, ends before.
        """
        if self.position + count > MAX_HEADER and count <= self.size - self.position:
            raise ValueError(f"its header has more than {MAX_HEADER >> 20} MiB")
        if count > self.size - self.position:
            raise ValueError(
                f"it ends early: {count} bytes are announced at byte {self.position}, and "
                f"{self.size - self.position} are left"
            )
        data = self._file.read(count)
        if len(data) < count:
            raise ValueError("it became shorter while it was read")
        self.position += count
        return data

    def number(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize), kind)[0].item()

    def count(self, most: int, what: str) -> int:
        value = self.number("<u8")
        if value > most:
            raise ValueError(f"it announces {value} {what}; at most {most} are read")
        return value

    def text(self, most: int = MAX_HEADER) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        if length > most:
            raise ValueError(f"it announces a text of {length} bytes at byte {self.position}")
        return self.take(length).decode()


def _read_metadata(source: _Source, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = source.text(MAX_NAME)
        if key in metadata:
            raise ValueError(f"key {format_value(key)} stands twice")
        kind = source.number("<u4")
        if kind == _ARRAY:
            metadata[key] = _read_array(source, key)
        else:
            metadata[key] = _read_value(source, kind, key)
    return metadata


def _read_value(source: _Source, kind: int, key: str) -> Any:
    if kind == _TEXT:
        return source.text()
    if kind not in _SCALARS:
        raise ValueError(f"key {format_value(key)} has a value of the unknown type {kind}")
    return source.number(_SCALARS[kind])


def _read_array(source: _Source, key: str) -> list[Any]:
    kind = source.number("<u4")
    count = source.number("<u8")
    if kind == _TEXT:
        # Each text has at least its length, of eight bytes.
        if count > (source.size - source.position) // 8:
            raise ValueError(f"key {format_value(key)} announces {count} texts: it ends early")
        return [source.text() for _ in range(count)]
    if kind not in _SCALARS:
        raise ValueError(f"key {format_value(key)} is an array of the unknown type {kind}")
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(source.take(count * dtype.itemsize), dtype).tolist()


def _read_tensors(
    source: _Source, count: int, metadata: dict[str, Any], package: Any
) -> dict[str, Tensor]:
    entries = {}
    for _ in range(count):
        name = source.text(MAX_NAME)
        dims = source.number("<u4")
        if not 1 <= dims <= MAX_DIMS:
            raise ValueError(f"tensor {format_value(name)} has {dims} dimensions")
        sizes = np.frombuffer(source.take(8 * dims), "<u8").tolist()
        if name in entries:
            raise ValueError(f"tensor {format_value(name)} stands twice")
        # The file lists the fastest axis, the inputs, first.
        entries[name] = (tuple(sizes[::-1]), source.number("<u4"), source.number("<u8"))

    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={format_value(alignment)} is no power of two")
    start = -(-source.position // alignment) * alignment
    tensors = {}
    for name, (shape, number, offset) in entries.items():
        tensors[name] = _placed(name, shape, number, start + offset, source.size, package)
    return tensors


def _placed(
    name: str,
    shape: tuple[int, ...],
    number: int,
    offset: int,
    file_size: int,
    package: Any,
) -> Tensor:
    """A tensor whose bytes are all in the file.

    Raises:
      ValueError: its type is unknown, its inputs are no whole blocks, or the file ends before it.
    """
    try:
        kind = package.GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"tensor {format_value(name)} has the unknown type {number}") from None
    block, block_bytes = package.GGML_QUANT_SIZES[kind]
    if shape[-1] % block or not math.prod(shape):
        raise ValueError(
            f"tensor {format_value(name)} has shape {list(shape)}, and blocks of {kind.name} have "
            f"{block} inputs"
        )
    size = math.prod(shape) // block * block_bytes
    if offset + size > file_size:
        raise ValueError(
            f"it ends early: tensor {format_value(name)} has {size} bytes from byte "
            f"{offset} on, and the file has {file_size}"
        )
    return Tensor(shape, kind.name, offset, size)
