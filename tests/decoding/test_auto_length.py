"""Draft lengths and trees by cost: choice, acceptance history, catching up, distribution."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_laws import PROMPT, SAMPLING, L, exact_continuations, tiny_pair

import specjax as sj
from conftest import tiny_lm
from specjax import metrics
from specjax._util.errors import OptionError, PairError
from specjax.core import loop
from specjax.core.round import DraftVerify
from specjax.core.types import POINT_MASS, Draft
from specjax.draft import auto_length
from specjax.draft.auto_length import (
    COSTS,
    LENGTHS,
    MARGIN,
    PRIOR_WEIGHT,
    RETRY_PENALTY,
    TREES,
    AcceptanceHistory,
    AutoLengthChain,
    AutoLengthTree,
    form_gains,
)
from specjax.registry import Context
from specjax.runtime import kept_costs, round_costs, runner
from specjax.runtime.engine import Engine
from specjax.runtime.generate import make_engine
from support import laws

N = len(LENGTHS)
PRIOR = 0.85
PAUSE = (1.0, *(9.0,) * (N - 1))  # costs under which only plain rounds pay
DRAFT = (9.0, *(1.0,) * (N - 1))  # costs under which only the longest drafts pay
PROMPTS = [[1, 2, 3], [4], list(range(5, 45)), [7, 7, 7, 7, 9]]


def test_the_length_with_the_most_tokens_per_cost_is_taken():
    """Against the formula of the cost model, on random costs."""
    generator = np.random.Generator(np.random.Philox(1))
    best = jax.jit(
        lambda rate, cost: jnp.argmax(form_gains(rate[None, None], auto_length.CHAINS, cost))
    )
    for rate in (0.0, 0.3, 0.6, 0.85, 0.99):
        for _ in range(20):
            cost = np.cumsum(generator.uniform(0.05, 1.0, N))
            gains = [metrics.expected_block_efficiency(rate, g) for g in LENGTHS] / cost
            gains[1:] -= MARGIN * gains[0]
            assert best(np.float32(rate), cost.astype(np.float32)) == np.argmax(gains)


def test_the_tree_with_the_most_tokens_per_cost_is_taken():
    """By hand: a level is accepted with 0.7 (two siblings), 0.8 (three) or 0.85 (four)."""
    rates = jnp.array([[0.5, 0.7, 0.8, 0.85]])
    cost = np.array([1.0, 1.8, 2.2, 2.4, 3.0], np.float32)
    tokens = [1, 1.875, 1 + 0.7 + 0.35 + 0.175, 1 + 0.8 + 0.56 + 0.28, 1 + 0.85 + 0.595 + 0.4165]
    for wanted in range(len(TREES)):
        level = cost.copy()
        level[wanted] = 0.94 * min(np.array(tokens[wanted]) * cost / tokens)
        assert jnp.argmax(form_gains(rates, TREES, level)) == wanted


def test_a_draft_counts_what_its_confidence_promises():
    """By hand: a token of confidence 0, 1, 2 is accepted with 0.1, 0.5, 0.9; later ones more."""
    rates, forms = jnp.array([[0.1], [0.5], [0.9]]), ((), (1,), (1, 1, 1))
    costs = np.array([1.0, 1.25, 2.0], np.float32)
    weak = np.array([1, 1.1, 1 + 0.1 + 0.05 + 0.045])
    strong = np.array([1, 1.9, 1 + 0.9 + 0.81 + 0.729])
    for confidence, running, tokens in (
        ([0], [1], weak),
        ([2], [1], strong),
        ([-1], [1], 1),  # nothing to draft
        ([0, 2], [1, 1], (weak + strong) / 2),  # one pass for both rows
        ([0, 2, -1], [1, 0, 1], (weak + 1) / 2),  # a row that has ended does not count
    ):
        running = jnp.array(running, bool)
        gains = form_gains(rates, forms, costs, jnp.array(confidence), running)
        wanted = tokens / costs - [0, MARGIN, MARGIN]
        np.testing.assert_allclose(gains, wanted, rtol=1e-6)


def test_a_history_counts_and_forgets_by_confidence():
    """Two of three tokens accepted, from confidence 0 on; another row has nothing to draft."""
    confidence = jnp.array([0, -1])
    form = jnp.ones(3, jnp.int32)

    def round_(record, drafted, accepted):
        before, now = (
            SimpleNamespace(stats=SimpleNamespace(accepted=a, drafted=d), length=jnp.full(2, 9))
            for a, d in ((0, 0), (jnp.array([accepted, 0]), jnp.array([drafted, 0])))
        )
        return record.record_round(before, now, confidence, jnp.bool_(drafted > 0), form)

    record = round_(AcceptanceHistory.begin(2, confidences=3), 3, 2)
    np.testing.assert_array_equal(record.tested[..., 0], [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(record.accepted[..., 0], [[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(record.streak, [[-1, 0, 0]] * 2)
    for _ in range(7):
        record = round_(record, 0, 0)
    np.testing.assert_array_equal(record.tested[0, :, 0], [1, 1, 1])
    record = round_(record, 0, 0)
    np.testing.assert_allclose(record.tested[..., 0].sum(0), [RETRY_PENALTY, 1, 1], rtol=1e-6)
    np.testing.assert_array_equal(record.retry_after, [[32, 8, 8]] * 2)


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_the_history_of_a_copied_text_has_all_its_tokens(name, monkeypatch):
    """Whatever the confidences are, each tested token counts once, and as what it was."""
    monkeypatch.setattr(auto_length, "DECAY", 1.0)
    engine = make_engine(tiny_lm(0), None, sj.method(name), {"gamma": "auto", "costs": DRAFT})
    prompts = [np.array([5, 6, 7, 8, 5, 6, 7]), np.arange(9)]
    inputs = engine.inputs(sj.Sampling(temperature=0), 2)
    inputs = inputs.replace(settings={COSTS: jnp.asarray(DRAFT, jnp.float32)})
    keys = jax.random.split(jax.random.key(0), 2)
    method, budget = engine.method, np.full(2, 40, np.int32)
    loop.forget(method)  # programs with another DECAY
    state = loop.start(method, inputs, prompts, budget, keys, chunk=16, capacity=128)
    state = loop.run_rounds(method)(inputs, state, np.int32(40))
    loop.forget(method)
    history, stats = state.method_state, state.stats
    assert stats.accepted.sum() > 20
    np.testing.assert_allclose(history.accepted.sum((1, 2)), stats.accepted)
    np.testing.assert_allclose(history.tested.sum((1, 2)), stats.tested)


def test_the_first_draft_is_a_cheap_one():
    """The longest draft promises most and costs four plain rounds, three of which may be lost."""
    unknown = AcceptanceHistory.begin(1)
    accepted = unknown.replace(tested=jnp.ones((1, 1, 1)), accepted=jnp.ones((1, 1, 1)))

    def gamma(history, *costs):
        costs = jnp.array(costs, jnp.float32)
        gains = form_gains(history.rates([PRIOR]), auto_length.CHAINS, costs)
        return LENGTHS[int(auto_length.next_form_index(history, gains, costs))]

    for costs, first, second in (
        ((1, 1.7, 2.6, 2.7, 3.9, 4.0), 1, 7),
        ((1, 1.6, 1.7, 1.7, 2.1, 2.3), 7, 7),  # none of these is a bet
        ((1, 2.6, 2.7, 2.8, 2.9, 3.0), 1, 7),  # the cheapest there is
        (PAUSE, 0, 0),
        ((1, *(np.inf,) * (N - 2), 3), 7, 7),  # timed
    ):
        assert (gamma(unknown, *costs), gamma(accepted, *costs)) == (first, second), costs


def test_a_draft_model_whose_drafts_never_pay_reads_no_prompt():
    method, inputs, keys = own_draft()
    prompts = [np.array(p) for p in PROMPTS]
    budget = np.full(len(PROMPTS), 60, np.int32)
    for costs, has_read in ((PAUSE, False), (DRAFT, True)):
        known = inputs.replace(settings={COSTS: jnp.asarray(costs, jnp.float32)})
        state = loop.start(method, known, prompts, budget, keys, chunk=16, capacity=128)
        cached = state.length - 1 if has_read else np.zeros(len(PROMPTS))
        np.testing.assert_array_equal(state.method_state.draft_cached, cached)
        keys_of_draft = state.drafter_state.k[0]
        assert bool((keys_of_draft != 0).any()) is has_read
        assert (state.cache.k[0] != 0).any()


def test_a_history_of_trees_counts_by_the_number_of_siblings():
    """Tree (2, 1, 1): one row accepts two levels, not the third; another row accepts none."""
    before, now = (
        SimpleNamespace(stats=SimpleNamespace(accepted=a, drafted=d), length=jnp.full(2, 9))
        for a, d in ((0, 0), (jnp.array([2, 0]), jnp.array([3, 3])))
    )
    record = AcceptanceHistory.begin(2, siblings=4).record_round(
        before, now, jnp.zeros(2, jnp.int32), jnp.bool_(True), jnp.array([2, 1, 1])
    )
    np.testing.assert_array_equal(record.tested[:, 0], [[2, 1, 0, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(record.accepted[:, 0], [[1, 1, 0, 0], [0, 0, 0, 0]])
    one = (1 + PRIOR * PRIOR_WEIGHT) / (2 + PRIOR_WEIGHT)
    (rates,) = record.rates([PRIOR])
    np.testing.assert_allclose(rates[0], one, rtol=1e-6)
    assert (np.diff(rates) > 0).all()
    unknown = 1 - (1 - PRIOR) ** 2  # two siblings that were never tested
    np.testing.assert_allclose(rates[3], unknown, rtol=1e-6)
    rejected = AcceptanceHistory.begin(1, siblings=4)
    rejected = rejected.replace(tested=rejected.tested.at[0, 0, 3].set(50))
    assert rejected.rates([PRIOR]).max() < 0.2, "what four siblings cannot do one does not, either"


def test_the_history_counts_forgets_and_tries_again():
    """By hand: 3 of 5 accepted counts as 3 of 4 tested; 5 of 5 as 5 of 5; an ended row as none."""

    @jax.jit
    def counted(record, accepted, drafted):
        before, now = (
            SimpleNamespace(stats=SimpleNamespace(accepted=a, drafted=d), length=jnp.full(3, 9))
            for a, d in ((0, 0), (accepted, drafted))
        )
        form = jnp.ones(max(LENGTHS), jnp.int32)
        confidence = jnp.zeros(3, jnp.int32)
        return record.record_round(before, now, confidence, jnp.any(drafted > 0), form)

    def round_(record, accepted, drafted):
        return counted(record, np.array(accepted), np.array(drafted))

    record = round_(AcceptanceHistory.begin(3), [3, 5, 0], [5, 5, 0])
    np.testing.assert_array_equal(record.tested[:, 0, 0], [4, 5, 0])
    np.testing.assert_array_equal(record.accepted[:, 0, 0], [3, 5, 0])
    known = (8 + PRIOR * PRIOR_WEIGHT) / (9 + PRIOR_WEIGHT)
    np.testing.assert_allclose(record.rates([PRIOR]), known, rtol=1e-6)
    np.testing.assert_array_equal(record.draft_cached, 7)
    plain_round = functools.partial(round_, accepted=[0] * 3, drafted=[0] * 3)
    for retry_after in (8, 32, 128, 512, 512):
        np.testing.assert_array_equal(record.retry_after, retry_after)
        for _ in range(retry_after - 1):
            record = plain_round(record)
        np.testing.assert_array_equal(record.streak, retry_after - 1)
        record = plain_round(record)
        reason = "all counts are forgotten, but that drafts were given up"
        assert record.rates([PRIOR]) == pytest.approx(
            PRIOR * PRIOR_WEIGHT / (PRIOR_WEIGHT + RETRY_PENALTY)
        ), reason
        record = round_(record, [0] * 3, [1] * 3)
        assert record.rates([PRIOR]) == pytest.approx(
            PRIOR * PRIOR_WEIGHT / (PRIOR_WEIGHT + 0.98 * RETRY_PENALTY + 3)
        )
    for _ in range(15):
        record = round_(record, [1] * 3, [1] * 3)
    np.testing.assert_array_equal(record.retry_after, 8)
    for rows, first in ((1, 8), (7, 8), (8, 16), (32, 64)):
        assert set(AcceptanceHistory.begin(rows).retry_after[:, 0].tolist()) == {first}, (
            "in a large batch bad luck is unlikely"
        )


@functools.cache
def own_draft():
    """A method whose draft model is the target, so that every drafted token is accepted."""
    target = tiny_lm(0)
    engine = make_engine(target, target, sj.method("speculative"), {"gamma": "auto"})
    inputs = engine.inputs(sj.Sampling(), len(PROMPTS))
    return engine.method, inputs, jax.random.split(jax.random.key(0), len(PROMPTS))


@pytest.mark.parametrize("costs", [PAUSE, (1.0, *(np.inf,) * (N - 1))])
def test_rounds_that_are_timed_verify_tokens_that_differ(costs, monkeypatch):
    """A draft that repeats one token would choose the same experts of a mixture again and again."""
    method, inputs, keys = own_draft()
    monkeypatch.setattr(DraftVerify, "_verify", lambda self, inputs, state, keys, draft: draft)
    inputs = inputs.replace(settings={COSTS: jnp.asarray(costs, jnp.float32)})
    root = jnp.arange(len(PROMPTS), dtype=jnp.int32)
    drafted = jnp.full((len(PROMPTS), max(LENGTHS)), 5, jnp.int32)
    draft = Draft.chain(drafted, root=root, valid=drafted > 0, sampling=POINT_MASS)
    verified = method._verify(inputs, None, keys, draft)
    np.testing.assert_array_equal(verified.tokens[:, 0], root)
    distinct = {len(set(row[1:].tolist())) for row in verified.tokens}
    assert distinct == {max(LENGTHS) if np.isinf(costs).any() else 1}


def after_plain_rounds(method, rounds):
    """Drafted and accepted tokens of 3 rounds with a draft, after ``rounds`` without one."""
    _, inputs, keys = own_draft()
    prompts, budget = [np.array(p) for p in PROMPTS], np.full(len(PROMPTS), 60, np.int32)
    state = loop.start(method, inputs, prompts, budget, keys, chunk=16, capacity=128)
    run = loop.run_rounds(method)
    for cost, count in ((PAUSE, rounds), (DRAFT, 3)):
        with_costs = inputs.replace(settings={COSTS: jnp.asarray(cost, jnp.float32)})
        state = run(with_costs, state, np.int32(count))
    assert (np.asarray(state.stats.rounds) == rounds + 3).all()
    return np.asarray(state.stats.drafted), np.asarray(state.stats.accepted)


@pytest.mark.slow
def test_a_draft_model_catches_up_after_plain_rounds():
    """If one token were missing from the draft's cache, it would draft tokens that are rejected."""
    for rounds in (1, 20):  # the catching up takes less than one pass, and more than one
        drafted, accepted = after_plain_rounds(own_draft()[0], rounds)
        np.testing.assert_array_equal(drafted, 3 * LENGTHS[-1])
        np.testing.assert_array_equal(accepted, drafted)


