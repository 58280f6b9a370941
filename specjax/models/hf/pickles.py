"""Reads checkpoints that are pickles (``pytorch_model*.bin``), with torch.

The unpickler is torch's restricted one (``weights_only``). It builds tensors and runs no code of
the file. Needs the torch extra.
"""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax._util.errors import ModelError, errors_as
from specjax._util.files import check_file

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def read_pickle(path: Path) -> dict[str, Any]:
    """The torch tensors of one pickle, by name; memory-mapped where the file's format allows.

    Raises:
      ModelError: torch is not installed, or the file holds anything except named tensors.
    """
    try:
        import torch
    except ImportError:
        raise ModelError(f'{path}: pickles need torch: pip install "specjax[torch]"') from None
    # A damaged file can make the unpickler raise anything.
    with errors_as(f"{path}: not a readable pickle of tensors"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_file(path)
        mapped = zipfile.is_zipfile(path)  # the format that torch writes since 1.6
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors.items())):
        raise ModelError(f"{path}: holds something else than named, dense tensors")
    return tensors


def _is_plain(entry: tuple[Any, Any]) -> bool:
    """Whether an entry is a name and a tensor that stores a value for each of its elements.

    An expanded tensor stores fewer: a small file could claim terabytes.
    """
    import torch

    name, value = entry
    return (
        type(name) is str
        and isinstance(value, torch.Tensor)
        and not (value.is_meta or value.is_quantized or value.is_nested)
        and value.layout is torch.strided
        and value.nbytes <= value.untyped_storage().nbytes()
    )


class Pickle:
    """A pickle with the part of the interface of ``safetensors.safe_open`` that loading uses.

    Raises:
      ModelError: as :func:`read_pickle`.
    """

    def __init__(self, path: Path):
        self._tensors = read_pickle(path)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Header:
        """Shape and dtype, and rows on demand: nothing is copied."""
        return _Header(self._tensors[name])

    def get_tensor(self, name: str) -> np.ndarray:
        """The tensor as a numpy array."""
        return _as_numpy(self._tensors[name])


def _as_numpy(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        # numpy has no bfloat16 of its own: the bits go through int16.
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


class _Header:
    """Shape, dtype and rows of a tensor, in safetensors' terms."""

    def __init__(self, tensor: Any):
        self._tensor = tensor

    def __getitem__(self, rows: slice) -> np.ndarray:
        return _as_numpy(self._tensor[rows])

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        name = str(self._tensor.dtype).removeprefix("torch.")
        return SAFETENSORS_DTYPES.get(name, name)
