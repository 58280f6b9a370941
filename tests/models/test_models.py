"""Logits against transformers (golden files, and live with torch), masks, backends, caches."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax._util.errors import ModelError
from specjax._util.platform import Platform
from specjax.core import tree
from specjax.core.types import NO_PARENT
from specjax.models import (
    ModelConfig,
    forward,
    forward_pass,
    from_hf,
    hidden_states,
    init_cache,
    init_params,
    logits_of,
    num_params,
    to_hf,
)
from specjax.models.attention import dense, long_cache
from specjax.models.cache import write_rows
from specjax.models.forward_pass import param_axes
from specjax.models.layers import linear, rope_frequencies
from specjax.models.placement import param_specs
from specjax.models.sharding import partition
from support import variants
from support.variant_models import build, close, golden, logits_jit, whole

BACKENDS = ["dense", "blockwise"]


@pytest.fixture(params=(*variants.VARIANTS, *variants.FAMILIES))
def name(request):
    return request.param


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_sequences(name, backend):
    cfg, params, fused = build(name)
    close(whole(cfg, fused, variants.tokens(), backend), golden(name)["logits"])
    if backend == "dense" or name == "mistral":
        close(whole(cfg, params, variants.tokens(), backend), golden(name)["logits"])


@functools.cache
def prefilled(name):
    """Hidden states and cache after 12 tokens of both rows, in a cache that was used before."""
    cfg, _, fused = build(name)
    cache = jax.tree.map(lambda x: x + 7, init_cache(cfg, 2, 32, jnp.float32))
    at = np.broadcast_to(np.arange(12), (2, 12))
    return forward(cfg, fused, cache, variants.tokens()[:, :12], at, jnp.zeros(2, jnp.int32))


def test_ragged_prefill_then_one_token_steps(name):
    """Row 0 continues after 5 tokens and row 1 after 12, each at its own position."""
    cfg, _, fused = build(name)
    rows, want = variants.tokens(), golden(name)["logits"]
    hidden, cache, _ = prefilled(name)
    close(logits_of(cfg, fused, hidden), want[:, :12])
    for step in range(8):
        here = np.array([5, 12], np.int32) + step
        token = np.take_along_axis(rows, here[:, None], 1)
        hidden, cache, _ = forward(cfg, fused, cache, token, here[:, None], jnp.asarray(here))
        close(np.asarray(logits_of(cfg, fused, hidden))[:, 0], want[np.arange(2), here])


@pytest.mark.parametrize("reads_whole", [True, False])
@pytest.mark.parametrize("family", ["codellama", "bloom"])
def test_a_doubled_query_attends_as_one(family, reads_whole, monkeypatch):
    """A TPU doubles the only query of a key head: without a mask, and with one of a node."""
    cfg, _, fused = build(family)
    assert cfg.num_heads == cfg.num_kv_heads
    cache = prefilled(family)[1]  # which other tests read, too
    widths = []
    monkeypatch.setattr(long_cache, "reads_whole", lambda *_: reads_whole)
    module = dense if reads_whole else long_cache
    name = "dense_attention" if reads_whole else "cached_attention"
    attention = getattr(module, name)

    def seen(q, *arguments, **others):
        widths.append(q.shape[1])
        return attention(q, *arguments, **others)

    monkeypatch.setattr(module, name, seen)
    here = jnp.asarray([5, 12])
    token = np.take_along_axis(variants.tokens(), np.asarray(here)[:, None], 1)
    node = jnp.ones((2, 1, 1), bool)
    for visible in (None, node):
        step = functools.partial(forward, cfg, fused, cache, token, here[:, None], here, visible)
        want = step().hidden
        monkeypatch.setattr(forward_pass, "platform", lambda: Platform(head_queries=2))
        close(step().hidden, want)
        monkeypatch.setattr(forward_pass, "platform", Platform)
    assert widths[-1] == 2 and 1 in widths


def test_positions_may_be_a_numpy_array_in_blocks_too(monkeypatch):
    want = np.asarray(prefilled("bloom").hidden)
    monkeypatch.setattr(long_cache, "reads_whole", lambda *_: False)
    close(np.asarray(prefilled.__wrapped__("bloom").hidden), want)


def tree_logits(cfg, params, cache):
    start = jnp.asarray(variants.PREFIXES, jnp.int32)
    parents = [[NO_PARENT if p is None else p for p in parents] for parents in variants.TREES]
    visible = tree.ancestors(jnp.asarray(parents, jnp.int32), variants.TREE_DEPTH)
    nodes = np.asarray(variants.TREE_TOKENS, np.int32)
    positions = start[:, None] + tree.depths(visible)
    hidden, *_ = forward(cfg, params, cache, nodes, positions, start, visible)
    return logits_of(cfg, params, hidden)


def test_tree_nodes_equal_their_paths_alone(name):
    """Two trees below prefixes of different lengths. Mistral's window counts positions."""
    cfg, params, fused = build(name)
    cache = prefilled(name).cache
    close(tree_logits(cfg, fused, cache), golden(name)["tree"])
    if name == "biases":
        close(tree_logits(cfg, params, cache), golden(name)["tree"])


