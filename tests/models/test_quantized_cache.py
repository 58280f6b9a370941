"""Keys and values in 8 bits, against the dequantized ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from infer.run.plan import model_plan
from specjax.models import init_cache
from specjax.models.attention import dense, long_cache
from specjax.models.quantized_cache import MAX_CODE, QuantizedKV, key_scores, quantize_kv

PROMPTS = [[5, 9, 2, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11] * 6, [30, 20, 10], [3, 4]]


def drawn(*shape):
    return np.random.Generator(np.random.Philox(len(shape))).standard_normal(shape, np.float32)


def dequantized(x: QuantizedKV):
    return np.asarray(x.codes, np.float32) * np.asarray(x.scales)


def test_codes_are_the_nearest_and_zeros_stay_zeros():
    x = drawn(2, 3, 5, 8)
    x[0, 1, 2] = 0
    quantized = quantize_kv(jnp.asarray(x))
    scales = np.abs(x).max(-1, keepdims=True) / MAX_CODE
    np.testing.assert_allclose(quantized.scales, scales, rtol=1e-6)
    assert (np.abs(dequantized(quantized) - x) <= scales * 0.5001).all()
    assert (
        np.abs(quantized.codes).max() == MAX_CODE and (dequantized(quantized)[0, 1, 2] == 0).all()
    )


@pytest.mark.parametrize("blocks", [False, True])
def test_attention_equals_that_of_the_dequantized_cache(blocks, monkeypatch):
    monkeypatch.setattr(long_cache, "MIN_BLOCK", 16)
    monkeypatch.setattr(long_cache, "MAX_BLOCK", 16)
    (q, k, v), top = (drawn(3, n, heads, 8) for n, heads in ((5, 4), (48, 2), (48, 2))), [9, 47, 30]
    k, v = (quantize_kv(jnp.asarray(x).transpose(0, 2, 1, 3)) for x in (k, 2 * v + 1))
    positions, top = np.array(top)[:, None] - 4 + np.arange(5), np.array(top)

    def run(k, v):
        if blocks:
            return long_cache.cached_attention(q, k, v, jnp.asarray(positions), jnp.asarray(top))
        seen = np.arange(48) <= positions[:, :, None]
        return dense.dense_attention(jnp.asarray(q), k, v, jnp.asarray(seen))

    want = run(*(jnp.asarray(dequantized(x)) for x in (k, v)))
    np.testing.assert_allclose(run(k, v), want, atol=2e-6)


@pytest.mark.parametrize("name", ["speculative", "specinfer"])
def test_lossless_methods_write_what_plain_decoding_writes(name, target, draft):
    target, draft = (dataclasses.replace(model, cache_dtype="int8") for model in (target, draft))
    said = {"max_new_tokens": 24, "batch_size": 2}  # slots refill, tree paths are committed
    plain = sj.generate(target, PROMPTS, **said)
    out = sj.generate(target, PROMPTS, method=name, draft=draft, **said)
    assert all(map(np.array_equal, plain.tokens, out.tokens))
    assert out.stats["accepted"].sum() > 0
    cache = jax.tree.leaves(target.net.cache(2, 128))
    assert {x.dtype for x in cache} == {jnp.dtype("int8"), jnp.dtype("float32")}


def test_the_plan_counts_its_bytes():
    cfg = sj.load("demo").config
    cache = sum(x.nbytes for x in jax.tree.leaves(init_cache(cfg, 2, 128, "int8")))
    assert model_plan("demo", None, cache_dtype="int8")["cache_bytes_per_token_and_row"] == (
        cache // 256
    )


def test_another_dtype_is_refused():
    with pytest.raises(sj.OptionError, match="cache_dtype=int3: expected one of int8"):
        sj.load("demo", cache_dtype="int3")


@pytest.mark.parametrize("queries", [1, 3, 8, 9])  # up to eight are multiplied one by one on a CPU
def test_scores_are_those_of_a_plain_product(queries):
    q, k = drawn(2, 3, queries, 16), drawn(2, 3, 40, 16)
    want = np.einsum("bkre,bkse->bkrs", q.astype(np.float64), k)
    np.testing.assert_allclose(key_scores(jnp.asarray(q), jnp.asarray(k)), want, atol=1e-5)
    codes = quantize_kv(jnp.asarray(k))
    want = np.einsum("bkre,bkse->bkrs", q.astype(np.float64), dequantized(codes))
    np.testing.assert_allclose(key_scores(jnp.asarray(q), codes), want, atol=1e-5)
