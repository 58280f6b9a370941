"""Loads a model from a Hugging Face directory, strictly.

Every tensor of the model must be in the files, with its exact shape, and the files must hold no
others. What does not match is an error that names it. Nothing that a checkpoint contains is
executed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Collection, Container
from operator import methodcaller
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util import steps
from specjax._util.errors import ModelError, ModelWarning
from specjax._util.memory import return_memory
from specjax.models.blocks import fuse_layer
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES, MODELS, from_hf
from specjax.models.forward_pass import param_axes, param_shapes
from specjax.models.hf import codes
from specjax.models.hf.config import quantization
from specjax.models.hf.files import OpenWeights, compare_names, read_json, tensor_files
from specjax.models.hf.kinds import describe_directory
from specjax.models.hf.layout import DELTA, ParameterPlace, is_place, leaves_of, parameter_places
from specjax.models.hf.quantizers.grouping import group_parts, zero_biases
from specjax.models.hf.quantizers.parts import StoredParts
from specjax.models.hf.quantizers.settings import Quantizer
from specjax.models.host_arrays import in_pieces
from specjax.models.quantization import NO_SCHEME, Scheme, parse_scheme, quantize_param
from specjax.models.quantized import cast_params, is_quantized

LORA = ".lora_"  # in the names of PEFT's updates
COMPARED_BYTES = 1 << 24  # of a table, as float32, that are compared at a time
ReadTensor = Callable[[str, tuple[int, ...]], Any]  # (tensor name, its shape)
ReadRows = Callable[[str, tuple[int, ...], int, int], np.ndarray]  # (…, first row, last row)
PlacePart = Callable[[ModelConfig, dict], dict]  # moves a part of the params to its devices
# Bytes of a part of the params after which freed memory goes back. That takes a tenth of a second
# for each gigabyte that the process has.
LARGE_PART = 1 << 20


def load_pretrained(
    directory: str | Path,
    dtype: jnp.dtype = jnp.float32,
    fused: bool = False,
    pickles: bool = False,
    place_part: PlacePart | None = None,
    quantize: str | None = None,
    only_tables: bool = False,
) -> tuple[ModelConfig, dict]:
    """Reads a model directory, tensor by tensor onto the device.

    Args:
      dtype: of the params.
      fused: return the inference layout, with q, k, v and gate, up joined.
      pickles: read ``pytorch_model*.bin`` where there are no safetensors. Only tensors are read:
        no code in the pickle runs. Needs the torch extra.
      place_part: is given every part of the params as soon as it is read.
      quantize: a scheme (:func:`specjax.models.quantization.parse_scheme`), which needs ``fused``.
        Each weight is quantized before the next is read. ``none`` dequantizes what another library
        quantized; by default its codes are kept, which needs ``fused``, too.
      only_tables: read no layer: the params are embedding, last norm and LM head.
    Returns:
      The config, and the params as a nested dict of arrays.
    Raises:
      ModelError: a file is missing or unreadable, a tensor is missing, unknown or of another
        shape, or a config feature is not supported. The message names it.
    """
    directory = Path(directory)
    cfg = load_config(directory)
    stored, requested = _forms(directory, quantize, fused)
    files = tensor_files(directory, pickles)
    # A config with a wrong number of layers must not make us allocate for each of them.
    if cfg.num_layers > len(files):
        raise ModelError(
            f"{directory}: config.json says {cfg.num_layers} layers, but its files hold "
            f"{len(files)} tensors"
        )
    weights = OpenWeights.open(files)
    quantized: dict[str, StoredParts] = {}
    if isinstance(stored, Quantizer):
        weights, quantized = group_parts(weights, stored)
    cfg = _complete(directory, cfg, weights, quantized)
    if isinstance(stored, Scheme):
        return cfg, _read_quantized(directory, cfg, stored, weights, dtype, place_part)

    others = None
    if stored is not None:
        others = _QuantizedReader(stored, quantized, quantize is None, _transposed_names(cfg))
    stored_names = _match_names(directory, cfg, weights, quantized)
    read, read_rows = _readers(cfg, weights, stored_names, others)
    params = from_tensors(cfg, read, dtype, fused, place_part, requested, read_rows, only_tables)
    if others is not None:
        others.warn_of_dequantized(directory, dtype)
    return cfg, params


def _forms(
    directory: Path, quantize: str | None, fused: bool
) -> tuple[Scheme | Quantizer | None, Scheme | None]:
    """How the weights are stored, and the scheme to quantize them by.

    Raises:
      ModelError: there is no such scheme, or it does not fit what is stored.
    """
    requested = None if quantize in (None, NO_SCHEME) else parse_scheme(quantize)
    if requested is not None and not fused:
        raise ModelError(
            f"quantize={quantize!r} needs fused=True: only the inference layout is quantized"
        )
    stored = stored_form(directory)
    if isinstance(stored, Scheme):
        _check_scheme(directory, stored, quantize, fused)
    if isinstance(stored, Quantizer) and quantize is None and not fused:
        raise _needs_arrays(directory, stored, "to train or to convert it")
    return stored, requested


def _readers(
    cfg: ModelConfig,
    weights: OpenWeights,
    stored_names: dict[str, str],
    others: _QuantizedReader | None,
) -> tuple[ReadTensor, ReadRows | None]:
    """What reads a tensor, and what reads rows of a table; None if a table is quantized."""

    def read(name: str, shape: tuple[int, ...]) -> Any:
        file_name = stored_names[name]
        if others is not None and file_name in others.parts:
            return others.read(name, file_name, shape)
        return weights.read(file_name, shape)

    def read_rows(name: str, shape: tuple[int, ...], first: int, last: int) -> np.ndarray:
        return weights.rows(stored_names[name], shape, first, last)

    if others is not None and _tables_of(cfg, stored_names) & others.parts.keys():
        return read, None
    return read, read_rows


def from_tensors(
    cfg: ModelConfig,
    read: ReadTensor,
    dtype: jnp.dtype,
    fused: bool = False,
    place_part: PlacePart | None = None,
    scheme: Scheme | None = None,
    read_rows: ReadRows | None = None,
    only_tables: bool = False,
    places: dict | None = None,
) -> dict:
    """The params, from a function that reads one tensor.

    Args:
      read: gives the tensor of a name, which must have the given shape. It may give a quantized
        weight, ``[out, in]`` even where the shape is ``[in, out]``.
      dtype: of the params.
      fused: join each layer into the inference layout before the next is read, so that the memory
        of its parts is used again.
      place_part: is given one layer or table after the other.
      scheme: quantize each parameter as it is read; needs ``fused``.
      read_rows: gives rows of a table, which is then read in pieces; None: it is read at once.
      only_tables: leave the layers out.
      places: where each parameter is stored; None: as in Hugging Face's directories.
    """
    converted = _converter(dtype, scheme)

    def read_param(place: ParameterPlace, axes: tuple[str, ...]) -> Any:
        stored = place.stored
        if stored.count:
            single = ParameterPlace(stored._replace(count=0), place.shape[1:])
            each = [read_one(name, single, axes[1:]) for name in stored.names]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        return read_one(stored.name, place, axes)

    def read_one(name: str, place: ParameterPlace, axes: tuple[str, ...]) -> Any:
        stored = place.stored
        tensor = read(name, stored.shape(place.shape))
        if is_quantized(tensor):  # its outputs come first, however the file stores it
            if stored.sizes:
                take = stored._replace(transposed=False, stacked=False).take
                rearrange = methodcaller("by_output", take)
                tensor = jax.vmap(rearrange)(tensor) if stored.stacked else rearrange(tensor)
            return cast_params(dtype, tensor)
        return converted(stored.take(tensor), axes)

    def read_table(place: ParameterPlace, axes: tuple[str, ...]) -> Any:
        if read_rows is None or len(place.shape) < 2:
            return read_param(place, axes)
        rows = functools.partial(read_rows, place.stored.name, place.shape)
        return in_pieces(lambda first, last: converted(rows(first, last), axes), place.shape)

    tables = dict(places or parameter_places(cfg))
    layer_places = tables.pop("layers")
    axes = param_axes(cfg)
    layers = {}
    for i in () if only_tables else layer_places:
        layer = jax.tree.map(read_param, layer_places[i], axes["layers"][i], is_leaf=is_place)
        if fused:
            layer = fuse_layer(layer)
        layers[i] = _placed(cfg, {"layers": {i: layer}}, place_part)["layers"][i]
        steps.tell(steps.LOADING, len(layers), len(layer_places))
    params = {}
    for name, table in tables.items():
        part = jax.tree.map(read_table, table, axes[name], is_leaf=is_place)
        params[name] = _placed(cfg, {name: part}, place_part)[name]
    return params if only_tables else params | {"layers": layers}


def _converter(dtype: jnp.dtype, scheme: Scheme | None) -> Callable[[Any, tuple[str, ...]], Any]:
    """What makes a parameter with these axes of a tensor; it quantizes what is to be quantized."""

    def convert(tensor: np.ndarray, axes: tuple[str, ...]) -> Any:
        if scheme is None:
            return jnp.asarray(tensor, dtype)
        # Codes are computed from float32 weights, whatever dtype the other params have.
        return quantize_param(jnp.asarray(tensor, jnp.float32), axes, scheme, dtype)

    return convert


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
        steps.tell(steps.LOADING, len(layers), cfg.num_layers)
    params = {}
    for name, table_forms in forms.items():
        params[name] = read_part({name: table_forms})[name]
    return params | {"layers": layers}


@dataclasses.dataclass(frozen=True)
class _QuantizedReader:
    """Reads weights that another library quantized.

    Attributes:
      parts: the stored tensors of each such weight.
      keep: whether codes are kept where ours has the form; otherwise all weights are dequantized.
      transposed: the names of weights that the family stores ``[in, out]``.
      dequantized: the names of weights that were to be kept and have no form.
    """

    quantizer: Quantizer
    parts: dict[str, StoredParts]
    keep: bool
    transposed: set[str]
    dequantized: list[str] = dataclasses.field(default_factory=list)

    def read(self, name: str, file_name: str, shape: tuple[int, ...]) -> Any:
        """A weight: quantized ``[out, in]``, or an array of this shape, as its family stores it.

        Raises:
          ModelError: its tensors do not fit.
        """
        parts = self.parts[file_name]
        is_transposed = name in self.transposed
        if len(shape) == 3:
            return self._read_experts(parts, shape, is_transposed)
        if is_transposed and not self.quantizer.stores_inputs_first:
            raise parts.fail(f"{self.quantizer.method} of weights [in, out] is not read")
        outputs, inputs = shape[::-1] if is_transposed else shape
        weight = self.quantizer.read(parts, (outputs, inputs))
        if self.keep and is_quantized(weight):
            return weight
        if self.keep:
            self.dequantized.append(file_name)
        elif is_quantized(weight):
            weight = np.asarray(weight.dense(jnp.float32))
        return weight.T if is_transposed else weight

    def _read_experts(self, parts: StoredParts, shape: tuple[int, ...], is_transposed: bool) -> Any:
        """As :meth:`read`, all experts' weights, whose axis comes first."""
        count, *single = shape
        outputs, inputs = single[::-1] if is_transposed else single
        experts = self.quantizer.read_experts(parts, (count, outputs, inputs))
        if self.keep:
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
        dense = np.stack([np.asarray(expert.dense(jnp.float32)) for expert in experts])
        return dense.swapaxes(1, 2) if is_transposed else dense

    def warn_of_dequantized(self, directory: Path, dtype: jnp.dtype) -> None:
        """Warns in one line if weights were dequantized that were to be kept."""
        if self.dequantized:
            text = (
                f"{directory}: {len(self.dequantized)} quantized weights, such as "
                f"{self.dequantized[0]}, have a form that is not kept; they are dequantized to "
                f"{jnp.dtype(dtype).name}"
            )
            warnings.warn(text, ModelWarning, stacklevel=3)