def test_a_window_counts_positions_between_nodes_of_a_tree():
    """With window 2 a node sees itself and its parent, wherever that is in the cache."""
    parents = jnp.asarray([[NO_PARENT, 0, 0, 2, 1, 3]], jnp.int32)
    visible = tree.ancestors(parents, 3)
    start, window = jnp.asarray([3], jnp.int32), 2
    positions = start[:, None] + tree.depths(visible)
    got = dense.cache_mask(positions, start, visible, 6, 12, window)[0]
    want = np.zeros((6, 12), bool)
    want[0, [2, 3]] = True  # the root sees the last committed token and itself
    for node, parent in enumerate([0, 0, 2, 1, 3], start=1):
        want[node, [3 + node, 3 + parent]] = True
    np.testing.assert_array_equal(got, want)


@pytest.mark.torch
def test_golden_files_are_what_transformers_gives(name):
    pytest.importorskip("torch")
    from golden import make

    for key, value in make.arrays(name).items():
        np.testing.assert_allclose(value, golden(name)[key], atol=1e-5)


STRETCHED = {
    "llama-3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama-3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"type": "linear", "factor": 4},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    "yarn at the full length": {"rope_type": "yarn", "factor": 4.0},
    "yarn ramp": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    },
    "yarn factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 1024,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "original_max_position_embeddings": 1024,
    },
    "yarn as Qwen documents it": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16384,
    },
    "yarn by its ratio": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 4096,
    },
    "yarn of its authors": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 1024,
        "finetuned": True,
    },
    "llama3 at the full length": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.torch
@pytest.mark.parametrize("beside", [{}, {"original_max_position_embeddings": 2048}])
@pytest.mark.parametrize("kind", STRETCHED)
def test_rope_frequencies_of_real_sizes(kind, beside):
    """``beside``: some configs name the trained length outside of ``rope_scaling``."""
    pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = (
        variants.BASE
        | beside
        | {
            "hidden_size": 512,
            "rope_theta": 500000.0,
            "max_position_embeddings": 16384,
            "rope_scaling": STRETCHED[kind],
        }
    )
    theirs = AutoConfig.for_model(**copy.deepcopy(config))  # which fills it in
    inverse, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu")
    ours = rope_frequencies(from_hf(config).rope, 128)
    np.testing.assert_allclose(ours[0], inverse.numpy(), rtol=1e-6)
    assert ours[1] == pytest.approx(factor)


