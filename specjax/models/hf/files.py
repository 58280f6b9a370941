"""The files of a checkpoint directory: small text files, and the weight files with their tensors.

Files are opened strictly: a missing, broken or misplaced one is an error that names it. Nothing
that a file contains is executed. This file does not know which tensors a model needs.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specjax._util.errors import ModelError, errors_as
from specjax._util.files import open_file, parse_json, read_file
from specjax.models.hf.kinds import describe_directory
from specjax.models.hf.layout import INDEX, WEIGHTS
from specjax.models.hf.pickles import PICKLE, PICKLE_INDEX, Pickle
from specjax.models.hf.tensor_file import FLOAT_DTYPES, SafetensorsFile

MAX_TEXT_BYTES = 1 << 28  # of a file that is not weights: tokenizers have about 2^25
POINTER = b"version https://git-lfs"  # the first bytes of what stands for a file in git


class TensorFile(Protocol):
    """What loading uses of an open file of weights."""

    def keys(self) -> Iterable[str]: ...

    def get_slice(self, name: str) -> Any: ...

    def get_tensor(self, name: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class OpenWeights:
    """The open weight files of a directory.

    Attributes:
      files: the file that holds each tensor, by the tensor's name.
      handles: the open file of each path.
    """

    files: dict[str, Path]
    handles: dict[Path, TensorFile]

    @classmethod
    def open(cls, files: dict[str, Path]) -> OpenWeights:
        """Opens the files that :func:`tensor_files` gives.

        Raises:
          ModelError: a file cannot be read.
        """
        paths = sorted(set(files.values()))
        return cls(files, {path: open_tensors(path) for path in paths})

    def read(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOAT_DTYPES
    ) -> np.ndarray:
        """One tensor, of this shape and one of these dtypes.

        Raises:
          ModelError: it has another shape or dtype, or cannot be read.
        """
        path = self.files[name]
        return read_tensor(self.handles[path], path, name, shape, dtypes)

    def rows(self, name: str, shape: tuple[int, ...], first: int, last: int) -> np.ndarray:
        """Rows ``first`` to ``last`` of one tensor of this shape; the others are not read.

        Raises:
          ModelError: it has another shape or no float dtype, or cannot be read.
        """
        path = self.files[name]
        header = checked_header(self.handles[path], path, name, shape)
        with errors_as(f"{path}: tensor {name} cannot be read"):
            return header[first:last]

    def read_any(self, name: str) -> np.ndarray:
        """One tensor, whatever its shape and dtype.

        Raises:
          ModelError: it cannot be read.
        """
        path = self.files[name]
        with errors_as(f"{path}: tensor {name} cannot be read"):
            return self.handles[path].get_tensor(name)


# --- text files ------------------------------------------------------------------------------


def read_json(path: Path) -> dict:
    """The JSON object in a file; an empty one where there is no file.

    Raises:
      ModelError: the file holds something else.
    """
    if not os.path.lexists(path):
        return {}
    try:
        value = parse_json(read_text_file(path))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_text_file(path: Path) -> bytes:
    """The bytes of a file that is not weights, such as a config or a tokenizer.

    Raises:
      ModelError: it cannot be read; the message gives the system's reason. Or it is a pointer of
        git-lfs.
    """
    try:
        data = read_file(path, most=MAX_TEXT_BYTES)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    _refuse_pointer(path, data)
    return data


def _refuse_pointer(path: Path, data: bytes) -> None:
    """Refuses what git leaves in a file's place where git-lfs is not installed.

    Raises:
      ModelError: says how to get the file.
    """
    if data.startswith(POINTER):
        raise ModelError(
            f"{path}: a git-lfs pointer, not the file itself; run git lfs pull in its repository"
        )


# --- weight files ----------------------------------------------------------------------------


def tensor_files(directory: Path, pickles: bool) -> dict[str, Path]:
    """The file that holds each tensor. The files are opened, so that a broken one is found.

    A single file is preferred to an index, as in transformers: saving over a sharded directory
    leaves its old index behind. Pickles come last, and are read only where ``pickles`` is set.

    Raises:
      ModelError: there are no weights, a shard is missing, or a file cannot be read.
    """
    kinds = [(WEIGHTS, INDEX)]
    if pickles:
        kinds.append((PICKLE, PICKLE_INDEX))
    for single, index in kinds:
        path = directory / single
        if os.path.lexists(path):
            return dict.fromkeys(open_tensors(path).keys(), path)
        if os.path.lexists(directory / index):
            return _sharded_files(directory, index)
        files = unlisted_shards(directory, single, index)
        if files:
            return files

    hint = describe_directory(directory)
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if others and not hint:
        hint = f"; if {others[0]} has the weights, name it {WEIGHTS}"
    unread = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if unread:
        hint = (
            f"; {unread[0]} is a pickle: --pickles (in Python pickles=True) reads its tensors, and "
            "python -m infer.convert makes safetensors of it"
        )
    raise ModelError(f"{directory}: no {WEIGHTS} and no {INDEX}{hint}")


def _sharded_files(directory: Path, index: str) -> dict[str, Path]:
    """The shard that holds each tensor: what the shards contain, checked against the index."""
    weight_map = read_weight_map(directory / index)
    shards = {name: directory / name for name in sorted(set(weight_map.values()))}
    for name, path in shards.items():
        if not os.path.lexists(path):
            raise ModelError(f"{directory}: shard {name}, named by {index}, is missing")

    contents = {name: set(open_tensors(path).keys()) for name, path in shards.items()}
    for tensor, shard in weight_map.items():
        if tensor not in contents[shard]:
            raise ModelError(
                f"{directory / shard}: lacks tensor {tensor}, which {index} puts there"
            )
    files = {}
    for name, path in shards.items():
        files |= dict.fromkeys(sorted(contents[name]), path)
    return files


def unlisted_shards(directory: Path, single: str, index: str) -> dict[str, Path]:
    """The shard that holds each tensor, where the index is missing; empty if there are no shards.

    ``single`` is the name of the weights in one file, such as ``model.safetensors``.

    Raises:
      ModelError: by their names the shards are not complete, or two hold the same tensor.
    """
    stem, ending = single.split(".")
    form = re.compile(rf"{stem}-[0-9]{{5}}-of-([0-9]{{5}})\.{ending}")
    found = {}
    counts = set()
    for path in sorted(directory.glob(f"{stem}-*")):
        match = form.fullmatch(path.name)
        if match:
            found[path.name] = path
            counts.add(match[1])
    if not found:
        return {}
    count = max(counts)
    wanted = [f"{stem}-{i:05d}-of-{count}.{ending}" for i in range(1, int(count) + 1)]
    for name in wanted:
        if name not in found:
            raise ModelError(f"{directory}: shard {name} is missing, and so is {index}")
    if len(found) > len(wanted):
        other = min(found.keys() - set(wanted))
        raise ModelError(f"{directory}: shard {other} is of another set, and {index} is missing")

    files: dict[str, Path] = {}
    for path in found.values():
        names = open_tensors(path).keys()
        for tensor in names:
            if tensor in files:
                first = files[tensor].name
                raise ModelError(
                    f"{directory}: {first} and {path.name} both hold tensor {tensor}, and {index} "
                    "is missing"
                )
            files[tensor] = path
    return files


def read_weight_map(index: Path) -> dict[str, str]:
    """The name of the file that holds each tensor, from the index of a sharded checkpoint.

    Raises:
      ModelError: it holds something else, or names a file outside its own directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{index}: no weight_map from tensors to files")
    for name in weight_map.values():
        if name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise ModelError(f"{index}: {name!r} is no plain name of a file in its directory")
    return weight_map