def _transposed_names(cfg: ModelConfig) -> set[str]:
    """The tensors that are stored ``[in, out]``."""
    places = leaves_of(parameter_places(cfg))
    return {name for place in places if place.stored.transposed for name in place.stored.names}


def _tables_of(cfg: ModelConfig, stored_names: dict[str, str]) -> set[str]:
    """The files' names of the tensors outside of layers."""
    places = parameter_places(cfg)
    del places["layers"]
    return {stored_names[place.stored.name] for place in leaves_of(places)}


def _placed(cfg: ModelConfig, part: dict, place_part: PlacePart | None) -> dict:
    """A part of the params on its devices; returns when it has arrived there.

    Without waiting, several parts would be in host memory at the same time. After a large part,
    freed memory goes back to the system, so that what was read is not kept beside the params.
    """
    if place_part is not None:
        part = place_part(cfg, part)
    part = jax.block_until_ready(part)
    if sum(leaf.nbytes for leaf in jax.tree.leaves(part)) >= LARGE_PART:
        return_memory()
    return part


# --- the config ------------------------------------------------------------------------------


def load_config(directory: Path) -> ModelConfig:
    """The config of a model directory.

    Raises:
      ModelError: there is no config.json, or :func:`specjax.models.families.from_hf` refuses it.
    """
    if os.path.isfile(directory) and directory.suffix == ".gguf":
        raise ModelError(
            f"{directory}: a GGUF file, which only decodes; make a directory of it: "
            "python -m infer.convert FILE.gguf --out DIR"
        )
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