@dataclasses.dataclass(frozen=True)
class Forgetful(AutoLengthChain):
    """A mutant: drafts without reading the tokens of the plain rounds."""

    def _catch_up(self, inputs, state):
        return state


@pytest.mark.slow
def test_a_draft_model_that_does_not_catch_up_is_caught():
    method = own_draft()[0]
    forgetful = Forgetful(method.drafter, method.target, method.rule)
    drafted, accepted = after_plain_rounds(forgetful, 20)
    assert (accepted < drafted).any()


def refilled(target, draft, method, **options):
    """Four prompts, two rows at a time."""
    return sj.generate(
        target,
        PROMPTS,
        method=method,
        draft=draft,
        options=options,
        max_new_tokens=[40, 9, 30, 21],
        batch_size=2,
    )


@pytest.mark.parametrize(
    "name",
    [
        "speculative",
        pytest.param("lookup", marks=pytest.mark.slow),
        *(
            pytest.param(n, marks=[pytest.mark.slow, pytest.mark.sweep])
            for n in ("block", "mentored", "scd")
        ),
    ],
)
def test_greedy_tokens_do_not_depend_on_the_lengths(target, draft, name):
    """Slots are refilled; draft lengths change from round to round, or costs are measured."""

    run = functools.partial(refilled, target, draft, name)
    fixed = run(gamma=3) if name == "scd" else refilled(target, draft, "autoregressive")
    for given in ((1, 1.9, 2.2, 2.5, 3, 4), PAUSE, DRAFT, "measured"):
        out = run(gamma="auto", costs=given)
        for a, b in zip(out.tokens, fixed.tokens, strict=True):
            np.testing.assert_array_equal(a, b)
        if given in (PAUSE, DRAFT) and name != "lookup":
            mean = out.stats["drafted"].sum() / out.stats["rounds"].sum()
            assert mean == (0 if given is PAUSE else pytest.approx(LENGTHS[-1], abs=0.3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["specinfer", pytest.param("tree-match", marks=pytest.mark.sweep)])
def test_greedy_tokens_do_not_depend_on_the_trees(target, draft, name):
    """Slots are refilled; trees change from round to round, or costs are measured."""

    plain = refilled(target, draft, "autoregressive")
    calls = []
    for given in ((1, 1.9, 2.2, 2.5, 3), PAUSE[: len(TREES)], (9, 9, 9, 9, 1), "measured"):
        out = refilled(target, draft, name, branching="auto", costs=given)
        for a, b in zip(out.tokens, plain.tokens, strict=True):
            np.testing.assert_array_equal(a, b)
        calls.append(out.stats["draft_calls"].sum() / out.stats["rounds"].sum())
    assert calls[1] == 0 and 10 < calls[2] <= 13, "a tree of (4, 2, 2) reads 1 + 4 + 8 tokens"


def measured(target, draft, slots=2):
    """The costs of rounds that are known after a few tokens with ``gamma=auto``."""
    sj.generate(
        target,
        PROMPTS[:2],
        method="speculative",
        draft=draft,
        options={"gamma": "auto"},
        max_new_tokens=4,
        batch_size=slots,
    )
    return dict(round_costs._MEASURED)


def test_costs_are_measured_once_per_shape(target, draft, monkeypatch):
    first = measured(target, draft)
    taken = []
    known_costs = runner.known_costs
    monkeypatch.setattr(runner, "known_costs", lambda *args: taken.append(known_costs(*args)))
    assert measured(target, draft) == first
    assert taken[-1] in first.values(), "they are known before the second batch's prompts are read"
    for (method, *_), cost in first.items():
        assert len(cost) == len(method.forms) and cost[0] == 1 and list(cost) == sorted(cost)


def test_costs_are_kept_on_disk(target, draft, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(round_costs, "_MEASURED", {})
    measurements = []
    seconds = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    monkeypatch.setattr(
        round_costs, "_measure", lambda *args: measurements.append(1) or (seconds, args[-1])
    )

    def decode(slots):
        round_costs._MEASURED.clear()  # as in another process
        (costs,) = measured(target, draft, slots).values()
        return costs

    first = decode(2)
    assert decode(2) == first and len(measurements) == 1
    (file,) = (tmp_path / kept_costs.NAME).iterdir()
    decode(1)
    assert len(measurements) == 2, "another number of slots has other costs"
    for damaged in ("[1.0, 2.0]", "[0.0, 1, 1, 1, 1, 1]", "{", "[NaN, 1.0, 1.0, 1.0, 1.0, 1.0]"):
        measurements.clear()
        file.write_text(damaged)
        decode(2)
        assert len(measurements) == 1, damaged
    seconds[1] = 3.0  # other work of the machine fell on this form
    file.unlink()
    assert decode(2)[1] == pytest.approx(1.2) and decode(2) and len(measurements) == 3
    assert not file.exists()


def test_what_cannot_be_sized_is_refused():
    head = sj.compose("tree", "specinfer")
    with pytest.raises(OptionError, match="unknown option 'gamma'"):
        head.resolve({"gamma": "auto"})
    assert head.resolve({"branching": "auto"})["branching"] == "auto"
    with pytest.raises(OptionError, match="costs=1,2: expected times above 0 at trees 0, 1,1,1"):
        head.resolve({"branching": "auto", "costs": "1,2"})
    with pytest.raises(OptionError, match="branching=auto: expected children per level"):
        sj.compose("head", "match").resolve({"branching": "auto"})
    with pytest.raises(PairError, match="branching=auto sizes trees of a draft model that can"):
        AutoLengthTree(sj.draft.Tree((2, 1)), sj.Warped(), sj.verify.specinfer)
    with pytest.raises(
        OptionError, match="gamma=many: expected a whole number from 1 to 64 or auto"
    ):
        sj.method("speculative").resolve({"gamma": "many"})
    for bad in ("1,2", "0,1,1,1,1,1", "nan,1,1,1,1,1", "fast"):
        with pytest.raises(OptionError, match=r"costs=.*: expected times above 0 at lengths 0, 1"):
            sj.method("speculative").resolve({"gamma": "auto", "costs": bad})
    with pytest.raises(PairError, match="gamma=auto sizes chains of up to 7 tokens"):
        AutoLengthChain(sj.draft.Chain(gamma=3), sj.Warped(), sj.verify.speculative)


# --- the distribution: each row chooses lengths from its own past rounds -------------------------

ROWS = 8192
# Costs that give drafts of 3 tokens, 2 after one rejection, none after two, and never more.
CHANGING = (1.0, 1.45, 1.6, 1.95, 99.0, 99.0)


@dataclasses.dataclass(frozen=True)
class Peeks(AutoLengthChain):
    """A mutant: cuts the draft at an unlikely token, so the length depends on the drawn tokens."""

    def propose(self, inputs, state, keys):
        made = super().propose(inputs, state, keys)
        draft = made.draft
        drawn = jnp.take_along_axis(draft.log_q, draft.tokens[:, 1:, None], axis=-1)[..., 0]
        likely = jnp.cumprod(drawn > jnp.log(0.4), axis=1, dtype=jnp.int32) > 0
        valid = draft.valid & jnp.pad(likely, ((0, 0), (1, 0)), constant_values=True)
        return made._replace(draft=draft.replace(valid=valid))


def own_pasts(
    method, costs=CHANGING, count="drafted", samples=laws.SAMPLES
) -> tuple[np.ndarray, set[int]]:
    """Counts of all continuations, and the drafted lengths that occurred. Batches have one row.

    Rows of one batch share their past, so a large batch would always draft the same lengths.
    """
    engine = Engine(*tiny_pair(), method, {COSTS: costs})
    inputs, budget = engine.inputs(SAMPLING, 1), np.full(1, L, np.int32)
    vocab = engine.target.vocab_limit

    @jax.jit
    def run(keys):
        def one(key):
            prompt = [np.array(PROMPT)]
            state = loop.start(
                method, inputs, prompt, budget, key[None], chunk=len(PROMPT), capacity=16
            )
            state = loop.run_rounds(method)(inputs, state, np.int32(L))
            return state.tokens[0, len(PROMPT) :][:L], getattr(state.stats, count)[0]

        return jax.vmap(one)(keys)

    counts, drafted = np.zeros((vocab,) * L, np.int64), set()
    with laws.optimized():
        for seed in range(-(-samples // ROWS)):
            tokens, lengths = run(jax.random.split(jax.random.key(seed), ROWS))
            counts += laws.histogram(np.asarray(tokens), vocab)
            drafted |= set(np.unique(lengths).tolist())
    return counts, drafted


def tiny_method(kind=AutoLengthChain):
    options = {"gamma": "auto", "costs": CHANGING}
    built, _ = sj.method("speculative").build(Context(*tiny_pair()), options)
    return kind(built.drafter, built.target, built.rule)


@pytest.mark.slow
def test_a_length_of_the_past_is_lossless():
    counts, drafted = own_pasts(tiny_method())
    assert {3, 5} <= drafted, "rows whose drafts change in length with what was accepted"
    assert laws.p_value(counts, exact_continuations(tiny_pair()[0])) > laws.ALPHA


@pytest.mark.slow
def test_a_length_that_peeks_at_the_draft_is_caught():
    counts, _ = own_pasts(tiny_method(Peeks), samples=laws.SAMPLES // 8)
    assert laws.p_value(counts, exact_continuations(tiny_pair()[0])) < laws.ALPHA


# --- the same for trees --------------------------------------------------------------------------

CHANGING_TREES = (1.0, 1.4, 1.75)  # a broad tree first; a narrow one, then none, after rejections


@dataclasses.dataclass(frozen=True)
class FewTrees(AutoLengthTree):
    forms = (), (1, 1), (2, 1)


@dataclasses.dataclass(frozen=True)
class Culled(sj.draft.Tree):
    """A mutant: drops unlikely children, so the tree depends on the drawn tokens."""

    def propose(self, inputs, state, keys):
        made = super().propose(inputs, state, keys)
        draft = made.draft
        laws = draft.log_q[:, np.array(draft.q_row)]
        drawn = jnp.take_along_axis(laws, draft.tokens[..., None], axis=-1)[..., 0]
        likely = (drawn > jnp.log(0.4)).at[:, 0].set(True)
        return made._replace(draft=draft.replace(valid=draft.valid & likely))


def trees_of(drafter):
    return FewTrees(drafter((2, 1)), sj.Warped(), sj.verify.specinfer)


@pytest.mark.slow
@pytest.mark.sweep
def test_a_tree_of_the_past_is_lossless():
    counts, calls = own_pasts(trees_of(sj.draft.Tree), CHANGING_TREES, "draft_calls")
    assert len(calls) > 2, "rows whose trees change with what was accepted"
    assert laws.p_value(counts, exact_continuations(tiny_pair()[0])) > laws.ALPHA


@pytest.mark.slow
@pytest.mark.sweep
def test_a_tree_that_peeks_at_the_draft_is_caught():
    few = laws.SAMPLES // 8  # the bias is large
    counts, _ = own_pasts(trees_of(Culled), CHANGING_TREES, "draft_calls", few)
    assert laws.p_value(counts, exact_continuations(tiny_pair()[0])) < laws.ALPHA