def open_tensors(path: Path) -> TensorFile:
    """A weight file, open to be read: safetensors, or a pickle by its ending.

    Raises:
      ModelError: it cannot be read, or it is a pointer of git-lfs.
    """
    is_pickle = path.suffix == ".bin"
    kind = "pickle of tensors" if is_pickle else "safetensors file"
    with errors_as(f"{path}: not a readable {kind}"):
        with open_file(path) as file:
            _refuse_pointer(path, file.read(len(POINTER)))
        if not is_pickle:
            return SafetensorsFile(path)
    return Pickle(path)


def read_tensor(
    handle: TensorFile,
    path: Path,
    name: str,
    shape: tuple[int, ...],
    dtypes: Sequence[str] = FLOAT_DTYPES,
    source: str = "config.json",
) -> np.ndarray:
    """One tensor of an open file, of this shape and one of these dtypes.

    ``source`` is the file that the shape follows from; the error names it.

    Raises:
      ModelError: it has another shape or dtype, or cannot be read.
    """
    checked_header(handle, path, name, shape, dtypes, source)
    with errors_as(f"{path}: tensor {name} cannot be read"):
        return handle.get_tensor(name)


def checked_header(
    handle: TensorFile,
    path: Path,
    name: str,
    shape: tuple[int, ...],
    dtypes: Sequence[str] = FLOAT_DTYPES,
    source: str = "config.json",
) -> Any:
    """The header of a tensor, whose slices can be read; arguments as of :func:`read_tensor`.

    Raises:
      ModelError: the tensor has another shape or dtype.
    """
    header = handle.get_slice(name)
    found = tuple(header.get_shape())
    if found != shape:
        raise ModelError(
            f"{path}: tensor {name} has shape {list(found)}, {source} says {list(shape)}"
        )
    if header.get_dtype() not in dtypes:
        raise ModelError(
            f"{path}: tensor {name} is stored as {header.get_dtype()}; supported: "
            f"{', '.join(dtypes)}"
        )
    return header


def compare_names(
    directory: Path, wanted: set[str], stored: set[str], source: str = "config.json describes"
) -> None:
    """Checks that the files hold exactly the wanted tensors, which follow from the ``source``.

    Raises:
      ModelError: a tensor is missing, or a file holds one that is not wanted.
    """
    missing = sorted(wanted - stored)
    if missing:
        raise ModelError(f"{directory}: tensor {missing[0]} is missing{_and_more(missing)}")
    extra = sorted(stored - wanted)
    if extra:
        raise ModelError(
            f"{directory}: tensor {extra[0]} belongs to no part of the model that "
            f"{source}{_and_more(extra)}"
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
