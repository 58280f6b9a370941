"""Drafts sized by their cost: the choice, what the past says, rest and catching up, and the law."""

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
from specjax import costs, decode, metrics, sized
from specjax.engine import Engine
from specjax.errors import OptionError, PairError
from specjax.generate import make_engine
from specjax.methods import Context
from specjax.sized import COSTS, LENGTHS, Record, Sized
from support import laws

N = len(LENGTHS)
REST = (1.0, *(9.0,) * (N - 1))  # nothing but plain rounds pays
DRAFT = (9.0, *(1.0,) * (N - 1))  # the longest drafts do
PROMPTS = [[1, 2, 3], [4], list(range(5, 45)), [7, 7, 7, 7, 9]]


def test_the_length_with_the_most_tokens_per_cost_is_taken():
    """Against the formula of the cost model, on random costs."""
    generator = np.random.Generator(np.random.Philox(1))
    best = jax.jit(sized.best_length)
    for rate in (0.0, 0.3, 0.6, 0.85, 0.99):
        for _ in range(20):
            cost = np.cumsum(generator.uniform(0.05, 1.0, N))
            gains = [metrics.expected_block_efficiency(rate, g) for g in LENGTHS] / cost
            assert best(np.float32(rate), cost.astype(np.float32)) == LENGTHS[np.argmax(gains)]


def test_the_record_counts_rests_forgets_and_tries_again():
    """By hand: 3 of 5 accepted is 3 of 4 tested; all of 5 is 5 of 5; a row that ended adds none."""

    @jax.jit
    def counted(record, accepted, drafted):
        before, now = (
            SimpleNamespace(stats=SimpleNamespace(accepted=a, drafted=d), length=jnp.full(3, 9))
            for a, d in ((0, 0), (accepted, drafted))
        )
        return record.after(before, now, jnp.any(drafted > 0))

    def round_(record, accepted, drafted):
        return counted(record, np.array(accepted), np.array(drafted))

    record = round_(Record.begin(3), [3, 5, 0], [5, 5, 0])
    np.testing.assert_array_equal(record.tested, [4, 5, 0])
    np.testing.assert_array_equal(record.accepted, [3, 5, 0])
    np.testing.assert_allclose(record.rate(), (8 + 0.85 * 1.5) / (9 + 1.5), rtol=1e-6)
    np.testing.assert_array_equal(record.read, 7)
    rest = functools.partial(round_, accepted=[0] * 3, drafted=[0] * 3)
    for patience in (8, 32, 128, 512, 512):
        np.testing.assert_array_equal(record.patience, patience)
        for _ in range(patience - 1):
            record = rest(record)
        np.testing.assert_array_equal(record.streak, patience - 1)
        record = rest(record)
        assert record.rate() == pytest.approx(0.85), "what was known is forgotten"
        record = round_(record, [0] * 3, [1] * 3)
        assert record.rate() == pytest.approx(0.85 * 1.5 / 4.5)
    for _ in range(15):
        record = round_(record, [1] * 3, [1] * 3)
    np.testing.assert_array_equal(record.patience, 8)


@functools.cache
def own_draft():
    """A method whose draft model is the target: what it drafts is accepted, always."""
    target = tiny_lm(0)
    engine = make_engine(target, target, sj.method("speculative"), {"gamma": "auto"})
    inputs = engine.inputs(sj.Sampling(), len(PROMPTS))
    return engine.method, inputs, jax.random.split(jax.random.key(0), len(PROMPTS))


def rested(method, rounds):
    """Rounds without a draft, then 3 with: what was drafted in these, and accepted."""
    _, inputs, keys = own_draft()
    prompts, budget = [np.array(p) for p in PROMPTS], np.full(len(PROMPTS), 60, np.int32)
    state = decode.start(method, inputs, prompts, budget, keys, chunk=16, slots=128)
    run = decode.run_rounds(method)
    for cost, count in ((REST, rounds), (DRAFT, 3)):
        told = inputs.replace(settings={COSTS: jnp.asarray(cost, jnp.float32)})
        state = run(told, state, np.int32(count))
    assert (np.asarray(state.stats.rounds) == rounds + 3).all()
    return np.asarray(state.stats.drafted), np.asarray(state.stats.accepted)


@pytest.mark.slow
def test_a_draft_model_that_rested_catches_up():
    """Were one token missing, it would draft others than the target writes."""
    for rounds in (1, 20):  # a part of a pass over what is missing, and more than one
        drafted, accepted = rested(own_draft()[0], rounds)
        np.testing.assert_array_equal(drafted, 3 * LENGTHS[-1])
        np.testing.assert_array_equal(accepted, drafted)


@dataclasses.dataclass(frozen=True)
class Forgetful(Sized):
    """Drafts without what it has missed."""

    def _caught_up(self, inputs, state):
        return state.drafter_state