# rope_scaling, max_position_embeddings, and the context that vLLM gives for them.
CONTEXTS = {
    "yarn, documented": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        32768,
        131072,
    ),
    "yarn, Qwen 3": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        40960,
        131072,
    ),
    "yarn, stretched in the config": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        131072,
        131072,
    ),
    "yarn, of the full length": ({"type": "yarn", "factor": 2.0}, 4096, 8192),
    "yarn, by its ratio": (
        {"type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
        16384,
        16384,
    ),
    "linear, Vicuna 16k": ({"type": "linear", "factor": 4.0}, 4096, 16384),
    "linear, a fraction": ({"type": "linear", "factor": 2.5}, 4095, 10237),
    "linear, shrunk": ({"type": "linear", "factor": 0.5}, 4096, 4096),
    "dynamic": ({"type": "dynamic", "factor": 4.0}, 4096, 4096),
    "llama3": (STRETCHED["llama-3.2"], 131072, 131072),
    "default": (None, 4096, 4096),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "pythia"])
@pytest.mark.parametrize("kind", CONTEXTS)
def test_a_stretched_rope_gives_its_whole_context(family, kind):
    scaling, size, context = CONTEXTS[kind]
    name = {"llama": "tinyllama"}.get(family, family)
    config = variants.config(name) | {"max_position_embeddings": size, "rope_scaling": scaling}
    cfg = from_hf(config)
    assert cfg.max_position == context
    assert from_hf(to_hf(cfg, "float32")) == cfg  # not stretched again


def test_the_documented_yarn_is_the_stretched_one():
    """Qwen's README leaves max_position_embeddings as it is; transformers goes by the factor."""
    stretched = variants.config("yarn")
    size = stretched["rope_scaling"]["original_max_position_embeddings"]
    assert from_hf(stretched | {"max_position_embeddings": size}) == from_hf(stretched)


def test_gemma_3_counts_the_stretched_positions_already():
    assert from_hf(variants.config("gemma3-27b")).max_position == 128


@pytest.mark.parametrize("factor", [1e30, 1e6])
def test_a_context_beyond_any_array_is_one_line(factor):
    scaling = {"type": "linear", "factor": factor}
    config = variants.config("tinyllama") | {"rope_scaling": scaling}
    with pytest.raises(ModelError, match="factor"):
        from_hf(config | {"max_position_embeddings": 131072})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["tinyllama", "mistral"])
def test_packed_documents_do_not_see_each_other(variant, backend):
    """Each row packs the beginnings of both documents; row 1 ends with padding."""
    cfg, _, fused = build(variant)
    a, b = variants.tokens()
    rows = np.stack([np.concatenate([a[:13], b[:7]]), np.concatenate([b[:6], a[:9], b[:5]])])
    segments = np.array([[1] * 13 + [2] * 7, [1] * 6 + [2] * 9 + [0] * 5], np.int32)
    positions = np.array([[*range(13), *range(7)], [*range(6), *range(9), *range(5)]])
    got = whole(cfg, fused, rows, backend, segments, positions)
    want_a, want_b = golden(variant)["logits"]
    close(got[0], np.concatenate([want_a[:13], want_b[:7]]))
    close(got[1, :15], np.concatenate([want_b[:6], want_a[:9]]))


def test_remat_changes_nothing():
    cfg, params, _ = build("tied")
    cfg = dataclasses.replace(cfg, num_layers=1)
    params = params | {"layers": {"0": params["layers"]["0"]}}
    rows = variants.tokens()
    at = np.broadcast_to(np.arange(20), rows.shape)

    @jax.jit
    def gradients(params):
        def loss(params, remat):
            return hidden_states(
                cfg, params, rows, at, np.ones_like(rows), remat=remat
            ).hidden.sum()

        return [jax.grad(loss)(params, remat) for remat in (False, True)]

    a, b = map(jax.tree.leaves, gradients(params))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("windows", [(None,) * 3, (4, None, 4, None, 4)], ids=["alike", "by turns"])