def stored_form(directory: Path) -> Scheme | Quantizer | None:
    """How the weights of a checkpoint are quantized; None: they are not.

    Raises:
      ModelError: another library quantized them in a way that is not read.
    """
    form = quantization(read_json(directory / "config.json"))
    return parse_scheme(form) if isinstance(form, str) else form


def _check_scheme(directory: Path, stored: Scheme, quantize: str | None, fused: bool) -> None:
    """Refuses a checkpoint of ours where other weights are needed than it has."""
    if fused and quantize in (None, str(stored)):
        return
    purpose = f"for {quantize}" if quantize else "to train or to convert it"
    raise _needs_arrays(directory, stored, purpose)


def _needs_arrays(directory: Path, stored: Scheme | Quantizer, purpose: str) -> ModelError:
    return ModelError(
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
    form = stored_form(directory)
    quantized: dict[str, StoredParts] = {}
    if isinstance(form, Quantizer):
        weights, quantized = group_parts(weights, form)
    return _complete(directory, cfg, weights, quantized)


def _complete(
    directory: Path, cfg: ModelConfig, weights: OpenWeights, quantized: Container[str] = ()
) -> ModelConfig:
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
    if cfg.tie_embeddings and _has_own_head(cfg, weights, stored_names, quantized):
        cfg = dataclasses.replace(cfg, tie_embeddings=False)
    return cfg


def _has_own_head(
    cfg: ModelConfig,
    weights: OpenWeights,
    stored_names: dict[str, str],
    quantized: Container[str],
) -> bool:
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
    if head in quantized or embedding in quantized:
        return True
    shape = param_shapes(cfg)["embed"].shape
    return not _equal_rows((weights, head), (weights, embedding), shape)


def same_embedding(first: Path, second: Path) -> bool:
    """Whether two model directories hold the same embedding; nothing is kept in memory.

    Raises:
      ModelError: a directory has no usable config or no safetensors.
    """
    tables = []
    shapes = set()
    for directory in (first, second):
        cfg = complete_config(directory)
        weights = OpenWeights.open(tensor_files(directory, pickles=False))
        name = _present_names(cfg, weights).get(_embedding_name(cfg))
        if name is None:
            return False
        tables.append((weights, name))
        shapes.add(param_shapes(cfg)["embed"].shape)
    return len(shapes) == 1 and _equal_rows(tables[0], tables[1], shapes.pop())


def _equal_rows(
    first: tuple[OpenWeights, str], second: tuple[OpenWeights, str], shape: tuple[int, ...]
) -> bool:
    """Whether two stored tables of this shape have equal values.

    Raises:
      ModelError: one of them has another shape.
    """
    # A few rows at a time, so that memory for two more tables is not needed.
    step = max(1, COMPARED_BYTES // (4 * shape[1]))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        ours, theirs = (
            weights.rows(name, shape, start, stop).astype(np.float32)
            for weights, name in (first, second)
        )
        if not np.array_equal(ours, theirs):
            return False
    return True


def _embedding_name(cfg: ModelConfig) -> str:
    return FAMILIES[cfg.family].names.stored(("embed",), cfg).name


def _present_names(cfg: ModelConfig, weights: OpenWeights) -> dict[str, str]:
    """The name that the files use for each tensor, by its present name."""
    names = FAMILIES[cfg.family].names
    own = [name for name in weights.files if not name.startswith(cfg.skipped_tensors)]
    unwrapped = names.unwrapped(sorted(own))
    return {names.full(name): stored for name, stored in unwrapped.items()}


def _match_names(
    directory: Path, cfg: ModelConfig, weights: OpenWeights, quantized: Collection[str] = ()
) -> dict[str, str]:
    """The name that the files use for each tensor, by its present name.

    Raises:
      ModelError: a tensor of the model is missing, or the files hold one that it lacks.
    """
    names = FAMILIES[cfg.family].names
    places = leaves_of(parameter_places(cfg))
    wanted = {name for place in places for name in place.stored.names}
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
    ignored |= {name for name in stored if name.startswith(cfg.skipped_tensors)}
    ignored |= zero_biases(weights, quantized, used)
    compare_names(directory, used, stored - (ignored - used))
    return stored_names