@pytest.mark.slow
def test_a_draft_model_that_does_not_catch_up_is_caught():
    method = own_draft()[0]
    forgetful = Forgetful(method.drafter, method.target, method.rule)
    drafted, accepted = rested(forgetful, 20)
    assert (accepted < drafted).any()


@pytest.mark.parametrize(
    "name",
    [
        "speculative",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("block", "mentored", "lookup", "scd")),
    ],
)
def test_greedy_tokens_do_not_depend_on_the_lengths(target, draft, name):
    """Rows refilled, with lengths that change, and with costs as measured."""

    def run(method=name, **options):
        return sj.generate(
            target,
            PROMPTS,
            method=method,
            draft=draft,
            options=options,
            max_new_tokens=[40, 9, 30, 21],
            batch_size=2,
        )

    fixed = run(gamma=3) if name == "scd" else run("autoregressive")
    for given in ((1, 1.9, 2.2, 2.5, 3, 4), REST, DRAFT, "measured"):
        out = run(gamma="auto", costs=given)
        for a, b in zip(out.tokens, fixed.tokens, strict=True):
            np.testing.assert_array_equal(a, b)
        if given in (REST, DRAFT) and name != "lookup":
            mean = out.stats["drafted"].sum() / out.stats["rounds"].sum()
            assert mean == (0 if given is REST else pytest.approx(LENGTHS[-1], abs=0.3))


def test_costs_are_measured_once_per_shape(target, draft):
    def measured():
        sj.generate(
            target,
            PROMPTS[:2],
            method="speculative",
            draft=draft,
            options={"gamma": "auto"},
            max_new_tokens=4,
            batch_size=2,
        )
        return dict(costs._MEASURED)

    first = measured()
    assert measured() == first
    for cost in first.values():
        assert len(cost) == N and cost[0] == 1 and list(cost) == sorted(cost)


def test_what_cannot_be_sized_is_refused():
    head = sj.compose("tree", "specinfer")
    with pytest.raises(OptionError, match="unknown option 'gamma'"):
        head.resolve({"gamma": "auto"})
    with pytest.raises(OptionError, match="gamma=many: expected a whole number or auto"):
        sj.method("speculative").resolve({"gamma": "many"})
    for bad in ("1,2", "0,1,1,1,1,1", "nan,1,1,1,1,1", "fast"):
        with pytest.raises(OptionError, match=r"costs=.*: expected times above 0 at lengths 0, 1"):
            sj.method("speculative").resolve({"gamma": "auto", "costs": bad})
    with pytest.raises(PairError, match="gamma=auto sizes chains of up to 7 tokens"):
        Sized(sj.draft.Chain(gamma=3), sj.Warped(), sj.verify.speculative)


# --- the law: each row decides alone, by its own past --------------------------------------------

ROWS = 8192
# 3 tokens at first, 2 after one refusal, none after two; no longer ones.
CHANGING = (1.0, 1.45, 1.6, 1.95, 99.0, 99.0)


@dataclasses.dataclass(frozen=True)
class Peeks(Sized):
    """Cuts a draft where a drawn token is unlikely: the length depends on the present draft."""

    def propose(self, inputs, state, keys):
        made = super().propose(inputs, state, keys)
        draft = made.draft
        drawn = jnp.take_along_axis(draft.log_q, draft.tokens[:, 1:, None], axis=-1)[..., 0]
        likely = jnp.cumprod(drawn > jnp.log(0.4), axis=1, dtype=jnp.int32) > 0
        valid = draft.valid & jnp.pad(likely, ((0, 0), (1, 0)), constant_values=True)
        return made._replace(draft=draft.replace(valid=valid))


def own_pasts(method) -> tuple[np.ndarray, set[int]]:
    """Counts over all continuations of batches of one row each, and the lengths drafted.

    Of a batch of many rows the common past would say the same every time.
    """
    engine = Engine(*tiny_pair(), method, {COSTS: CHANGING})
    inputs, budget = engine.inputs(SAMPLING, 1), np.full(1, L, np.int32)
    vocab = engine.target.vocab_limit

    @jax.jit
    def run(keys):
        def one(key):
            how = {"chunk": len(PROMPT), "slots": 16}
            state = decode.start(method, inputs, [np.array(PROMPT)], budget, key[None], **how)
            state = decode.run_rounds(method)(inputs, state, np.int32(L))
            return state.tokens[0, len(PROMPT) :][:L], state.stats.drafted[0]

        return jax.vmap(one)(keys)

    counts, drafted = np.zeros((vocab,) * L, np.int64), set()
    with laws.optimised():
        for seed in range(-(-laws.SAMPLES // ROWS)):
            tokens, lengths = run(jax.random.split(jax.random.key(seed), ROWS))
            counts += laws.histogram(np.asarray(tokens), vocab)
            drafted |= set(np.unique(lengths).tolist())
    return counts, drafted


def tiny_method(kind=Sized):
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
    counts, _ = own_pasts(tiny_method(Peeks))
    assert laws.p_value(counts, exact_continuations(tiny_pair()[0])) < laws.ALPHA
