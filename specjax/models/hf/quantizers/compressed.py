"""compressed-tensors (github.com/vllm-project/compressed-tensors), what LLM Compressor writes.

``config_groups`` says how weights may be quantized. Which of these entries a weight has follows
from its tensors, so that names and patterns in the config are not needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax._util.checks import FLAG, OBJECT, require, whole
from specjax._util.errors import ModelError
from specjax.models.hf.quantizers.floats import BLOCK, scaled, scaled_fp8, shared_exponents
from specjax.models.hf.quantizers.parts import (
    FP4,
    INT4,
    INT8,
    StoredParts,
    grouped,
    per_output,
    unpack,
    unpack_fp4,
)
from specjax.models.hf.quantizers.settings import (
    HOLDER,
    OFFSET_BYTES,
    SCALE_BYTES,
    Quantizer,
    refuse_setting,
    setting,
)

METHOD = "compressed-tensors"
WORDS = ("I32", "U32")
# Bits that each format is read with.
FORMATS = {
    "float-quantized": (8,),
    "int-quantized": (8,),
    "naive-quantized": (8,),
    "pack-quantized": (4, 8),
    "mxfp4-pack-quantized": (4,),
    "nvfp4-pack-quantized": (4,),
}
MIXED = "mixed-precision"  # each group of the config names its own format
STATUSES = ("compressed", "frozen")  # the second was written by the first versions
DENSE = "dense"  # the format of sparsity that stores every weight
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of the config's groups: how its weights are quantized."""

    form: str
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool

    @classmethod
    def of(cls, form: Any, weights: Mapping[str, Any]) -> Entry:
        """From the settings of its weights.

        Raises:
          ModelError: a setting is not read.
        """
        if not isinstance(form, str) or form not in FORMATS:
            raise refuse_setting("format", form, ", ".join(FORMATS))
        bits = setting(weights, "num_bits", whole(1, 32), 8)
        if bits not in FORMATS[form]:
            widths = " and ".join(map(str, FORMATS[form]))
            raise refuse_setting("num_bits", bits, f"{widths} for {form}")
        group = weights.get("group_size")
        strategy = weights.get("strategy")
        if strategy is None:
            strategy = "tensor" if group is None else "group"
            if group == -1:
                strategy = "channel"
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise refuse_setting("strategy", strategy, ", ".join(STRATEGIES))
        if strategy in ("group", "tensor_group"):
            require(HOLDER, "group_size", group, whole(2, 1 << 20), ModelError)
        block = None
        if strategy == "block":
            require(HOLDER, "block_structure", weights.get("block_structure"), BLOCK, ModelError)
            block = tuple(weights["block_structure"])
        symmetric = setting(weights, "symmetric", FLAG, True)
        return cls(form, bits, strategy, None if group == -1 else group, block, symmetric)


@dataclasses.dataclass(frozen=True)
class CompressedTensors(Quantizer):
    """``entries``: how weights may be quantized; activations stay in the model's dtype."""

    codes = ("weight_packed", "weight")
    others = (
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
    )
    unused = (
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "output_scale",
        "output_zero_point",
        "k_scale",
        "v_scale",
    )

    entries: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CompressedTensors:
        """The quantizer of these settings.

        Raises:
          ModelError: a setting is not read.
        """
        if settings.get("transform_config"):
            raise refuse_setting("transform_config", "of this kind", "quantized weights")
        sparsity = setting(settings, "sparsity_config", OBJECT, {})
        if sparsity and sparsity.get("format") != DENSE:
            raise refuse_setting("sparsity_config.format", sparsity.get("format"), DENSE)
        status = settings.get("quantization_status") or "compressed"
        if status not in STATUSES:
            raise refuse_setting("quantization_status", status, " and ".join(STATUSES))
        groups = setting(settings, "config_groups", OBJECT, {})
        entries = []
        for name, group in groups.items():
            require(HOLDER, f"config_groups.{name}", group, OBJECT, ModelError)
            weights = setting(group, "weights", OBJECT, None)
            if weights is None:  # its activations alone are quantized
                continue
            form = settings.get("format")
            if form == MIXED:
                form = group.get("format")
            entries.append(Entry.of(form, weights))
        if not entries:
            raise refuse_setting("config_groups", "without weights", "quantized weights")
        first = entries[0]
        scale_bytes = SCALE_BYTES if first.symmetric else SCALE_BYTES + OFFSET_BYTES
        return cls(METHOD, first.bits, first.group, scale_bytes, tuple(entries))

    def read(self, parts: StoredParts, shape: tuple[int, int]) -> Any:
        errors = []
        for entry in self.entries:
            try:
                return _read(entry, parts, shape)
            except ModelError as error:
                errors.append(error)
        raise errors[0]


