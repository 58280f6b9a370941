"""A delta: a directory with adapters, and the name of the untouched base that they are for.

``delta.json`` says what the base is, by a path or an id and by its fingerprint, and which ids are
adaptive; ``delta.safetensors`` holds the adapters (:mod:`specjax.models.adapters`). The base is
read where it lies and never copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.checks import TEXT, list_of, require, whole
from specjax._util.errors import ModelError, foreign
from specjax._util.files import write_text
from specjax.models.adapters import DOWN, UP, distinct
from specjax.models.config import ModelConfig
from specjax.models.forward_pass import param_shapes
from specjax.models.hf.checkpoint import (
    DELTA,
    DTYPES,
    compare_names,
    open_tensors,
    read_json,
    read_tensor,
    save_tensors,
    tensor_files,
)

NOTE, TENSORS = DELTA, "delta.safetensors"
SAMPLED = 16  # rows of each tensor that a fingerprint reads: tuning changes all of them
CHECKS = {
    "base": TEXT,
    "fingerprint": TEXT,
    "adaptive_ids": list_of(whole(0)),
    "rank": whole(),
    "matrices": list_of(TEXT),
}


@dataclasses.dataclass(frozen=True)
class Delta:
    """What ``delta.json`` says.

    Attributes:
      base: a directory, a hub id, or an embedded model's name.
      fingerprint: the base's, as :func:`fingerprint` gives it.
      adaptive_ids: by their place in a window, as :class:`ModelConfig` has them.
      rank: of every update.
      matrices: those that have one in each layer, ``module.name``.
    """

    base: str
    fingerprint: str
    adaptive_ids: tuple[int, ...]
    rank: int
    matrices: tuple[str, ...]


def read_delta(directory: Path) -> Delta | None:
    """What a directory's ``delta.json`` says; None where there is none: it holds a model.

    Raises:
      ModelError: it says something else.
    """
    path = directory / NOTE
    if not os.path.lexists(path):
        return None
    note = read_json(path)
    for name, check in CHECKS.items():
        require(f"{path}: ", name, note.get(name), check, ModelError)
    values = {name: note[name] for name in CHECKS}
    return Delta(**{k: tuple(x) if isinstance(x, list) else x for k, x in values.items()})


def save_delta(
    base: str, base_directory: Path, cfg: ModelConfig, adapters: dict, dtype: str, directory: Path
) -> None:
    """Writes plain (not fused) adapters of ``cfg``, whose params lie in ``base_directory``.

    ``base`` is what finds that directory again. ``delta.json`` is written last, so that a
    directory with one is complete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = jax.tree.map(lambda x: np.asarray(x.astype(DTYPES[dtype])), adapters)
    modules = adapters["layers"]["0"]
    pairs = {f"{part}.{name}": pair for part, own in modules.items() for name, pair in own.items()}
    rank = next(iter(pairs.values()))[DOWN].shape[0]
    save_tensors(directory / TENSORS, _flat(tensors))
    note = Delta(base, fingerprint(base_directory), cfg.adaptive_ids, rank, tuple(pairs))
    write_text(directory / NOTE, json.dumps(dataclasses.asdict(note), indent=1) + "\n")


def load_delta(
    directory: Path, delta: Delta, base: Path, cfg: ModelConfig, dtype: jnp.dtype
) -> dict:
    """The adapters of a delta, plain, for the model in ``base``, whose config is ``cfg``.

    Raises:
      ModelError: the base is another one; a tensor is missing, unknown, or of another shape.
    """
    if fingerprint(base) != delta.fingerprint:
        raise ModelError(
            f"{directory}: it was made for {delta.base}, and the weights in {base} are others by "
            f"now; restore them, or let {NOTE} name where they are"
        )
    path, shapes = directory / TENSORS, _flat(_shapes(directory, delta, cfg))
    if not os.path.lexists(path):
        raise ModelError(f"{directory}: no {TENSORS} beside {NOTE}; copy all of the directory")
    handle = open_tensors(path)
    compare_names(directory, set(shapes), set(handle.keys()))
    read = {
        name: jnp.asarray(read_tensor(handle, path, name, shape, note=NOTE), dtype)
        for name, shape in shapes.items()
    }
    return _nested(read)


def fingerprint(directory: Path) -> str:
    """SHA-256 of every tensor's name, dtype and shape, and of some rows of each, as hex digits.

    Raises:
      ModelError: there are no weights, or they cannot be read.
    """
    digest = hashlib.sha256()
    files = tensor_files(directory, pickles=False)
    handles = {file: open_tensors(file) for file in set(files.values())}
    for name, file in sorted(files.items()):
        with foreign(f"{file}: tensor {name} cannot be read"):
            tensor = handles[file].get_slice(name)
            shape = tensor.get_shape()
            digest.update(json.dumps([name, tensor.get_dtype(), shape]).encode())
            for row in np.unique(np.linspace(0, shape[0] - 1, SAMPLED).astype(int)).tolist():
                digest.update(np.ascontiguousarray(tensor[row : row + 1]).tobytes())
    return digest.hexdigest()


def _shapes(directory: Path, delta: Delta, cfg: ModelConfig) -> dict:
    """The adapters that the note describes, as shapes."""
    params, rank, layers = param_shapes(cfg), delta.rank, {}
    for i, block in params["layers"].items():
        layers[i] = {}
        for matrix in delta.matrices:
            part, _, name = matrix.partition(".")
            module = block.get(part, {}).get(name)
            if not isinstance(module, dict) or module["weight"].ndim != 2:
                raise ModelError(f"{directory / NOTE}: the base has no matrix {matrix!r}")
            outputs, inputs = module["weight"].shape
            pair = {DOWN: (rank, inputs), UP: (outputs, rank)}
            layers[i].setdefault(part, {})[name] = pair
    embed = len(distinct(delta.adaptive_ids)), params["embed"].shape[1]
    return {"embed": embed, "layers": layers}


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Leaves by the names on their way, joined by dots."""
    flat = {}
    for name, value in tree.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return flat


def _nested(flat: dict[str, Any]) -> dict:
    """The inverse of :func:`_flat`."""
    tree: dict = {}
    for name, value in flat.items():
        *way, last = name.split(".")
        at = tree
        for part in way:
            at = at.setdefault(part, {})
        at[last] = value
    return tree
