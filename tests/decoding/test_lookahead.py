"""CDLH, CDLH-appx and CDSL: against a slow reference, and the checks that all methods pass."""

import contextlib
import dataclasses
import functools
import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.core import loop
from specjax.models import ModelConfig, init_params
from specjax.registry import Context
from specjax.rewards import DeviceReward, Together
from specjax.runtime.engine import Engine
from support.caches import check_cache
from support.lookahead_reference import COUNTERS, Model, Run

PROMPTS = [[1, 2, 3], [4], list(range(5, 20)), [7, 7, 7, 7, 9], [50, 3], [11, 12], [60], [2, 2]]
BUDGET, SLOTS, SEED = 20, 64, 7
SLOW = pytest.mark.slow
# Ids that the target often writes. WANTED earn reward; EOS end drafts and lookaheads.
WANTED, EOS = (79, 38, 21, 5, 18), (90, 16, 85)


@dataclasses.dataclass(frozen=True)
class Share:
    """A custom reward: the share of wanted ids that occur, on the device and on the host."""

    wanted: tuple[int, ...] = WANTED
    name = "share"
    bounds = (0.0, 1.0)
    full = 1.0

    def check(self, tokenizer, constraints):
        pass

    def score(self, sample):
        return self.of(sample.tokens)

    def of(self, tokens):
        return float(np.float32(len(set(self.wanted) & set(map(int, tokens)))) / len(self.wanted))

    def on_device(self, tokenizer, constraints):
        wanted = np.tile(np.array(self.wanted, np.int32), (len(constraints), 1))
        return DeviceReward(ShareFold(), (), wanted)


@dataclasses.dataclass(frozen=True)
class ShareFold:
    def init(self, shared, own):
        return jnp.zeros(own.shape, bool)

    def advance(self, shared, own, carry, token):
        return carry | (own == token)

    def value(self, shared, own, carry):
        return carry.sum() / jnp.float32(carry.shape[0])


@dataclasses.dataclass(frozen=True)
class FromHost(Share):
    """The same reward on the host only, so that the loop is host-driven."""

    def on_device(self, tokenizer, constraints):
        return None


@dataclasses.dataclass(frozen=True)
class Constant:
    """One value, whatever the tokens are."""

    number: float
    host_driven: bool
    name = "constant"
    bounds = None
    full = 1.0

    def check(self, tokenizer, constraints):
        pass

    def score(self, sample):
        return self.number

    def on_device(self, tokenizer, constraints):
        if self.host_driven:
            return None
        return DeviceReward(
            ConstantFold(), np.float32(self.number), np.zeros((len(constraints), 0))
        )


@dataclasses.dataclass(frozen=True)
class ConstantFold:
    def init(self, shared, own):
        return jnp.int32(0)

    def advance(self, shared, own, carry, token):
        return carry

    def value(self, shared, own, carry):
        return shared


@pytest.fixture(scope="module")
def target():
    """A random model that does not repeat itself; its first layer agrees with it often."""
    cfg = _config(layers=2)
    params = init_params(cfg, jax.random.key(0))
    params["layers"] = jax.tree.map(lambda x: 3.5 * x, params["layers"])
    params = params | {"embed": params["embed"] * 30, "head": params["head"] * 20}
    return sj.from_params(cfg, params)


@pytest.fixture(scope="module")
def draft(target):
    params = target.params | {"layers": {"0": target.params["layers"]["0"]}}
    return sj.LM(_config(layers=1), params, None, (), 97, "draft")


def _config(layers):
    return ModelConfig.llama(
        vocab_size=97,
        hidden_size=32,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        max_position=256,
        tie_embeddings=False,
    )


@pytest.fixture(scope="module")
def ending(target):
    return dataclasses.replace(target, eos_ids=EOS)


@pytest.fixture(scope="module")
def models(target, draft):
    return Model(target, 97, SLOTS), Model(draft, 97, SLOTS)