def test_scanned_layers_are_the_unrolled_ones(windows):
    """Alternating layers are scanned period by period; left-over layers run after the scan."""
    cfg = ModelConfig.llama(
        vocab_size=61, hidden_size=16, num_layers=len(windows), num_heads=2, intermediate_size=24
    )
    kinds = tuple(width is not None for width in windows)
    cfg = dataclasses.replace(cfg, sliding_window=4, sliding_layers=kinds)
    assert cfg.windows == windows
    params, rows = init_params(cfg, jax.random.key(3)), variants.tokens()[:, :9]
    at = np.broadcast_to(np.arange(9), rows.shape)

    def loss(params, **how):
        hidden = hidden_states(cfg, params, rows, at, np.ones_like(rows), **how).hidden
        return jnp.sum(hidden**2 * jnp.arange(16)), hidden

    def run(**how):
        graded = jax.value_and_grad(functools.partial(loss, **how), has_aux=True)
        (_, hidden), gradients = jax.jit(graded)(params)
        return hidden, jax.tree.leaves(gradients)

    want, gradients = run()
    for remat in (False, True):
        got, also = run(scan=True, remat=remat)
        np.testing.assert_allclose(got, want, atol=1e-5)
        for x, y in zip(also, gradients, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-3, rtol=1e-4)


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


@pytest.mark.parametrize("at", [0, 1, 7, 15])
def test_write_rows_of_a_lone_entry_touches_one_slot(at):
    generator = np.random.Generator(np.random.Philox(2))
    buffer, new = generator.random((1, 2, 16, 3), np.float32), np.ones((1, 2, 1, 3), np.float32)
    want = buffer.copy()
    want[:, :, at] = 1
    start = jnp.array([at], jnp.int32)
    got = jax.jit(write_rows, donate_argnums=0)(jnp.asarray(buffer), new, start)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [1, 4, 5, 7, 8, 9, 16, 23, 31, 128, 129])
def test_linear_pads_rows_and_gives_only_what_was_asked(rows):
    generator = np.random.Generator(np.random.Philox(3))
    x, weight = generator.random((rows, 24)), generator.random((10, 24))
    got = linear(jnp.asarray(x[None], jnp.float32), jnp.asarray(weight, jnp.float32), jnp.ones(10))
    np.testing.assert_allclose(got, (x @ weight.T + 1)[None], rtol=1e-5)


def test_bfloat16_stays_bfloat16_and_close():
    cfg, params, _ = build("tinyllama")
    half = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), params)
    rows = variants.tokens()
    positions = np.broadcast_to(np.arange(20), rows.shape)
    got = logits_jit(cfg, half, rows, positions, np.ones_like(rows), "dense")
    assert got.dtype == jnp.bfloat16
    want = golden("tinyllama")["logits"]
    assert np.corrcoef(np.asarray(got, np.float32).ravel(), want.ravel())[0, 1] > 0.99


def test_parameter_count_and_init(name):
    cfg, params, _ = build(name)
    assert num_params(cfg) == sum(x.size for x in jax.tree.leaves(params))
    made = init_params(cfg, jax.random.key(0), jnp.bfloat16)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)


def test_init_is_random_per_key_and_of_the_dtype():
    cfg = ModelConfig.llama(
        vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8
    )
    a, b = (init_params(cfg, jax.random.key(k), jnp.bfloat16) for k in (0, 1))
    assert a["embed"].dtype == jnp.bfloat16
    assert (a["embed"] != b["embed"]).any()


def test_every_weight_names_axes_that_the_rules_know(name):
    """In both layouts. A part of the params gets the same sharding as in the whole tree."""
    cfg, params, fused = build(name)
    for layout, made in ((False, params), (True, fused)):
        specs = jax.tree.map(lambda x, a: partition(a, x.shape, 2), made, param_axes(cfg, layout))
        split = {path[-2].key for path, s in jax.tree.leaves_with_path(specs["layers"]) if any(s)}
        parts = {"qkv", "gate_up"} if layout else {"q", "k", "v", "gate", "up"}
        assert {"out", "down"} <= split <= {"out", "down", "up", *parts}
    part = param_specs(cfg, {"layers": {"1": fused["layers"]["1"]}}, 2)
    assert specs["layers"]["1"] == part["layers"]["1"]
