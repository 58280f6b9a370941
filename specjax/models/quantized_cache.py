"""A KV cache in 8 bits: one layer's keys or values, and the two attention products with them.

Each token has one scale per head, ``max|x| / 127``. A write therefore reads no other cache
position, and an entry is off by at most 1/254 of its token's largest entry. The products read the
int8 codes themselves. Key scales multiply the scores, after the sum over E. Value scales multiply
the attention weights, before the sum over S.

Axis legend: B rows, S cache positions, K key heads, R queries of a key head, E head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from specjax._util.platform import platform

MAX_CODE = 127


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
) -> Float[Array, "B K R E"]:
    """``weights @ v``, computed in ``dtype``.

    The result has ``result_dtype``; None: it has ``dtype``.
    """
    if isinstance(v, QuantizedKV):
        weights = weights * v.scales[..., 0][:, :, None]
        v = v.codes.astype(dtype)
    return jnp.einsum(
        "bkrs,bkse->bkre", weights.astype(dtype), v, preferred_element_type=result_dtype
    )
