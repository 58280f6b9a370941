"""A KV cache in 8 bits: one layer's keys or values, and the two attention products with them.

Each token has one scale per head, ``max|x| / 127``. A write therefore reads no other cache
position, and an entry is off by at most 1/254 of its token's largest entry. The products read the
int8 codes themselves. Key scales multiply the scores, after the sum over E. Value scales multiply
the attention weights, before the sum over S.

Axis legend: B rows, S cache positions, K key heads, R queries of a key head, E head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from specjax._util.platform import platform

MAX_CODE = 127
ADDED_PER_STEP = 16  # cache positions; more make larger programs, and no faster ones


class QuantizedKV(NamedTuple):
    """Keys or values ``codes * scales`` of one layer.

    Cache positions are the third axis of both leaves, so that one function writes or moves both.
    """

    codes: Int8[Array, "B K S E"]
    scales: Float[Array, "B K S 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


KVBuffer = QuantizedKV | Float[Array, "B K S E"]  # one layer's keys, or its values


def quantize_kv(x: Float[Array, "B K S E"]) -> QuantizedKV:
    """Codes rounded to the nearest, and one float32 scale per token and head."""
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(-1, keepdims=True) / MAX_CODE
    # A token of zeros has scale 0: dividing by 1 instead keeps its codes 0.
    codes = jnp.round(x / jnp.where(scales == 0, 1, scales))
    return QuantizedKV(codes.astype(jnp.int8), scales)


def key_scores(q: Float[Array, "B K R E"], k: KVBuffer) -> Float[Array, "B K R S"]:
    """float32 ``q · k``."""
    if isinstance(k, QuantizedKV):
        return key_scores(q, k.codes.astype(q.dtype)) * k.scales[..., 0][:, :, None]
    if 1 < q.shape[2] <= platform().scores_one_by_one:
        queries = jnp.unstack(q, axis=2)
        return jnp.stack([_scores("bke,bkse->bks", query, k) for query in queries], axis=2)
    return _scores("bkre,bkse->bkrs", q, k)


def _scores(letters: str, q: Array, k: Array) -> Array:
    return jnp.einsum(letters, q, k, preferred_element_type=jnp.float32)


def weighted_values(
    weights: Float[Array, "B K R S"],
    v: KVBuffer,
    dtype: DTypeLike,
    *,
    result_dtype: DTypeLike | None = None,
    one_by_one: bool = False,
) -> Float[Array, "B K R E"]:
    """``weights @ v``, computed in ``dtype``.

    The result has ``result_dtype``; None: it has ``dtype``. ``one_by_one``: see
    :func:`_sum_one_by_one`.
    """
    if isinstance(v, QuantizedKV):
        weights = weights * v.scales[..., 0][:, :, None]
        v = v.codes.astype(dtype)
    weights = weights.astype(dtype)
    if one_by_one:
        return _sum_one_by_one(weights, v).astype(result_dtype or dtype)
    return jnp.einsum("bkrs,bkse->bkre", weights, v, preferred_element_type=result_dtype)


def _sum_one_by_one(
    weights: Float[Array, "B K R S"], v: Float[Array, "B K S E"]
) -> Float[Array, "B K R E"]:
    """float32 ``weights @ v``, added up in the order of the cache positions.

    A weight of zero then changes no bit, and it does not matter how many are between two others.
    A matrix product sums blocks or every fourth position apart, differently on each CPU.
    """
    block = math.gcd(weights.shape[3], ADDED_PER_STEP)

    def add(step: Int[Array, ""], total: Float[Array, "B K R E"]) -> Float[Array, "B K R E"]:
        some_weights = lax.dynamic_slice_in_dim(weights, step * block, block, axis=3)
        some_values = lax.dynamic_slice_in_dim(v, step * block, block, axis=2)
        some_weights = some_weights.astype(jnp.float32)
        some_values = some_values.astype(jnp.float32)
        for i in range(block):
            total = total + some_weights[..., i, None] * some_values[:, :, None, i]
        return total

    zeros = jnp.zeros((*weights.shape[:3], v.shape[3]), jnp.float32)
    return lax.fori_loop(0, weights.shape[3] // block, add, zeros)
