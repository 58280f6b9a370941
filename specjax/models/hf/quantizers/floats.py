"""Weights in 8-bit floats (FP8), and in 4-bit floats with a shared exponent (MXFP4).

FP8 is what Qwen and DeepSeek (arXiv 2412.19437, §3.3) publish: codes ``[O, I]`` and a scale for
each block of 128 × 128, or one for the weight. MXFP4 (OCP Microscaling Formats 1.0, arXiv
2310.10537) is gpt-oss's: groups of 32 inputs with a power of two as their scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax._util.checks import list_of, satisfying, whole
from specjax.models.hf.quantizers.parts import (
    FP4,
    FP8_DTYPES,
    StoredParts,
    grouped,
    per_output,
    powers_of_two,
    unpack_fp4,
)
from specjax.models.hf.quantizers.settings import Quantizer, setting
from specjax.models.hf.tensor_file import FLOAT_DTYPES
from specjax.models.quantized import Grouped, PerOutput

BLOCK = satisfying(
    "two whole numbers, such as [128, 128]",
    lambda value: list_of(whole(1, 1 << 16)).holds(value) and len(value) == 2,
)
MX_GROUP = 32  # inputs that share an exponent


def scaled_fp8(
    parts: StoredParts, scale: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> PerOutput | Grouped:
    """FP8 codes ``[O, I]`` with one scale, one per output, or one per block of outputs and inputs.

    A block's scale is repeated for each of its outputs.

    Raises:
      ModelError: a part is missing, or the scale fits none of these.
    """
    codes = parts.read("weight", shape, FP8_DTYPES)
    return scaled(parts, codes, codes.dtype, scale, block)


def scaled(
    parts: StoredParts,
    codes: np.ndarray,
    code_dtype: Any,
    scale: str,
    block: tuple[int, int] | None,
) -> PerOutput | Grouped:
    """:func:`scaled_fp8` of codes that were read already."""
    outputs, inputs = codes.shape
    found = parts.shape(scale)
    if math.prod(found) == 1 or found in ((outputs,), (outputs, 1)):
        return per_output(codes, _scales(parts, scale, found))
    if block is None:
        raise parts.fail(
            f"{parts.names[scale]} has shape {list(found)}, which does not fit; expected [], "
            f"[{outputs}] or [{outputs}, 1]"
        )
    stored = (-(-outputs // block[0]), -(-inputs // block[1]))
    scales = _scales(parts, scale, stored)
    by_output = np.repeat(scales, block[0], axis=0)[:outputs]
    return grouped(codes.T, code_dtype, by_output.T, block[1])


def _scales(parts: StoredParts, scale: str, shape: tuple[int, ...]) -> np.ndarray:
    """The scales; those of E8M0 as powers of two."""
    scales = parts.scales(scale, shape, (*FLOAT_DTYPES, "F8_E8M0"))
    if scales.dtype.itemsize == 1:
        return powers_of_two(scales.view(np.uint8))
    return scales


@dataclasses.dataclass(frozen=True)
class FP8(Quantizer):
    """Block scales, or one per weight; activations stay in the model's dtype."""

    codes = ("weight",)
    others = ("weight_scale_inv", "weight_scale")
    unused = ("input_scale", "activation_scale", "input_scale_ub")

    block: tuple[int, int] | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> FP8:
        """The quantizer of these settings.

        Raises:
          ModelError: a setting is not read.
        """
        block = setting(settings, "weight_block_size", BLOCK, None)
        method = settings["quant_method"]
        return cls(method, 8, block[1] if block else None, 4, tuple(block) if block else None)

    def read(self, parts: StoredParts, shape: tuple[int, int]) -> PerOutput | Grouped:
        scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        return scaled_fp8(parts, scale, shape, self.block)


@dataclasses.dataclass(frozen=True)
class MXFP4(Quantizer):
    """Blocks ``uint8 [O, G, 16]`` of two codes each, and scales ``uint8 [O, G]``.

    gpt-oss has both for all experts at once, ``[E, O, …]``.
    """

    codes = ("weight_blocks", "blocks")
    others = ("weight_scales", "scales")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> MXFP4:
        """The quantizer of these settings."""
        return cls("mxfp4", 4, MX_GROUP)

    def read(self, parts: StoredParts, shape: tuple[int, int]) -> Grouped:
        pairs, exponents = self._read_tensors(parts, shape)
        return shared_exponents(parts, pairs, exponents)

    def read_experts(self, parts: StoredParts, shape: tuple[int, int, int]) -> list[Grouped]:
        experts = zip(*self._read_tensors(parts, shape), strict=True)
        return [shared_exponents(parts, pairs, exponents) for pairs, exponents in experts]

    def _read_tensors(
        self, parts: StoredParts, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of codes ``uint8 [..., O, I/2]``, and exponents ``uint8 [..., O, I/32]``."""
        *rest, inputs = shape
        prefix = "weight_" if "weight_blocks" in parts else ""
        if inputs % MX_GROUP:
            raise parts.fail(f"{inputs} inputs are not divided by groups of {MX_GROUP}")
        groups = inputs // MX_GROUP
        pairs = parts.read(f"{prefix}blocks", (*rest, groups, MX_GROUP // 2), ("U8",))
        exponents = parts.read(f"{prefix}scales", (*rest, groups), ("U8",))
        return pairs.reshape(*rest, inputs // 2), exponents


def shared_exponents(parts: StoredParts, pairs: np.ndarray, exponents: np.ndarray) -> Grouped:
    """A weight from pairs of FP4 codes ``uint8 [O, I/2]`` and E8M0 scales ``uint8 [O, I/32]``.

    Raises:
      ModelError: an exponent is 255, which means that its group is not a number.
    """
    if (exponents == 255).any():
        raise parts.fail("a shared exponent is 255: its group is not a number")
    codes = unpack_fp4(pairs)
    return grouped(codes.T, FP4, powers_of_two(exponents).T, MX_GROUP)
