"""Exact joint distributions with settings of paths, end to end, and mutants of their bookkeeping.

A repetition, a presence and a frequency penalty, a ban of repeated n-grams, a minimum length and
min-p at once. The law is computed with transformers' processors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_laws import PROMPT, V, tiny_pair

import specjax as sj
from specjax.core import commit, loop, path_logits, tree
from specjax.draft.adaptive import Candidates, ProbePass, SinglePass, VerifyPass
from specjax.registry import Context
from specjax.runtime.engine import Engine
from specjax.search.sdsat import TwoStep
from support import laws

torch = pytest.importorskip("torch")  # transformers' processors need it, and the law is theirs
pytestmark = pytest.mark.torch

LENGTH, STOP, MINIMUM = 4, 2, 2
GIVEN = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "min_tokens": MINIMUM,
    "temperature": 1.2,
    "min_p": 0.02,
}
PRESENCE, FREQUENCY = 0.4, 0.5
SAMPLING = sj.Sampling(
    **GIVEN, presence_penalty=PRESENCE, frequency_penalty=FREQUENCY, stop_token_ids=(STOP,)
)


def next_p(prefixes):
    """p of the next token after the prompt and each prefix; a row that has ended repeats STOP."""
    from support.processors import transformers_list

    target, _ = tiny_pair()
    texts = laws.texts_after(PROMPT, prefixes)
    logits = torch.tensor(np.array(laws.logits_of_texts(target, texts)[:, -1], np.float32))
    tokens = texts.astype(np.int64)
    counts = torch.tensor((prefixes[:, :, None] == np.arange(V)).sum(1))
    processors = transformers_list(GIVEN, (STOP,), len(PROMPT))
    # Presence and frequency act after the repetition penalty, which is the first of the list.
    logits = processors[0](torch.tensor(tokens), logits)
    logits = logits - PRESENCE * (counts > 0) - FREQUENCY * counts
    for processor in processors[1:]:
        logits = processor(torch.tensor(tokens), logits)
    p = torch.softmax(logits.double(), -1).numpy()
    p[(prefixes == STOP).any(1)] = np.arange(V) == STOP
    return p


@functools.cache
def law():
    return laws.joint(next_p, V, LENGTH)


def counts_of(method, settings=None):
    """Counts of the first tokens of all rows, STOP after a row's end."""
    engine = Engine(*tiny_pair(), method, settings or {})
    inputs = engine.inputs(SAMPLING, laws.ROWS)
    budget = np.full(laws.ROWS, LENGTH, np.int32)
    capacity = -(-(len(PROMPT) + LENGTH + method.round_positions) // 16) * 16
    total = np.zeros((V,) * LENGTH, np.int64)
    with laws.optimized():
        for seed in range(-(-laws.SAMPLES // laws.ROWS)):
            keys = jax.random.split(jax.random.key(seed), laws.ROWS)
            prompts = [np.array(PROMPT)] * laws.ROWS
            state = loop.start(
                method, inputs, prompts, budget, keys, chunk=len(PROMPT), capacity=capacity
            )
            state = loop.advance(method, inputs, state, 2**31 - 1)
            new = np.asarray(state.tokens[:, len(PROMPT) : len(PROMPT) + LENGTH])
            written = np.asarray(state.length - state.prompt_length)[:, None]
            new = np.where(np.arange(LENGTH) < written, new, STOP)
            total += laws.histogram(new, V)
    return total


def built(name, options):
    return sj.method(name).build(Context(*tiny_pair()), options)


def p_value(method, settings=None):
    return laws.p_value(counts_of(method, settings), law())


def test_the_law_has_room_for_errors():
    assert np.sum(law() > 1e-3) > 20


def test_speculative_sampling_has_the_law():
    assert p_value(*built("speculative", {"gamma": 2})) > laws.ALPHA


def sdsat(single):
    """Drafts for itself; no token is really adaptive here, so the drafts are poor."""
    candidates = Candidates(2)
    if single:
        drafter = SinglePass(candidates, adaptive=(0, 1), groups=3)
        return sj.draft_verify(drafter, sj.Warped(), sj.verify.speculative), {}
    probe = ProbePass((0, 1))
    return TwoStep(probe, VerifyPass(candidates), sj.Warped(), sj.verify.speculative), {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("block", {"gamma": 2}),
        ("specinfer", {"branching": (2, 2), "replacement": True}),
        pytest.param("speculative", {"gamma": 2, "draft_warp": False}, marks=pytest.mark.sweep),
        pytest.param("specinfer", {"branching": (2, 2)}, marks=pytest.mark.sweep),
        pytest.param("tree-match", {"branching": (3, 1)}, marks=pytest.mark.sweep),
        pytest.param("lookup", {"gamma": 2}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_every_rule_has_the_law(name, options):
    assert p_value(*built(name, options)) > laws.ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("single", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_sdsat_has_the_law(single):
    assert p_value(*sdsat(single)) > laws.ALPHA


# --- mutants -----------------------------------------------------------------------------------


def keeps_rejected(monkeypatch):
    """Counts what a rejected branch wrote, too: all places of the verdict."""
    real = path_logits.count_new

    def count(counts, tokens, emitted):
        return real(counts, tokens, jnp.full_like(emitted, tokens.shape[1]))

    monkeypatch.setattr(commit, "count_new", count)


def counts_prompt(monkeypatch):
    """The prompt counts as generated."""
    real = path_logits.begin_counts

    def begin(inputs, state):
        return real(inputs, state.replace(prompt_length=jnp.zeros_like(state.prompt_length)))

    monkeypatch.setattr(loop, "begin_counts", begin)


def ends_early(monkeypatch):
    """An end of sequence is allowed one token early."""
    real = path_logits._bound_length

    def bound(settings, state, x, paths):
        settings = settings.replace(min_tokens=settings.min_tokens - 1)
        return real(settings, state, x, paths)

    monkeypatch.setattr(path_logits, "_bound_length", bound)


def reads_sibling(monkeypatch):
    """A node's path is that of the node before it."""
    real = tree.paths

    def paths(tokens, parents, depth):
        found = real(tokens, parents, depth)
        return jnp.concatenate([found[:, :1], found[:, :-1]], axis=1)

    monkeypatch.setattr(tree, "paths", paths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        keeps_rejected,
        reads_sibling,
        pytest.param(counts_prompt, marks=pytest.mark.sweep),
        pytest.param(ends_early, marks=pytest.mark.sweep),
    ],
)
def test_mutant_is_caught(mutate, monkeypatch):
    mutate(monkeypatch)
    method, settings = built("specinfer", {"branching": (2, 2)})
    loop.forget(method)
    found = p_value(method, settings)
    loop.forget(method)
    assert found < laws.ALPHA