def generate(target, draft, method, options, reward=None, prompts=PROMPTS, **kw):
    kw = {"max_new_tokens": BUDGET, "seed": SEED, **kw}
    return sj.generate(
        target, prompts, method=method, draft=draft, options=options, reward=reward or Share(), **kw
    )


def reference(models, method, options, eos, prompts=PROMPTS):
    """The reference's run of every prompt."""
    shape = {name: options[name] for name in ("k", "d") if name in options}
    rest = {name: value for name, value in options.items() if name not in shape}
    runs = []
    for i, prompt in enumerate(prompts):
        run = Run(*models, eos, Share().of, prompt, BUDGET, **shape)
        if method == "cdsl":
            run.cdsl(jax.random.fold_in(jax.random.key(SEED), i), **rest)
        else:
            getattr(run, method.replace("-", "_"))()
        runs.append(run)
    return runs


def assert_equal(out, runs):
    for i, run in enumerate(runs):
        assert out.tokens[i].tolist() == run.tokens, i
        assert {name: out.stats[name][i] for name in COUNTERS} == run.counters, i


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("cdlh", {"k": 3, "d": 3}),
        ("cdlh-appx", {"k": 4, "d": 2}),
        pytest.param("cdlh", {"k": 1, "d": 1}, marks=SLOW),
    ],
)
def test_lookaheads_are_the_reference(ending, draft, models, method, options):
    runs = reference(models, method, options, EOS)
    assert_equal(generate(ending, draft, method, options), runs)
    if options["k"] > 1:
        assert any("lookahead" in run.ends for run in runs)
        greedy = sj.generate(ending, PROMPTS, max_new_tokens=BUDGET)
        assert any(a.tolist() != run.tokens for a, run in zip(greedy.tokens, runs, strict=True))


CASES = [
    {"k": 3, "d": 3, "b": 2, "a_t": 0.5, "r_t": 0.2, "accept": "hard", "keep_verified": True},
    {"k": 3, "d": 3, "b": 1, "a_t": 0.5, "r_t": 0.15, "accept": "ratio", "keep_verified": False},
    {"k": 1, "d": 2, "b": 1, "a_t": 0.3, "r_t": 0.1, "accept": "exact", "keep_verified": True},
    {"k": 2, "d": 4, "b": 3, "a_t": 0.6, "r_t": 0.3, "accept": "hard", "keep_verified": False},
    {"k": 3, "d": 5, "b": 0, "a_t": 0.4, "r_t": 0.2, "accept": "ratio", "keep_verified": True},
    {"k": 3, "d": 3, "b": 1, "a_t": 0.3, "r_t": 0.2, "accept": "exact", "keep_verified": False},
]


@pytest.mark.parametrize(
    "options",
    [CASES[0], *(pytest.param(case, marks=SLOW) for case in CASES[1:])],
    ids=lambda o: f"{o['accept']}-{o['keep_verified']}",
)
def test_cdsl_is_the_reference(ending, draft, models, options):
    runs = reference(models, "cdsl", options, EOS)
    out = generate(ending, draft, "cdsl", options, logprobs=True)
    assert_equal(out, runs)
    for prompt, tokens, found in zip(PROMPTS, out.tokens, out.logprobs, strict=True):
        want = [models[0]([*prompt, *tokens[:i]])[token] for i, token in enumerate(tokens)]
        np.testing.assert_allclose(found, want, atol=1e-4)
    for other in ({"a_t": 0.9, "r_t": 0.0}, {"a_t": 0.0, "r_t": 0.4}):
        changed = options | other
        assert_equal(
            generate(ending, draft, "cdsl", changed, logprobs=True),
            reference(models, "cdsl", changed, EOS),
        )
    reached = {state for run in runs for state in run.states}
    assert reached == {"S1", "S2", "S3", "S4"}, "the case must reach them to test anything"
    at_once = [{run.states[i] for run in runs if len(run.states) > i} for i in range(6)]
    assert max(map(len, at_once)) >= 2, "rows must be in different states in one round"


