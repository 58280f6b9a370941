"""What a notebook sees: public names, the loop by hand, rules alone, errors of a line."""

import dataclasses
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax._util.errors import OptionError, PairError
from specjax.core.types import DETERMINISTIC
from specjax.core.warp import warp

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
SAMPLED = sj.Sampling(0.9, top_p=0.9)
P = np.array([0.6, 0.3, 0.1], np.float32)
Q = np.array([0.2, 0.5, 0.3], np.float32)


# --- the loop by hand ------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [sj.Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_loop_by_hand_writes_what_generate_writes(target, draft, sampling):
    method = sj.draft_verify(sj.draft.Chain(gamma=3), sj.Warped(), sj.verify.speculative)
    inputs = sj.Inputs.of(target, draft, sampling, batch=3)
    begin = sj.init_state(method, inputs, PROMPTS, max_new_tokens=20, seed=4)
    state, rounds = begin, 0
    while not state.done.all():
        state = sj.step(method, inputs, state)
        rounds += 1
    at_once = sj.run_rounds(method, inputs, begin)  # begin is still usable
    out = sj.generate(
        target,
        PROMPTS,
        draft=draft,
        options={"gamma": 3},
        sampling=sampling,
        seed=4,
        max_new_tokens=20,
    )
    for i, prompt in enumerate(PROMPTS):
        for found in (state, at_once):
            new = found.tokens[i, len(prompt) : int(found.length[i])]
            np.testing.assert_array_equal(new, out.tokens[i])
    np.testing.assert_array_equal(state.stats.accepted, out.stats["accepted"])
    assert rounds == out.stats["rounds"].max() > 1
    assert begin.stats.rounds.sum() == 0


def test_a_few_rounds_stop_where_they_are_told(target):
    method = sj.draft_verify(sj.draft.NoDraft(), sj.Warped(), sj.verify.match)
    inputs = sj.Inputs.of(target, None, sj.Sampling(), batch=1)
    state = sj.init_state(method, inputs, PROMPTS[:1], max_new_tokens=20)
    assert sj.run_rounds(method, inputs, state, 3).stats.rounds.tolist() == [3]


@pytest.mark.parametrize("prompts", [PROMPTS[:2], [[1], [], [2]], [[1], [[2]], [3]]])
def test_prompts_that_are_not_one_per_row_are_refused(target, prompts):
    method = sj.draft_verify(sj.draft.NoDraft(), sj.Warped(), sj.verify.match)
    inputs = sj.Inputs.of(target, None, sj.Sampling(), batch=3)
    with pytest.raises(OptionError, match="expected 3, one per row"):
        sj.init_state(method, inputs, prompts)


def test_generate_with_a_draft_speculates(target, draft):
    plain = sj.generate(target, PROMPTS, max_new_tokens=12)
    fast = sj.generate(target, PROMPTS, draft=draft, max_new_tokens=12)
    assert plain.stats["drafted"].sum() == 0 and fast.stats["accepted"].sum() > 0
    for a, b in zip(plain.tokens, fast.tokens, strict=True):
        np.testing.assert_array_equal(a, b)


# --- a rule alone ----------------------------------------------------------------------------


def one_draft(rows: int, log_q=None):
    """One token drawn from Q in each row, and log p of the two tokens after it."""
    drawn = jax.random.choice(jax.random.key(1), 3, (rows, 1), p=Q).astype(jnp.int32)
    log_q = jnp.broadcast_to(jnp.log(Q), (rows, 1, 3)) if log_q is None else log_q
    return sj.Draft.chain(drawn, log_q), jnp.broadcast_to(jnp.log(P), (rows, 2, 3))


def test_a_rule_alone_emits_p():
    keys = jax.random.split(jax.random.key(0), 100_000)
    draft, log_p = one_draft(100_000)
    verdict = sj.verify.speculative(keys, draft, log_p)
    share = np.bincount(np.asarray(verdict.tokens[:, 0]), minlength=3) / 100_000
    np.testing.assert_allclose(share, P, atol=0.01)  # 6 standard deviations


