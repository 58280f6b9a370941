"""Loads a model from a GGUF file, strictly: every tensor of the model, and no others.

Weights in blocks that :mod:`specjax.models.gguf.blocks` knows keep their codes. The gguf package
dequantizes others.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.errors import ModelError, ModelWarning
from specjax._util.files import open_file
from specjax.models.config import ModelConfig
from specjax.models.gguf.blocks import KINDS, BlockParts, take_apart
from specjax.models.gguf.config import ARCHITECTURE, config_of
from specjax.models.gguf.header import Header, Tensor, gguf_package, read_header
from specjax.models.gguf.names import NAMES, ROPE_FACTORS
from specjax.models.hf.files import compare_names
from specjax.models.hf.layout import leaves_of, parameter_places
from specjax.models.hf.read import PlacePart, from_tensors
from specjax.models.host_arrays import aligned, on_device
from specjax.models.quantization import NO_SCHEME, parse_scheme
from specjax.models.quantized import Grouped, by_output

CHUNK_BYTES = 1 << 20  # of a tensor in the file that are taken apart at a time
FLOATS = ("F32", "F16", "BF16", "F64")


def load_config(path: Path) -> ModelConfig:
    """The architecture of a GGUF file.

    Raises:
      ModelError: as :func:`~specjax.models.gguf.header.read_header` and
        :func:`~specjax.models.gguf.config.config_of`.
    """
    return _config(read_header(path))


def load_gguf(
    path: Path,
    dtype: jnp.dtype = jnp.float32,
    fused: bool = False,
    place_part: PlacePart | None = None,
    quantize: str | None = None,
) -> tuple[ModelConfig, dict]:
    """Reads a GGUF file, as :func:`specjax.models.hf.read.load_pretrained` reads a directory.

    Args:
      quantize: None: weights keep their codes where that is exact, in the inference layout.
        ``none``: all are dequantized. A scheme: they are dequantized, and quantized anew.
    Raises:
      ModelError: the file is damaged, a tensor is missing, unknown or of another shape, or the
        architecture is not supported. The message names it.
    """
    header = read_header(path)
    cfg = _config(header)
    if fused and quantize is None:
        _say_dequantized(header)
    scheme = None
    if quantize not in (None, NO_SCHEME):
        scheme = parse_scheme(quantize)
    places = parameter_places(cfg, NAMES[header.metadata[ARCHITECTURE]])
    _check_tensors(header, places)
    keep = fused and quantize is None
    # Codes are computed from float32 weights, whatever dtype the other params have.
    read_dtype = jnp.dtype(dtype if scheme is None else jnp.float32)

    with open_file(path) as file:

        def read(name: str, shape: tuple[int, ...]) -> Any:
            return _in_order(header, cfg, name, _read_tensor(file, header, name, read_dtype, keep))

        def read_rows(name: str, shape: tuple[int, ...], first: int, last: int) -> np.ndarray:
            return _dequantized(file, header.tensors[name], read_dtype, first, last)

        tables = [place.stored.name for place in leaves_of(places) if len(place.shape) == 2]
        is_table_kept = any(keep and is_kept(header.tensors[name]) for name in tables)
        return cfg, from_tensors(
            cfg,
            read,
            jnp.dtype(dtype),
            fused,
            place_part,
            scheme,
            None if is_table_kept else read_rows,
            places=places,
        )


def _read_tensor(
    file: Any, header: Header, name: str, read_dtype: jnp.dtype, keep: bool
) -> np.ndarray | Grouped:
    """A tensor: with its codes where ``keep`` is set and they have a form, else dequantized."""
    tensor = header.tensors[name]
    if keep and is_kept(tensor):
        return _grouped(file, tensor, read_dtype)
    if _has_offset(header, name):
        # The file holds 1 + weight; only then is it rounded to its dtype.
        return _dequantized(file, tensor, jnp.dtype(jnp.float32)) - 1
    return _dequantized(file, tensor, read_dtype)


def is_kept(tensor: Tensor) -> bool:
    """Whether a tensor keeps its codes."""
    return tensor.kind in KINDS and len(tensor.shape) == 2


def _say_dequantized(header: Header) -> None:
    """Warns of quantized tensors that do not keep their codes."""
    kinds = Counter(tensor.kind for tensor in header.tensors.values() if not is_kept(tensor))
    named = ", ".join(f"{n} of {kind}" for kind, n in sorted(kinds.items()) if kind not in FLOATS)
    if named:
        text = f"{header.path}: tensors that are dequantized, since their form is not kept: {named}"
        warnings.warn(text, ModelWarning, stacklevel=4)


def kept_bytes(path: Path, dtype: jnp.dtype) -> int:
    """Bytes of the params of a file whose weights keep their codes."""
    total = 0
    for tensor in read_header(path).tensors.values():
        if is_kept(tensor):
            size, _ = KINDS[tensor.kind]
            leaves = jax.tree.leaves(take_apart(tensor.kind, np.zeros((1, size), np.uint8)))
            bits = sum(x.size * (4 if "int4" in x.dtype.name else 8 * x.itemsize) for x in leaves)
            total += tensor.size // size * bits // 8
        else:
            total += int(np.prod(tensor.shape)) * jnp.dtype(dtype).itemsize
    return total


def _config(header: Header) -> ModelConfig:
    """The architecture.

    Raises:
      ModelError: it is not read, or has more layers than the file has tensors.
    """

    def rope_factors() -> np.ndarray:
        with open_file(header.path) as file:
            return _dequantized(file, header.tensors[ROPE_FACTORS], jnp.dtype(jnp.float32))

    cfg = config_of(header, rope_factors)
    # A wrong number of layers must not make us build each of them.
    if cfg.num_layers > len(header.tensors):
        raise ModelError(
            f"{header.path}: its metadata say {cfg.num_layers} layers, and it has "
            f"{len(header.tensors)} tensors"
        )
    return cfg


def _check_tensors(header: Header, places: dict) -> None:
    """Checks names and shapes of all tensors before the first is read.

    Raises:
      ModelError: a tensor is missing, belongs to no part of the model, or has another shape.
    """
    wanted = leaves_of(places)
    compare_names(
        header.path,
        {place.stored.name for place in wanted},
        set(header.tensors) - {ROPE_FACTORS},
        "its metadata describe",
    )
    for place in wanted:
        name = place.stored.name
        found = header.tensors[name].shape
        expected = place.stored.shape(place.shape)
        if found != expected:
            raise ModelError(
                f"{header.path}: tensor {name} has shape {list(found)}, its metadata say "
                f"{list(expected)}"
            )


def _in_order(header: Header, cfg: ModelConfig, name: str, weight: Any) -> Any:
    """A tensor with its outputs in the order of Hugging Face's directories."""
    kind = name.split(".")[-2]
    if header.metadata[ARCHITECTURE] == "llama" and kind in ("attn_q", "attn_k"):
        heads = cfg.num_heads if kind == "attn_q" else cfg.num_kv_heads
        return by_output(functools.partial(_unpaired, heads), weight)
    return weight


