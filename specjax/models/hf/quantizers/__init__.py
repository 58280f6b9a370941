"""Weights that other libraries quantized, as they store them.

A weight stays in its 8 or 4 bits where :mod:`specjax.models.quantized` has the form, and is
dequantized where it has not. Which weights are quantized follows from the tensors: lists such as
``modules_to_not_convert`` are not needed. Activations are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specjax._util.checks import OBJECT, quoted, require
from specjax._util.errors import ModelError
from specjax.models.hf.quantizers import compressed
from specjax.models.hf.quantizers.compressed import CompressedTensors
from specjax.models.hf.quantizers.floats import FP8, MXFP4
from specjax.models.hf.quantizers.integers import AWQ, GPTQ
from specjax.models.hf.quantizers.settings import ADVICE, Quantizer

QUANTIZERS: dict[str, Callable[[Mapping[str, Any]], Quantizer]] = {
    "fp8": FP8.of,
    "fbgemm_fp8": FP8.of,
    compressed.METHOD: CompressedTensors.of,
    "awq": AWQ.of,
    "gptq": GPTQ.of,
    "mxfp4": MXFP4.of,
}


def parse(settings: Any) -> Quantizer:
    """The quantizer of a ``quantization_config``.

    Raises:
      ModelError: it is of a library, a version or a width that is not read.
    """
    method = settings.get("quant_method") if type(settings) is dict else settings
    if type(method) is not str or method not in QUANTIZERS:
        raise ModelError(
            f"quantization_config: quant_method {quoted(method)} is not supported; read are "
            f"{', '.join(sorted(QUANTIZERS))} and specjax; {ADVICE}"
        )
    require("config.json: ", "quantization_config", settings, OBJECT, ModelError)
    return QUANTIZERS[method](settings)
