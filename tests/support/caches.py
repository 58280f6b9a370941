"""What every method promises of the target's cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj

CHUNK = 16


@functools.cache
def _prefill():
    return jax.jit(lambda net, tokens, length: net.prefill(tokens, length, CHUNK))


def check_cache(lm: sj.LM, state: sj.DecodeState, atol: float = 2e-5) -> None:
    """It holds what a prefill of the committed tokens gives."""
    want = _prefill()(lm.net, state.tokens, state.length)
    held = (jnp.arange(state.slots) < state.length[:, None] - 1)[:, None, :, None]
    for a, b in zip(jax.tree.leaves(state.cache), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(jnp.where(held, a, 0), jnp.where(held, b, 0), atol=atol)
