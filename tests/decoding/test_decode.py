"""The loop: greedy equality, cache against fresh prefill, rows, budgets, buckets, traces."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from conftest import tiny_lm
from specjax._util.errors import OptionError
from specjax._util.platform import platform
from specjax.core import loop
from specjax.core.round import NARROW, DraftVerify
from specjax.core.scoring import score
from specjax.core.types import Draft
from specjax.draft import Lookup
from specjax.models.cache import MAX_TOKENS, bucket, chunk_size
from specjax.registry import Context
from specjax.runtime.engine import Engine
from specjax.verify import speculative
from support.caches import check_cache
from support.lengths import fixed_lengths
from support.variant_models import logits_jit

PROMPTS = [[1, 2, 3], [4], list(range(5, 45)), [7, 7, 7, 7, 9]]
# One method of each kind by default, the others among the slow tests.
CORE = ("autoregressive", "speculative", "specinfer")
# For these checks the others differ only in their rule or target distribution.
SAME_LOOP = (
    *("bild", "block", "block-scd", "lookup-mentored", "mentored", "scd", "tree-match"),
    "tree-scd",
)


def methods(fast, swept=()):
    """Parameters for every method of the plain loop.

    Those not in ``fast`` are slow tests, and those in ``swept`` are left to sweeps.
    """
    marks = dict.fromkeys(swept, (pytest.mark.slow, pytest.mark.sweep))
    marks |= dict.fromkeys(fast, ())
    return [
        pytest.param(name, marks=marks.get(name, pytest.mark.slow))
        for name, spec in sorted(sj.methods().items())
        if not spec.search
    ]


def shares_drafts(name):
    """Whether drafts come from other rows. Then counters depend on them, but tokens do not."""
    return sj.method(name).drafter == "suffix"


METHODS, TREE_SLOW = methods(CORE), methods(CORE[:2])
LOOPS, LOOPS_TREE_SLOW = methods(CORE, SAME_LOOP), methods(CORE[:2], SAME_LOOP)
SAMPLING = sj.Sampling(temperature=0.8, top_k=20, top_p=0.9)


def run(target, draft, method, prompts=PROMPTS, **kw):
    options = kw.pop("options", None) or fixed_lengths(method)
    return sj.generate(target, prompts, method=method, draft=draft, options=options, **kw)


@pytest.mark.parametrize("gamma", [1, 8])
def test_greedy_speculative_equals_plain(target, draft, gamma):
    plain = run(target, None, "autoregressive", max_new_tokens=75)
    out = run(target, draft, "speculative", max_new_tokens=75, options={"gamma": gamma})
    for a, b in zip(plain.tokens, out.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    accepted = out.stats["accepted"].sum() / out.stats["tested"].sum()
    assert 0.02 < accepted < 0.98, "the pair must both agree and differ for this to test anything"


def states_by_round(target, draft, name, options, sampling, budget=40, prompts=PROMPTS):
    """The state after every round, through the public functions of the loop."""
    built, settings = sj.method(name).build(Context(target, draft), options)
    engine = Engine(target, draft, built, settings)
    inputs = engine.inputs(sampling, len(prompts))
    keys = jax.random.split(jax.random.key(3), len(prompts))
    budgets = np.full(len(prompts), budget, np.int32)
    state = loop.start(built, inputs, [np.array(p) for p in prompts], budgets, keys, chunk=64)
    while not bool(state.done.all()):
        state = loop.advance(built, inputs, state, 1)
        yield state


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sampling", [sj.Sampling(), SAMPLING], ids=["greedy", "sampled"])
def test_cache_equals_fresh_prefill_after_every_round(target, draft, name, sampling):
    rounds = 0
    for state in states_by_round(target, draft, name, {}, sampling, budget=24):
        rounds += 1
        check_cache(target, state)
    assert rounds > 4


@pytest.mark.parametrize("name", TREE_SLOW)
@pytest.mark.parametrize("sampling", [sj.Sampling(), SAMPLING], ids=["greedy", "sampled"])
def test_row_of_a_batch_is_the_prompt_alone(target, draft, name, sampling):
    """In a full batch, and in the last one, which has empty rows."""
    kw = {"max_new_tokens": 30, "sampling": sampling, "seed": 5}
    prompts = [*PROMPTS, [9, 8], list(range(50, 84))]
    together = run(target, draft, name, prompts, batch_size=4, **kw)
    for i, prompt in enumerate(prompts):
        alone = run(target, draft, name, [prompt], indices=[i], **kw)
        np.testing.assert_array_equal(together.tokens[i], alone.tokens[0])
        for counter, values in {} if shares_drafts(name) else alone.stats.items():
            np.testing.assert_array_equal(together.stats[counter][i], values[0], counter)


@pytest.mark.parametrize("name", LOOPS)
def test_a_smaller_budget_gives_a_prefix(target, draft, name):
    long = run(target, draft, name, max_new_tokens=40, sampling=SAMPLING)
    for budget in (1, 2, 7, 23):
        short = run(target, draft, name, max_new_tokens=budget, sampling=SAMPLING)
        for a, b in zip(short.tokens, long.tokens, strict=True):
            assert len(a) == budget
            np.testing.assert_array_equal(a, b[:budget])


def test_a_row_that_the_drafts_context_does_not_hold_is_refused(target, draft):
    short = dataclasses.replace(draft.config, max_position=16)
    short = dataclasses.replace(draft, config=short)
    prompt = [list(range(1, 11))]
    with pytest.raises(OptionError, match=r"context of draft draft holds 16; .* ask for 6 new"):
        sj.generate(target, prompt, method="speculative", draft=short, max_new_tokens=7)
    out = sj.generate(target, prompt, method="speculative", draft=short, max_new_tokens=6)
    assert out.lengths == 6
    with pytest.raises(OptionError, match="decode without the draft"):
        next(sj.stream(target, [[1] * 16], method="speculative", draft=short))
    plain = {"method": "autoregressive", "max_new_tokens": 7}
    out = sj.generate(target, prompt, draft=short, **plain)  # this method runs no draft
    assert out.lengths == 7


@pytest.mark.parametrize("name", LOOPS)
def test_ends_at_any_of_several_eos_ids(target, draft, name):
    plain = run(target, draft, name, max_new_tokens=40, sampling=SAMPLING)
    ids = (int(plain.tokens[0][9]), int(plain.tokens[2][14]))
    ending = dataclasses.replace(target, eos_ids=ids)
    out = run(ending, draft, name, max_new_tokens=40, sampling=SAMPLING)
    for tokens, reason, full in zip(out.tokens, out.finish_reasons, plain.tokens, strict=True):
        inside = np.isin(tokens, ids)
        assert not inside[:-1].any()
        assert (reason == "eos") == bool(inside[-1])
        assert reason == "eos" or len(tokens) == 40
        if name == "autoregressive":  # with a draft, a cut at EOS changes later draws
            np.testing.assert_array_equal(tokens, full[: len(tokens)])
    # A draft cut at EOS changes later draws, so which rows end differs; some must.
    assert "eos" in out.finish_reasons


@pytest.mark.parametrize("name", LOOPS_TREE_SLOW)
def test_growing_buckets_and_chunks_change_nothing(target, draft, name):
    new = 300 if name == "speculative" else 100  # grows by two buckets, or one
    whole = run(target, draft, name, max_new_tokens=new, sampling=SAMPLING, logprobs=True)
    pieces = list(
        sj.stream(
            target,
            PROMPTS,
            method=name,
            draft=draft,
            options=fixed_lengths(name),
            max_new_tokens=new,
            sampling=SAMPLING,
            logprobs=True,
            rounds_per_piece=7,
        )
    )
    final = pieces[-1].generation
    for i in range(len(PROMPTS)):
        np.testing.assert_array_equal(whole.tokens[i], final.tokens[i])
        np.testing.assert_array_equal(whole.logprobs[i], final.logprobs[i])
        streamed = np.concatenate([p.tokens for p in pieces[:-1] if p.index == i])
        np.testing.assert_array_equal(streamed, final.tokens[i])
    for counter in whole.stats:
        np.testing.assert_array_equal(whole.stats[counter], final.stats[counter])


def test_logprobs_are_the_unwarped_targets(target, draft):
    out = run(target, draft, "speculative", max_new_tokens=20, sampling=SAMPLING, logprobs=True)
    rows = np.zeros((len(PROMPTS), 60), np.int32)
    for row, prompt, tokens in zip(rows, PROMPTS, out.tokens, strict=True):
        row[: len(prompt) + 20] = [*prompt, *tokens]  # later tokens do not change it
    at = np.tile(np.arange(60), (len(rows), 1))
    logits = logits_jit(target.config, target.params, rows, at, np.ones_like(rows), "dense")
    log_p = np.asarray(jax.nn.log_softmax(logits))
    for row, prompt, tokens, found in zip(log_p, PROMPTS, out.tokens, out.logprobs, strict=True):
        want = row[len(prompt) - 1 + np.arange(20), tokens]
        np.testing.assert_allclose(found, want, atol=1e-4)


def test_counters_of_plain_decoding(target):
    out = run(target, None, "autoregressive", max_new_tokens=17)
    for name in ("target_calls", "rounds", "emitted"):
        np.testing.assert_array_equal(out.stats[name], 17)
    for name in ("draft_calls", "drafted", "tested", "accepted"):
        np.testing.assert_array_equal(out.stats[name], 0)


def test_counters_when_the_draft_is_the_target(draft):
    out = run(draft, draft, "speculative", max_new_tokens=20, options={"gamma": 4})
    np.testing.assert_array_equal(out.stats["rounds"], 4)
    np.testing.assert_array_equal(out.stats["accepted"], 16)
    np.testing.assert_array_equal(out.stats["tested"], 16)
    np.testing.assert_array_equal(out.stats["draft_calls"], 16)
    np.testing.assert_array_equal(out.stats["accepted_hist"][:, 4], 4)


def test_greedy_trees_rank_the_drafts_own_choices(draft):
    """With the target as its own draft, the first child is the target's argmax."""
    out = run(draft, draft, "specinfer", max_new_tokens=12, options={"branching": (2, 1)})
    np.testing.assert_array_equal(out.stats["accepted"], out.stats["tested"])
    np.testing.assert_array_equal(out.stats["rounds"], 4)