def test_the_cases_reach_everything(models):
    """The comparison above covers all four states, and ends in drafts and lookaheads."""
    runs = [run for options in CASES for run in reference(models, "cdsl", options, EOS)]
    assert {state for run in runs for state in run.states} == {"S1", "S2", "S3", "S4"}
    assert {end for run in runs for end in run.ends} >= {"draft", "lookahead", "attempt"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("cdsl", CASES[0]),
        ("cdlh", {"k": 3, "d": 3}),
    ],
)
def test_the_host_driven_loop_is_the_device_loop(ending, draft, method, options):
    device = generate(ending, draft, method, options, logprobs=True)
    host = generate(ending, draft, method, options, FromHost(), logprobs=True)
    assert device.passes == host.passes
    for i in range(len(PROMPTS)):
        np.testing.assert_array_equal(device.tokens[i], host.tokens[i])
        for name in device.stats:
            np.testing.assert_array_equal(device.stats[name][i], host.stats[name][i], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("cdsl", CASES[0]),
        ("cdlh", {"k": 3, "d": 3}),
        ("cdlh-appx", {"k": 4, "d": 2}),
        ("cdsl", CASES[4]),
    ],
)
def test_a_row_of_a_batch_is_the_prompt_alone(ending, draft, method, options):
    together = generate(ending, draft, method, options, logprobs=True)
    alone = generate(ending, draft, method, options, batch_size=1)
    for i in range(len(PROMPTS)):
        np.testing.assert_array_equal(together.tokens[i], alone.tokens[i])
        for name, values in together.stats.items():
            np.testing.assert_array_equal(values[i], alone.stats[name][i], name)


def states_by_round(target, draft, method, options):
    spec = sj.method(method)
    built, settings = spec.build(Context(target, draft, reward=Together((ShareFold(),))), options)
    inputs = Engine(target, draft, built, settings).inputs(sj.Sampling(), len(PROMPTS))
    wanted = jnp.tile(jnp.array(WANTED), (len(PROMPTS), 1))
    inputs = inputs.replace(reward=sj.rewards.Data(((),), (wanted,)))
    budgets = np.full(len(PROMPTS), BUDGET, np.int32)
    keys = jax.random.split(jax.random.key(3), len(PROMPTS))
    state = loop.start(
        built, inputs, [np.array(p) for p in PROMPTS], budgets, keys, logprobs=True, chunk=16
    )
    while not bool(state.done.all()):
        state = loop.advance(built, inputs, state, 1)
        yield state


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param("cdlh", {"k": 3, "d": 3}, marks=SLOW),
        ("cdsl", CASES[0]),
    ],
)
def test_cache_equals_fresh_prefill_after_every_round(target, draft, method, options):
    rounds = 0
    for state in states_by_round(target, draft, method, options):
        rounds += 1
        check_cache(target, state)
    assert rounds > 4


