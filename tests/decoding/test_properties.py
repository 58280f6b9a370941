"""Properties of the loop over random trees, models, batches, ends of sequence and budgets.

The tree, the model's params, the budgets and the ends are arrays of one shape, so that all examples
share one program. Axis legend: B rows, N nodes.
"""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from conftest import tiny_lm
from specjax import verify
from specjax.core import loop, probs
from specjax.core.probs import Purpose
from specjax.core.protocols import Proposal
from specjax.core.types import DETERMINISTIC, NO_PARENT, ROOT, Draft, TreeShape
from specjax.runtime.engine import Engine
from support.caches import check_cache

VOCAB, ROWS, NODES, SLOTS = 5, 3, 7, 128
CHUNK = 16  # prefill chunk; prompts are shorter
LONGEST = 10  # prompt tokens


@dataclasses.dataclass(frozen=True)
class RandomTree(sj.Drafter):
    """Draws tokens without a model, for the tree that ``inputs.settings`` describe.

    ``parents[N]`` come before their children; nodes whose ``kept[N]`` is false, and all below
    them or below an end of sequence, are invalid. The first two nodes are siblings: no chain.
    """

    shape = TreeShape(NODES, NODES - 2, NODES - 1)
    name = "random"
    sampling = DETERMINISTIC

    def propose(self, inputs, state, keys):
        rows = state.length.shape[0]
        parents, kept = (inputs.settings[n].astype(jnp.int32) for n in ("parents", "kept"))
        nodes = jnp.broadcast_to(jnp.arange(NODES), (rows, NODES))
        drawn = jnp.int32(VOCAB * (1 - probs.uniforms(keys, Purpose.DRAFT, nodes)))
        root = probs.at_index(state.tokens, state.length - 1)
        tokens = drawn.at[:, ROOT].set(root)
        ended, valid = inputs.is_eos(tokens).at[:, ROOT].set(False), [~state.done]
        for i in range(1, NODES):
            above = jnp.stack(valid, 1)[:, parents[i]] & ~ended[:, parents[i]]
            valid.append(above & (kept[i] > 0))
        draft = Draft(
            tokens=tokens,
            parents=jnp.broadcast_to(parents, (rows, NODES)),
            valid=jnp.stack(valid, 1).at[:, ROOT].set(True),
            shape=self.shape,
            sampling=self.sampling,
        )
        return Proposal(draft, (), jnp.zeros((rows,), jnp.int32), jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class Example:
    """One case; everything in it is data."""

    model: int
    parents: list[int]  # of nodes 3 … N − 1
    kept: list[bool]
    prompts: list[list[int]]
    budgets: list[int]
    more: int  # by how much the second run's budget is larger
    eos: tuple[int, ...]
    temperature: float
    seed: int


tokens = st.integers(0, VOCAB - 1)
examples = st.builds(
    Example,
    model=st.integers(0, 2),
    parents=st.tuples(*(st.integers(0, i - 1) for i in range(3, NODES))).map(list),
    kept=st.lists(st.booleans(), min_size=NODES, max_size=NODES),
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=LONGEST), min_size=ROWS, max_size=ROWS),
    budgets=st.lists(st.integers(1, 24), min_size=ROWS, max_size=ROWS),
    more=st.integers(1, 12),
    eos=st.sets(tokens, max_size=2).map(tuple),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)


@functools.cache
def model(number):
    return dataclasses.replace(tiny_lm(number, vocab=VOCAB), eos_ids=())


def rounds_of(method, example, extra=0):
    """The state after every round."""
    lm = dataclasses.replace(model(example.model), eos_ids=example.eos)
    inputs = Engine(lm, None, method, {}).inputs(sj.Sampling(example.temperature), ROWS)
    parents = jnp.array([NO_PARENT, ROOT, ROOT, *example.parents], jnp.int32)
    # tau is read by the joint rule alone.
    inputs = inputs.replace(
        settings={"parents": parents, "kept": jnp.array(example.kept), "tau": jnp.float32(0.1)}
    )
    keys = jax.random.split(jax.random.key(example.seed), ROWS)
    budgets = np.array(example.budgets, np.int32) + extra
    prompts = [np.array(p, np.int32) for p in example.prompts]
    state = loop.start(method, inputs, prompts, budgets, keys, chunk=CHUNK)
    while not bool(state.done.all()):
        state = loop.advance(method, inputs, state, 1)
        yield jax.tree.map(jnp.copy, state)  # the next round donates the state


def emitted(state):
    """New tokens of every row."""
    return [
        np.asarray(state.tokens)[row, start:end]
        for row, (start, end) in enumerate(zip(state.prompt_length, state.length, strict=True))
    ]


def check_counters(before, state):
    """Checks what a round added to the counters; ``before`` is None for the first."""
    stats = jax.tree.map(np.asarray, state.stats)
    length, start = np.asarray(state.length), np.asarray(state.prompt_length)
    np.testing.assert_array_equal(stats.emitted, length - start)
    np.testing.assert_array_equal(stats.rounds, stats.target_calls)
    np.testing.assert_array_equal(stats.accepted_hist.sum(1), stats.rounds)
    depth = np.arange(stats.accepted_hist.shape[1])
    np.testing.assert_array_equal(stats.accepted_hist @ depth, stats.accepted)
    assert (stats.accepted <= stats.tested).all() and (stats.tested <= stats.drafted).all()
    assert (stats.emitted <= stats.accepted + stats.rounds).all()
    if before is not None:
        gained = length - np.asarray(before.length)
        assert (gained[np.asarray(before.done)] == 0).all()
        assert (gained[~np.asarray(before.done)] >= 1).all()


def check_ends(example, state):
    """Checks that rows stop at EOS or the budget, and give the right finish reason."""
    for row, new in enumerate(emitted(state)):
        ends = np.isin(new, example.eos)
        assert len(new) <= example.budgets[row]
        assert not ends[:-1].any()
        assert ends[-1] or len(new) == example.budgets[row]


METHODS = {
    "match": verify.match,
    "specinfer": verify.specinfer,
    "joint": verify.joint,
}


@pytest.mark.parametrize(
    "name", ["match", *(pytest.param(n, marks=pytest.mark.slow) for n in ("specinfer", "joint"))]
)
@hypothesis.settings(max_examples=15, derandomize=True, database=None)
@hypothesis.given(example=examples)
def test_random_trees_keep_the_loops_promises(name, example):
    lm = model(example.model)
    method = sj.DraftVerify(RandomTree(), sj.Warped(), METHODS[name])
    before = None
    for state in rounds_of(method, example):
        check_cache(lm, state, atol=5e-5)
        check_counters(before, state)
        before = state
    check_ends(example, before)
    *_, longer = rounds_of(method, example, example.more)
    for row, (short, long) in enumerate(zip(emitted(before), emitted(longer), strict=True)):
        np.testing.assert_array_equal(short, long[: len(short)])
        cut = len(short) == example.budgets[row] and short[-1] not in example.eos
        assert len(long) > len(short) if cut else len(long) == len(short)


def test_random_trees_are_accepted_and_rejected():
    """The random examples reach every accepted depth, so the properties are really tested."""
    method = sj.DraftVerify(RandomTree(), sj.Warped(), verify.match)
    example = Example(
        0, [1, 3, 4, 2], [True] * NODES, [[1], [2, 3], [4]], [24] * ROWS, 1, (), 1.0, 0
    )
    *_, last = rounds_of(method, example)
    hist = np.asarray(last.stats.accepted_hist).sum(0)
    assert hist[0] > 0 and hist[1] > 0 and hist[2:].sum() > 0
