"""Sampling by quantile, residuals and KL at their edges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax._util.platform import GPU
from specjax.core import probs


@pytest.mark.parametrize("vocab", [1, 2, 3, 17, 1000, 4096, 50_257])
def test_sample_equals_a_plain_inverse_cdf(vocab):
    generator = np.random.Generator(np.random.Philox(vocab))
    weights = generator.random(vocab).astype(np.float32) ** 4
    weights[generator.random(vocab) < 0.3] = 0
    weights[-1] = 0.1
    u = generator.random(200).astype(np.float32)
    got = np.asarray(probs.sample(jnp.tile(weights, (200, 1)), jnp.asarray(u)))
    cdf = np.cumsum(weights.astype(np.float64)) / weights.astype(np.float64).sum()
    assert (weights[got] > 0).all()
    # The quantile must lie in the token's cell; a float32 sum may move its bounds by a few ulps.
    low = np.where(got > 0, cdf[np.maximum(got - 1, 0)], 0)
    assert ((u > low - 1e-5) & (u <= cdf[got] + 1e-5)).all()


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0]), min_size=1, max_size=9),
    st.sampled_from([2.0**-24, 0.3, 1 - 2.0**-24, 1.0]),
)
def test_sample_never_takes_a_token_without_weight(weights, u):
    if not any(weights):
        weights[0] = 1.0
    token = int(probs.sample(jnp.asarray(weights, jnp.float32), jnp.float32(u)))
    assert weights[token] > 0


def test_residual_of_equal_distributions_is_p():
    p = jnp.asarray([0.25, 0.75, 0.0])
    np.testing.assert_array_equal(probs.residual(p, p), p)
    np.testing.assert_allclose(probs.residual(p, jnp.asarray([0.5, 0.5, 0])), [0, 0.25, 0])


def test_uniforms_lie_in_the_half_open_interval_and_are_apart():
    import jax

    keys = jax.random.split(jax.random.key(0), 500)
    nodes = jnp.tile(jnp.arange(20), (500, 1))
    a = np.asarray(probs.uniforms(keys, probs.Purpose.ACCEPT, nodes))
    b = np.asarray(probs.uniforms(keys, probs.Purpose.EMIT, nodes))
    assert (a > 0).all() and (a <= 1).all()
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05
    assert len(np.unique(a)) > 0.99 * a.size


def test_an_index_that_would_run_into_another_purpose_is_refused():
    import jax

    keys = jax.random.split(jax.random.key(0), 2)
    last = probs.STREAM - 1
    same = jax.random.key_data(probs.draw_keys(keys, probs.Purpose.DRAFT, last))
    other = jax.random.key_data(probs.draw_keys(keys, probs.Purpose.ACCEPT, 0))
    assert not np.array_equal(same, other)
    for index in (probs.STREAM, -1, np.array([0, probs.STREAM])):
        with pytest.raises(AssertionError, match="65535"):
            probs.draw_keys(keys, probs.Purpose.DRAFT, index)
    with pytest.raises(AssertionError, match="65535"):
        probs.uniforms(keys, probs.Purpose.ACCEPT, np.full((2, 1), probs.STREAM))


@pytest.mark.parametrize("count", [17, 20, 40, 300])
def test_top_k_in_blocks_equals_the_sorted_row(count, monkeypatch):
    """With ties, values of −inf, and fewer finite values than asked for."""
    small_blocks = dataclasses.replace(GPU, sort_block=32)
    monkeypatch.setattr(probs, "platform", lambda: small_blocks)
    generator = np.random.Generator(np.random.Philox(count))
    x = generator.integers(0, 50, (2, 3, 1000)).astype(np.float32)
    x[0, 0, 10:] = -np.inf
    x[1] = -np.inf
    values, index = jax.jit(probs.top_k, static_argnums=1)(x, count)
    order = np.argsort(-x, axis=-1, kind="stable")[..., :count]
    np.testing.assert_array_equal(index, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=-1))
