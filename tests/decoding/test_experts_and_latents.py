"""The methods on a mixture of experts and on a model of latents: laws, caches, greedy tokens."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

import specjax as sj
from decoding.test_decode import states_by_round
from specjax.models import from_hf, init_params
from specjax.registry import Context
from specjax.runtime.engine import Engine
from support import laws, variants
from support.caches import check_cache
from support.lengths import fixed_lengths
from support.variant_models import pair

NAMES = ("qwen3_moe", "deepseek_v3")
PROMPTS = variants.tokens()[:, : variants.GREEDY_PROMPT].tolist()
V, L = 4, 3
PROMPT = (1, 3, 0)
SAMPLING = sj.Sampling(temperature=0.9, top_k=3)


@functools.cache
def tiny_pair(name):
    """Models of V ids, whose prefix matters and whose tokens are all likely enough."""

    def make(seed, layers):
        config = variants.config(name) | {"vocab_size": V, "pad_token_id": None}
        cfg = from_hf(config | {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": None})
        cfg = cfg.first_layers(layers)
        params = init_params(cfg, jax.random.key(seed))
        params["layers"] = jax.tree.map(lambda x: 6 * x, params["layers"])
        params["embed"] = params["embed"] * 40
        params["head"] = params["head"] * 8
        return sj.from_params(dataclasses.replace(cfg, eos_ids=()), params)

    return make(0, 2), make(5, 1)


@functools.cache
def exact_law(name):
    target = tiny_pair(name)[0]
    grid, logits = laws.continuation_logits(target, PROMPT, L)
    return laws.continuation_law(target, grid, logits, SAMPLING)


LAWS = {
    "speculative": {"gamma": 2},
    "block": {"gamma": 2},
    "specinfer": {"branching": (2, 2)},
    "mentored": {"gamma": 2, "max_kl": 0.0},  # with this bound its law is the target's
}


# A block on the latents; the other pairs are swept.
TAKEN = ("deepseek_v3", "block")
PAIRS = [
    case if case == TAKEN else pytest.param(*case, marks=pytest.mark.sweep)
    for case in itertools.product(NAMES, LAWS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_exact_law(name, method):
    target, draft = tiny_pair(name)
    built, settings = sj.method(method).build(Context(target, draft), LAWS[method])
    law = exact_law(name)
    assert np.sum(law > 1e-3) > 15, "the tiny model must leave room for errors to show"
    counts = laws.continuation_counts(Engine(target, draft, built, settings), PROMPT, L, SAMPLING)
    assert laws.p_value(counts, law) > laws.ALPHA


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "method", ["speculative", pytest.param("specinfer", marks=pytest.mark.slow)]
)
def test_cache_equals_fresh_prefill_after_every_round(name, method):
    target, draft = pair(name)
    options = {"gamma": 3} if method == "speculative" else {"branching": (2, 2)}
    rounds = 0
    for state in states_by_round(
        target, draft, method, options, sj.Sampling(0.9), budget=12, prompts=PROMPTS
    ):
        rounds += 1
        check_cache(target, state, atol=1e-4)
    assert rounds > 2


# What decodes plainly from the same distribution, by method; autoregressive for all others.
PLAIN = dict.fromkeys(("scd", "block-scd", "tree-scd"), "contrastive")
EXACT = [
    name
    for name, spec in sj.methods().items()
    if spec.lossless and name not in ("autoregressive", "contrastive")  # they are the plain ones
]
LOOPS = [name for name, spec in sj.methods().items() if not spec.search]


@functools.cache
def adaptive_pair(name):
    """The variant's pair; the target has adaptive tokens, for the methods that draft by those."""
    target, draft = pair(name)
    last = target.config.vocab_size - 1
    own = dataclasses.replace(target.config, adaptive_ids=(last,) * 3)
    return dataclasses.replace(target, config=own), draft


def random_prompts():
    """A hundred, of up to twenty tokens."""
    draws = np.random.default_rng(0)
    return [draws.integers(1, 60, draws.integers(1, 21)).tolist() for _ in range(100)]


@functools.cache
def greedy(name, method):
    target, draft = adaptive_pair(name)
    out = sj.generate(
        target,
        random_prompts(),
        method=method,
        draft=draft,
        sampling=sj.Sampling(0.0),
        max_new_tokens=16,
        batch_size=20,
        options=fixed_lengths(method),
    )
    return np.stack(out.tokens)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", EXACT)
def test_every_lossless_method_is_greedy_decoding(name, method):
    plain = greedy(name, PLAIN.get(method, "autoregressive"))
    np.testing.assert_array_equal(greedy(name, method), plain)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", LOOPS)
def test_cache_of_every_method_equals_fresh_prefill(name, method):
    target, draft = adaptive_pair(name)
    rounds = 0
    for state in states_by_round(
        target, draft, method, {}, sj.Sampling(0.9), budget=12, prompts=PROMPTS
    ):
        rounds += 1
        check_cache(target, state, atol=1e-4)
    assert rounds > 1
