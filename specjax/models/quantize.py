"""Weights into codes: which ones, by which scheme, and what they take.

Symmetric and weight-only: codes are ``round(w / scale)``, so an entry is off by half a scale at
most (fp8: by a sixteenth of itself, or 2⁻¹⁰ scales). Norms, biases and position tables stay as they
are. Tables (embedding, head) have one scale per id in every scheme, and 8 bits at least: a look-up
reads one row, and the tied head its product.

Axis legend: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax._util.errors import ModelError
from specjax.models import sharding
from specjax.models.config import ModelConfig
from specjax.models.forward_pass import param_axes, param_shapes, part_axes
from specjax.models.quantized import Grouped, PerOutput, Quantized, is_quantized

GROUP = 32  # inputs that share a scale, where int4 does not say
LARGEST = {"int8": 127, "fp8": 448, "int4": 7}  # code of each kind
CODES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4}
TABLE_AXIS, POSITIONS = "vocab", "positions"


class Scheme(NamedTuple):
    """int8 and fp8 (e4m3): a float32 scale per output; int4: a bfloat16 one per group of inputs."""

    kind: str
    group: int | None = None

    def __str__(self) -> str:
        return self.kind if self.group in (None, GROUP) else f"{self.kind}:{self.group}"

    def of(self, axes: tuple[str, ...]) -> Scheme | None:
        """The scheme of one parameter, by its axes; None: it stays as it is."""
        if len(axes) < 2 or axes[0] == POSITIONS:
            return None
        return Scheme("int8") if self.group and axes[0] == TABLE_AXIS else self


def parse_scheme(text: str) -> Scheme:
    """``int8``, ``fp8``, ``int4`` or ``int4:GROUP``.

    Raises:
      ModelError: it is none of them.
    """
    if text in ("int8", "fp8"):
        return Scheme(text)
    found = re.fullmatch(r"int4(?::([0-9]{1,4}))?", text) if isinstance(text, str) else None
    group = int(found[1] or GROUP) if found else 0
    if group < 2 or group % 2:
        raise ModelError(
            f"quantize={text!r} is no scheme; choose int8, fp8, int4 or int4:GROUP, the inputs "
            f"that share a scale, an even number (default {GROUP})"
        )
    return Scheme("int4", group)


def quantize(weight: Float[Array, "O I"], scheme: Scheme, dtype: jnp.dtype) -> Quantized:
    """A weight's codes and scales; it counts as ``dtype`` from here on.

    Raises:
      ModelError: the groups do not divide the inputs.
    """
    _check_groups(scheme, weight.shape[1])
    return _encode(weight, scheme, jnp.dtype(dtype))


def _check_groups(scheme: Scheme, inputs: int) -> None:
    if scheme.group and inputs % scheme.group:
        raise ModelError(
            f"{scheme}: groups of {scheme.group} do not divide a weight of {inputs} inputs; "
            "choose int4:GROUP with a number that divides it, or int8"
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encode(weight: Float[Array, "O I"], scheme: Scheme, dtype: jnp.dtype) -> Quantized:
    kind, most = CODES[scheme.kind], LARGEST[scheme.kind]
    rows = weight.shape[0]
    parts = weight.astype(jnp.float32).reshape(rows, -1, scheme.group or weight.shape[1])
    scales = jnp.abs(parts).max(-1) / most
    scales = jnp.where(scales == 0, 1, scales)  # nothing but zeros, or next to it
    scales = scales.astype(jnp.bfloat16 if scheme.group else jnp.float32)
    codes = jnp.clip(parts / scales[..., None].astype(jnp.float32), -most, most)
    codes = (codes if scheme.kind == "fp8" else jnp.round(codes)).reshape(weight.shape)
    if scheme.group:
        return Grouped(codes.T.astype(kind), scales.T, dtype)
    return PerOutput(codes.astype(kind), scales[:, 0], dtype)


def quantize_params(cfg: ModelConfig, params: dict, scheme: Scheme, dtype: jnp.dtype) -> dict:
    """Params in the inference layout, or a part of them, with their weights quantized.

    What stays as it is becomes ``dtype``.

    Raises:
      ModelError: the groups do not divide the inputs of a weight, or a weight is not finite.
    """

    def coded(x: Any, axes: tuple[str, ...]) -> Any:
        own = scheme.of(axes)
        if own is None:
            return x.astype(dtype)
        coded = quantize(x.dense(jnp.float32) if is_quantized(x) else x, own, dtype)
        made = not isinstance(coded.scales, jax.core.Tracer)
        if made and not jnp.isfinite(coded.scales).all():
            raise ModelError(f"{scheme}: a weight ({' × '.join(axes)}) has entries not finite")
        return coded

    axes = part_axes(cfg, params)
    return jax.tree.map(coded, params, axes, is_leaf=is_quantized)


def param_bytes(cfg: ModelConfig, dtype: jnp.dtype, scheme: Scheme | None = None) -> int:
    """Bytes of a model's params; of a split model those of one device.

    Raises:
      ModelError: the groups do not divide the inputs of a weight.
    """

    def count(leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> int:
        # Heads and columns are the device's own in ``cfg``, the vocabulary is the whole one.
        shared = "vocab" in axes and any(sharding.partition(axes, leaf.shape, cfg.shards))
        size = leaf.size // cfg.shards if shared else leaf.size
        own = scheme and scheme.of(axes)
        if not own:
            return size * jnp.dtype(dtype).itemsize
        _check_groups(own, leaf.shape[1])
        if own.group:
            return size // 2 + 2 * (size // own.group)
        return size + 4 * (size // leaf.shape[1])

    return sum(jax.tree.leaves(jax.tree.map(count, param_shapes(cfg), param_axes(cfg))))
