"""Quantizing weights: which ones, by which scheme, and how many bytes that takes.

Quantization is symmetric and weight-only. Codes are ``round(w / scale)``, so an entry is off by at
most half a scale (fp8: by a sixteenth of itself, or 2⁻¹⁰ scales). Norms, biases and position tables
are not quantized. Tables (embedding, head) have one scale per id in every scheme, and at least 8
bits: a look-up reads one row, and a tied head multiplies with the same table.

Axis legend: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from specjax._util.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.experts import distinct_experts
from specjax.models.forward_pass import param_axes, param_shapes, part_axes, size_per_device
from specjax.models.quantized import Grouped, PerOutput, Quantized, is_quantized
from specjax.models.sharding import EXPERTS

GROUP = 32  # inputs that share a scale, by default
MAX_CODE = {"int8": 127, "fp8": 448, "int4": 7}
CODES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4}
TABLE_AXIS = "vocab"
KEPT_TABLES = ("positions", "router")  # by their first axis
NO_SCHEME = "none"  # dequantizes what a checkpoint quantized


class Scheme(NamedTuple):
    """How weights are quantized.

    int8 and fp8 (e4m3) have a float32 scale per output, int4 a bfloat16 one per ``group`` inputs.
    """

    kind: str
    group: int | None = None

    def __str__(self) -> str:
        if self.group is None or self.group == GROUP:
            return self.kind
        return f"{self.kind}:{self.group}"

    def for_axes(self, axes: tuple[str, ...]) -> Scheme | None:
        """The scheme of a parameter with these axes; None: it is not quantized."""
        if len(axes) < 2 or axes[0] in KEPT_TABLES or "head" in axes:
            return None
        if axes[0] == EXPERTS and len(axes) == 2:  # their biases
            return None
        if self.group and axes[0] == TABLE_AXIS:
            return Scheme("int8")
        return self

    def of_share(self, inputs: int) -> Scheme:
        """The scheme of one device's share, which has so many inputs: at most one group of them.

        Where a whole row is one group, each device has a group of its own.
        """
        if self.group and self.group > inputs:
            return self._replace(group=inputs)
        return self

    def weight_bytes(self, size: int, inputs: int) -> int:
        """Bytes of a weight with ``size`` entries.

        Raises:
          ModelError: the groups do not divide the inputs.
        """
        _check_groups(self, inputs)
        if self.group:
            return size // 2 + 2 * (size // self.group)  # 4 bits, and bfloat16 scales
        return size + 4 * (size // inputs)  # 8 bits, and float32 scales


class StoredForm(Protocol):
    """How weights are stored: a :class:`Scheme`, or another library's quantizer."""

    @property
    def group(self) -> int | None: ...

    def for_axes(self, axes: tuple[str, ...]) -> StoredForm | None: ...

    def weight_bytes(self, size: int, inputs: int) -> int: ...


def parse_scheme(text: str) -> Scheme:
    """The scheme ``int8``, ``fp8``, ``int4`` or ``int4:GROUP``.

    Raises:
      ModelError: it is none of them.
    """
    if text in ("int8", "fp8"):
        return Scheme(text)
    group = 0
    if isinstance(text, str) and (match := re.fullmatch(r"int4(?::([0-9]{1,4}))?", text)):
        group = int(match[1] or GROUP)
    if group < 2 or group % 2:
        raise ModelError(
            f"quantize={text!r} is no scheme; choose int8, fp8, int4 or int4:GROUP, the inputs "
            f"that share a scale, an even number (default {GROUP})"
        )
    return Scheme("int4", group)


def quantize(weight: Float[Array, "O I"], scheme: Scheme, dtype: DTypeLike) -> Quantized:
    """A weight's codes and scales; products with it are computed in ``dtype``.

    Raises:
      ModelError: the groups do not divide the inputs.
    """
    _check_groups(scheme, weight.shape[-1])
    encode = functools.partial(_encode, scheme=scheme, dtype=jnp.dtype(dtype))
    # Weights of experts [E, O, I] are quantized one by one, with E the first axis of every part.
    return jax.vmap(encode)(weight) if weight.ndim > 2 else encode(weight)


def _check_groups(scheme: Scheme, inputs: int) -> None:
    if scheme.group and inputs % scheme.group:
        raise ModelError(
            f"{scheme}: groups of {scheme.group} do not divide a weight of {inputs} inputs; "
            "choose int4:GROUP with a number that divides it, or int8"
        )


