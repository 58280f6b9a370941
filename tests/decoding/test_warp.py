"""Warping against a plain sorted reference, ties, padding ids, row independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import specjax as sj
from specjax.core.probs import fit_vocabulary, limit_vocabulary
from specjax.core.warp import warp

WARP = jax.jit(
    lambda logits, settings, limit: warp(limit_vocabulary(logits, limit), settings),
    static_argnums=2,
)


def reference(logits, temperature, top_k, top_p, limit):
    """The same by sorting, in float64; returns probabilities."""
    x = np.array(logits, np.float64)
    x[limit:] = -np.inf
    if temperature == 0:
        out = np.zeros_like(x)
        out[np.argmax(x)] = 1
        return out
    x = x / temperature
    if top_k:
        x[x < np.sort(x)[::-1][min(top_k, len(x)) - 1]] = -np.inf
    p = np.exp(x - x[np.isfinite(x)].max())
    p /= p.sum()
    above = np.array([p[p > value].sum() for value in p])
    p[above >= top_p] = 0 if top_p < 1 else p[above >= top_p]
    return p / p.sum()


CASES = [
    (0.0, 0, 1.0),
    (1.0, 0, 1.0),
    (0.7, 5, 1.0),
    (1.0, 0, 0.9),
    (1.3, 20, 0.5),
    (1.0, 100, 1.0),
    (2.0, 0, 0.999),
    (1.0, 1, 1.0),
    (1.0, 0, 1e-6),
    (3.0, 90, 0.97),
]


@pytest.fixture(params=["tpu", "gpu", "cpu"])
def backend_warp(request, monkeypatch):
    """``WARP`` for a backend: TPUs and GPUs search for the cut, a CPU reads the 64 largest."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    WARP.clear_cache()
    yield WARP
    WARP.clear_cache()


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
def test_equals_the_sorted_reference(scale, backend_warp):
    logits = np.random.Generator(np.random.Philox(4)).normal(size=(3, 2, 150)) * scale
    for case in CASES:
        check_against_the_reference(logits.astype(np.float32), case, backend_warp)


def check_against_the_reference(logits, case, warp):
    temperature, top_k, top_p = case
    got = np.exp(warp(logits, sj.Sampling(temperature, top_k, top_p).arrays(3), 140))
    for b in range(3):
        for n in range(2):
            want = reference(logits[b, n], temperature, top_k, top_p, 140)
            np.testing.assert_array_equal(got[b, n] > 0, want > 0)
            np.testing.assert_allclose(got[b, n], want, atol=2e-6)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_search_takes_four_passes_for_logits_of_bfloat16(top_p, scale, monkeypatch):
    """Four passes keep the same tokens as 64; docs/tools/measure_tpu.py counts four."""
    key = jax.random.key(5)
    logits = scale * jax.random.normal(key, (2, 1, 128256), jnp.bfloat16).astype(jnp.float32)
    settings = sj.Sampling(0.8, 0, top_p).arrays(2)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    kept = []
    for iterations in (4, 64):
        monkeypatch.setattr("specjax.core.floor.ITERATIONS", iterations)
        kept.append(np.exp(jax.jit(lambda x: warp(x, settings))(logits)))
    np.testing.assert_array_equal(*kept)
    assert (kept[0] > 0).sum() > 2 * 64  # more tokens than the 64 largest per row


def test_ties_keep_every_token_at_the_kth_logit_and_argmax_takes_the_lowest_id():
    logits = jnp.asarray([[[1.0, 3.0, 3.0, 3.0, 0.0]]])
    two = np.exp(WARP(logits, sj.Sampling(1.0, 2).arrays(1), 5))[0, 0]
    np.testing.assert_allclose(two, [0, 1 / 3, 1 / 3, 1 / 3, 0], atol=1e-6)
    greedy = np.exp(WARP(logits, sj.Sampling(0.0).arrays(1), 5))[0, 0]
    np.testing.assert_array_equal(greedy, [0, 1, 0, 0, 0])


def test_top_p_keeps_the_token_that_crosses():
    logits = jnp.log(jnp.asarray([[[0.5, 0.3, 0.15, 0.05]]]))
    kept = np.exp(WARP(logits, sj.Sampling(1.0, 0, 0.6).arrays(1), 4))[0, 0] > 0
    np.testing.assert_array_equal(kept, [True, True, False, False])


def test_rows_do_not_see_each_other():
    logits = np.random.Generator(np.random.Philox(6)).normal(size=(4, 1, 300)).astype(np.float32)
    rows = [(0.0, 0, 1.0), (1.0, 0, 0.999), (0.5, 200, 1.0), (1.0, 3, 0.9)]
    temperature, top_k, top_p = zip(*rows, strict=True)
    both = sj.core.types.Warp(
        jnp.asarray(temperature, "f4"), jnp.asarray(top_k), jnp.asarray(top_p)
    )
    together = WARP(logits, both, 300)
    for i, row in enumerate(rows):
        alone = WARP(logits[i : i + 1], sj.Sampling(*row).arrays(1), 300)
        np.testing.assert_array_equal(together[i : i + 1], alone)


@settings(max_examples=60)
@given(
    # XLA takes numbers below the normal ones as 0, so there they tie with 0.
    st.lists(st.floats(-50, 50, width=32, allow_subnormal=False), min_size=8, max_size=8),
    st.floats(0, 4, width=32),
    st.integers(0, 12),
    st.floats(2.0**-10, 1, width=32),
)
@example([0.0] * 7 + [4.0], 2.0**-126, 0, 1.0)  # a quotient that overflows
def test_is_always_a_distribution_that_keeps_the_argmax(logits, temperature, top_k, top_p):
    row = np.asarray(logits, np.float32)[None, None]
    p = np.exp(WARP(row, sj.Sampling(temperature, top_k, top_p).arrays(1), 8))[0, 0]
    assert np.isfinite(p).all()
    assert abs(p.sum() - 1) < 1e-5
    assert p[np.argmax(row[0, 0])] > 0


def test_vocabularies_of_two_sizes():
    assert fit_vocabulary(jnp.zeros((2, 3)), 5).shape == (2, 5)
    assert np.isneginf(fit_vocabulary(jnp.zeros((2, 3)), 5)[:, 3:]).all()
    assert fit_vocabulary(jnp.zeros((2, 7)), 5).shape == (2, 5)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"temperature": float("nan")},
    ],
)
def test_bad_settings_are_named(bad):
    with pytest.raises(sj.OptionError, match=next(iter(bad))):
        sj.Sampling(**bad)
