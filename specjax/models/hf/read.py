"""Loads a model from a Hugging Face directory, strictly.

Every tensor of the model must be in the files, with its exact shape, and the files must hold no
others. What does not match is an error that names it. Nothing that a checkpoint contains is
executed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.errors import ModelError
from specjax.models.blocks import fuse_layer
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES, MODELS, from_hf
from specjax.models.forward_pass import param_shapes
from specjax.models.hf import codes
from specjax.models.hf.config import quantization
from specjax.models.hf.files import OpenWeights, compare_names, read_json, tensor_files
from specjax.models.hf.kinds import describe_directory
from specjax.models.hf.layout import DELTA, ParameterPlace, is_place, leaves_of, parameter_places
from specjax.models.quantization import Scheme, parse_scheme, quantize_params
from specjax.models.quantized import cast_params

LORA = ".lora_"  # in the names of PEFT's updates
COMPARED_BYTES = 1 << 26  # of a table, as float32, that are compared at a time
ReadTensor = Callable[[str, tuple[int, ...]], np.ndarray]  # (tensor name, its shape)
PlacePart = Callable[[ModelConfig, dict], dict]  # moves a part of the params to its devices


def load_pretrained(
    directory: str | Path,
    dtype: jnp.dtype = jnp.float32,
    fused: bool = False,
    pickles: bool = False,
    place_part: PlacePart | None = None,
    quantize: str | None = None,
) -> tuple[ModelConfig, dict]:
    """Reads a model directory, tensor by tensor onto the device.

    Args:
      dtype: of the params.
      fused: return the inference layout, with q, k, v and gate, up joined.
      pickles: read ``pytorch_model*.bin`` where there are no safetensors. Only tensors are read:
        no code in the pickle runs. Needs the torch extra.
      place_part: is given every part of the params as soon as it is read.
      quantize: a scheme (:func:`specjax.models.quantization.parse_scheme`), which needs ``fused``.
        Each layer and each table is quantized before the next is read.
    Returns:
      The config, and the params as a nested dict of arrays.
    Raises:
      ModelError: a file is missing or unreadable, a tensor is missing, unknown or of another
        shape, or a config feature is not supported. The message names it.
    """
    directory = Path(directory)
    cfg = load_config(directory)
    requested = None if quantize is None else parse_scheme(quantize)
    if requested is not None and not fused:
        raise ModelError(
            f"quantize={quantize!r} needs fused=True: only the inference layout is quantized"
        )
    stored = stored_scheme(directory)
    if stored is not None:
        _check_scheme(directory, stored, requested, fused)

    files = tensor_files(directory, pickles)
    # A config with a wrong number of layers must not make us allocate for each of them.
    if cfg.num_layers > len(files):
        raise ModelError(
            f"{directory}: config.json says {cfg.num_layers} layers, but its files hold "
            f"{len(files)} tensors"
        )
    weights = OpenWeights.open(files)
    cfg = _complete(directory, cfg, weights)
    if stored is not None:
        return cfg, _read_quantized(directory, cfg, stored, weights, dtype, place_part)

    stored_names = _match_names(directory, cfg, weights)

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return weights.read(stored_names[name], shape)

    return cfg, from_tensors(cfg, read, dtype, fused, place_part, requested)


def from_tensors(
    cfg: ModelConfig,
    read: ReadTensor,
    dtype: jnp.dtype,
    fused: bool = False,
    place_part: PlacePart | None = None,
    scheme: Scheme | None = None,
) -> dict:
    """The params, from a function that reads one tensor.

    Args:
      read: gives the tensor of a name, which must have the given shape.
      dtype: of the params.
      fused: join each layer into the inference layout before the next is read, so that the memory
        of its parts is used again.
      place_part: is given one layer or table after the other.
      scheme: quantize each part as it is read; needs ``fused``.
    """
    # Codes are computed from float32 weights, whatever dtype the other params have.
    read_dtype = dtype if scheme is None else jnp.float32

    def read_param(place: ParameterPlace) -> jax.Array:
        tensor = read(place.stored.name, place.stored.shape(place.shape))
        return jnp.asarray(place.stored.take(tensor), read_dtype)

    def read_params(places: dict) -> dict:
        return jax.tree.map(read_param, places, is_leaf=is_place)

    def finish(part: dict) -> dict:
        if scheme is not None:
            part = quantize_params(cfg, part, scheme, dtype)
        return _placed(cfg, part, place_part)

    places = parameter_places(cfg)
    layers = {}
    for i, layer_places in places.pop("layers").items():
        layer = read_params(layer_places)
        if fused:
            layer = fuse_layer(layer)
        layers[i] = finish({"layers": {i: layer}})["layers"][i]
    params = {}
    for name, table_places in places.items():
        params[name] = finish({name: read_params(table_places)})[name]
    return params | {"layers": layers}


def _read_quantized(
    directory: Path,
    cfg: ModelConfig,
    scheme: Scheme,
    weights: OpenWeights,
    dtype: jnp.dtype,
    place_part: PlacePart | None,
) -> dict:
    """The params of a quantized checkpoint; each part is placed before the next is read."""
    forms = codes.forms(cfg, scheme)
    wanted = {form.name for form in jax.tree.leaves(forms, is_leaf=codes.is_form)}
    buffers = FAMILIES[cfg.family].buffers(cfg)
    compare_names(directory, wanted, set(weights.files) - set(buffers))

    def read_param(form: codes.Form) -> jax.Array:
        value = weights.read(form.name, codes.stored_shape(form), (codes.stored_dtype(form),))
        return jnp.asarray(codes.from_stored(value, form))

    def read_part(part_forms: dict) -> dict:
        part = jax.tree.map(read_param, part_forms, is_leaf=codes.is_form)
        return _placed(cfg, cast_params(dtype, part), place_part)

    layers = {}
    for i, layer_forms in forms.pop("layers").items():
        layers[i] = read_part({"layers": {i: layer_forms}})["layers"][i]
    params = {}
    for name, table_forms in forms.items():
        params[name] = read_part({name: table_forms})[name]
    return params | {"layers": layers}


def _placed(cfg: ModelConfig, part: dict, place_part: PlacePart | None) -> dict:
    """A part of the params on its devices; returns when it has arrived there.

    Without waiting, several parts would be in host memory at the same time.
    """
    if place_part is not None:
        part = place_part(cfg, part)
    return jax.block_until_ready(part)


# --- the config ------------------------------------------------------------------------------


def load_config(directory: Path) -> ModelConfig:
    """The config of a model directory.

    Raises:
      ModelError: there is no config.json, or :func:`specjax.models.families.from_hf` refuses it.
    """
    if os.path.isfile(directory):
        raise ModelError(f"{directory}: is a file: give the directory that it is in")
    if not os.path.isdir(directory):
        raise ModelError(f"{directory}: no such model directory")
    path = directory / "config.json"
    if not os.path.lexists(path):
        hint = describe_directory(directory)
        if os.path.lexists(directory / DELTA):
            hint = "; it holds a delta: name its base"
        raise ModelError(f"{directory}: no config.json, so this is no model directory{hint}")
    try:
        return from_hf(read_json(path))
    except ModelError as error:
        if str(error).startswith(str(directory)):
            raise ModelError(error) from None
        raise ModelError(f"{directory}: {error}") from None


def stored_scheme(directory: Path) -> Scheme | None:
    """The scheme of a quantized checkpoint; None for any other.

    Raises:
      ModelError: another library quantized it.
    """
    scheme = quantization(read_json(directory / "config.json"))
    return None if scheme is None else parse_scheme(scheme)


def _check_scheme(directory: Path, stored: Scheme, requested: Scheme | None, fused: bool) -> None:
    """Refuses a quantized checkpoint where unquantized weights are needed."""
    if fused and requested in (None, stored):
        return
    purpose = f"for {requested}" if requested else "to train or to convert it"
    raise ModelError(
        f"{directory}: its weights are quantized ({stored}); take the unquantized checkpoint "
        f"{purpose}"
    )


def complete_config(directory: Path) -> ModelConfig:
    """:func:`load_config`, completed with what only the weights show.

    That is the ids that a draft head drafts, and a head where the config says that there is none.
    A directory without safetensors, as for a dry run, has its config alone.

    Raises:
      ModelError: as :func:`load_config`, or a file of weights cannot be read.
    """
    cfg = load_config(directory)
    if not any(directory.glob("*.safetensors")):
        return cfg
    weights = OpenWeights.open(tensor_files(directory, pickles=False))
    return _complete(directory, cfg, weights)


def _complete(directory: Path, cfg: ModelConfig, weights: OpenWeights) -> ModelConfig:
    """The config, completed with what only the tensors show (``Family.complete``)."""
    family = FAMILIES[cfg.family]
    stored_names = _present_names(cfg, weights)
    readers = {
        name: functools.partial(weights.read_any, stored) for name, stored in stored_names.items()
    }
    try:
        cfg = family.complete(cfg, readers)
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from None
    if cfg.tie_embeddings and _has_own_head(cfg, weights, stored_names):
        cfg = dataclasses.replace(cfg, tie_embeddings=False)
    return cfg


def _has_own_head(cfg: ModelConfig, weights: OpenWeights, stored_names: dict[str, str]) -> bool:
    """Whether the files hold a head that differs from the embedding.

    Some tied checkpoints repeat the embedding as their head. Others were trained with a head of
    their own, and only their config is wrong. transformers also goes by the weights.

    Raises:
      ModelError: one of the tables has another shape than config.json says.
    """
    head = stored_names.get(FAMILIES[cfg.family].names.head)
    embedding = stored_names.get(_embedding_name(cfg))
    if head is None or embedding is None:
        return False
    shape = param_shapes(cfg)["embed"].shape
    # A few rows at a time, so that memory for two more tables is not needed.
    step = max(1, COMPARED_BYTES // (4 * shape[1]))
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        head_rows = weights.rows(head, shape, first, last).astype(np.float32)
        embedding_rows = weights.rows(embedding, shape, first, last).astype(np.float32)
        if not np.array_equal(head_rows, embedding_rows):
            return True
    return False


def _embedding_name(cfg: ModelConfig) -> str:
    return FAMILIES[cfg.family].names.stored(("embed",), cfg.num_heads).name


def _present_names(cfg: ModelConfig, weights: OpenWeights) -> dict[str, str]:
    """The name that the files use for each tensor, by its present name."""
    names = FAMILIES[cfg.family].names
    unwrapped = names.unwrapped(sorted(weights.files))
    return {names.full(name): stored for name, stored in unwrapped.items()}


def _match_names(directory: Path, cfg: ModelConfig, weights: OpenWeights) -> dict[str, str]:
    """The name that the files use for each tensor, by its present name.

    Raises:
      ModelError: a tensor of the model is missing, or the files hold one that it lacks.
    """
    names = FAMILIES[cfg.family].names
    wanted = {place.stored.name for place in leaves_of(parameter_places(cfg))}
    stored = set(weights.files)
    stored_names = _present_names(cfg, weights)
    if cfg.tie_embeddings and names.head in stored_names:
        head = stored_names.pop(names.head)
        embedding = _embedding_name(cfg)
        if embedding in stored_names:
            stored.remove(head)  # a copy of the embedding
        else:
            stored_names[embedding] = head  # the one table, under its other name
    updates = [name for name in sorted(stored) if LORA in name]
    if updates:
        raise ModelError(
            f"{directory}: tensor {updates[0]}: LoRA updates that are not merged; merge them into "
            "the base first, with PEFT's merge_and_unload"
        )
    if wanted - stored_names.keys() == {names.head} and cfg.family in MODELS:
        raise ModelError(
            f"{directory}: tensor {names.head} is missing; if the head is the embedding, set "
            "tie_word_embeddings to true in config.json"
        )
    used = {stored_names.get(name, name) for name in wanted}
    ignored = {name for name in stored if name.endswith(names.ignored)}
    compare_names(directory, used, stored - (ignored - used))
    return stored_names