@functools.partial(jax.jit, static_argnames=("scheme", "dtype"))
def _encode(weight: Float[Array, "O I"], scheme: Scheme, dtype: jnp.dtype) -> Quantized:
    code_type = CODES[scheme.kind]
    max_code = MAX_CODE[scheme.kind]
    rows = weight.shape[0]
    parts = weight.astype(jnp.float32).reshape(rows, -1, scheme.group or weight.shape[1])
    scales = jnp.abs(parts).max(-1) / max_code
    scales = jnp.where(scales == 0, 1, scales)  # all entries are zero, or nearly
    scales = scales.astype(jnp.bfloat16 if scheme.group else jnp.float32)
    # Clipped, because a scale that bfloat16 rounded down gives codes beyond the largest.
    codes = jnp.clip(parts / scales[..., None].astype(jnp.float32), -max_code, max_code)
    if scheme.kind != "fp8":  # the cast to fp8 rounds by itself
        codes = jnp.round(codes)
    codes = codes.reshape(weight.shape)
    if scheme.group:
        # Inputs first: see `Grouped`.
        return Grouped(codes.T.astype(code_type), scales.T, dtype)
    return PerOutput(codes.astype(code_type), scales[:, 0], dtype)


def quantize_params(cfg: ModelConfig, params: dict, scheme: Scheme, dtype: DTypeLike) -> dict:
    """Params in the inference layout, or a part of them, with their weights quantized.

    Parameters that are not quantized are cast to ``dtype``.

    Raises:
      ModelError: the groups do not divide the inputs of a weight, or a weight is not finite.
    """

    quantize_leaf = functools.partial(quantize_param, scheme=scheme, dtype=dtype)
    axes = part_axes(cfg, params)
    return jax.tree.map(quantize_leaf, params, axes, is_leaf=is_quantized)


def quantize_param(x: Any, axes: tuple[str, ...], scheme: Scheme, dtype: DTypeLike) -> Any:
    """One parameter with these axes: quantized, or cast to ``dtype`` if its kind stays as it is.

    Raises:
      ModelError: as :func:`quantize_params`.
    """
    param_scheme = scheme.for_axes(axes)
    if param_scheme is None:
        return x.astype(dtype)
    if is_quantized(x):
        x = jax.vmap(lambda w: w.dense(jnp.float32))(x) if len(axes) > 2 else x.dense(jnp.float32)
    quantized = quantize(x, param_scheme, dtype)
    # Under a trace, as of `eval_shape`, there are no values to check.
    is_concrete = not isinstance(quantized.scales, Tracer)
    if is_concrete and not jnp.isfinite(quantized.scales).all():
        raise ModelError(f"{scheme}: a weight ({' × '.join(axes)}) has entries not finite")
    return quantized


def param_bytes(cfg: ModelConfig, dtype: DTypeLike, scheme: StoredForm | None = None) -> int:
    """Bytes of a model's params; of a split model those on one device.

    Raises:
      ModelError: the groups do not divide the inputs of a weight.
    """
    return sum(jax.tree.leaves(_leaf_bytes(cfg, dtype, scheme)))


def active_bytes(
    cfg: ModelConfig, tokens: int, dtype: DTypeLike, scheme: StoredForm | None = None
) -> int:
    """Bytes of the params that a pass over so many tokens uses.

    Of a mixture's experts only the active ones count, if each token chooses by itself
    (:func:`specjax.models.experts.distinct_experts`). The embedding counts.
    """
    sizes = _leaf_bytes(cfg, dtype, scheme)
    inactive = 0.0
    for layer in sizes["layers"].values():
        if cfg.experts is not None and "experts" in layer["mlp"]:
            share = 1 - distinct_experts(cfg.experts, tokens) / cfg.experts.count
            inactive += share * sum(jax.tree.leaves(layer["mlp"]["experts"]))
    return sum(jax.tree.leaves(sizes)) - round(inactive)


def _leaf_bytes(cfg: ModelConfig, dtype: DTypeLike, scheme: StoredForm | None) -> dict:
    """Bytes of each parameter on one device, as the nested dict of the params."""

    def count_bytes(leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> int:
        size = size_per_device(cfg, leaf, axes)
        param_scheme = scheme.for_axes(axes) if scheme else None
        if param_scheme is None:
            return size * jnp.dtype(dtype).itemsize
        if isinstance(param_scheme, Scheme) and cfg.shards > 1:
            param_scheme = param_scheme.of_share(leaf.shape[-1])
        return param_scheme.weight_bytes(size, leaf.shape[-1])

    return jax.tree.map(count_bytes, param_shapes(cfg), param_axes(cfg))
