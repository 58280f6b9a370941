"""GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978): unsigned codes packed into 32-bit words.

Both store ``w = (code - zero) * scale`` with a zero point and a scale per output and group of
inputs, and the codes ``[I, O]``. GPTQ packs along the inputs, AWQ along the outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax._util.checks import FLAG, OBJECT, TEXT, either, satisfying, whole
from specjax.models.hf.quantizers.parts import INT4, INT8, StoredParts, grouped, unpack
from specjax.models.hf.quantizers.settings import (
    OFFSET_BYTES,
    SCALE_BYTES,
    Quantizer,
    refuse_setting,
    setting,
)
from specjax.models.quantized import Grouped

GROUP = either(satisfying("-1", lambda value: value == -1), whole(1, 1 << 20))
# In a word of AWQ, output n of eight is nibble AWQ_ORDER[n].
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
CODE_DTYPES = {4: INT4, 8: INT8}


def _bits_and_group(settings: Mapping[str, Any], widths: tuple[int, ...]) -> tuple[int, int | None]:
    bits = setting(settings, "bits", whole(1, 32), 4)
    if bits not in widths:
        raise refuse_setting("bits", bits, " and ".join(map(str, widths)))
    group = setting(settings, "group_size", GROUP, 128)
    return bits, None if group == -1 else group


def _codes(values: np.ndarray, bits: int) -> np.ndarray:
    """Signed codes of unsigned ones: the half of the range is subtracted."""
    return (values ^ (1 << (bits - 1))).view(np.int8) if bits == 8 else values.view(np.int8) - 8


def _zero_points(values: np.ndarray, bits: int) -> np.ndarray:
    """Zero points of the signed codes."""
    return values.astype(np.int16) - (1 << (bits - 1))


@dataclasses.dataclass(frozen=True)
class GPTQ(Quantizer):
    """``symmetric``: all zero points are the middle. ``first_version``: they are stored less 1."""

    codes = ("qweight",)
    others = ("qzeros", "scales", "g_idx")
    stores_inputs_first = True

    symmetric: bool = False
    first_version: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> GPTQ:
        """The quantizer of these settings.

        Raises:
          ModelError: a setting is not read.
        """
        bits, group = _bits_and_group(settings, (4, 8))
        dynamic = setting(settings, "dynamic", OBJECT, {})
        if any(not str(key).startswith("-:") for key in dynamic):  # "-:" leaves modules out
            raise refuse_setting("dynamic", min(dynamic), "one width for all modules")
        form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise refuse_setting("checkpoint_format", form, "gptq and gptq_v2")
        symmetric = setting(settings, "sym", FLAG, False)
        scale_bytes = SCALE_BYTES if symmetric else SCALE_BYTES + OFFSET_BYTES
        return cls("gptq", bits, group, scale_bytes, symmetric, form == "gptq")

    def read(self, parts: StoredParts, shape: tuple[int, int]) -> Any:
        outputs, inputs = shape
        group = self.group or inputs
        count = -(-inputs // group)
        per_word = 32 // self.bits
        words = parts.read("qweight", (-(-inputs // per_word), outputs), ("I32", "U32"))
        packed_zeros = parts.read("qzeros", (count, -(-outputs // per_word)), ("I32", "U32"))
        scales = parts.scales("scales", (count, outputs))

        codes = unpack(words.T.copy(), self.bits)[:, :inputs].T
        zeros = unpack(packed_zeros, self.bits)[:, :outputs]
        if self.first_version:
            # A zero point 0 was stored as -1, all ones.
            zeros = (zeros + 1) & (2**self.bits - 1)
        zeros = _zero_points(zeros, self.bits)
        if self.symmetric and not zeros.any():
            zeros = None
        signed = _codes(np.ascontiguousarray(codes), self.bits)

        order = None
        usual = np.arange(inputs) // group
        groups = self._groups(parts, count, usual)
        if not np.array_equal(groups, usual):
            order = np.argsort(groups, kind="stable")
            if not np.array_equal(groups[order], usual):  # groups of several sizes
                return _dequantized(signed, scales, zeros, groups)
            signed = signed[order]
        return grouped(signed, CODE_DTYPES[self.bits], scales, group, zeros, order)

    @staticmethod
    def _groups(parts: StoredParts, count: int, usual: np.ndarray) -> np.ndarray:
        """The group of each input: act-order gives neighbors to different ones."""
        if "g_idx" not in parts:
            return usual
        groups = parts.read("g_idx", usual.shape, ("I32", "I64"))
        if groups.min() < 0 or groups.max() >= count:
            raise parts.fail(
                f"{parts.names['g_idx']} names group {groups.max()}, there are {count}"
            )
        return groups


def _dequantized(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, groups: np.ndarray
) -> np.ndarray:
    """The weight ``[O, I]`` in float32, from signed codes ``[I, O]`` and each input's group."""
    values = codes.astype(np.float32)
    if zeros is not None:
        values -= zeros[groups]
    return (values * scales.astype(np.float32)[groups]).T


@dataclasses.dataclass(frozen=True)
class AWQ(Quantizer):
    """The layout ``gemm`` of AutoAWQ."""

    codes = ("qweight",)
    others = ("qzeros", "scales")
    stores_inputs_first = True

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> AWQ:
        """The quantizer of these settings.

        Raises:
          ModelError: a setting is not read.
        """
        bits, group = _bits_and_group(settings, (4,))
        version = setting(settings, "version", TEXT, settings.get("format") or "gemm")
        if str(version).lower() != "gemm":
            raise refuse_setting("version", version, "gemm")
        if setting(settings, "zero_point", FLAG, True) is False:
            raise refuse_setting("zero_point", False, "true")
        return cls("awq", bits, group, SCALE_BYTES + OFFSET_BYTES)

    def read(self, parts: StoredParts, shape: tuple[int, int]) -> Grouped:
        outputs, inputs = shape
        if outputs % 8:
            raise parts.fail(f"{outputs} outputs do not fill words of 8")
        group = self.group or inputs
        count = -(-inputs // group)
        words = parts.read("qweight", (inputs, outputs // 8), ("I32", "U32"))
        packed_zeros = parts.read("qzeros", (count, outputs // 8), ("I32", "U32"))
        scales = parts.scales("scales", (count, outputs))
        codes = _codes(unpack(words, 4, AWQ_ORDER), 4)
        zeros = _zero_points(unpack(packed_zeros, 4, AWQ_ORDER), 4)
        return grouped(codes, INT4, scales, group, zeros)
