"""Hugging Face directories: strict loading and saving of config.json + safetensors.

Every tensor of the model must be in the files with its exact shape and every tensor of the
files must be one of the model's: what does not match is an error by name. Nothing that a
checkpoint contains is executed.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax._util.errors import ModelError, foreign
from specjax._util.files import aside, check_file, parse_json, read_file, write_text
from specjax.models.blocks import fuse_layer
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES, from_hf, to_hf
from specjax.models.forward_pass import param_shapes
from specjax.models.hf import codes
from specjax.models.hf.config import QUANT_METHOD, quantization
from specjax.models.hf.names import Stored
from specjax.models.hf.pickles import PICKLE, PICKLE_INDEX, Pickle
from specjax.models.quantization import Scheme, parse_scheme, quantize_params
from specjax.models.quantized import cast_params

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DELTA = "delta.json"  # of a directory that holds adapters alone
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
MOST_TEXT = 1 << 28  # bytes of a file that is no weights: tokenizers have some 2^25
STORED_DTYPES = ("F32", "BF16", "F16")  # safetensors' names of the same

Place = tuple[Stored, tuple[int, ...]]  # of a parameter in the checkpoint; its shape here
Read = Callable[[str, tuple[int, ...]], np.ndarray]
Placed = Callable[[ModelConfig, dict], dict]  # moves a part of the params to where it is to lie


@functools.cache
def _places(cfg: ModelConfig) -> tuple[tuple[Place, ...], jax.tree_util.PyTreeDef]:
    """Where a checkpoint keeps each parameter, in the order of the tree, and the tree."""
    names = FAMILIES[cfg.family].names
    leaves, tree = tree_flatten_with_path(param_shapes(cfg))
    paths = [(tuple(k.key for k in path), leaf.shape) for path, leaf in leaves]
    return tuple((names.stored(path, cfg.num_heads), shape) for path, shape in paths), tree


def from_tensors(
    cfg: ModelConfig,
    read: Read,
    dtype: jnp.dtype,
    fused: bool = False,
    placed: Placed | None = None,
    scheme: Scheme | None = None,
) -> dict:
    """The params, from a function of a checkpoint tensor's name and the shape it must have.

    ``fused``: in the inference layout, each layer joined before the next is read, so that
    what the parts took is used again; so ``placed`` gets one layer after the other. ``scheme``:
    quantized, which takes the inference layout, of float32, whatever the ``dtype`` of the rest.
    """
    placed = placed or (lambda _, part: part)
    places, tree = _places(cfg)
    read_as = dtype if scheme is None else jnp.float32

    def load(part: dict) -> dict:
        return jax.tree.map(leaf, part, is_leaf=_is_tuple)

    def leaf(place: Place) -> jax.Array:
        stored, shape = place
        return jnp.asarray(stored.take(read(stored.name, stored.shape(shape))), read_as)

    def validate_fields(part: dict) -> dict:
        if scheme is not None:
            part = quantize_params(cfg, part, scheme, dtype)
        return jax.block_until_ready(placed(cfg, part))

    def layer(block: dict) -> dict:
        block = fuse_layer(load(block)) if fused else load(block)
        return validate_fields({"layers": {"": block}})["layers"][""]

    parts = jax.tree.unflatten(tree, places)
    layers = {i: layer(block) for i, block in parts.pop("layers").items()}
    rest = {name: validate_fields({name: load(part)})[name] for name, part in parts.items()}
    return rest | {"layers": layers}


def to_tensors(cfg: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """The checkpoint's tensors of plain (not fused) params."""
    tensors: dict[str, np.ndarray] = {}
    for (place, shape), leaf in zip(_places(cfg)[0], jax.tree.leaves(params), strict=True):
        value = np.asarray(leaf)
        if place == Stored(place.name):
            tensors[place.name] = value  # as it is: no second copy of the model
            continue
        if place.name not in tensors:
            tensors[place.name] = np.empty(place.shape(shape), value.dtype)
        place.put(tensors[place.name], value)
    return tensors | FAMILIES[cfg.family].buffers(cfg)


