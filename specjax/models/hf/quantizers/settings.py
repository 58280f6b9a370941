"""What the quantizers' settings have in common, and how many bytes a weight takes.

Each quantizer is a frozen dataclass. Its ``of`` reads the settings in ``quantization_config``, and
``read`` makes one weight of its stored tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specjax._util.checks import Check, format_value, require
from specjax._util.errors import ModelError
from specjax.models.hf.quantizers.parts import StoredParts

HOLDER = "config.json: quantization_config."
ADVICE = "load the checkpoint before it was quantized, --quantize quantizes it"
TABLE_AXIS = "vocab"
SCALE_BYTES = 2
OFFSET_BYTES = 4  # of what a zero point becomes


def setting(settings: Mapping[str, Any], name: str, check: Check, default: Any) -> Any:
    """One of the settings; null counts as absent.

    Raises:
      ModelError: it is not as expected.
    """
    value = settings.get(name)
    if value is None:
        return default
    require(HOLDER, name, value, check, ModelError)
    return value


def refuse_setting(name: str, value: Any, read: str) -> ModelError:
    """The error for a setting with a value that is not read; ``read`` says what is."""
    return ModelError(
        f"quantization_config: {name} {format_value(value)} is not read, only {read}; {ADVICE}"
    )


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How a library stores quantized weights. ``bits`` and ``group`` (inputs) are those of most.

    Attributes of the class:
      codes: the parts that hold a weight's codes; the first that is there says that it is
        quantized.
      others: its other parts.
      unused: parts that belong to activations, which are not quantized here.
      stores_inputs_first: whether it stores weights ``[in, out]`` for every family.
    """

    codes: ClassVar[tuple[str, ...]]
    others: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()
    stores_inputs_first: ClassVar[bool] = False

    method: str
    bits: int
    group: int | None
    scale_bytes: int = SCALE_BYTES  # of a group of one output, with its zero point

    def __str__(self) -> str:
        groups = f", groups of {self.group}" if self.group else ""
        return f"{self.method}, {self.bits} bits{groups}"

    def read(self, parts: StoredParts, shape: tuple[int, int]) -> Any:
        """The weight ``[O, I]``: quantized, or an array where ours has no form for it.

        Raises:
          ModelError: a part is missing or does not fit.
        """
        raise NotImplementedError

    def read_experts(self, parts: StoredParts, shape: tuple[int, int, int]) -> list[Any]:
        """Each expert's weight ``[O, I]``, of the tensors ``[E, O, …]`` of all of them.

        Raises:
          ModelError: a part does not fit, or weights of all experts in one tensor are not read.
        """
        raise parts.fail(f"{self.method} of all experts in one tensor is not read")

    def for_axes(self, axes: tuple[str, ...]) -> Quantizer | None:
        """Itself for the weights that are usually quantized; None for norms, biases and tables."""
        if len(axes) < 2 or axes[0] in (TABLE_AXIS, "positions"):
            return None
        return self

    def weight_bytes(self, size: int, inputs: int) -> int:
        """Bytes of a weight with ``size`` entries."""
        return size * self.bits // 8 + size // (self.group or inputs) * self.scale_bytes
