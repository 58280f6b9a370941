"""Every other family as the Llamas: logits, trees, greedy decoding, round trips, methods."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
import variants
from specjax.models import (
    forward,
    from_hf,
    init_params,
    load_pretrained,
    logits_of,
    save_pretrained,
    to_hf,
)
from test_hf import same
from test_models import build, close, golden, prefilled, tree_logits, whole

PROMPTS = variants.tokens()[:, : variants.GREEDY_PROMPT].tolist()


@pytest.fixture(params=variants.FAMILIES)
def name(request):
    return request.param


@pytest.fixture(params=variants.FIRST)
def family(request):
    return request.param


@pytest.mark.parametrize("backend", ["dense", "blockwise"])
def test_whole_sequences(name, backend):
    cfg, params, fused = build(name)
    close(whole(cfg, fused, variants.tokens(), backend), golden(name)["logits"])
    if backend == "dense":
        close(whole(cfg, params, variants.tokens(), backend), golden(name)["logits"])


def test_ragged_prefill_then_one_token_steps(name):
    """Row 0 starts after 5 tokens, row 1 after 12: each goes on at its own position."""
    cfg, _, fused = build(name)
    rows, want = variants.tokens(), golden(name)["logits"]
    hidden, cache = prefilled(name)
    close(logits_of(cfg, fused, hidden), want[:, :12])
    for step in range(8):
        here = np.array([5, 12], np.int32) + step
        token = np.take_along_axis(rows, here[:, None], 1)
        hidden, cache = forward(cfg, fused, cache, token, here[:, None], jnp.asarray(here))
        close(np.asarray(logits_of(cfg, fused, hidden))[:, 0], want[np.arange(2), here])


def test_tree_nodes_equal_their_paths_alone(name):
    cfg, _, fused = build(name)
    close(tree_logits(cfg, fused, prefilled(name)[1]), golden(name)["tree"])


def test_parameter_count_and_init(name):
    cfg, params, _ = build(name)
    assert cfg.num_params == sum(x.size for x in jax.tree.leaves(params))
    made = init_params(cfg, jax.random.key(0), jnp.bfloat16)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)


def test_round_trip(name, tmp_path):
    cfg, params, _ = build(name)
    assert from_hf(json.loads(json.dumps(to_hf(cfg, "float32")))) == cfg
    save_pretrained(tmp_path, cfg, params)
    found, loaded = load_pretrained(tmp_path)
    assert found == cfg and same(params, loaded)


@functools.cache
def pair(name):
    """A model that never ends, and its first layer as a draft that often agrees."""
    cfg, params, _ = build(name)
    cfg = dataclasses.replace(cfg, eos_ids=())
    slides = cfg.sliding_layers and cfg.sliding_layers[:1]
    small = dataclasses.replace(cfg, num_layers=1, sliding_layers=slides)
    layer = params | {"layers": {"0": params["layers"]["0"]}}
    return sj.from_params(cfg, params), sj.from_params(small, layer)


def greedy(name, method, **options):
    """Greedy tokens [rows, tokens], and the share of drafted tokens that were accepted."""
    target, draft = pair(name)
    out = sj.generate(
        target,
        PROMPTS,
        method=method,
        draft=None if method == "autoregressive" else draft,
        options=options,
        sampling=sj.Sampling(0.0),
        max_new_tokens=variants.GREEDY_TOKENS,
    )
    return np.stack(out.tokens), out.stats["accepted"].sum() / max(1, out.stats["tested"].sum())


def test_greedy_decoding(name):
    np.testing.assert_array_equal(greedy(name, "autoregressive")[0], golden(name)["greedy"])


METHODS = {"speculative": {"gamma": 3}, "specinfer": {"branching": (2, 2, 1)}}


@pytest.mark.parametrize("method", METHODS)
def test_drafting_changes_nothing(family, method):
    name = variants.FIRST[family]
    tokens, accepted = greedy(name, method, **METHODS[method])
    np.testing.assert_array_equal(tokens, golden(name)["greedy"])
    assert accepted > 0


@pytest.mark.torch
def test_golden_files_are_what_transformers_gives(name):
    pytest.importorskip("torch")
    from golden import make

    for key, value in make.arrays(name).items():
        np.testing.assert_allclose(value, golden(name)[key], atol=1e-5)


@pytest.mark.torch
def test_transformers_loads_what_we_save(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    cfg, params, _ = build(name)
    save_pretrained(tmp_path, cfg, params)
    made, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    with torch.inference_mode():
        theirs = made.eval()(torch.from_numpy(variants.tokens().astype(np.int64))).logits.numpy()
    close(theirs, golden(name)["logits"])


@pytest.mark.torch
def test_we_load_what_transformers_saves(name, tmp_path):
    pytest.importorskip("torch")
    from golden import make

    make.model(name).save_pretrained(tmp_path, max_shard_size="20KB")
    cfg, params, _ = build(name)
    found, loaded = load_pretrained(tmp_path)
    assert same(params, loaded)
    assert dataclasses.replace(found, bos_id=1, eos_ids=(2,), pad_id=cfg.pad_id) == cfg
