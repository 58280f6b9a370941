"""The families that are made of switches: logits, configs, decoding and checkpoints both ways."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.models import (
    forward,
    from_hf,
    init_cache,
    load_pretrained,
    logits_of,
    save_pretrained,
    to_hf,
)
from support import stack_variants, variants
from support.checkpoints import same
from support.variant_models import build, close, golden_stacks, pair, whole

PROMPTS = variants.tokens()[:, : variants.GREEDY_PROMPT].tolist()
METHODS = {
    "autoregressive": {},
    "speculative": {"gamma": 3},
    "specinfer": {"branching": (2, 2, 1)},
    "lookup": {"gamma": 3},
}


# These have unusual parts: experts, latents, sinks. All others are left to sweeps.
UNUSUAL = ("qwen3_moe", "deepseek_v3", "gpt_oss")
SWEPT = [
    name if name in UNUSUAL else pytest.param(name, marks=pytest.mark.sweep)
    for name in stack_variants.ALL
]
each_swept = pytest.mark.parametrize("name", SWEPT)


@pytest.mark.parametrize("name", stack_variants.ALL)
def test_logits(name):
    cfg, _, fused = build(name)
    want = golden_stacks()[f"{name}/logits"]
    got = whole(cfg, fused, variants.tokens(), "dense")
    close(np.asarray(got)[:, -variants.LAST :], want)
    assert from_hf(json.loads(json.dumps(to_hf(cfg, "float32")))) == cfg


def short_factors(config):
    return {"rope_parameters": config["rope_parameters"] | {"short_factor": [1.0]}}


def long_factors(config):
    return {"rope_parameters": config["rope_parameters"] | {"long_factor": [1.0, 2.0, 3.0]}}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("smollm3", lambda config: {"no_rope_layers": [0]}, "no_rope_layers has 1 entries for 2"),
        ("llama4_text", lambda config: {"no_rope_layers": [0]}, "no_rope_layers has 1 entries"),
        ("phi3", short_factors, "short_factor of the rope has 1 entries, expected 2"),
        ("phi3", long_factors, "long_factor of the rope has 3 entries, expected 2"),
    ],
)
def test_lists_of_a_wrong_length_are_one_line(name, change, says):
    config = stack_variants.config(name)
    with pytest.raises(sj.ModelError, match=says) as caught:
        from_hf(config | change(config))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@each_swept
def test_prefill_then_steps(name):
    """A cache that was used before, filled in two chunks and then token by token."""
    cfg, _, fused = build(name)
    rows = variants.tokens()
    want = golden_stacks()[f"{name}/logits"]
    cache = jax.tree.map(lambda x: x + 7, init_cache(cfg, 2, 32, jnp.float32))
    first = rows.shape[1] - variants.LAST
    step = functools.partial(forward, cfg, fused)
    ends = [(0, 9), (9, first)] + [(i, i + 1) for i in range(first, rows.shape[1])]
    for start, end in ends:
        positions = np.broadcast_to(np.arange(start, end), (2, end - start))
        begin = jnp.full(2, start, jnp.int32)
        out = step(cache, rows[:, start:end], positions, begin)
        cache = out.cache
        if start >= first:
            close(np.asarray(logits_of(cfg, fused, out.hidden))[:, 0], want[:, start - first])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@each_swept
def test_greedy_tokens(name, method):
    target, draft = pair(name)
    out = sj.generate(
        target,
        PROMPTS,
        method=method,
        draft=draft if method in ("speculative", "specinfer") else None,
        options=METHODS[method],
        sampling=sj.Sampling(0.0),
        max_new_tokens=variants.GREEDY_TOKENS,
    )
    np.testing.assert_array_equal(np.stack(out.tokens), golden_stacks()[f"{name}/greedy"])


@pytest.mark.slow
@pytest.mark.torch
@each_swept
def test_checkpoints_both_ways(name, tmp_path):
    """transformers loads what we save, by the config that we write; we load what it saves."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    cfg, params, _ = build(name)
    save_pretrained(tmp_path / "ours", cfg, params)
    made, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
    )
    assert not any(info.values())
    with torch.inference_mode():
        theirs = made.eval()(torch.from_numpy(variants.tokens().astype(np.int64))).logits.numpy()
    close(theirs[:, -variants.LAST :], golden_stacks()[f"{name}/logits"])

    made.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    read, loaded = load_pretrained(tmp_path / "theirs")
    assert same(params, loaded)
    assert dataclasses.replace(read, bos_id=1, eos_ids=(2,), pad_id=cfg.pad_id) == cfg


@pytest.mark.slow
@pytest.mark.torch
@each_swept
def test_golden_files_are_what_transformers_gives(name):
    pytest.importorskip("torch")
    from golden import make

    for key, value in make.stack_arrays(name).items():
        np.testing.assert_allclose(value, golden_stacks()[key], atol=1e-5)