def _has_offset(header: Header, name: str) -> bool:
    """Whether a tensor is one of Gemma's norms, whose weights count from one."""
    is_gemma = header.metadata[ARCHITECTURE].startswith("gemma")
    return is_gemma and name.endswith("norm.weight")


def _unpaired(heads: int, x: Any) -> Any:
    """Outputs in the order of rotated halves: the file has the two of each pair adjacent."""
    pairs = x.reshape(heads, -1, 2, *x.shape[1:])
    return pairs.swapaxes(1, 2).reshape(x.shape)


# --- tensors ---------------------------------------------------------------------------------


def _chunks(
    file: Any, tensor: Tensor, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """The bytes of outputs ``first`` to ``last``, some after the other.

    Yields the number of the first one, counted from ``first``, and bytes ``[outputs, bytes]``.

    Raises:
      ModelError: the file cannot be read, or became shorter.
    """
    outputs = 1 if len(tensor.shape) == 1 else tensor.shape[0]
    width = tensor.size // outputs
    step = max(1, CHUNK_BYTES // width)
    end = outputs if last is None else last
    for begin in range(first, end, step):
        count = min(step, end - begin)
        data = os.pread(file.fileno(), count * width, tensor.offset + begin * width)
        if len(data) < count * width:
            raise ModelError(f"{file.name}: became shorter while it was read")
        yield begin - first, np.frombuffer(data, np.uint8).reshape(count, width)


def _dequantized(
    file: Any, tensor: Tensor, dtype: jnp.dtype, first: int = 0, last: int | None = None
) -> np.ndarray:
    """A tensor as an array, or rows ``first`` to ``last`` of it."""
    package = gguf_package()
    kind = package.GGMLQuantizationType[tensor.kind]
    shape = tensor.shape
    if last is not None:
        shape = (last - first, *shape[1:])
    values = aligned((1, *shape) if len(shape) == 1 else shape, dtype)
    for begin, data in _chunks(file, tensor, first, last):
        try:
            dense = _floats(tensor.kind, data)
            if dense is None:
                dense = package.dequantize(data, kind)
        except NotImplementedError:
            raise ModelError(f"{file.name}: weights of {tensor.kind} are not supported") from None
        values[begin : begin + len(data)] = dense.reshape(len(data), *values.shape[1:])
    return values.reshape(shape)


def _floats(kind: str, data: np.ndarray) -> np.ndarray | None:
    """The numbers of a tensor that is not quantized; None for the others."""
    dtypes = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": jnp.bfloat16}
    return data.view(dtypes[kind]) if kind in dtypes else None


def _grouped(file: Any, tensor: Tensor, dtype: jnp.dtype) -> Grouped:
    """A weight with the codes of the file."""
    outputs = tensor.shape[0]
    whole: Any = None
    for first, data in _chunks(file, tensor):
        parts = take_apart(tensor.kind, data)
        if whole is None:
            # Inputs first, as products read them.
            whole = jax.tree.map(lambda x: aligned((x.shape[1], outputs), x.dtype), parts)
        jax.tree.map(functools.partial(_put, first), whole, parts)
    return _as_grouped(whole, dtype)


def _put(first: int, whole: np.ndarray, part: np.ndarray) -> None:
    whole[:, first : first + len(part)] = part.T


def _as_grouped(parts: BlockParts, dtype: jnp.dtype) -> Grouped:
    """Codes and scales on the device; scales that are codes themselves give float32."""

    def values(part: np.ndarray | BlockParts | None) -> Any:
        if isinstance(part, BlockParts):
            return _as_grouped(part, jnp.dtype(jnp.float32))
        return None if part is None else on_device(part)

    codes, scales, offsets = map(values, parts)
    return Grouped(codes, scales, dtype, offsets)