def test_a_rule_runs_under_jit_and_vmap():
    keys = jax.random.split(jax.random.key(0), 8)
    draft, log_p = one_draft(8)
    alone = sj.verify.speculative(keys, draft, log_p)
    jitted = jax.jit(sj.verify.speculative)(keys, draft, log_p)

    def fold(x):
        return jnp.reshape(jnp.asarray(x), (4, 2, *x.shape[1:]))

    mapped = jax.vmap(sj.verify.speculative)(fold(keys), jax.tree.map(fold, draft), fold(log_p))
    for a, b, c in zip(*map(jax.tree.leaves, (alone, jitted, mapped)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c.reshape(a.shape))


def test_a_gradient_goes_through_a_rule_to_log_q():
    """REINFORCE on accepted tokens: the verdict is a constant, log q of the draft is not."""
    keys = jax.random.split(jax.random.key(0), 16)
    start, log_p = one_draft(16)

    def loss(log_q):
        draft = start.replace(log_q=log_q)
        verdict = sj.verify.speculative(keys, draft, log_p)
        own = jnp.take_along_axis(log_q[:, 0], draft.tokens[:, 1:], axis=1)[:, 0]
        return jnp.sum(verdict.num_accepted * own)

    accepted = sj.verify.speculative(keys, start, log_p).num_accepted
    drafted = np.asarray(jax.nn.one_hot(start.tokens[:, 1], 3))
    want = np.asarray(accepted)[:, None] * drafted
    np.testing.assert_array_equal(jax.grad(loss)(start.log_q)[:, 0], want)
    assert want.sum() > 0


def test_a_gradient_goes_through_warp():
    """It equals the formula for the renormalized kept tokens; the cut itself has no gradient."""
    logits = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
    for sampling, kept in ((sj.Sampling(0.5), 4), (sj.Sampling(0.5, top_k=2), 2)):
        settings = sampling.arrays(1)
        grad = jax.grad(lambda x, s=settings: warp(x, s)[0, 0, 0])(logits)[0, 0]
        probs = np.zeros(4)
        probs[:kept] = np.asarray(jax.nn.softmax(logits[0, 0, :kept] / 0.5))
        np.testing.assert_allclose(grad, (np.eye(4)[0] - probs) / 0.5, atol=1e-5)
    nucleus = sj.Sampling(0.5, top_p=0.9).arrays(1)
    grad = jax.grad(lambda x: warp(x, nucleus)[0, 0, 0])(logits)
    assert np.isfinite(grad).all() and np.abs(grad).sum() > 0


def test_a_rule_alone_refuses_drafts_that_it_is_not_made_for():
    """Accepting it would give a wrong distribution: (0.398, 0.602, 0) for p = (0.6, 0.3, 0.1)."""
    keys = jax.random.split(jax.random.key(0), 4)
    chosen, log_p = one_draft(4)
    with pytest.raises(
        PairError, match=r"speculative accepts drafts sampled iid or certain.*deterministic"
    ):
        sj.verify.speculative(keys, chosen.replace(sampling=DETERMINISTIC), log_p)
    tree = chosen.replace(shape=sj.TreeShape(2, 0, 1))
    with pytest.raises(PairError, match="speculative verifies a chain"):
        sj.verify.speculative(keys, tree, log_p)
    sj.verify.match(keys, chosen.replace(sampling=DETERMINISTIC), log_p)  # match accepts any draft


# --- parts that are not what they should be --------------------------------------------------


class NoPropose(sj.Drafter):
    """A drafter that drafts nothing."""

    name = "nothing"
    sampling = "iid"
    shape = sj.TreeShape.chain(1)


class Unhashable(sj.draft.NoDraft):
    """A drafter that holds an array."""

    __hash__ = None


class UnknownSampling(sj.draft.NoDraft):
    """A drafter with a label of its own."""

    sampling = "beams"


def verified(drafter):
    return sj.draft_verify(drafter, sj.Warped(), sj.verify.match)


def test_a_drafter_without_propose_is_named():
    with pytest.raises(TypeError, match=r"abstract class NoPropose .*abstract method '?propose"):
        NoPropose()


@pytest.mark.parametrize(
    ("drafter", "error"),
    [
        (Unhashable(), "drafter Unhashable is not hashable: make it a frozen dataclass"),
        (UnknownSampling(), "sampling 'beams': expected one of point_mass, iid"),
        (sj.draft.Chain, r"drafter=.*: expected a specjax.Drafter, as specjax.draft.Chain\(\)"),
        (object(), "drafter=object: expected a specjax.Drafter"),
    ],
)
def test_a_drafter_that_cannot_be_used_is_one_line(drafter, error):
    with pytest.raises(OptionError, match=error) as caught:
        verified(drafter)
    assert len(str(caught.value).splitlines()) == 1


def test_a_rule_that_accepts_an_unknown_label_is_refused():
    with pytest.raises(OptionError, match="rule len accepts 'beams': expected one of"):
        sj.rule(accepts=("beams",), lossless=False)(len)


# --- names -----------------------------------------------------------------------------------


def test_dir_lists_the_public_names():
    names = set(dir(sj))
    assert {"generate", "stream", "load", "methods", "verify", "draft", "Inputs", "step"} <= names
    assert not [name for name in names if name.startswith("_") and not name.startswith("__")]
    for name in names:
        assert getattr(sj, name) is not None


def test_no_name_is_both_a_module_and_something_else():
    for info in pkgutil.walk_packages(sj.__path__, "specjax."):
        if info.name.endswith(("__main__", "chat_process")):
            continue
        module = importlib.import_module(info.name)
        package, _, leaf = info.name.rpartition(".")
        assert getattr(importlib.import_module(package), leaf) is module, info.name


def test_help_of_generate_names_its_arguments_the_main_ones_first():
    names = list(inspect.signature(sj.generate).parameters)
    assert names[:5] == ["target", "prompts", "draft", "method", "max_new_tokens"]
    text = inspect.getdoc(sj.generate)
    for name in names:
        assert name in text, name


def test_parts_are_values():
    """Frozen and hashable, so that a method is a static choice of a program."""
    parts = (sj.draft.Chain(gamma=3), sj.draft.Tree(), sj.Warped(), sj.Contrastive())
    for part in parts:
        assert hash(part) == hash(dataclasses.replace(part)) and part == dataclasses.replace(part)
