"""Suffix drafts: against a slow reference, bounded memory, tokens independent of the batch."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from conftest import tiny_lm
from project.test_docs import load
from specjax.draft import Suffix
from specjax.registry import choose
from specjax.runtime.engine import Request
from specjax.runtime.generate import make_engine
from specjax.runtime.scheduler import Bounds, Scheduler

EOS = 9
INPUTS = SimpleNamespace(is_eos=lambda tokens: tokens == EOS)
SAMPLED = sj.Sampling(temperature=0.8, top_k=20, top_p=0.9)
PROMPTS = [[1, 2, 3], [4], list(range(5, 45)), [7, 7, 7, 7, 9], [1, 2, 3], [8, 1, 2, 3]]


def padded(rows):
    """Tokens and lengths of rows; scratch past the length must never be read."""
    tokens = np.full((len(rows), 64), 99, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def state_of(tokens, length, drafted):
    """The fields of a state that a drafter reads."""
    done = jnp.zeros(length.shape, bool)
    return SimpleNamespace(tokens=tokens, length=length, done=done, drafter_state=drafted)


def drafts(tokens, valid):
    """Each row's valid tokens."""
    tokens, valid = np.asarray(tokens), np.asarray(valid)
    assert (np.diff(valid.astype(int)) <= 0).all(), "valid tokens come first"
    return [t[v].tolist() for t, v in zip(tokens, valid, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def begin(drafter, tokens, length, before):
    """The drafter state after prompts; with ``before``, they reuse those rows' batch slots."""
    state = state_of(tokens, length, ())
    if before:
        return drafter.on_slot_reuse(state_of(tokens, length, before), state)
    return drafter.init(INPUTS, state)


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, tokens, length, drafted):
    proposal = drafter.propose(INPUTS, state_of(tokens, length, drafted), None)
    draft = proposal.draft
    return draft.tokens[:, 1:], draft.valid[:, 1:], proposal.state, proposal.confidence


def first_drafts(rows):
    drafter = Suffix(gamma=4, pool=4 * 32)
    # Fill up to four rows without a match, so that all cases share one trace.
    rows = rows + [[90 + i] for i in range(4 - len(rows))]
    return drafts(*propose(drafter, *padded(rows), begin(drafter, *padded(rows), ()))[:2])


@pytest.mark.parametrize(
    ("rows", "drafted"),
    [
        ([[1, 2, 3, 4, 5, 1, 2, 3]], [4, 5, 1, 2]),
        ([[1, 2, 3, 1, 2, 4, 1, 2]], [4, 1, 2]),  # the newest match in the row itself
        ([[5, 1, 2, 3, 6, 3, 7, 1, 2, 3]], [6, 3, 7, 1]),  # a longer match beats a more recent one
        ([[1, 2, 3, 4]], []),
        ([[4, 4]], [4]),
        ([[1, 2, EOS, 5, 1, 2]], [EOS]),
        ([[1, 2], [3, 1, 2, 6, 8]], [6, 8]),  # a match in another row
        ([[1, 2], [1, 2, 6], [1, 2, 5, 8], [1, 2, 5, 7]], [5, 8]),  # two against one; then a tie
        ([[1, 2, 7, 1, 2], [1, 2, 6], [1, 2, 6]], [7, 1, 2]),  # the row itself has priority
        ([[2, 7, 1, 2], [1, 2, 6], [1, 2, 6]], [6]),  # unless others match a longer n-gram
    ],
)
def test_draft(rows, drafted):
    assert first_drafts(rows)[0] == drafted


def reference(texts, row, slot, gamma, ngram):
    """The draft and its confidence, from plain lists.

    ``texts[slot]`` are a slot's texts, the current row's last.
    """
    found = []  # (length, whether own, how new, what follows)
    for other, past in enumerate(texts):
        offset = 0
        for text in reversed(past):
            for end in range(len(text) - 1, 0, -1):
                most = min(ngram, end, len(row))
                same = itertools.takewhile(lambda n: text[end - n] == row[-n], range(1, most + 1))
                if length := len(list(same)):
                    newness = -(offset + len(text) - end)
                    found.append((length, other == slot, newness, -other, text[end : end + gamma]))
            offset += len(text) + 1
    longest = max((f[0] for f in found), default=0)
    voters = sorted((f[1:] for f in found if f[0] == longest), key=lambda f: f[:3], reverse=True)
    is_own = bool(voters) and voters[0][0]
    strength = longest if is_own or longest < 2 else longest // 2  # other texts count half
    draft = []
    for at in range(gamma):
        voters = [v for v in voters if len(v[3]) > at]
        if not voters:
            break
        votes = [v[3][at] for v in voters]
        draft.append(votes[0] if voters[0][0] else max(votes, key=votes.count))
        voters = [v for v in voters if v[3][at] == draft[-1]]
        if draft[-1] == EOS:
            break
    return draft, min(strength, 4) - 1


def test_drafts_equal_those_of_a_slow_reference_over_the_rows_of_a_job():
    """Rows grow by up to γ + 1 tokens. Three per batch slot share a pool that never wraps."""
    rng = np.random.default_rng(3)
    drafter = Suffix(gamma=3, ngram=4, pool=3 * 200)
    texts, carried, drafted, seen = [[], [], []], (), 0, set()
    for _ in range(3):
        rows = [rng.integers(0, 4, n).tolist() for n in rng.integers(2, 12, 3)]
        own = [list(row) for row in rows]
        for past, row in zip(texts, own, strict=True):
            past.append(row)
        state = begin(drafter, *padded(rows), carried)
        for round_ in range(5):
            for row, new in zip(own, rows, strict=True):
                row[:] = new
            tokens, valid, state, confidence = propose(drafter, *padded(rows), state)
            wanted = [reference(texts, row, slot, 3, 4) for slot, row in enumerate(rows)]
            expected, strength = map(list, zip(*wanted, strict=True))
            assert drafts(tokens, valid) == expected
            assert confidence.tolist() == strength
            drafted += sum(map(len, expected))
            seen.update(strength)
            if round_ < 4:
                rows = [row + rng.integers(0, 4, rng.integers(1, 5)).tolist() for row in rows]
        carried = state
    assert drafted > 60 and len(seen) > 3


def test_memory_is_bounded_and_the_oldest_is_forgotten():
    drafter, carried = Suffix(gamma=2, pool=24), ()
    for first in range(10, 50, 5):
        rows = [list(range(first, first + 5)), [first]]
        carried = begin(drafter, *padded(rows), carried)
        assert carried[0].tokens.shape == (2, 12) and carried[0].head.shape == (2,)
    kept = set(np.asarray(carried[0].tokens[0]).tolist())
    assert set(range(45, 50)) | set(range(40, 45)) <= kept and not kept & set(range(10, 35))
    long = begin(drafter, *padded([list(range(60)), [1]]), ())
    assert set(np.asarray(long[0].tokens[0]).tolist()) == {-1, *range(49, 60)}


def test_the_pool_holds_each_row_of_a_job_once(plain):
    """Requests reuse slots while others run: earlier texts stay, and free slots write nothing."""
    target, drafter = plain[0], Suffix(gamma=3, pool=2**10)
    engine = make_engine(target, None, sj.draft_verify(drafter, sj.Warped(), sj.verify.match), {})
    budgets, key = [3, 30, 1, 14, 9, 22], jax.random.key(0)
    rows = [
        Request(np.array(prompt, np.int32), budget, key, request_id=i)
        for i, (prompt, budget) in enumerate(zip(PROMPTS, budgets, strict=True))
    ]
    scheduler = Scheduler(engine, 2, sj.Sampling(), Bounds.of(rows))
    done = {piece.index: piece.row.tokens[0] for piece in scheduler.run(rows, 99) if piece.row}
    kept = []
    for ring in np.asarray(scheduler._runner.state.drafter_state[0].tokens):
        kept += [list(part) for end, part in itertools.groupby(ring, lambda x: x == -1) if not end]
    assert len(kept) == len(rows)
    for prompt, (_, written) in zip(PROMPTS, sorted(done.items()), strict=True):
        text = [*prompt, *written]
        texts = [x for x in kept if text[: len(x)] == x and len(x) >= len(prompt)]
        # Two of the prompts are the same; what the last round wrote is in no pool.
        assert any(len(text) - len(x) <= drafter.gamma + 1 for x in texts)


@pytest.fixture(scope="module")
def plain():
    target = tiny_lm(0)
    return target, {
        sampling: sj.generate(target, PROMPTS, max_new_tokens=40, sampling=sampling, seed=5)
        for sampling in (None, SAMPLED)
    }


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_tokens_are_those_of_plain_decoding_whatever_the_batch(plain, sampling, batch_size):
    """A draw depends on the token's place only, so neither drafts nor other rows change it."""
    target, expected = plain
    arguments = {"max_new_tokens": 40, "sampling": sampling, "seed": 5, "batch_size": batch_size}
    out = sj.generate(target, PROMPTS, drafter="suffix", **arguments)
    for a, b in zip(out.tokens, expected[sampling].tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert 0 < out.stats["accepted"].sum() < out.stats["tested"].sum()


@pytest.mark.slow
def test_another_rule_draws_by_rounds_which_other_rows_change(plain):
    """The reason why ``match`` is this drafter's default rule."""
    target = plain[0]
    assert choose(None, "suffix", None, None, False).rule == "match"
    assert choose(None, Suffix(), None, None, False).rule == "match"
    arguments = {"max_new_tokens": 40, "sampling": SAMPLED, "seed": 5, "drafter": "suffix"}
    one, many = (
        sj.generate(target, PROMPTS, rule="speculative", batch_size=n, **arguments) for n in (1, 6)
    )
    assert any((a != b).any() for a, b in zip(one.tokens, many.tokens, strict=True))


def test_edits_take_fewer_passes_than_with_lookup():
    """Sixteen functions with renamed variables, as a job of two batches."""
    measured = load("measure_suffix")
    encode = sj.load("demo").tokenizer.encode
    rows = [tuple(list(map(int, encode(text))) for text in one) for one in measured.edits(16)]
    lookup, suffix = (measured.replay(d, rows, 8) for d in (sj.draft.Lookup(), Suffix()))
    assert suffix > 1.03 * lookup > 3
