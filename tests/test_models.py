"""Logits against transformers (golden files, and live with torch), masks, backends, caches."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import variants
from specjax import tree
from specjax.models import (
    ModelConfig,
    attention,
    forward,
    from_hf,
    fuse,
    hidden_states,
    init_cache,
    init_params,
    logits_of,
    param_shapes,
)
from specjax.models.functional import write_rows
from specjax.models.hf import hf_name
from specjax.types import NO_PARENT

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-4
FORWARD = jax.jit(forward, static_argnums=0)


@functools.cache
def build(name):
    """(config, params, fused params) of a variant."""
    cfg = from_hf(variants.config(name))
    leaves, structure = jax.tree_util.tree_flatten_with_path(param_shapes(cfg))
    values = [
        jnp.asarray(variants.weights(hf_name(tuple(k.key for k in path)), leaf.shape))
        for path, leaf in leaves
    ]
    params = jax.tree.unflatten(structure, values)
    return cfg, params, fuse(params)


@functools.cache
def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as stored:
        return dict(stored)


@pytest.fixture(params=variants.VARIANTS)
def name(request):
    return request.param


def whole(cfg, params, rows, backend):
    at = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    hidden = hidden_states(cfg, params, rows, at, np.ones_like(rows), backend=backend)
    return logits_of(cfg, params, hidden)


@pytest.mark.parametrize("backend", ["dense", "blockwise"])
def test_whole_sequences(name, backend):
    cfg, params, fused = build(name)
    for layout in (params, fused):
        got = whole(cfg, layout, variants.tokens(), backend)
        np.testing.assert_allclose(got, golden(name)["logits"], atol=TOLERANCE)


def test_ragged_prefill_then_one_token_steps(name):
    """Row 0 starts after 5 tokens, row 1 after 12: each goes on at its own position."""
    cfg, _, fused = build(name)
    rows, want = variants.tokens(), golden(name)["logits"]
    start = jnp.asarray([5, 12], jnp.int32)
    cache = init_cache(cfg, 2, 32, jnp.float32)
    at = jnp.broadcast_to(jnp.arange(12), (2, 12))
    _, cache = FORWARD(cfg, fused, cache, rows[:, :12], at, jnp.zeros(2, jnp.int32))
    for step in range(8):
        here = start + step
        token = np.take_along_axis(rows, np.asarray(here)[:, None], 1)
        hidden, cache = FORWARD(cfg, fused, cache, token, here[:, None], here)
        got = logits_of(cfg, fused, hidden)[:, 0]
        np.testing.assert_allclose(got, want[np.arange(2), here], atol=TOLERANCE)


def test_tree_nodes_equal_their_paths_alone(name):
    cfg, _, fused = build(name)
    prefix = variants.PREFIX
    cache = init_cache(cfg, 1, 32, jnp.float32)
    at = jnp.arange(prefix)[None]
    zero = jnp.zeros(1, jnp.int32)
    _, cache = FORWARD(cfg, fused, cache, variants.tokens()[:1, :prefix], at, zero)
    parents = jnp.asarray([[NO_PARENT if p is None else p for p in variants.TREE]], jnp.int32)
    visible = tree.ancestors(parents, 3)
    nodes = jnp.asarray([variants.TREE_TOKENS], jnp.int32)
    positions = prefix + tree.depths(visible)
    hidden, _ = FORWARD(cfg, fused, cache, nodes, positions, zero + prefix, visible)
    np.testing.assert_allclose(logits_of(cfg, fused, hidden)[0], golden(name)["tree"],
                               atol=TOLERANCE)  # fmt: skip


@pytest.mark.torch
def test_golden_files_are_what_transformers_gives(name):
    pytest.importorskip("torch")
    from golden import make

    for key, value in make.arrays(name).items():
        np.testing.assert_allclose(value, golden(name)[key], atol=1e-5)


def test_backends_agree_in_value_and_gradient():
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 9, 4, 8))
    k, v = (jax.random.normal(key, (2, 2, 9, 8)) for key in keys[1:])
    meta = {
        "position": jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 0, 0], list(range(9))]),
        "segment": jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9]),
    }
    for window in (None, 2):
        mask_fn = functools.partial(attention.causal_mask, window=window)
        real = (meta["segment"] > 0)[..., None, None]

        def dense(q, k, v, mask_fn=mask_fn, real=real):
            out = attention.dense_attention(q, k, v, mask_fn(meta, meta))
            return jnp.sum(jnp.where(real, out, 0) ** 2)

        def blockwise(q, k, v, mask_fn=mask_fn, real=real):
            out = attention.blockwise_attention(q, k, v, meta, meta, mask_fn, block=4)
            return jnp.sum(jnp.where(real, out, 0) ** 2)

        gradients = [jax.grad(f, (0, 1, 2))(q, k, v) for f in (dense, blockwise)]
        for a, b in zip(*gradients, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(dense(q, k, v), blockwise(q, k, v), rtol=1e-5)


@pytest.mark.parametrize("backend", ["dense", "blockwise"])
def test_packed_documents_do_not_see_each_other(backend):
    cfg, params, _ = build("tinyllama")
    rows = variants.tokens(1, 12)
    at = np.concatenate([np.arange(7), np.arange(5)])[None]
    segments = np.array([[1] * 7 + [2] * 5])
    packed = hidden_states(cfg, params, rows, at, segments, backend=backend)
    for part in (slice(0, 7), slice(7, 12)):
        alone = hidden_states(cfg, params, rows[:, part], at[:, part], segments[:, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-5)


def test_remat_changes_nothing():
    cfg, params, _ = build("tied")
    rows = variants.tokens()
    at = np.broadcast_to(np.arange(20), rows.shape)

    def loss(params, remat):
        return hidden_states(cfg, params, rows, at, np.ones_like(rows), remat=remat).sum()

    a, b = (jax.grad(loss)(params, remat) for remat in (False, True))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("rows", [3, 40])
def test_write_rows_equals_a_plain_loop(rows):
    generator = np.random.Generator(np.random.Philox(1))
    buffer = generator.random((rows, 2, 16, 3), np.float32)
    new = generator.random((rows, 2, 4, 3), np.float32)
    start = generator.integers(0, 12, rows).astype(np.int32)
    want = buffer.copy()
    for row in range(rows):
        want[row, :, start[row] : start[row] + 4] = new[row]
    np.testing.assert_array_equal(write_rows(jnp.asarray(buffer), new, jnp.asarray(start)), want)


def test_bfloat16_stays_bfloat16_and_close():
    cfg, params, _ = build("tinyllama")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got = whole(cfg, half, variants.tokens(), "dense")
    assert got.dtype == jnp.bfloat16
    want = golden("tinyllama")["logits"]
    assert np.corrcoef(np.asarray(got, np.float32).ravel(), want.ravel())[0, 1] > 0.99


def test_parameter_count():
    for name in variants.VARIANTS:
        cfg, params, _ = build(name)
        assert cfg.num_params == sum(x.size for x in jax.tree.leaves(params)), name


def test_init_is_random_per_key_and_of_the_dtype():
    cfg = ModelConfig.llama(vocab_size=8, hidden_size=8, num_layers=1, num_heads=2,
                            intermediate_size=8)  # fmt: skip
    a, b = (init_params(cfg, jax.random.key(k), jnp.bfloat16) for k in (0, 1))
    assert a["embed"].dtype == jnp.bfloat16
    assert (a["embed"] != b["embed"]).any()
