"""Keys and values in 8 bits: one layer's buffer of a cache, and the two products with it.

Each token's key (value) of each head has a scale of its own, ``max|x| / 127``, so a write needs
nothing of its neighbors and an entry is off by 1/254 of the token's largest at most. Scales
stand behind the sum over E for keys and before the sum over S for values: what streams from
memory are the codes.

Axis legend: B rows, S cache positions, K key heads, R queries of a key head, E head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

LARGEST = 127


class Coded(NamedTuple):
    """``codes * scales``. Both leaves have positions third: writes and moves treat them alike."""

    codes: Int8[Array, "B K S E"]
    scales: Float[Array, "B K S 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


def encode(x: Float[Array, "B K S E"]) -> Coded:
    """The codes that come nearest; scales are float32."""
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(-1, keepdims=True) / LARGEST
    codes = jnp.round(x / jnp.where(scales == 0, 1, scales))
    return Coded(codes.astype(jnp.int8), scales)


def key_scores(
    q: Float[Array, "B K R E"], k: Coded | Float[Array, "B K S E"]
) -> Float[Array, "B K R S"]:
    """float32 ``q · k``."""
    codes = k.codes.astype(q.dtype) if isinstance(k, Coded) else k
    scores = jnp.einsum("bkre,bkse->bkrs", q, codes, preferred_element_type=jnp.float32)
    return scores * k.scales[..., 0][:, :, None] if isinstance(k, Coded) else scores


def value_sums(
    weights: Float[Array, "B K R S"], v: Coded | Float[Array, "B K S E"], dtype: jnp.dtype, **out
) -> Float[Array, "B K R E"]:
    """``weights @ v``, computed in ``dtype``; ``out`` may ask for another result."""
    if isinstance(v, Coded):
        weights, v = weights * v.scales[..., 0][:, :, None], v.codes.astype(dtype)
    return jnp.einsum("bkrs,bkse->bkre", weights.astype(dtype), v, **out)
