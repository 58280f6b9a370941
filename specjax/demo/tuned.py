"""The embedded model ``demo-sdsat``: what SDSAT tuning changed in the demo target, in 8 bits.

A second copy of all weights would double the size of the package. So only the difference is kept,
as int8 with one scale per row. Adding it to the target's weights gives an ordinary model directory,
which is written once to the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save, save_file

from specjax._util.errors import ModelError, system_error
from specjax._util.files import user_cache

HERE = Path(__file__).parent
BASE = HERE / "target"
TUNED = HERE / "sdsat"
WEIGHTS = "model.safetensors"
DELTA = "delta.safetensors"
SCALE = ".scale"  # suffix of the tensor with the scales of another one
MAX_CODE = 127  # int8, symmetric
NOT_WRITTEN = "demo-sdsat cannot be written to the user's cache"
WAY_OUT = "set XDG_CACHE_HOME to a directory that can be written"


def pack(tuned: Path, directory: Path = TUNED, base: Path = BASE) -> None:
    """Writes ``tuned``'s config, and the difference of its weights to ``base``'s.

    Vectors are stored as float16; matrices as int8, with a float32 scale per row.

    Args:
      tuned: the directory of the tuned model.
      directory: where the difference goes.
      base: the directory of the model that was tuned.
    """
    base_tensors = load_file(base / WEIGHTS)
    delta = {}
    for name, tensor in load_file(tuned / WEIGHTS).items():
        change = tensor.astype(np.float32) - _padded(base_tensors[name], tensor.shape[0])
        if change.ndim == 1:
            delta[name] = change.astype(np.float16)
            continue
        scale = np.maximum(np.abs(change).max(1), 1e-8) / MAX_CODE
        delta[name] = np.round(change / scale[:, None]).astype(np.int8)
        delta[name + SCALE] = scale.astype(np.float32)
    directory.mkdir(exist_ok=True)
    save_file(delta, directory / DELTA)
    shutil.copyfile(tuned / "config.json", directory / "config.json")


def unpack(directory: Path = TUNED, base: Path = BASE) -> dict[str, np.ndarray]:
    """The tuned model's tensors, float16."""
    base_tensors = load_file(base / WEIGHTS)
    delta = load_file(directory / DELTA)
    tensors = {}
    for name, stored in delta.items():
        if name.endswith(SCALE):
            continue
        change = stored.astype(np.float32)
        if change.ndim > 1:
            change *= delta[name + SCALE][:, None]
        tensor = _padded(base_tensors[name], change.shape[0]) + change
        tensors[name] = tensor.astype(np.float16)
    return tensors


def directory() -> Path:
    """The model directory of ``demo-sdsat``, which the first call writes.

    Its name has a hash of the difference, so another version of the package writes another one.

    Raises:
      ModelError: the user has no cache directory, or it cannot be written.
    """
    cache = user_cache()
    if cache is None:
        raise ModelError(f"{NOT_WRITTEN} (there is no home directory): {WAY_OUT}")
    try:
        return _unpacked(cache / "specjax")
    except OSError as error:
        raise ModelError(f"{NOT_WRITTEN} ({system_error(error)}): {WAY_OUT}") from None


def _unpacked(cache: Path) -> Path:
    """The model directory in a cache directory; it is written if it is missing."""
    key = hashlib.sha256((TUNED / DELTA).read_bytes()).hexdigest()[:16]
    path = cache / f"demo-sdsat-{key}"
    if os.path.exists(path):
        return path
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=cache, prefix=".demo-sdsat-"))
    try:
        # Written by Python: a full disk is an OSError then.
        (scratch / WEIGHTS).write_bytes(save(unpack(), metadata={"format": "pt"}))
        for file in (TUNED / "config.json", HERE / "tokenizer.json"):
            shutil.copyfile(file, scratch / file.name)
        scratch.chmod(0o755)  # mkdtemp makes directories that only the owner can read
        os.rename(scratch, path)
    except OSError:
        if not path.exists():  # if it does, another process was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _padded(tensor: np.ndarray, rows: int) -> np.ndarray:
    """The tensor as float32, with rows of zeros added at the end for new ids."""
    tensor = tensor.astype(np.float32)
    padding = [(0, rows - len(tensor))] + [(0, 0)] * (tensor.ndim - 1)
    return np.pad(tensor, padding)