def test_origins_name_the_writer(target, draft):
    out = run(target, draft, "speculative", max_new_tokens=60)
    for i, origin in enumerate(out.origins):
        drafted = int((origin == 1).sum())
        assert set(origin.tolist()) <= {1, 2}
        assert 0 <= out.stats["accepted"][i] - drafted <= 4  # the last round may be cut


def test_samples_differ_and_seeds_repeat(target, draft):
    kw = {"prompts": PROMPTS[2:], "max_new_tokens": 20, "sampling": SAMPLING, "num_samples": 2}
    one, two = (run(target, draft, "speculative", **kw) for _ in range(2))
    other = run(target, draft, "speculative", seed=1, **kw)
    assert len(one.tokens) == 4
    for a, b in zip(one.tokens, two.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (one.tokens[0] != one.tokens[1]).any()
    assert (one.tokens[0] != other.tokens[0]).any()


def values_of(spec):
    """Two values of every float option, well inside its bounds."""
    floats = {name: o for name, o in spec.options.items() if isinstance(o.default, float)}
    return [
        {n: 0.75 * o.default if half else o.default for n, o in floats.items()}
        for half in (False, True)
    ]


@pytest.mark.parametrize(
    "name",
    [
        *methods(("speculative",), SAME_LOOP),
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n, spec in sj.methods().items()
            if spec.search
        ),
    ],
)
def test_one_trace_per_bucket_over_settings_keys_and_lengths(target, draft, name):
    spec = sj.method(name)
    # By default SDSAT's form depends on the temperature, and each form is a method of its own.
    fixed = fixed_lengths(name)
    if "form" in spec.options:
        fixed["form"] = "chain"
    # MTJD draws from the k likeliest blocks, so it needs as many beams.
    most = 7 if name == "mtjd" else 80
    reward = "length:4-9" if spec.needs_reward else None
    loop.run_rounds.made.clear()
    for seed, (temperature, k, p) in enumerate([(0, 0, 1), (1, 0, 1), (0.5, 7, 1), (2, most, 0.3)]):
        if spec.needs_reward and temperature:
            continue  # greedy by definition
        sampling = sj.Sampling(float(temperature), k, float(p))
        for values, length in zip(values_of(spec) * 2, (3, 33, 60, 47), strict=True):
            prompts = [list(range(length // row + 1)) for row in (1, 2, 3, 4)]
            run(
                target,
                draft,
                name,
                prompts,
                max_new_tokens=12,
                sampling=sampling,
                seed=seed,
                options=fixed | values,
                reward=reward,
                logprobs=True,
            )
    assert len(loop.run_rounds.made) == 1
    context = Context(target, draft)
    if not spec.needs_reward:  # the others hold a reward, so this build would differ
        rounds = loop.run_rounds(spec.build(context, fixed)[0])
        assert len(loop.run_rounds.made) == 1 and rounds._cache_size() == 1
        run(target, draft, name, max_new_tokens=100, options=fixed, logprobs=True)
        assert rounds._cache_size() == 2  # the next bucket


@pytest.mark.parametrize(
    ("name", "options", "rows"),
    [
        ("speculative", {"gamma": 3}, 2),
        ("speculative", {"gamma": 3}, 1),
        ("autoregressive", {}, 1),
        ("lookup", {"gamma": 5}, 1),
        ("bild", {"gamma": 5}, 2),
    ],
)
@pytest.mark.skipif(
    jax.default_backend() == "gpu",
    reason="the kernel's partial sums are half of a layer's keys: see test_gpu_programs for a GPU",
)
def test_compiled_loop_holds_no_copy_of_the_cache(name, options, rows):
    # Large heads make the cache much larger than the scores, which also grow with the positions.
    target, draft = tiny_lm(1, head_dim=64), tiny_lm(2, layers=1)
    built, settings = sj.method(name).build(Context(target, draft), options)
    inputs = Engine(target, draft, built, settings).inputs(SAMPLING, rows)
    keys, budget = jax.random.split(jax.random.key(0), rows), np.full(rows, 10, np.int32)
    state = loop.start(built, inputs, [np.arange(5)] * rows, budget, keys, chunk=16)
    state = loop.resize_state(built)(state, 4096)
    compiled = loop.run_rounds(built).lower(inputs, state, np.int32(5)).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 0.5 * state.cache.k[0].nbytes, "a layer's cache is copied"


def test_buckets_waste_at_most_a_third_and_hold_whole_prefill_passes():
    for capacity in range(257, 5000):
        assert capacity <= bucket(capacity) <= 1.5 * capacity and bucket(capacity) % 128 == 0
    for rows, prompt in itertools.product((1, 8, 64, 1024), (5, 700, 5000, 40_000)):
        chunk = chunk_size(prompt, rows)
        assert chunk == 16 or chunk < 2 * prompt
        assert chunk == 16 or rows * chunk <= MAX_TOKENS
    assert chunk_size(5000) == chunk_size(5000, 64) == platform().prefill_chunk
    target = tiny_lm(1)
    built, settings = sj.method("autoregressive").build(Context(target, None), {})
    inputs = Engine(target, None, built, settings).inputs(SAMPLING, 1)
    keys, budget = jax.random.split(jax.random.key(0), 1), np.full(1, 10, np.int32)
    prompt = np.arange(700) % target.config.vocab_size

    def prefilled(chunk):
        return loop.start(built, inputs, [prompt], budget, keys, chunk=chunk)

    with jax.default_matmul_precision("highest"):  # a GPU rounds float32 operands to 10 bits
        wide, narrow = prefilled(512), prefilled(16)  # chunks of 512: the second pass ends at 1024
    for a, b in zip(wide.cache.k, narrow.cache.k, strict=True):
        np.testing.assert_allclose(a[:, :, :699], b[:, :, :699], atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "live", "wide"),
    [
        ([1, 4], [True, True], False),
        ([5, 2], [True, True], True),
        ([5, 2], [False, True], False),
    ],
)
def test_a_pass_is_as_wide_as_the_longest_live_draft(lengths, live, wide):
    target, rows, nodes = dataclasses.replace(tiny_lm(1), pass_width=1), 2, 7
    method = DraftVerify(Lookup(gamma=nodes - 1), sj.Warped(), speculative)
    tokens = jnp.arange(rows * nodes).reshape(rows, nodes)
    valid = jnp.arange(1, nodes) < jnp.array(lengths)[:, None]
    draft = Draft.chain(tokens[:, 1:], root=tokens[:, 0], valid=valid)
    start = jnp.array([3, 9], jnp.int32)
    want = jax.jit(score)(target.net, target.net.cache(rows, 128), start, draft)[1]
    inputs = Engine(target, None, method, {}).inputs(SAMPLING, rows)
    keys, length = jax.random.split(jax.random.key(0), rows), start + 1
    begin = loop.begin_prefill(method, False)
    row = jnp.ones((rows, 128), jnp.int32)
    state = begin(inputs, row, length, length + jnp.where(jnp.array(live), 9, 0), keys, None)
    also = jax.jit(method._verify)(inputs, state, keys, draft).cache
    width = nodes if wide else NARROW
    for row, at in enumerate(start):
        for a, b in zip(also.k, want.k, strict=True):
            np.testing.assert_allclose(
                a[row, :, at : at + width], b[row, :, at : at + width], atol=1e-5
            )
            assert not np.any(a[row, :, at + width :])
