"""The layers every family shares: linear layers, norms, activations, rotary embedding.

Axis legend: B rows, N tokens, R = B·N, D hidden size, H heads, E head size.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.models import sharding
from specjax.models.adapters import LowRank
from specjax.models.config import RopeConfig
from specjax.models.quantized import Grouped, PerOutput, Quantized

# Up to this many rows the layout decides what a CPU product costs; beyond, XLA's own choice is as
# good.
NARROW_ROWS = 128


@jax.named_scope("weights")
def linear(
    x: Float[Array, "... i"],
    weight: Float[Array, "o i"] | Quantized | LowRank,
    bias: Float[Array, "o"] | None = None,
) -> Float[Array, "... o"]:
    """``x @ weight.T + bias`` with weights as Hugging Face stores them, ``[out, in]``.

    Every product with a weight is this one. Codes are widened on their way into it, which exact
    codes of 8 bits are in bfloat16, too, and one scale per output follows its float32 sum.
    """
    if isinstance(weight, LowRank):
        y = linear(x, weight.base)
        y = jnp.where(weight.gate[..., None], y + linear(linear(x, weight.down), weight.up), y)
    elif isinstance(weight, PerOutput):
        y = _product(x, weight.codes.astype(x.dtype), jnp.float32) * weight.scales
        y = y.astype(x.dtype)
    elif isinstance(weight, Grouped):
        y = _grouped_product(x, weight)
    else:
        y = _product(x, weight)
    return y if bias is None else y + bias


def _product(
    x: Float[Array, "... i"], weight: Float[Array, "o i"], dtype: jnp.dtype | None = None
) -> Float[Array, "... o"]:
    """``x @ weight.T`` in ``dtype``.

    On CPU and for few rows the product is taken as ``weight @ x.T``, which reads the weights
    once, row by row. The barrier keeps XLA from swapping the operands back.
    """
    rows = math.prod(x.shape[:-1])
    if jax.default_backend() == "cpu" and rows <= NARROW_ROWS:
        flat = jnp.pad(x.reshape(rows, x.shape[-1]), ((0, _padding(rows)), (0, 0)))
        contracted = (((1,), (1,)), ((), ()))
        y = jax.lax.dot_general(weight, flat, contracted, preferred_element_type=dtype)
        y = jax.lax.optimization_barrier(y)[:, :rows].T
        return y.reshape(*x.shape[:-1], weight.shape[0])
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=dtype)


def _grouped_product(x: Float[Array, "... i"], weight: Grouped) -> Float[Array, "... o"]:
    """Group by group, each scaled behind its float32 sum, while the sums of all groups take no
    more memory than the dense weight; that one is made for more rows, and on CPUs."""
    rows, size = math.prod(x.shape[:-1]), weight.shape[1] // weight.groups
    if jax.default_backend() == "cpu" or 2 * rows > size:
        return _product(x, weight.dense(x.dtype))
    parts, codes = x.reshape(rows, weight.groups, size), weight.by_group(x.dtype)
    sums = jnp.einsum("rgi,gio->gro", parts, codes, preferred_element_type=jnp.float32)
    y = (sums * weight.scales[:, None]).sum(0).astype(x.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _padding(rows: int) -> int:
    """Rows to add: the CPU's kernel has tiles of 8 and 16, and slow ones for what is left.

    Five rows cost a sixth more than eight, nine half as much again as sixteen.
    """
    if 4 < rows < 8:
        return 8 - rows
    return -rows % 16 if rows % 16 > 8 else 0


class Linear(nnx.Module):
    """A linear layer ``y = x Wᵀ (+ b)`` with a weight of ``shape`` ``[out, in]``.

    ``axes`` names the weight's axes (:data:`specjax.models.sharding.RULES`). Where the second is
    split over ``shards`` devices, each has some of the inputs, and their products are summed.
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
        self.summed = shards if sharding.RULES[axes[1]] else 1
        init = nnx.initializers.normal(std)
        self.weight = nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)
        self.bias = nnx.Param(jnp.zeros(shape[:1]), axes=axes[:1]) if bias else None

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        y = sharding.psum_shards(linear(x, self.weight[...]), self.summed)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32, scaled in the input's dtype (as transformers)."""

    def __init__(self, size: int, eps: float, axis: str = "hidden"):
        self.weight = nnx.Param(jnp.ones((size,)), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return self.weight[...] * _of_unit_size(x, self.eps).astype(x.dtype)


class UnitOffsetRMSNorm(nnx.Module):
    """RMS norm scaled by ``1 + weight``, all of it in float32 (Gemma)."""

    def __init__(self, size: int, eps: float, axis: str = "hidden"):
        self.weight = nnx.Param(jnp.zeros((size,)), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        scale = 1 + self.weight[...].astype(jnp.float32)
        return (_of_unit_size(x, self.eps) * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean and variance norm in float32, with scale and bias."""

    def __init__(self, size: int, eps: float, axis: str = "hidden"):
        self.weight = nnx.Param(jnp.ones((size,)), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros((size,)), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        wide = x.astype(jnp.float32)
        even = _of_unit_size(wide - wide.mean(-1, keepdims=True), self.eps)
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (even * weight + bias).astype(x.dtype)


def _of_unit_size(x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    """float32, divided by the root of its mean square."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


NORMS = {"rms": RMSNorm, "rms+1": UnitOffsetRMSNorm, "layer": LayerNorm}
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 ``[E/2]`` and the factor on cos and sin.

    The kinds and their constants are those of transformers' ``modeling_rope_utils``;
    llama3: arXiv 2407.21783, yarn: arXiv 2309.00071.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, inverse)
    # "dynamic" at the configured length stretches by 1: the default frequencies.
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, between: a ramp."""
    wavelength = 2 * math.pi / inverse
    context = rope.original_max_position
    ramp = (context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = np.clip(ramp, 0.0, 1.0)
    return ((1 - ramp) * inverse / rope.factor + ramp * inverse).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int, inverse: np.ndarray) -> tuple[np.ndarray, float]:
    """Interpolates the low frequencies, keeps the high ones, ramps between."""

    def correction(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    keep = 1 - np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0, 1)
    stretched = inverse / rope.factor * (1 - keep) + inverse * keep
    return stretched.astype(np.float32), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_table(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B N"]
) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"]]:
    """cos and sin in float32 for each token's position; layers share the table."""
    inverse, factor = rope_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "B N H E"], cos: Float[Array, "B N R"], sin: Float[Array, "B N R"]
) -> Float[Array, "B N H E"]:
    """Rotates the two halves of each head (the pairing of Hugging Face checkpoints).

    A table narrower than the head leaves the head's last entries as they are.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], cos, sin), x[..., width:]], axis=-1)
    half = x.shape[-1] // 2
    # The sine takes the sign: what is turned is then moved alone, not copied to be negated.
    sign = np.where(np.arange(width) < half, -1, 1).astype(x.dtype)
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype) * sign
    return x * cos + jnp.roll(x, half, axis=-1) * sin