def load_pretrained(
    directory: str | Path,
    dtype: jnp.dtype = jnp.float32,
    fused: bool = False,
    pickles: bool = False,
    placed: Placed | None = None,
    quantize: str | None = None,
) -> tuple[ModelConfig, dict]:
    """Reads a model directory, tensor by tensor onto the device.

    Args:
      pickles: where there are no safetensors, read ``pytorch_model*.bin``: tensors alone, no
        code of theirs runs; needs the torch extra.
      placed: gets every part of the params as soon as it is read.
      quantize: a scheme (:func:`specjax.models.quantization.parse_scheme`); each layer and each
        table is quantized before the next is read.
    Returns:
      The config and the params as a nested dict of arrays of ``dtype``; ``fused`` in the
      inference layout.
    Raises:
      ModelError: missing or unreadable files, a missing, unknown or misshapen tensor, or a
        config feature that is not supported; each by name.
    """
    directory = Path(directory)
    cfg = load_config(directory)
    asked, stored = quantize and parse_scheme(quantize), stored_scheme(directory)
    if stored is not None and (not fused or asked not in (None, stored)):
        wanted = f"for {asked}" if asked else "to train or to convert it"
        raise ModelError(
            f"{directory}: its weights are quantized ({stored}); take the unquantised checkpoint "
            f"{wanted}"
        )
    files = tensor_files(directory, pickles)
    if cfg.num_layers > len(files):  # before anything is made for each of them
        raise ModelError(
            f"{directory}: config.json says {cfg.num_layers} layers, but its files hold "
            f"{len(files)} tensors"
        )
    handles = {file: open_tensors(file) for file in sorted(set(files.values()))}
    cfg = _completed(directory, cfg, files, handles)
    if stored is not None:
        return cfg, _read_codes(directory, cfg, stored, files, handles, dtype, placed)
    present = _check_names(directory, cfg, sorted(files))

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        file = files[present[name]]
        return read_tensor(handles[file], file, present[name], shape)

    return cfg, from_tensors(cfg, read, dtype, fused, placed, asked)


def _read_codes(directory, cfg, scheme: Scheme, files, handles, dtype, placed) -> dict:
    """The params of a quantized checkpoint, each part placed before the next is read."""
    wanted = codes.forms(cfg, scheme)
    names = {name for name, *_ in jax.tree.leaves(wanted, is_leaf=_is_tuple)}
    compare_names(directory, names, files.keys() - FAMILIES[cfg.family].buffers(cfg).keys())

    def leaf(form: codes.Form) -> jax.Array:
        file, held = files[form[0]], codes.stored_dtype(form)
        value = read_tensor(handles[file], file, form[0], codes.stored_shape(form), (held,))
        return jnp.asarray(codes.from_stored(value, form))

    def validate_fields(part: dict) -> dict:
        part = cast_params(dtype, jax.tree.map(leaf, part, is_leaf=_is_tuple))
        return jax.block_until_ready(placed(cfg, part) if placed else part)

    layers = wanted.pop("layers")
    layers = {
        i: validate_fields({"layers": {i: block}})["layers"][i] for i, block in layers.items()
    }
    return {name: validate_fields({name: part})[name] for name, part in wanted.items()} | {
        "layers": layers
    }


def save_pretrained(
    directory: str | Path,
    cfg: ModelConfig,
    params: dict,
    tokenizer_json: str | None = None,
    dtype: str = "float32",
) -> None:
    """Writes a directory that transformers loads unchanged.

    Each file is written aside and renamed, config.json last, so that a directory with a
    config is complete. ``tokenizer_json`` is the text of a ``tokenizer.json``.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = to_tensors(cfg, jax.tree.map(lambda x: x.astype(DTYPES[dtype]), params))
    save_tensors(directory / WEIGHTS, tensors)
    if tokenizer_json is not None:
        write_text(directory / "tokenizer.json", tokenizer_json)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        write_text(directory / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
    write_text(directory / "config.json", json.dumps(to_hf(cfg, dtype), indent=1) + "\n")


def save_quantized(
    directory: Path, cfg: ModelConfig, config: dict, params: dict, scheme: Scheme
) -> None:
    """Writes quantized params of float32 (:mod:`specjax.models.hf.codes`), config.json last.

    ``config`` is the unquantised checkpoint's config.json, ``cfg`` what it and its tensors say.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory / WEIGHTS, codes.to_stored(params) | FAMILIES[cfg.family].buffers(cfg))
    note = {"quant_method": QUANT_METHOD, "version": 1, "scheme": str(scheme)}
    config = config | {"quantization_config": note}
    write_text(directory / "config.json", json.dumps(config, indent=1) + "\n")


