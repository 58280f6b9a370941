"""Attention over a long cache by blocks of positions, against loops and against dense attention."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from conftest import tiny_lm
from specjax.core import loop
from specjax.models.attention import dense, long_cache, splash, splash_chunk
from specjax.models.attention.dense import ScoreTransform
from specjax.models.attention.long_cache import cached_attention, choose_blocks
from specjax.models.quantized_cache import QuantizedKV
from specjax.registry import Context
from specjax.runtime.engine import Engine

ROWS, HEADS, KEYS, SIZE, SLOTS = 3, 4, 2, 8, 56
BASES = np.array([3, 41, 17], np.int32)  # rows of different lengths
PARENTS = [-1, 0, 0, 1, 2, 3]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 8 positions, because 16 do not divide the cache."""
    monkeypatch.setattr(long_cache, "MIN_BLOCK", 16)
    monkeypatch.setattr(long_cache, "MAX_BLOCK", 16)


def reference(q, k, v, seen, distance, window, transform):
    """Row by row, query by query, head by head, in float64."""
    out = np.zeros(q.shape)
    slopes = dense.alibi_slopes(HEADS)
    for b, i, h in itertools.product(range(ROWS), range(q.shape[1]), range(HEADS)):
        at = [s for s in range(SLOTS) if seen[b, i, s] and distance[b, i, s] < window]
        keys = k[b, h // (HEADS // KEYS), at].astype(np.float64)
        scores = keys @ q[b, i, h] * (transform.scale or SIZE**-0.5)
        if transform.softcap:
            scores = transform.softcap * np.tanh(scores / transform.softcap)
        if transform.alibi:
            scores = scores - slopes[h] * distance[b, i, at]
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights / weights.sum() @ v[b, h // (HEADS // KEYS), at]
    return out


def drawn(n):
    draws = np.random.Generator(np.random.Philox(n))
    q = draws.standard_normal((ROWS, n, HEADS, SIZE), np.float32)
    return q, *draws.standard_normal((2, ROWS, KEYS, SLOTS, SIZE), np.float32)


def nodes(parents):
    """(positions, seen, distance) of tree nodes, by simple loops.

    ``seen`` and ``distance [rows, nodes, slots]``: which cache positions a node sees, how far back.
    """
    n = len(parents)
    above = [{i} for i in range(n)]
    for i, parent in enumerate(parents):
        above[i] |= above[parent] if parent >= 0 else set()
    depth = np.array([len(path) - 1 for path in above], np.int32)
    seen, distance = np.zeros((ROWS, n, SLOTS), bool), np.zeros((ROWS, n, SLOTS), np.int32)
    for b, i, place in itertools.product(range(ROWS), range(n), range(SLOTS)):
        node = place - BASES[b]
        seen[b, i, place] = node < 0 or node in above[i]
        position = BASES[b] + depth[node] if 0 <= node < n else place
        distance[b, i, place] = BASES[b] + depth[i] - position
    return BASES[:, None] + depth, seen, distance


CASES = {
    "chain": (5, None, ScoreTransform()),
    "chain in a window": (5, 9, ScoreTransform(softcap=2.0)),
    "chain with slopes": (5, None, ScoreTransform(alibi=True)),
    "tree": (6, None, ScoreTransform()),
    "tree in a window": (6, 9, ScoreTransform(softcap=2.0)),
    "tree with slopes": (6, None, ScoreTransform(scale=0.7, alibi=True)),
}


@pytest.mark.parametrize("rows", ["shared", "one by one", "sum in product"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_a_loop_over_what_each_token_sees(case, rows, monkeypatch):
    n, window, transform = CASES[case]
    if rows == "one by one":
        monkeypatch.setattr(long_cache, "BLOCK_SCORES", 1)
    if rows == "sum in product":
        monkeypatch.setattr(long_cache, "SUM_IN_PRODUCT", 1)
    assert choose_blocks(ROWS, HEADS * n, SLOTS) == (rows != "one by one", 8)
    positions, seen, distance = nodes(PARENTS if "tree" in case else range(-1, n - 1))
    tree = ()
    if "tree" in case:
        inside = seen & (distance < (window or SLOTS + 1))
        tree = jnp.asarray(inside), jnp.asarray(distance) if transform.alibi else None
    arrays = drawn(n)
    run = jax.jit(lambda *x: cached_attention(*x, window=window, transform=transform))
    got = run(*map(jnp.asarray, arrays), jnp.asarray(positions), jnp.asarray(BASES + n - 1), *tree)
    want = reference(*arrays, seen, distance, window or SLOTS + 1, transform)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_row_reads_no_block_after_its_last():
    """Later blocks hold NaN, which would show in the result even with weight 0."""
    q, k, v = drawn(5)
    positions, top = BASES[:, None] + np.arange(5, dtype=np.int32), BASES + 4
    run = jax.jit(cached_attention)
    want = np.asarray(run(q, k, v, positions, top))
    k, v = k.copy(), v.copy()  # JAX may still read the original arrays
    for row in range(ROWS):
        for x in (k, v):
            x[row, :, (top[row] // 8 + 1) * 8 :] = np.nan
    for row in range(ROWS):
        own = (x[row : row + 1] for x in (q, k, v, positions, top))
        np.testing.assert_allclose(run(*own)[0], want[row], atol=2e-6)
    # Rows share a loop up to the second longest of the three, so the shortest one meets NaN.
    shared = run(q, k, v, positions, top)
    assert np.isnan(shared[0]).all()
    np.testing.assert_allclose(shared[1:], want[1:], atol=2e-6)


def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it():
    """bfloat16, passes of eight tokens: copies of one token give the bits that a chain gives."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in drawn(8))
    positions, run = BASES[:, None] + np.arange(8, dtype=np.int32), jax.jit(cached_attention)
    chain = run(q, k, v, positions, BASES + 7)
    for i in range(8):
        alone = (jnp.repeat(x[:, i : i + 1], 8, axis=1) for x in (q, positions))
        q_alone, own = alone
        np.testing.assert_array_equal(run(q_alone, k, v, own, BASES + i)[:, 0], chain[:, i])


@pytest.mark.parametrize(
    "method", ["speculative", pytest.param("specinfer", marks=pytest.mark.slow)]
)
def test_decoding_by_blocks_equals_decoding_by_whole_caches(method, monkeypatch):
    """Same tokens for long and short rows, with a sliding layer, greedy and sampled."""
    slides = {"sliding_window": 24, "sliding_layers": (True, False)}
    target, draft = tiny_lm(0, **slides), tiny_lm(2, layers=1, sliding_window=24)
    built, settings = sj.method(method).build(Context(target, draft), {})
    prompts = [np.arange(150) % 90, np.arange(20), np.arange(7, 140) % 80]
    keys, budget = jax.random.split(jax.random.key(0), 3), np.full(3, 30, np.int32)
    engine = Engine(target, draft, built, settings)
    monkeypatch.setattr(long_cache, "DENSE_CAPACITY", 256)
    for sampling in (sj.Sampling(temperature=0.0), sj.Sampling(temperature=1.0)):
        states = []
        for capacity in (256, 384):
            inputs = engine.inputs(sampling, 3)
            state = loop.start(built, inputs, prompts, budget, keys, chunk=32, capacity=capacity)
            states.append(loop.advance(built, inputs, state, 1000))
        whole, blocks = states
        np.testing.assert_array_equal(whole.length, blocks.length)
        for ours, theirs, length in zip(whole.tokens, blocks.tokens, whole.length, strict=True):
            np.testing.assert_array_equal(ours[:length], theirs[:length])
        ours, theirs = (np.asarray(state.cache.k[1][:, :, :149]) for state in states)
        assert (ours != theirs).any()  # the two round differently, so blocks were used
        assert 0 < int(whole.stats.accepted.sum()) < int(whole.stats.tested.sum())


# The TPU's kernel for prefill chunks, run by Pallas's interpreter.
kernel = functools.partial(
    splash_chunk.chunk_attention, blocks=splash.SplashBlocks(128, 256, 256, 128), interpret=True
)


@pytest.mark.parametrize(
    "window, transform", [(None, ScoreTransform()), (100, ScoreTransform(0.4, softcap=2.0))]
)
def test_the_tpu_kernel_visits_what_a_chunk_sees(window, transform):
    """It reads only the blocks that the chunk sees: all others hold NaN."""
    draws, capacity = np.random.Generator(np.random.Philox(5)), 1280
    q = draws.standard_normal((2, 256, HEADS, SIZE), np.float32)
    k, v = draws.standard_normal((2, 2, KEYS, capacity, SIZE), np.float32)
    positions = np.array([[700], [5]], np.int32) + np.arange(256, dtype=np.int32)
    seen = dense.in_window(dense.chain_distances(positions, capacity), window)
    want = dense.dense_attention(*map(jnp.asarray, (q, k, v)), seen, transform)
    for x in (k, v):
        x[0, :, 1024:], x[1, :, 512:] = np.nan, np.nan
        x[0, :, : 512 if window else 0] = np.nan
    got = kernel(q, k, v, positions, window=window, transform=transform)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_tpu_kernel_runs_wide_chunks_of_unquantized_caches(monkeypatch):
    cache = jnp.zeros((1, 1, 8192, 8))
    assert not splash_chunk.supports_chunk(512, ScoreTransform(), cache)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert splash_chunk.supports_chunk(512, ScoreTransform(softcap=2.0), cache)
    assert not splash_chunk.supports_chunk(128, ScoreTransform(), cache)
    assert not splash_chunk.supports_chunk(512, ScoreTransform(alibi=True), cache)
    assert not splash_chunk.supports_chunk(512, ScoreTransform(), QuantizedKV(cache, cache))


def test_prefill_through_the_kernel_leaves_the_same_cache(monkeypatch):
    """With a sliding layer, and a row that ends within a chunk."""
    slides = {"sliding_window": 150, "sliding_layers": (True, False)}
    target, calls = tiny_lm(0, **slides), []
    built, settings = sj.method("autoregressive").build(Context(target, None), {})
    engine, prompts = Engine(target, None, built, settings), [np.arange(380) % 90, np.arange(150)]
    keys, budget = jax.random.split(jax.random.key(0), 2), np.full(2, 4, np.int32)
    inputs = engine.inputs(sj.Sampling(), 2)

    def prefilled(capacity):
        return loop.start(built, inputs, prompts, budget, keys, chunk=128, capacity=capacity)

    want = prefilled(512)
    monkeypatch.setattr(long_cache, "DENSE_CAPACITY", 512)
    monkeypatch.setattr(splash_chunk, "supports_chunk", lambda tokens, *_: tokens == 128)
    monkeypatch.setattr(
        splash_chunk, "chunk_attention", lambda *a, **how: calls.append(how) or kernel(*a, **how)
    )
    got = prefilled(768)
    assert [how["window"] for how in calls] == [150, None]
    for ours, theirs in zip(got.cache.k + got.cache.v, want.cache.k + want.cache.v, strict=True):
        for row, prompt in enumerate(prompts):
            held = slice(len(prompt) - 1)
            np.testing.assert_allclose(ours[row, :, held], theirs[row, :, held], atol=1e-5)
