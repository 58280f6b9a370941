"""The embedded ``demo-sdsat``: what SDSAT tuning changed in the demo target, in 8 bits.

A whole second copy of the weights would double what the package carries. The difference is
kept instead, as int8 with one scale per row; adding it to the target's weights gives an
ordinary model directory, written once to the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
BASE, TUNED = HERE / "target", HERE / "sdsat"
WEIGHTS, DELTA, SCALE = "model.safetensors", "delta.safetensors", ".scale"
LEVELS = 127  # int8, symmetric


def pack(tuned: Path, directory: Path = TUNED, base: Path = BASE) -> None:
    """Writes ``tuned``'s config, and the difference of its weights to ``base``'s."""
    old, delta = load_file(base / WEIGHTS), {}
    for name, new in load_file(tuned / WEIGHTS).items():
        change = new.astype(np.float32) - _grown(old[name], new.shape[0])
        if change.ndim == 1:
            delta[name] = change.astype(np.float16)
            continue
        scale = np.maximum(np.abs(change).max(1), 1e-8) / LEVELS
        delta[name] = np.round(change / scale[:, None]).astype(np.int8)
        delta[name + SCALE] = scale.astype(np.float32)
    directory.mkdir(exist_ok=True)
    save_file(delta, directory / DELTA)
    shutil.copyfile(tuned / "config.json", directory / "config.json")


def unpack(directory: Path = TUNED, base: Path = BASE) -> dict[str, np.ndarray]:
    """The tuned model's tensors, float16."""
    old, delta = load_file(base / WEIGHTS), load_file(directory / DELTA)
    tensors = {}
    for name, change in delta.items():
        if name.endswith(SCALE):
            continue
        change = change.astype(np.float32)
        if change.ndim > 1:
            change *= delta[name + SCALE][:, None]
        tensors[name] = (_grown(old[name], change.shape[0]) + change).astype(np.float16)
    return tensors


def directory() -> Path:
    """The model directory of ``demo-sdsat``, made at its first use; it is named by its content."""
    key = hashlib.sha256((TUNED / DELTA).read_bytes()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"
    made = home / f"demo-sdsat-{key}"
    if made.exists():
        return made
    home.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=home, prefix=".demo-sdsat-"))
    try:
        save_file(unpack(), scratch / WEIGHTS, metadata={"format": "pt"})
        for file in (TUNED / "config.json", HERE / "tokenizer.json"):
            shutil.copyfile(file, scratch / file.name)
        scratch.chmod(0o755)
        os.rename(scratch, made)
    except OSError:
        if not made.exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return made


def _grown(table: np.ndarray, rows: int) -> np.ndarray:
    """float32, with rows of zeros for new ids."""
    table = table.astype(np.float32)
    return np.pad(table, [(0, rows - len(table)), *[(0, 0)] * (table.ndim - 1)])
