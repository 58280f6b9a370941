"""The tensors that a quantizer stores for one weight, and what makes ours of them.

Axis legend: O outputs, I inputs, G groups of inputs, S groups as stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax._util.errors import ModelError
from specjax.models.hf.tensor_file import FLOAT_DTYPES
from specjax.models.quantized import Grouped, PerOutput

if TYPE_CHECKING:
    from specjax.models.hf.files import OpenWeights

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
POWER_BIAS = 127  # of an E8M0 scale: the byte b means 2^(b - 127)
F32 = jnp.dtype("float32")
INT4 = jnp.dtype("int4")
INT8 = jnp.dtype("int8")
FP4 = jnp.dtype("float4_e2m1fn")


@dataclasses.dataclass(frozen=True)
class StoredParts:
    """The stored tensors of one weight.

    Attributes:
      weights: the open files.
      weight: the name that the weight itself would have.
      names: the stored name of each part, such as ``qweight``.
    """

    weights: OpenWeights
    weight: str
    names: Mapping[str, str]

    def __contains__(self, part: str) -> bool:
        return part in self.names

    def path(self) -> Path:
        """The file of the first part."""
        return self.weights.files[next(iter(self.names.values()))]

    def fail(self, reason: str) -> ModelError:
        """The error for a weight that cannot be read."""
        return ModelError(f"{self.path()}: weight {self.weight}: {reason}")

    def shape(self, part: str) -> tuple[int, ...]:
        """A part's shape.

        Raises:
          ModelError: there is no such part.
        """
        if part not in self.names:
            first = next(iter(self.names.values()))
            raise self.fail(f"{first} is there, but its {part} is missing")
        name = self.names[part]
        header = self.weights.handles[self.weights.files[name]].get_slice(name)
        return tuple(header.get_shape())

    def read(
        self, part: str, shape: Sequence[int], dtypes: Sequence[str] = FLOAT_DTYPES
    ) -> np.ndarray:
        """A part, of this shape and one of these dtypes.

        Raises:
          ModelError: it is missing, it has another shape or dtype, or it cannot be read.
        """
        found = self.shape(part)
        if found != tuple(shape):
            raise self.fail(
                f"{self.names[part]} has shape {list(found)}, which does not fit; expected "
                f"{list(shape)}"
            )
        return self.weights.read(self.names[part], tuple(shape), dtypes)

    def scales(
        self, part: str, shape: Sequence[int], dtypes: Sequence[str] = FLOAT_DTYPES
    ) -> np.ndarray:
        """A part that must be finite: scales."""
        scales = self.read(part, shape, dtypes)
        if not np.isfinite(scales.astype(np.float32)).all():
            raise self.fail(f"{self.names[part]} has entries that are not finite")
        return scales


def unpack(words: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Unsigned codes ``uint8 [R, N]`` that 32-bit words ``[R, N · bits / 32]`` hold.

    The first code of a word is in its lowest bits. ``order`` names the codes of a word in another
    order: entry n is the place of code n.
    """
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    if order is not None:
        shifts = shifts[np.asarray(order)]
    codes = np.empty((*words.shape, per_word), np.uint8)
    unsigned = words.view(np.uint32)
    for place, shift in enumerate(shifts):  # one code of each word at a time needs less memory
        codes[..., place] = (unsigned >> shift) & (2**bits - 1)
    return codes.reshape(words.shape[0], -1)


def unpack_fp4(pairs: np.ndarray) -> np.ndarray:
    """FP4 (e2m1) codes ``[R, 2 N]`` of bytes ``[R, N]``; the first code is in the low half."""
    codes = np.empty((*pairs.shape, 2), np.uint8)
    codes[..., 0] = pairs & 15
    codes[..., 1] = pairs >> 4
    return codes.reshape(pairs.shape[0], -1).view(ml_dtypes.float4_e2m1fn)


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """The scales that E8M0 bytes mean; bfloat16 holds them exactly."""
    return np.exp2(exponents.astype(np.float32) - POWER_BIAS).astype(ml_dtypes.bfloat16)


def equal_groups(scales: np.ndarray, group: int, inputs: int) -> np.ndarray:
    """Scales ``[G, O]`` of groups that divide the inputs, from stored ones ``[S, O]``.

    Where ``group`` does not divide the inputs, the last stored group is smaller. Then all groups
    are cut to the greatest common divisor.
    """
    size = math.gcd(group, inputs)
    if size == group:
        return scales
    return scales[np.arange(inputs // size) * size // group]


def per_output(codes: np.ndarray, scales: np.ndarray) -> PerOutput:
    """``codes [O, I]`` with one scale per output ``[O]``, or one for all."""
    wide = np.broadcast_to(scales.astype(np.float32).reshape(-1), codes.shape[:1])
    return PerOutput(jnp.asarray(codes), jnp.asarray(wide), F32)


def grouped(
    codes: np.ndarray,
    code_dtype: Any,
    scales: np.ndarray,
    group: int,
    zeros: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> Grouped:
    """A weight with one scale per ``group`` inputs; the last group may be smaller.

    Args:
      codes: signed ``[I, O]``.
      code_dtype: what they are kept as.
      scales: ``[S, O]``.
      zeros: the zero points ``[S, O]``, subtracted from a code before it is scaled.
      order: see :class:`specjax.models.quantized.Grouped`.
    """
    inputs = codes.shape[0]
    offsets = None
    if zeros is not None:
        # Exact for scales of 16 bits.
        products = -zeros.astype(np.float32) * scales.astype(np.float32)
        offsets = jnp.asarray(equal_groups(products, group, inputs))
    return Grouped(
        jnp.asarray(codes).astype(code_dtype),
        jnp.asarray(equal_groups(scales, group, inputs)),
        F32,
        offsets,
        None if order is None else jnp.asarray(order, jnp.int32),
    )
