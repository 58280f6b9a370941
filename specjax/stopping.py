"""End-of-sequence tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def is_eos(tokens: Int[Array, "..."], eos_ids: Int[Array, "E"]) -> Bool[Array, "..."]:
    """Whether each token ends a sequence."""
    return jnp.any(tokens[..., None] == eos_ids, axis=-1)
