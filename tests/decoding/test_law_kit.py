"""specjax.laws itself: right samplers pass, planted mistakes fail, and transformers passes."""

import dataclasses
import functools

import numpy as np
import pytest
from scipy.stats import binom
from test_laws import PROMPT, tiny_pair

import specjax as sj
from specjax import laws
from support.laws import child, tables
from support.serving import served_models, serving

V, L, GAMMA = 3, 4, 2
RUNS, ERROR = 200, 0.05


def law_of(table):
    """The conditional distribution p(next token | prefix) that a table holds."""

    def next_law(prefixes):
        context = np.zeros(len(prefixes), np.int64)
        for tokens in prefixes.T:
            context = child(context, tokens)
        return table[context]

    return next_law


P, Q = map(law_of, tables(zeros=False))


def drawn(rows, generator):
    """One token per row of probabilities."""
    u = generator.random((len(rows), 1))
    return np.minimum((np.cumsum(rows, axis=1) < u).sum(1), V - 1)


def right(samples, seed, law=P, length=L):
    """Tokens drawn from p one by one."""
    generator = np.random.Generator(np.random.Philox(seed))
    tokens = np.empty((samples, 0), np.int64)
    for _ in range(length):
        tokens = np.column_stack([tokens, drawn(law(tokens), generator)])
    return tokens


def speculated(samples, seed, slip=""):
    """Naive speculative sampling, one token at a time, with an optional mistake."""
    generator = np.random.Generator(np.random.Philox(seed))
    tokens, rows = np.empty((samples, 0), np.int64), np.arange(samples)
    drafted = np.zeros(samples, int)  # accepted tokens of the current draft
    for _ in range(L):
        p, q = P(tokens), Q(tokens)
        x, u = drawn(q, generator), generator.random(samples)
        if slip == "the likeliest token drafted, judged as a draw from q":
            x = q.argmax(1)
        above, below = p[rows, x], q[rows, x]
        if slip == "accepted by q/p instead of p/q":
            above, below = below, above
        passed = u * below < above
        if slip == "every drafted token accepted":
            passed[:] = True
        left = np.maximum(p - q, 1e-300)
        left /= left.sum(1, keepdims=True)
        if slip == "after a rejection a draw from p, not from the residual":
            left = p
        bonus = q if slip == "the bonus token drawn from q" else p
        over = drafted == GAMMA
        token = np.where(passed, x, drawn(left, generator))
        token = np.where(over, drawn(bonus, generator), token)
        drafted = np.where(passed & ~over, drafted + 1, 0)
        tokens = np.column_stack([tokens, token])
    return tokens


NAIVE = (
    "the likeliest token drafted, judged as a draw from q",
    "accepted by q/p instead of p/q",
    "every drafted token accepted",
    "after a rejection a draw from p, not from the residual",
    "the bonus token drawn from q",
)
check = functools.partial(laws.check, next_p=P, next_q=Q, vocab=V, length=L, gamma=GAMMA)


def test_right_samplers_pass():
    for draw in (right, speculated):
        report = check(draw)
        assert report.passed and "has the distribution" in str(report)
    assert set(report.caught) == set(laws.SLIPS)


@pytest.mark.parametrize("slip", NAIVE)
def test_a_slip_is_found_as_its_report_promises(slip):
    report = check(functools.partial(speculated, slip=slip))
    assert report.caught[slip] > 0.999 and not report.passed
    exact = laws.speculative_joint(P, Q, V, L, GAMMA, slip)
    counts = laws.histogram(speculated(laws.SAMPLES, 1, slip), V)
    assert laws.p_value(counts, exact) > laws.ALPHA


def test_without_a_slip_the_law_is_the_targets():
    for p, q in ((P, Q), map(law_of, tables())):  # the second has zeros
        exact = laws.joint(p, V, L)
        for gamma in (1, 2, 5):
            spoken = laws.speculative_joint(p, q, V, L, gamma)
            np.testing.assert_allclose(spoken, exact, atol=1e-12)


@pytest.mark.parametrize("slip", laws.SLIPS)
def test_every_slip_has_a_law_of_its_own(slip):
    other = laws.speculative_joint(P, Q, V, L, GAMMA, slip)
    assert abs(other.sum() - 1) < 1e-9
    assert abs(other - laws.joint(P, V, L)).max() > 1e-3


def biased(prefixes):
    """p with 1 % of one token's probability moved to another."""
    return np.tile([0.5 + 0.01, 0.3 - 0.01, 0.2], (len(prefixes), 1))


def unbiased(prefixes):
    return np.tile([0.5, 0.3, 0.2], (len(prefixes), 1))


def test_a_bias_of_one_per_cent_is_found():
    draw = functools.partial(right, law=biased, length=2)
    assert not laws.check(draw, unbiased, vocab=V, length=2).passed
    draw = functools.partial(right, law=unbiased, length=2)
    assert laws.check(draw, unbiased, vocab=V, length=2).passed