def save_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    try:
        with aside(path) as scratch:
            save_file(tensors, scratch, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None


def stored_scheme(directory: Path) -> Scheme | None:
    """The scheme of a quantized checkpoint; None for any other.

    Raises:
      ModelError: it is not one of ours.
    """
    scheme = quantization(read_json(directory / "config.json"))
    return None if scheme is None else parse_scheme(scheme)


def load_config(directory: Path) -> ModelConfig:
    """The config of a model directory.

    Raises:
      ModelError: there is none, or as :func:`specjax.models.families.from_hf`.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory")
    path = directory / "config.json"
    if not os.path.lexists(path):
        hint = "; it holds a delta: name its base" if os.path.lexists(directory / DELTA) else ""
        raise ModelError(f"{directory}: no config.json, so this is no model directory{hint}")
    try:
        return from_hf(read_json(path))
    except ModelError as error:
        named = str(error).startswith(str(directory))
        raise ModelError(error if named else f"{directory}: {error}") from None


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
    """A file of a checkpoint, but for its weights.

    Raises:
      ModelError: it cannot be read; the reason is the system's.
    """
    try:
        return read_file(path, most=MOST_TEXT)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None


def tensor_files(directory: Path, pickles: bool) -> dict[str, Path]:
    """Which file holds each tensor; the files are opened, so a broken one is found.

    A single file goes before an index, as in transformers: saving over a sharded directory
    leaves its old index behind. Pickles come last, and only where they are asked for.
    """
    kinds = [(WEIGHTS, INDEX)] + [(PICKLE, PICKLE_INDEX)] * pickles
    for single, index in kinds:
        if os.path.lexists(directory / single):
            return dict.fromkeys(open_tensors(directory / single).keys(), directory / single)
        if os.path.lexists(directory / index):
            return _sharded(directory, index)
    unread, hint = sorted(p.name for p in directory.glob("pytorch_model*.bin")), ""
    if unread:
        hint = (
            f"; {unread[0]} is a pickle: --pickles (in Python pickles=True) reads its tensors, and "
            "python -m infer.convert makes safetensors of it"
        )
    raise ModelError(f"{directory}: no {WEIGHTS} and no {INDEX}{hint}")


def read_weight_map(index: Path) -> dict[str, str]:
    """The file that holds each tensor, by the index of a sharded checkpoint.

    Raises:
      ModelError: it says something else, or names a file outside its own directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{index}: no weight_map from tensors to files")
    for name in weight_map.values():
        if name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise ModelError(f"{index}: {name!r} is no plain name of a file in its directory")
    return weight_map


def _sharded(directory: Path, index: str) -> dict[str, Path]:
    """Which shard holds each tensor: what the shards hold, checked against the index."""
    weight_map = read_weight_map(directory / index)
    shards = {name: directory / name for name in sorted(set(weight_map.values()))}
    for name, path in shards.items():
        if not os.path.lexists(path):
            raise ModelError(f"{directory}: shard {name}, named by {index}, is missing")
    held = {name: set(open_tensors(path).keys()) for name, path in shards.items()}
    for tensor, shard in weight_map.items():
        if tensor not in held[shard]:
            raise ModelError(
                f"{directory / shard}: lacks tensor {tensor}, which {index} puts there"
            )
    return {tensor: path for name, path in shards.items() for tensor in sorted(held[name])}


def open_tensors(path: Path):
    if path.suffix == ".bin":
        return Pickle(path)
    with foreign(f"{path}: not a readable safetensors file"):
        check_file(path)
        return safe_open(path, framework="np")


def _completed(
    directory: Path, cfg: ModelConfig, files: Mapping[str, Path], handles: Mapping[Path, Any]
) -> ModelConfig:
    """The config, with what only the tensors say."""
    family = FAMILIES[cfg.family]

    def read(name: str) -> np.ndarray:
        with foreign(f"{files[name]}: tensor {name} cannot be read"):
            return handles[files[name]].get_tensor(name)

    tensors = {family.names.full(name): functools.partial(read, name) for name in files}
    try:
        return family.complete(cfg, tensors)
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from None


def _check_names(directory: Path, cfg: ModelConfig, stored: list[str]) -> dict[str, str]:
    """What the files call each tensor that the model wants."""
    names = FAMILIES[cfg.family].names
    wanted = {place.name for place, _ in _places(cfg)[0]}
    if cfg.tie_embeddings:
        stored = [n for n in stored if names.full(n) != names.head]  # a copy of the embedding
    present = {names.full(name): name for name in stored}
    ignored = {name for name in stored if name.endswith(names.ignored)}
    used = {present.get(name, name) for name in wanted}
    compare_names(directory, used, set(stored) - (ignored - used))
    return present


def compare_names(directory: Path, wanted: set[str], stored: set[str]) -> None:
    """Refuses files that lack a tensor, or hold one more."""
    if missing := sorted(wanted - stored):
        raise ModelError(f"{directory}: tensor {missing[0]} is missing{_more(missing)}")
    if extra := sorted(stored - wanted):
        raise ModelError(
            f"{directory}: tensor {extra[0]} belongs to no part of the model that "
            f"config.json describes{_more(extra)}"
        )


def _is_tuple(x: object) -> bool:
    return isinstance(x, tuple)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def read_tensor(
    handle,
    path: Path,
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...] = STORED_DTYPES,
    note: str = "config.json",
) -> np.ndarray:
    stored = handle.get_slice(name)
    if tuple(stored.get_shape()) != shape:
        raise ModelError(
            f"{path}: tensor {name} has shape {list(stored.get_shape())}, {note} says {list(shape)}"
        )
    if stored.get_dtype() not in dtypes:
        raise ModelError(
            f"{path}: tensor {name} is stored as {stored.get_dtype()}; supported: "
            f"{', '.join(dtypes)}"
        )
    with foreign(f"{path}: tensor {name} cannot be read"):
        return handle.get_tensor(name)