@pytest.mark.parametrize("host_driven", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("number", [0.0, 1.0, math.nan, -math.inf])
def test_every_reward_makes_progress(target, draft, number, host_driven):
    reward = Constant(number, host_driven)
    expected_warning = (
        pytest.warns(sj.rewards.RewardWarning) if number != number else contextlib.nullcontext()
    )
    with expected_warning:
        out = generate(
            target,
            draft,
            "cdsl",
            {"k": 1, "d": 3, "b": 0, "a_t": 0, "r_t": 0},
            reward,
            PROMPTS[:2],
            max_new_tokens=8,
        )
    assert [len(tokens) for tokens in out.tokens] == [8, 8]
    # One candidate, or a constant reward, gives the target's greedy tokens.
    greedy = sj.generate(target, PROMPTS[:2], max_new_tokens=8)
    for a, b in zip(out.tokens, greedy.tokens, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_lookaheads_grow_their_buckets(target, draft):
    options = {"k": 3, "d": 3}
    long = generate(target, draft, "cdsl", options, prompts=PROMPTS[:2], max_new_tokens=150)
    short = generate(target, draft, "cdsl", options, prompts=PROMPTS[:2], max_new_tokens=60)
    for a, b in zip(long.tokens, short.tokens, strict=True):
        assert (len(a), len(b)) == (150, 60)
        np.testing.assert_array_equal(a[:60], b)


@functools.cache
def _demo():
    """The embedded pair, 50 prompts of held-out functions, and three identifiers of each."""
    from specjax.demo.heldout import held_out_functions

    target, draft = sj.load("demo", "float32"), sj.load("demo-draft", "float32")
    models = Model(target, target.vocab_limit, 48), Model(draft, draft.vocab_limit, 48)
    prompts, words = [], []
    for function in held_out_functions(80)[0]:
        names = list(dict.fromkeys(re.findall(r"[A-Za-z_]\w{2,}", function.reference)))
        if len(names) >= 3 and len(prompts) < 50:
            prompts.append(target.tokenizer.encode(function.prompt)[-16:])
            words.append(names[:3])
    assert len(prompts) == 50
    return target, draft, models, prompts, words


def _share_of(words, tokenizer, tokens):
    text = tokenizer.decode(tokens)
    found = sum(re.search(rf"(?<!\w){word}(?!\w)", text) is not None for word in words)
    return float(np.float32(found) / np.float32(len(words)))


def _demo_cases(method, cases):
    target, draft, models, prompts, words = _demo()
    reached = set()
    for options in cases:
        out = sj.generate(
            target,
            prompts,
            method=method,
            draft=draft,
            options=options,
            seed=SEED,
            reward="lexical",
            constraints=[{"lexical": [f"={w}" for w in each]} for each in words],
            max_new_tokens=16,
            batch_size=10,
        )
        shape = {name: options[name] for name in ("k", "d")}
        rest = {name: value for name, value in options.items() if name not in shape}
        for i, (prompt, each) in enumerate(zip(prompts, words, strict=True)):
            worth = functools.partial(_share_of, each, target.tokenizer)
            run = Run(*models, target.eos_ids, worth, prompt, 16, **shape)
            if method == "cdsl":
                run.cdsl(jax.random.fold_in(jax.random.key(SEED), i), **rest)
            else:
                getattr(run, method.replace("-", "_"))()
            assert out.tokens[i].tolist() == run.tokens, (options, i)
            assert {name: out.stats[name][i] for name in COUNTERS} == run.counters, (options, i)
            reached |= set(run.states)
    assert method != "cdsl" or reached == {"S1", "S2", "S3", "S4"}


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["hard", "ratio", "exact"])
@pytest.mark.parametrize("keep", [True, False])
def test_cdsl_on_the_demo_pair_is_the_reference(accept, keep):
    """50 prompts with different words each, greedy, token for token."""
    small = {"k": 3, "d": 3, "b": 1, "a_t": 0.3, "r_t": 0.3}
    deep = {"k": 2, "d": 5, "b": 2, "a_t": 0.6, "r_t": 0.5}
    shape = deep if keep == (accept == "ratio") else small
    _demo_cases("cdsl", [shape | {"accept": accept, "keep_verified": keep}])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("method", ["cdlh-appx", "cdlh"])
def test_lookaheads_on_the_demo_pair_are_the_reference(method):
    _demo_cases(method, [{"k": 3, "d": 3}, {"k": 2, "d": 5}])


@pytest.mark.slow
def test_three_branches_cost_little_more_than_one():
    """The lookaheads' batching: k = 3 against k = 1, least of seven repeats each.

    Seconds are the processor's, of all threads: the clock on the wall also counts other work.
    """
    target, draft, _, prompts, words = _demo()
    least = {1: math.inf, 3: math.inf}
    for repeat in range(8):
        for k in least:
            began = time.process_time()
            sj.generate(
                target,
                prompts[:1],
                method="cdlh",
                draft=draft,
                options={"k": k, "d": 5},
                reward="lexical",
                constraints=[{"lexical": words[0]}],
                max_new_tokens=24,
            )
            if repeat:  # the first one compiles
                least[k] = min(least[k], time.process_time() - began)
    print(f"k = 3 over k = 1: {least[3] / least[1]:.2f}, {least[1]:.3f} s for k = 1")
    assert least[3] < 1.7 * least[1]
