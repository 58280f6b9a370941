"""Takes the blocks of a GGUF file apart: codes, scales and offsets, as arrays.

A block of 32 inputs has a scale, and perhaps an offset. K-quants have blocks of 256 inputs. Their
groups of 16 or 32 have scales that are codes themselves, with one more scale for the block. All of
it fits :class:`specjax.models.quantized.Grouped`, so nothing is rounded: ``codes · scale + offset``
in float32 is bit for bit what the ``gguf`` package dequantizes a block to.

Axis legend: O outputs, B blocks of an output, G groups of an output, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


class BlockParts(NamedTuple):
    """A weight in parts, outputs first: ``codes [O, I]``, and ``[O, G]`` the others."""

    codes: np.ndarray
    scales: np.ndarray | BlockParts
    offsets: np.ndarray | BlockParts | None = None


def take_apart(kind: str, data: np.ndarray) -> BlockParts:
    """The parts of a weight of this kind, from its bytes ``[O, bytes of an output]``."""
    size, unpack = KINDS[kind]
    outputs = data.shape[0]
    parts = unpack(data.reshape(outputs, -1, size))
    return _flat(parts, outputs)


def _flat(parts: BlockParts, outputs: int) -> BlockParts:
    """BlockParts with one axis after the outputs."""

    def flat(part: np.ndarray | BlockParts | None) -> np.ndarray | BlockParts | None:
        if isinstance(part, BlockParts):
            return _flat(part, outputs)
        return None if part is None else part.reshape(outputs, -1)

    return BlockParts(*map(flat, parts))  # pyright: ignore[reportArgumentType]


def _halves(data: np.ndarray) -> np.ndarray:
    """``[O, B, I]`` numbers of 4 bits: those of the low halves, then those of the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _half(data: np.ndarray) -> np.ndarray:
    """float16 numbers, from their bytes; as in the file, little-endian."""
    return np.ascontiguousarray(data).view("<f2")


def _as_uint4(codes: np.ndarray) -> np.ndarray:
    return codes.astype(np.uint8).view(ml_dtypes.uint4)


def _as_int4(codes: np.ndarray) -> np.ndarray:
    return codes.astype(np.int8).astype(ml_dtypes.int4)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    """``[O, B, 32]``: the highest bit of each code of 5 bits, in its place."""
    bits = np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little")
    return bits << 4


def _q4_0(blocks: np.ndarray) -> BlockParts:
    codes = _halves(blocks[..., 2:]).view(np.int8) - 8
    return BlockParts(_as_int4(codes), _half(blocks[..., :2]))


def _q4_1(blocks: np.ndarray) -> BlockParts:
    codes = _as_uint4(_halves(blocks[..., 4:]))
    return BlockParts(codes, _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q5_0(blocks: np.ndarray) -> BlockParts:
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return BlockParts(codes.view(np.int8) - 16, _half(blocks[..., :2]))


def _q5_1(blocks: np.ndarray) -> BlockParts:
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return BlockParts(codes.view(np.int8), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q8_0(blocks: np.ndarray) -> BlockParts:
    return BlockParts(blocks[..., 2:].view(np.int8), _half(blocks[..., :2]))


def _q4_k(blocks: np.ndarray) -> BlockParts:
    # Each 32 bytes hold two groups of 32 codes: the low halves, then the high ones.
    codes = _halves(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return BlockParts(_as_uint4(codes), *_scales_and_offsets(blocks))


def _q5_k(blocks: np.ndarray) -> BlockParts:
    codes = _halves(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    # Bit g of byte i is the fifth bit of code i of group g.
    bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    codes = codes.reshape(*blocks.shape[:2], 8, 32) | ((bits & 1) << 4)
    return BlockParts(codes.view(np.int8), *_scales_and_offsets(blocks))


def _scales_and_offsets(blocks: np.ndarray) -> tuple[BlockParts, BlockParts]:
    """Of the eight groups of a block of 256: codes of 6 bits, each kind with a scale."""
    packed = blocks[..., 4:16]
    low = packed[..., :4]
    middle = packed[..., 4:8]
    high = packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    scale = _half(blocks[..., :2])
    negative = -_half(blocks[..., 2:4])  # what the file holds is subtracted
    return BlockParts(scales.view(np.int8), scale), BlockParts(offsets.view(np.int8), negative)


def _q6_k(blocks: np.ndarray) -> BlockParts:
    shape = blocks.shape[:2]
    # Two halves of 128 codes; in each, 32 bytes hold the upper two bits of four codes each.
    low = _halves(blocks[..., :128].reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts
    codes = (low | ((upper & 3) << 4)).view(np.int8) - 32
    scales = BlockParts(blocks[..., 192:208].view(np.int8), _half(blocks[..., 208:210]))
    return BlockParts(codes, scales)


# The bytes of a block, and the function that takes blocks ``[O, B, bytes]`` apart.
KINDS: dict[str, tuple[int, Callable[[np.ndarray], BlockParts]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