def _read(entry: Entry, parts: StoredParts, shape: tuple[int, int]) -> Any:
    """The weight as one entry of the config says."""
    if entry.form == "pack-quantized":
        return _packed(entry, parts, shape)
    if entry.form in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        return _packed_fp4(entry, parts, shape)
    if "weight_zero_point" not in parts or entry.symmetric:
        return _plain(entry, parts, shape)
    codes = parts.read("weight", shape, ("I8",))
    scales = _by_group(entry, parts, "weight_scale", shape)
    zeros = _by_group(entry, parts, "weight_zero_point", shape, ("I8", "I32"))
    return grouped(codes.T, INT8, scales, entry.group or shape[1], zeros)


def _plain(entry: Entry, parts: StoredParts, shape: tuple[int, int]) -> Any:
    """One code per byte, symmetric."""
    if entry.strategy in ("group", "tensor_group"):
        codes = parts.read("weight", shape, ("I8", "F8_E4M3", "F8_E5M2"))
        scales = _by_group(entry, parts, "weight_scale", shape)
        return grouped(codes.T, codes.dtype, scales, entry.group or shape[1])
    if entry.form == "float-quantized":
        return scaled_fp8(parts, "weight_scale", shape, entry.block)
    codes = parts.read("weight", shape, ("I8", "F8_E4M3", "F8_E5M2"))
    return scaled(parts, codes, codes.dtype, "weight_scale", entry.block)


def _packed(entry: Entry, parts: StoredParts, shape: tuple[int, int]) -> Any:
    """Codes in 32-bit words along the inputs, zero points in words along the outputs."""
    outputs, inputs = shape
    if "weight_shape" in parts:
        stated = parts.read("weight_shape", (2,), ("I64", "I32"))
        if tuple(stated) != shape:
            raise parts.fail(
                f"{parts.names['weight_shape']} is {stated.tolist()}, config.json says "
                f"{list(shape)}"
            )
    per_word = 32 // entry.bits
    words = parts.read("weight_packed", (outputs, -(-inputs // per_word)), WORDS)
    half = 1 << (entry.bits - 1)
    codes = (unpack(words, entry.bits)[:, :inputs] - half).view(np.int8)
    scales = _by_group(entry, parts, "weight_scale", shape)
    zeros = None
    if not entry.symmetric:
        packed = parts.read("weight_zero_point", (-(-outputs // per_word), len(scales)), WORDS)
        unsigned = unpack(packed.T.copy(), entry.bits)[:, :outputs]
        zeros = unsigned.astype(np.int16) - half
    code_dtype = INT4 if entry.bits == 4 else INT8
    group = entry.group or inputs
    order = None
    codes = codes.T
    if "weight_g_idx" in parts:
        order = _act_order(parts, inputs, group)
        if order is not None:
            codes = codes[order]
    elif zeros is None and len(scales) == 1 and entry.bits == 8:
        return per_output(codes.T, scales[0])
    return grouped(codes, code_dtype, scales, group, zeros, order)


def _act_order(parts: StoredParts, inputs: int, group: int) -> np.ndarray | None:
    """The inputs in the order of their groups; None where that is the usual order.

    Raises:
      ModelError: the groups have other sizes than the config says.
    """
    groups = parts.read("weight_g_idx", (inputs,), ("I32", "I64"))
    usual = np.arange(inputs) // group
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], usual):
        raise parts.fail(f"{parts.names['weight_g_idx']} has groups of other sizes than {group}")
    return None if np.array_equal(groups, usual) else order


def _packed_fp4(entry: Entry, parts: StoredParts, shape: tuple[int, int]) -> Any:
    """Two FP4 codes per byte; scales are E8M0, or FP8 over a scale for the whole weight."""
    outputs, inputs = shape
    pairs = parts.read("weight_packed", (outputs, -(-inputs // 2)), ("U8",))
    group = entry.group or inputs
    stored = (outputs, -(-inputs // group))
    if entry.form == "mxfp4-pack-quantized":
        return shared_exponents(parts, pairs, parts.read("weight_scale", stored, ("U8",)))
    scales = parts.scales("weight_scale", stored, ("F8_E4M3",)).astype(np.float32)
    whole_scale = parts.scales("weight_global_scale", (1,), ("F32",))
    return grouped(unpack_fp4(pairs).T, FP4, (scales / whole_scale).T, group)


def _by_group(
    entry: Entry,
    parts: StoredParts,
    part: str,
    shape: tuple[int, int],
    dtypes: tuple[str, ...] = ("F32", "BF16", "F16"),
) -> np.ndarray:
    """Scales or zero points ``[S, O]``, from ``[O, S]``, ``[O]`` or one for the whole weight."""
    outputs, inputs = shape
    count = -(-inputs // entry.group) if entry.group else 1
    found = parts.shape(part)
    if count == 1 and found in ((), (1,), (1, 1), (outputs,)):
        values = parts.scales(part, found, dtypes)
        return np.broadcast_to(values.reshape(1, -1), (1, outputs))
    return parts.scales(part, (outputs, count), dtypes).T