def rejected(law, samples):
    """How many of RUNS tests at α = 5 % reject a sampler of ``law``."""
    run = functools.partial(
        laws.check, functools.partial(right, law=law, length=2), unbiased, vocab=V, length=2
    )
    return sum(not run(samples=samples, alpha=ERROR, seed=seed).passed for seed in range(RUNS))


def test_the_stated_error_and_the_stated_power_hold():
    low, high = binom.ppf([1e-4, 1 - 1e-4], RUNS, ERROR)
    assert low <= rejected(unbiased, 2000) <= high
    exact, other = (laws.joint(law, V, 2) for law in (unbiased, biased))
    chance = laws.power(exact, other, 10_000, ERROR)
    assert 0.2 < chance < 0.8, "a test that may go either way"
    low, high = binom.ppf([1e-4, 1 - 1e-4], RUNS, chance)
    assert low <= rejected(biased, 10_000) <= high


def test_what_cannot_happen_is_rejected():
    never = laws.joint(lambda prefixes: np.tile([0.5, 0.5, 0], (len(prefixes), 1)), V, 1)
    assert laws.p_value(np.array([500_000, 499_999, 1]), never) == 0
    assert laws.power(never, np.array([0.5, 0.4999, 0.0001])) > 0.999


SAMPLING = sj.Sampling(temperature=0.9, top_k=3)


@pytest.mark.slow
def test_generate_has_the_law_of_its_model():
    target, draft = tiny_pair()

    def draw(samples, seed):
        out = sj.generate(
            target,
            [PROMPT] * samples,
            method="speculative",
            draft=draft,
            options={"gamma": 2},
            max_new_tokens=3,
            sampling=SAMPLING,
            seed=seed,
        )
        return np.array(out.tokens)

    p, q = (laws.model_law(model, PROMPT, SAMPLING) for model in (target, draft))
    report = laws.check(draw, p, next_q=q, vocab=4, length=3, samples=4096)
    assert report.passed
    assert report.caught["every drafted token accepted"] > 0.999


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vocab": 1}, "vocab=1"),
        ({"vocab": 100, "length": 4}, "at most"),
        ({"alpha": 0}, "alpha"),
        ({"samples": 0}, "samples"),
        ({"next_p": lambda prefixes: np.ones((len(prefixes), V))}, "no probabilities"),
        ({"next_p": lambda prefixes: np.ones(V) / V}, "shape"),
        ({"next_p": lambda prefixes: np.eye(V)[np.zeros(len(prefixes), int)]}, "one outcome"),
        ({"draw": lambda samples, seed: np.zeros((samples, 1), int)}, "draw gave shape"),
        ({"draw": lambda samples, seed: np.full((samples, L), V)}, "vocab=3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_tested_is_refused(changed, said):
    given = {"draw": right, "next_p": P, "vocab": V, "length": L} | changed
    with pytest.raises(sj.OptionError, match=said):
        laws.check(**given)


@pytest.mark.slow
def test_our_server_has_its_law(tiny_pair_dirs, tmp_path):
    """Through HTTP, with speculative drafts; a temperature that is not the law's is found."""
    models = served_models(tiny_pair_dirs, tmp_path / "target")
    with serving(*models, "--method", "speculative", "--set", "gamma=2") as running:
        sampler = laws.ServerSampler(
            f"{running.url}/v1", prompt=[5, 9, 20], tokens=[40, 41, 50], length=3, temperature=0.9
        )
        check = functools.partial(laws.check, sampler.draw, vocab=3, length=3, samples=800)
        report = check(sampler.next_p)
        assert report.passed, report
        flatter = dataclasses.replace(sampler, temperature=1.6)
        assert not check(flatter.next_p).passed
        with pytest.raises(sj.OptionError, match="are the texts"):
            dataclasses.replace(sampler, tokens=[40, 40]).draw(1, 0)
        with pytest.raises(sj.OptionError, match="/completions of http"):
            dataclasses.replace(sampler, options={"top_p": 7}).draw(1, 0)
    with pytest.raises(sj.OptionError, match="/models of http"):
        sampler.draw(1, 0)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sweep
def test_assisted_generation_of_transformers_has_its_law():
    """transformers' assisted sampling, with its default confidence threshold, passes the test."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    def model(layers, seed):
        torch.manual_seed(seed)
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
        config = LlamaConfig(
            vocab_size=V, num_hidden_layers=layers, initializer_range=0.35, **sizes, **none
        )
        return LlamaForCausalLM(config).eval()

    target, draft = model(2, 0), model(1, 1)
    draft.generation_config.num_assistant_tokens = GAMMA
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    sampler = laws.TransformersSampler(target, [1, 2, 0], length=3, assistant=draft)
    how = {"vocab": V, "length": 3, "gamma": GAMMA}
    report = laws.check(sampler.draw, sampler.next_p, next_q=sampler.next_q, samples=1500, **how)
    assert report.passed
    assert min(report.caught.values()) > 0.99
