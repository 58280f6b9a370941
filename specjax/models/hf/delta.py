"""A delta: a directory with adapters, and the name of the unchanged base that they are for.

``delta.json`` names the base, with a fingerprint of its weights, and it lists the adaptive ids. The
name is a hub id, an embedded model's name, or a path. A path that begins with a dot starts at the
delta's own directory, so that both can be moved together. ``delta.safetensors`` holds the adapters
(:mod:`specjax.models.adapters`). The base is read from its own directory and never copied.

8-bit adapters are stored as int8 codes with a float32 scale for each output, ``NAME.scales``.
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
from specjax._util.errors import ModelError, errors_as
from specjax._util.files import write_text
from specjax.models.adapters import DOWN, UP, distinct
from specjax.models.config import ModelConfig
from specjax.models.forward_pass import param_shapes
from specjax.models.hf.files import (
    OpenWeights,
    compare_names,
    open_tensors,
    read_json,
    read_tensor,
    tensor_files,
)
from specjax.models.hf.layout import DELTA, DTYPES
from specjax.models.hf.write import save_tensors
from specjax.models.quantization import parse_scheme, quantize

NOTE = DELTA
TENSORS = "delta.safetensors"
INT8 = "int8"  # a dtype of saved adapters, besides those of models
SCALES = ".scales"  # ends the name of a tensor with the scales of int8 codes
SAMPLED_ROWS = 16  # of each tensor, for a fingerprint: tuning changes all rows
CHECKS = {
    "base": TEXT,
    "fingerprint": TEXT,
    "adaptive_ids": list_of(whole(0)),
    "rank": whole(),
    "matrices": list_of(TEXT),
}


@dataclasses.dataclass(frozen=True)
class Delta:
    """The content of ``delta.json``.

    Attributes:
      base: a hub id, an embedded model's name, or a path; one that begins with a dot starts at
        the delta's directory.
      fingerprint: the base's, as :func:`fingerprint` gives it.
      adaptive_ids: in the order of their indices in a window, as in :class:`ModelConfig`.
      rank: of every update.
      matrices: the matrices that have an update in each layer, as ``module.name``.
      chat_template: the digest of the chat template that the adapters were tuned with
        (:func:`specjax.text.tokenizer.template_digest`); empty: they saw no conversation.
    """

    base: str
    fingerprint: str
    adaptive_ids: tuple[int, ...]
    rank: int
    matrices: tuple[str, ...]
    chat_template: str = ""


def read_delta(directory: Path) -> Delta | None:
    """The directory's ``delta.json``; None where there is none: it then holds a model.

    Raises:
      ModelError: a value is missing or of a wrong type.
    """
    path = directory / NOTE
    if not os.path.lexists(path):
        return None
    note = read_json(path)
    for name, check in CHECKS.items():
        require(f"{path}: ", name, note.get(name), check, ModelError)
    require(f"{path}: ", "chat_template", note.get("chat_template", ""), TEXT, ModelError)
    return Delta(
        base=note["base"],
        fingerprint=note["fingerprint"],
        adaptive_ids=tuple(note["adaptive_ids"]),
        rank=note["rank"],
        matrices=tuple(note["matrices"]),
        chat_template=note.get("chat_template", ""),
    )


def save_delta(
    base: str,
    base_directory: Path,
    cfg: ModelConfig,
    adapters: dict,
    dtype: str,
    chat_template: str,
    directory: Path,
) -> None:
    """Writes a delta. ``delta.json`` is written last, so a directory with one is complete.

    Args:
      base: a name by which ``base_directory`` is found again, as in :class:`Delta`.
      base_directory: where the base's weights are.
      cfg: the base's config, with the adaptive ids.
      adapters: plain ones, not in the inference layout.
      dtype: of the saved adapters: ``float32``, ``bfloat16``, ``float16`` or ``int8``. The new
        embedding rows of int8 adapters are float16.
      chat_template: as in :class:`Delta`.
    Raises:
      ModelError: the base's weights cannot be read.
      OSError: the delta cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory / TENSORS, _stored(_flatten(adapters), dtype))

    # The same matrices have an update in every layer, all of one rank: the first layer shows them.
    matrices = {}
    for module, pairs in adapters["layers"]["0"].items():
        for name, pair in pairs.items():
            matrices[f"{module}.{name}"] = pair
    rank = next(iter(matrices.values()))[DOWN].shape[0]
    print_of_base = fingerprint(base_directory)
    note = Delta(base, print_of_base, cfg.adaptive_ids, rank, tuple(matrices), chat_template)
    write_text(directory / NOTE, json.dumps(dataclasses.asdict(note), indent=1) + "\n")


