"""The layers every family shares: linear layers, norms, activations, rotary embedding.

Axis legend: B rows, N tokens, D hidden size, H heads, E head size, i inputs, o outputs, r = B·N.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specjax._util.platform import platform
from specjax.models import sharding
from specjax.models.adapters import LowRank
from specjax.models.config import RopeConfig
from specjax.models.cpu_kernels import narrow_product
from specjax.models.quantized import Grouped, Joined, PerOutput

# Up to this many rows the layout decides what a product costs on a CPU; beyond that XLA's own
# choice is as good.
NARROW_ROWS = 128
DEQUANTIZED_ENTRIES = 1 << 20  # of a quantized weight, at a time on a CPU
SMALL_ENTRIES = 1 << 16  # of a weight that is dequantized at once


@jax.named_scope("weights")
def linear(
    x: Float[Array, "... i"],
    weight: Float[Array, "o i"] | PerOutput | Grouped | Joined | LowRank,
    bias: Float[Array, "o"] | None = None,
) -> Float[Array, "... o"]:
    """``x @ weight.T + bias`` with weights as Hugging Face stores them, ``[out, in]``.

    Every product with a weight goes through this function. The codes of a quantized weight are cast
    to the activations' dtype; for codes of 8 bits that is exact even in bfloat16. One scale per
    output multiplies the product after its float32 sum. A :class:`LowRank` weight adds its update
    at the tokens where its gate is true.
    """
    if isinstance(weight, LowRank):
        y = linear(x, weight.base)
        gate = weight.gate[..., None]
        adapted = y + linear(linear(x, weight.down), weight.up)
        y = jnp.where(gate, adapted, y)
    elif isinstance(weight, Joined):
        y = jnp.concatenate([linear(x, part) for part in weight.parts], axis=-1)
    elif narrow_product.supports(x, weight):
        y = _kernel_product(x, weight)
    else:
        y = _product(x, weight)
    if bias is None:
        return y
    return y + bias


def _product(
    x: Float[Array, "... i"], weight: Float[Array, "o i"] | PerOutput | Grouped
) -> Float[Array, "... o"]:
    """``x @ weight.T`` by XLA."""
    if isinstance(weight, PerOutput):
        return _by_parts(_scaled_matmul, x, weight)
    if isinstance(weight, Grouped):
        return _by_parts(_grouped_matmul, x, weight)
    return _matmul(x, weight)


_kernel_product = narrow_product.kernel_product(by_xla=_product)


def _matmul(
    x: Float[Array, "... i"], weight: Float[Array, "o i"], dtype: DTypeLike | None = None
) -> Float[Array, "... o"]:
    """``x @ weight.T``, summed and returned in ``dtype``, by default that of the inputs.

    For few rows on a CPU it is ``(weight @ x.T).T``, which reads each row of the weights once.
    Measured on two AVX-512 cores, float32: a pass over 8 tokens costs 1.24 times one of a single
    token for a model of 13M parameters, and 1.48 times with a plain ``x @ weight.T``; for 100M
    1.35 and 2.13 times.
    """
    rows = math.prod(x.shape[:-1])
    if not platform().weights_first or rows > NARROW_ROWS:
        # On accelerators the layout is the compiler's choice.
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=dtype)

    flat = x.reshape(rows, x.shape[-1])
    flat = jnp.pad(flat, ((0, _rows_to_pad(rows)), (0, 0)))
    contracted = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(weight, flat, contracted, preferred_element_type=dtype)
    # Without the barrier XLA swaps the operands back, and the product is a plain one again.
    y = jax.lax.optimization_barrier(y)[:, :rows].T
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _by_parts(
    product: Callable[[Array, Any], Array], x: Float[Array, "... i"], weight: PerOutput | Grouped
) -> Float[Array, "... o"]:
    """``product(x, weight)``; on a CPU for a part of the outputs after the other.

    A CPU dequantizes the codes before it multiplies. XLA starts early what does not depend on the
    activations: without the loop it has all layers' weights dequantized at the same time.
    """
    outputs, inputs = weight.shape
    if not platform().dense_groups or outputs * inputs < SMALL_ENTRIES:
        return product(x, weight)
    # At least two parts: XLA unrolls one.
    size = min(-(-outputs // 2), max(1, DEQUANTIZED_ENTRIES // inputs))
    whole = outputs // size

    def add(y, first, count):
        part = product(x, weight.part(first, count))
        return jax.lax.dynamic_update_slice_in_dim(y, part, first, -1)

    # All of y is overwritten. XLA would make zeros, which do not depend on x, early for all layers.
    y = jnp.broadcast_to(x[..., :1], (*x.shape[:-1], outputs))
    y = jax.lax.fori_loop(0, whole, lambda i, y: add(y, i * size, size), y)
    if outputs % size:
        y = add(y, whole * size, outputs % size)
    return y


def _scaled_matmul(x: Float[Array, "... i"], weight: PerOutput) -> Float[Array, "... o"]:
    """A product that is scaled after its float32 sum."""
    y = _matmul(x, weight.codes.astype(x.dtype), jnp.float32) * weight.scales
    return y.astype(x.dtype)


def _grouped_matmul(x: Float[Array, "... i"], weight: Grouped) -> Float[Array, "... o"]:
    """One product per group of inputs, each scaled after its float32 sum.

    A group's offset multiplies the sum of its inputs.

    The sums of all groups exist at once. With more rows than half a group's inputs they would take
    more memory than the dense weight. Then, and always on a CPU, the dense weight is made instead.
    """
    if weight.order is not None:
        x = jnp.take(x, weight.order, axis=-1, mode="clip")
    rows = math.prod(x.shape[:-1])
    size = weight.shape[1] // weight.groups
    if platform().dense_groups or 2 * rows > size:
        return _matmul(x, weight.dense_in_order(x.dtype))

    inputs = x.reshape(rows, weight.groups, size)
    codes = weight.by_group(x.dtype)
    sums = jnp.einsum("rgi,gio->gro", inputs, codes, preferred_element_type=jnp.float32)
    y = (sums * weight.group_scales()[:, None]).sum(0)
    offsets = weight.group_offsets()
    if offsets is not None:
        input_sums = inputs.sum(-1, dtype=jnp.float32)
        offsets = offsets.astype(jnp.float32)
        # The result cancels most of the first term, so it needs all of float32's digits.
        y = y + jnp.matmul(input_sums, offsets, precision=jax.lax.Precision.HIGHEST)
    y = y.astype(x.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _rows_to_pad(rows: int) -> int:
    """Rows to add before a product on a CPU, whose kernel is fast for tiles of 8 and 16 rows.

    Rows that do not fill a tile take slow paths: five rows cost a sixth more than eight, and nine
    cost 1.5 times as much as sixteen.
    """
    if 4 < rows < 8:
        return 8 - rows
    if rows % 16 > 8:
        return -rows % 16
    return 0


class Linear(nnx.Module):
    """A linear layer ``y = x Wᵀ (+ b)`` with a weight of ``shape`` ``[out, in]``.

    ``axes`` names the weight's axes (:data:`specjax.models.sharding.RULES`). If the inputs are
    split over ``shards`` devices, the devices' partial products are summed.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        axes: tuple[str, str],
        bias: bool,
        shards: int,
        rngs: nnx.Rngs,
        std: float = 0.02,
    ):
        inputs_are_split = sharding.RULES[axes[1]] is not None
        self.summed_shards = shards if inputs_are_split else 1  # one: nothing is summed
        init = nnx.initializers.normal(std)
        self.weight = nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)
        self.bias = nnx.Param(jnp.zeros(shape[:1]), axes=axes[:1]) if bias else None

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        # The bias comes after the sum, or it would be added once per device.
        y = sharding.psum_shards(linear(x, self.weight[...]), self.summed_shards)
        if self.bias is None:
            return y
        return y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32, scaled in the input's dtype (as transformers does)."""

    def __init__(self, size: int, eps: float, axis: str = "hidden"):
        self.weight = nnx.Param(jnp.ones((size,)), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return self.weight[...] * _rms_normalize(x, self.eps).astype(x.dtype)


class UnitOffsetRMSNorm(nnx.Module):
    """RMS norm scaled by ``1 + weight``, all of it in float32 (Gemma)."""

    def __init__(self, size: int, eps: float, axis: str = "hidden"):
        self.weight = nnx.Param(jnp.zeros((size,)), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        scale = 1 + self.weight[...].astype(jnp.float32)
        return (_rms_normalize(x, self.eps) * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean and variance norm in float32, with scale and bias."""

    def __init__(self, size: int, eps: float, axis: str = "hidden"):
        self.weight = nnx.Param(jnp.ones((size,)), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros((size,)), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return self.normed(x, self.weight[...].astype(jnp.float32))

    def normed(self, x: Float[Array, "... d"], scale: Float[Array, "d"]) -> Float[Array, "... d"]:
        """``x``, normed, with this scale and the bias."""
        wide = x.astype(jnp.float32)
        normalized = _rms_normalize(wide - wide.mean(-1, keepdims=True), self.eps)
        bias = self.bias[...].astype(jnp.float32)
        return (normalized * scale + bias).astype(x.dtype)


def _rms_normalize(x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    """``x`` over the root of its mean square, float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class LayerScaleNorm(nnx.Module):
    """:class:`LayerNorm` without a bias; ``size`` may be the shape of weights per head (Cohere)."""

    def __init__(self, size: int | tuple[int, int], eps: float, axis: str = "hidden"):
        shape = size if isinstance(size, tuple) else (size,)
        axes = ("heads", "head") if isinstance(size, tuple) else (axis,)
        self.weight = nnx.Param(jnp.ones(shape), axes=axes)
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        wide = x.astype(jnp.float32)
        normalized = _rms_normalize(wide - wide.mean(-1, keepdims=True), self.eps)
        return (normalized * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class UnitOffsetLayerNorm(LayerNorm):
    """:class:`LayerNorm` scaled by ``1 + weight`` (Nemotron)."""

    def __init__(self, size: int, eps: float, axis: str = "hidden"):
        super().__init__(size, eps, axis)
        self.weight = nnx.Param(jnp.zeros((size,)), axes=(axis,))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return self.normed(x, 1 + self.weight[...].astype(jnp.float32))


class PlainRMSNorm(nnx.Module):
    """RMS norm without weights (nanochat)."""

    def __init__(self, size: int, eps: float, axis: str = "hidden"):
        del size, axis
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return _rms_normalize(x, self.eps).astype(x.dtype)


class PlainLayerNorm(PlainRMSNorm):
    """Mean and variance norm without weights (OLMo 1)."""

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        wide = x.astype(jnp.float32)
        centered = wide - wide.mean(-1, keepdims=True)
        return _rms_normalize(centered, self.eps).astype(x.dtype)


class AllHeadsRMSNorm(nnx.Module):
    """RMS norm over the entries of all heads together, which may be split over devices (OLMo 2)."""

    def __init__(self, size: int, eps: float, shards: int):
        self.weight = nnx.Param(jnp.ones((size,)), axes=("heads",))
        self.eps = eps
        self.shards = shards

    def __call__(self, x: Float[Array, "... H E"]) -> Float[Array, "... H E"]:
        wide = x.astype(jnp.float32)
        squares = (wide * wide).mean((-2, -1), keepdims=True)
        squares = sharding.psum_shards(squares, self.shards) / self.shards
        normalized = wide * jax.lax.rsqrt(squares + self.eps)
        weight = self.weight[...].reshape(x.shape[-2:]).astype(jnp.float32)
        return (normalized * weight).astype(x.dtype)


def relu_squared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``relu(x)²``."""
    return jnp.square(jax.nn.relu(x))


NORMS = {
    "rms": RMSNorm,
    "rms+1": UnitOffsetRMSNorm,
    "rms-plain": PlainRMSNorm,
    "layer": LayerNorm,
    "layer+1": UnitOffsetLayerNorm,
    "layer-scale": LayerScaleNorm,
    "layer-plain": PlainLayerNorm,
}
ACTIVATIONS = {
    "relu2": relu_squared,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 ``[E/2]``, and the factor on cos and sin.

    The kinds and their constants are those of transformers' ``modeling_rope_utils``;
    llama3: arXiv 2407.21783, yarn: arXiv 2309.00071.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.reversed:
        inverse = -inverse
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.kind == "longrope":
        return _longrope(rope, inverse)
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, inverse)
    # "dynamic" at the configured length stretches by 1: the default frequencies.
    return inverse, 1.0


def _longrope(rope: RopeConfig, inverse: np.ndarray) -> tuple[np.ndarray, float]:
    """Divides each frequency by a factor of its own (arXiv 2402.13753).

    transformers takes the short factors while a sequence is short and the long ones after that.
    Cached keys would then have wrong rotations. So the factors follow the model's length: it has
    the long ones if it reads more tokens than it was trained on.
    """
    is_long = rope.max_position > rope.original_max_position
    factors = rope.long_factor if is_long else rope.short_factor
    stretched = inverse / np.asarray(factors, np.float32)
    if rope.attention_factor is not None:
        return stretched, rope.attention_factor
    if rope.factor <= 1:
        return stretched, 1.0
    length = math.log(rope.original_max_position)
    return stretched, math.sqrt(1 + math.log(rope.factor) / length)


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Divides long wavelengths by the factor, keeps short ones, and interpolates in between."""
    wavelength = 2 * math.pi / inverse
    context = rope.original_max_position
    ramp = (context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = np.clip(ramp, 0.0, 1.0)
    return ((1 - ramp) * inverse / rope.factor + ramp * inverse).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int, inverse: np.ndarray) -> tuple[np.ndarray, float]:
    """Stretches low frequencies, keeps high ones, and interpolates in between."""

    def dimension_of(rotations: float) -> float:
        """The (fractional) dimension that makes this many rotations over the original context."""
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = dimension_of(rope.beta_fast)
    high = dimension_of(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    span = max(high - low, 0.001)
    keep = 1 - np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0, 1)
    stretched = inverse / rope.factor * (1 - keep) + inverse * keep
    return stretched.astype(np.float32), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The factor on cos and sin, which changes the softmax's temperature (YaRN, §3.4)."""

    def mscale(weight: float) -> float:
        if rope.factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class Table(NamedTuple):
    """What attention does by position: cos and sin of the rotation, and a factor on queries.

    Each is None where a layer has none.
    """

    cos: Float[Array, "B N R"] | None = None
    sin: Float[Array, "B N R"] | None = None
    query_scale: Float[Array, "B N"] | None = None


def rope_table(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B N"], interleaved: bool = False
) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"]]:
    """cos and sin of each token's position, float32; all layers share them.

    ``interleaved``: the entries of a pair are adjacent.
    """
    inverse, factor = rope_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse)
    if interleaved:
        angles = jnp.repeat(angles, 2, axis=-1)
    else:
        angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "B N H E"],
    cos: Float[Array, "B N R"],
    sin: Float[Array, "B N R"],
    interleaved: bool = False,
) -> Float[Array, "B N H E"]:
    """Rotates pairs of entries of each head: its two halves, or ``interleaved`` adjacent ones.

    If the table has R < E entries, only the first R of each head are rotated.
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        first = rotate(x[..., :rotated], cos, sin, interleaved)
        return jnp.concatenate([first, x[..., rotated:]], axis=-1)
    half = x.shape[-1] // 2
    # The rotation is (x cos − y sin, y cos + x sin). The minus goes into the sine: negating the
    # half of `x` would be one more copy of it.
    index = np.arange(rotated)
    is_first = index % 2 == 0 if interleaved else index < half
    sign = np.where(is_first, -1, 1).astype(x.dtype)
    cos = cos[:, :, None].astype(x.dtype)
    sin = sin[:, :, None].astype(x.dtype) * sign
    if interleaved:
        partner = x.reshape(*x.shape[:-1], half, 2)[..., ::-1].reshape(x.shape)
    else:
        partner = jnp.roll(x, half, axis=-1)
    return x * cos + partner * sin
