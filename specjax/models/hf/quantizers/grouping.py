"""Which tensors of a quantized checkpoint belong to one weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from specjax.models.hf.quantizers.parts import StoredParts
from specjax.models.hf.quantizers.settings import Quantizer
from specjax.models.hf.tensor_file import FLOAT_DTYPES

if TYPE_CHECKING:
    from specjax.models.hf.files import OpenWeights

WEIGHT = "weight"
BIAS = "bias"


def group_parts(
    weights: OpenWeights, quantizer: Quantizer
) -> tuple[OpenWeights, dict[str, StoredParts]]:
    """The weights with one name for all tensors of a quantized weight.

    That is the name that it would have if it were not quantized. Tensors that belong to
    activations are left out.

    Returns:
      The weights, and the parts of each quantized one.
    """
    by_weight: dict[str, dict[str, str]] = {}
    files = dict(weights.files)
    for name in weights.files:
        weight, part = _split(name, (*quantizer.codes, *quantizer.others))
        if part:
            by_weight.setdefault(weight, {})[part] = name
        elif _split(name, quantizer.unused)[1]:
            del files[name]

    grouped = {}
    for weight, parts in by_weight.items():
        codes = [part for part in quantizer.codes if part in parts]
        if not codes or not _holds_codes(weights, parts[codes[0]], codes[0]):
            continue
        if codes[0] != WEIGHT and weight in weights.files:
            continue  # unquantized as well: what is too much will be named
        # The codes first: messages name them and their file.
        names = {codes[0]: parts.pop(codes[0]), **parts}
        grouped[weight] = StoredParts(weights, weight, names)
        for name in names.values():
            del files[name]
        files[weight] = grouped[weight].path()
    return dataclasses.replace(weights, files=files), grouped


def zero_biases(
    weights: OpenWeights, quantized: Collection[str], used: Collection[str]
) -> set[str]:
    """The biases of quantized weights that the model does not use, if they are zero.

    Some quantizers write a bias for every weight.
    """
    biases = {f"{weight.removesuffix(WEIGHT)}{BIAS}" for weight in quantized}
    unused = (biases & weights.files.keys()) - set(used)
    return {bias for bias in unused if not weights.read_any(bias).any()}


def _split(name: str, parts: Collection[str]) -> tuple[str, str]:
    """The weight that a tensor belongs to, and its part of it; no part: it is none of these."""
    module, _, part = name.rpartition(".")
    if part in parts:
        return f"{module}.{WEIGHT}", part
    # gpt-oss joins the part to the name of a weight of all experts: down_proj_blocks.
    for part in ("blocks", "scales"):
        if part in parts and name.endswith(f"_{part}"):
            return name.removesuffix(f"_{part}"), part
    return name, ""


def _holds_codes(weights: OpenWeights, name: str, part: str) -> bool:
    """Whether a tensor holds codes; one that has the weight's own name may be the weight itself."""
    if part != WEIGHT:
        return True
    return weights.handles[weights.files[name]].get_slice(name).get_dtype() not in FLOAT_DTYPES
