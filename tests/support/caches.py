"""The check that every method's target cache must pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj


@functools.cache
def _prefill():
    def fill(net, tokens):
        begin = jnp.zeros((len(tokens),), jnp.int32)
        return net.prefill_chunk(net.cache(*tokens.shape), tokens, begin)[0]

    return jax.jit(fill)


def check_cache(lm: sj.LM, state: sj.DecodeState, atol: float = 2e-5) -> None:
    """Checks that the state's cache equals a fresh prefill of the committed tokens."""
    want = _prefill()(lm.net, state.tokens)
    held = (jnp.arange(state.capacity) < state.length[:, None] - 1)[:, None, :, None]
    for a, b in zip(jax.tree.leaves(state.cache), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(jnp.where(held, a, 0), jnp.where(held, b, 0), atol=atol)