def load_delta(
    directory: Path, delta: Delta, base: Path, cfg: ModelConfig, dtype: jnp.dtype
) -> dict:
    """The adapters of a delta, as plain params of ``dtype``.

    ``base`` is the directory of the model that they are for, ``cfg`` that model's config.

    Raises:
      ModelError: the base's weights are not the ones that the delta was made for, or a tensor is
        missing, unknown, or of another shape.
    """
    if fingerprint(base) != delta.fingerprint:
        raise ModelError(
            f"{directory}: it was made for {delta.base}, but the weights in {base} are others; "
            "restore them, or name its base with --base DIR or load(…, base=)"
        )
    shapes = _flatten(_adapter_shapes(directory, delta, cfg))
    path = directory / TENSORS
    if not os.path.lexists(path):
        raise ModelError(f"{directory}: no {TENSORS} beside {NOTE}; copy all of the directory")
    handle = open_tensors(path)
    stored = set(handle.keys())
    scales = {name + SCALES for name in shapes} & stored
    compare_names(directory, set(shapes) | scales, stored)
    adapters = {}
    for name, shape in shapes.items():
        if name + SCALES not in scales:
            tensor = read_tensor(handle, path, name, shape, source=NOTE)
        else:
            codes = read_tensor(handle, path, name, shape, ("I8",), NOTE)
            scale = read_tensor(handle, path, name + SCALES, shape[:1], ("F32",), NOTE)
            tensor = codes * scale[:, None]
        adapters[name] = jnp.asarray(tensor, dtype)
    return _unflatten(adapters)


def _stored(adapters: dict[str, jax.Array], dtype: str) -> dict[str, np.ndarray]:
    """The tensors of ``delta.safetensors``, from adapters by their path."""
    tensors = {}
    for name, x in adapters.items():
        if dtype != INT8:
            tensors[name] = np.asarray(x.astype(DTYPES[dtype]))
        elif name == "embed":
            tensors[name] = np.asarray(x.astype(jnp.float16))
        else:
            codes = quantize(jnp.asarray(x), parse_scheme(INT8), jnp.float32)
            tensors[name] = np.asarray(codes.codes)
            tensors[name + SCALES] = np.asarray(codes.scales)
    return tensors


def fingerprint(directory: Path) -> str:
    """SHA-256 of every tensor's name, dtype and shape, and of some rows of each, as hex digits.

    Raises:
      ModelError: there are no weights, or they cannot be read.
    """
    digest = hashlib.sha256()
    weights = OpenWeights.open(tensor_files(directory, pickles=False))
    for name, path in sorted(weights.files.items()):
        with errors_as(f"{path}: tensor {name} cannot be read"):
            tensor = weights.handles[path].get_slice(name)
            shape = tensor.get_shape()
            digest.update(json.dumps([name, tensor.get_dtype(), shape]).encode())
            # Some evenly spaced rows: reading all of a large model would take minutes.
            rows = np.linspace(0, shape[0] - 1, SAMPLED_ROWS).astype(int)
            for row in np.unique(rows).tolist():
                digest.update(np.ascontiguousarray(tensor[row : row + 1]).tobytes())
    return digest.hexdigest()


def _adapter_shapes(directory: Path, delta: Delta, cfg: ModelConfig) -> dict:
    """The shapes of the adapters that ``delta.json`` describes: a nested dict of tuples."""
    params = param_shapes(cfg)
    layers: dict[str, dict] = {}
    for i, block in params["layers"].items():
        layers[i] = {}
        for matrix in delta.matrices:
            module, _, name = matrix.partition(".")
            param = block.get(module, {}).get(name)
            if not isinstance(param, dict) or param["weight"].ndim != 2:
                raise ModelError(f"{directory / NOTE}: the base has no matrix {matrix!r}")
            outputs, inputs = param["weight"].shape
            shapes = {DOWN: (delta.rank, inputs), UP: (outputs, delta.rank)}
            layers[i].setdefault(module, {})[name] = shapes
    # One new embedding row for each adaptive id.
    embed = (len(distinct(delta.adaptive_ids)), params["embed"].shape[1])
    return {"embed": embed, "layers": layers}


def _flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested dict by their path, its keys joined by dots."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _unflatten(flat: dict[str, Any]) -> dict:
    """The inverse of :func:`_flatten`."""
    tree: dict = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        parent = tree
        for key in path:
            parent = parent.setdefault(key, {})
        parent[last] = value
    return tree
