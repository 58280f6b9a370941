"""Rules: verdicts worked out by hand, exact output distributions, mutants, edge cases."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import verify
from specjax.core import probs, tree
from specjax.core.probs import Purpose
from specjax.core.types import (
    IID,
    NO_NODE,
    NO_PARENT,
    POINT_MASS,
    WITHOUT_REPLACEMENT,
    Draft,
    TreeShape,
)
from specjax.verify import mentored_decoding
from specjax.verify.mentored_decoding import mentor_levels, mentored_kl
from specjax.verify.spectr_kseq import solve_rho
from specjax.verify.verdicts import path_verdict, tree_verdict
from support import laws, tools, tree_laws

KEYS = jax.random.split(jax.random.key(0), 64)  # hand-computed verdicts hold for every key


def build(tokens, parents, p, q=None, sampling=POINT_MASS, valid=None):
    """One tree for all rows; ``p [N, V]`` after each node, ``q [N, V]`` that it was drawn from."""
    rows, n = len(KEYS), len(tokens)
    depth = int(tree.depths(tree.ancestors(jnp.array([[NO_PARENT, *parents]]), n)).max())
    draft = Draft(
        tokens=jnp.broadcast_to(jnp.array(tokens), (rows, n)),
        parents=jnp.broadcast_to(jnp.array([NO_PARENT, *parents]), (rows, n)),
        valid=jnp.broadcast_to(jnp.array(valid or [True] * n), (rows, n)),
        log_q=None if q is None else jnp.log(jnp.broadcast_to(jnp.array(q, float), (rows, n, 4))),
        shape=TreeShape(n, depth, max(np.bincount(parents))),
        q_row=tuple(range(n)),
        sampling=sampling,
    )
    return draft, jnp.log(jnp.broadcast_to(jnp.array(p, jnp.float32), (rows, n, 4)))


def assert_verdict(verdict, path, tokens, tested):
    n = len(path) - 1
    assert (np.asarray(verdict.num_accepted) == n).all()
    assert (np.asarray(verdict.num_tokens) == n + 1).all()
    assert (np.asarray(verdict.num_tested) == tested).all()
    want = np.append(path, [NO_NODE] * (verdict.path.shape[1] - n - 1))
    np.testing.assert_array_equal(verdict.path, np.tile(want, (len(KEYS), 1)))
    np.testing.assert_array_equal(verdict.tokens[:, : n + 1], np.tile(tokens, (len(KEYS), 1)))


def certain(token):
    return [float(t == token) for t in range(4)]


# --- hand-computed verdicts ------------------------------------------------------------------


def test_block_accepts_a_token_that_fails_alone():
    # w_1 = 1/4 and p·w_1 ≤ q everywhere: h_1 = 0. w_2 = min(1, ¼·4) = 1: the block stands.
    p = [[0.25, 0.75, 0, 0], [0, 0, 1, 0], certain(3)]
    q = [certain(0), certain(0), [0.25, 0.25, 0.25, 0.25]]
    draft, log_p = build([9, 0, 2], [0, 1], p, q, sampling=IID)
    draft = draft.replace(log_q=draft.log_q[:, 1:], q_row=(0, 0, 1))
    assert_verdict(verify.block(KEYS, draft, log_p), [0, 1, 2], [0, 2, 3], tested=2)


def test_joint_accepts_the_longest_prefix_that_passes():
    # P_1/q_1 = 0.1, P_2/q_2 = 0.1·9: the second prefix passes at τ = ½, neither at 0.95.
    p = [[0.05, 0, 0.95, 0], [0, 0.9, 0.1, 0], certain(3)]
    q = [certain(0), [0.5, 0.5, 0, 0], [0.9, 0.1, 0, 0]]
    draft, log_p = build([9, 0, 1], [0, 1], p, q, sampling=IID)
    assert_verdict(verify.joint(KEYS, draft, log_p, tau=0.5), [0, 1, 2], [0, 1, 3], tested=2)
    rejected = verify.joint(KEYS, draft, log_p, tau=0.95)
    assert (rejected.num_accepted == 0).all() and (rejected.num_tested == 2).all()
    ended = draft.replace(valid=draft.valid.at[:, 2].set(False))
    assert (verify.joint(KEYS, ended, log_p, tau=0.5).num_accepted == 0).all()
    none = log_p.at[:, 1, 1].set(-jnp.inf)
    assert_verdict(
        verify.joint(KEYS, draft, none.at[:, 1].set(jnp.log(jnp.array(certain(2)))), tau=0.0),
        [0, 1],
        [0, 2],
        tested=2,
    )


def test_joint_over_beams_accepts_the_deepest_then_the_more_probable():
    # Beams 1-3 and 2-4, and 2-5: all pass; node 5 has the larger joint.
    p = [[0.5, 0.5, 0, 0], [0, 0.4, 0.6, 0], [0.1, 0.3, 0.6, 0], *[certain(3)] * 3]
    draft, log_p = build([9, 0, 1, 1, 1, 2], [0, 0, 1, 2, 2], p)
    assert_verdict(verify.joint(KEYS, draft, log_p, tau=0.1), [0, 2, 5], [1, 2, 3], tested=2)
    assert_verdict(verify.joint(KEYS, draft, log_p, tau=0.25), [0, 2, 5], [1, 2, 3], tested=2)
    assert (verify.joint(KEYS, draft, log_p, tau=0.35).num_accepted == 1).all()


def test_match_descends_into_the_first_child_that_carries_the_draw():
    p = [certain(2), certain(0), certain(1), certain(0), certain(3), certain(3)]
    draft, log_p = build([9, 0, 2, 2, 1, 0], [0, 0, 0, 2, 3], p)
    assert_verdict(verify.match(KEYS, draft, log_p), [0, 2, 4], [2, 1, 3], tested=2)
    hidden = draft.replace(valid=draft.valid.at[:, 4].set(False))
    assert_verdict(verify.match(KEYS, hidden, log_p), [0, 2], [2, 1], tested=1)
    other = draft.replace(tokens=draft.tokens.at[:, 4].set(3))
    assert_verdict(verify.match(KEYS, other, log_p), [0, 2], [2, 1], tested=2)


@pytest.mark.parametrize("sampling", [IID, WITHOUT_REPLACEMENT])
def test_specinfer_tries_children_in_order(sampling):
    p = [certain(1), certain(3), certain(2), certain(0)]
    flat = [[0.25] * 4] * 4
    draft, log_p = build([9, 0, 1, 2], [0, 0, 2], p, flat, sampling=sampling)
    assert_verdict(verify.specinfer(KEYS, draft, log_p), [0, 2, 3], [1, 2, 0], tested=2)
    cut = draft.replace(valid=draft.valid.at[:, 2].set(False))
    assert_verdict(verify.specinfer(KEYS, cut, log_p), [0], [1], tested=1)


def test_specinfer_residual_between_siblings():
    # p − q = (0, ½, 0, 0)+: after token 0 is rejected, p is certain of 1, so 2 is rejected.
    p = [[0, 0.75, 0.25, 0], *[certain(3)] * 2]
    q = [certain(0), [0.5, 0.25, 0.25, 0], [0.5, 0.25, 0.25, 0]]
    draft, log_p = build([9, 0, 2], [0, 0], p, q, sampling=IID)
    assert_verdict(verify.specinfer(KEYS, draft, log_p), [0], [1], tested=1)


def test_specinfer_keeps_p_where_the_residual_is_empty():
    # Token 0 has q mass only where p has it too, yet is rejected: p(0) = 0 is the way there.
    p = [certain(1), certain(3), certain(3)]
    draft, log_p = build([9, 0, 2], [0, 0], p, [certain(1)] * 3, sampling=IID)
    assert_verdict(verify.specinfer(KEYS, draft, log_p), [0], [1], tested=1)


def test_spectr_continues_with_all_equal_candidates():
    # Chains 0-·, 1-0, 1-2. p is certain of 1, then of 2: node 6 is below the second token 1.
    p = [certain(1), certain(0), certain(2), certain(2), certain(3), certain(3), certain(3)]
    draft, log_p = build(
        [9, 0, 1, 1, 0, 0, 2], [0, 0, 0, 1, 2, 3], p, [[0.25] * 4] * 7, sampling=IID
    )
    assert_verdict(verify.spectr(KEYS, draft, log_p), [0, 3, 6], [1, 2, 3], tested=2)
    missed = draft.replace(tokens=draft.tokens.at[:, 6].set(1))
    assert_verdict(verify.spectr(KEYS, missed, log_p), [0, 2], [1, 2], tested=2)


def test_bild_rolls_back_at_the_first_unlikely_token():
    raw = [[0.5, 0.5, 0, 0], [0.3, 0.7, 0, 0], [0.9, 0.1, 0, 0], certain(0)]
    draft, _ = build([9, 0, 0, 0], [0, 1, 2], raw)
    log_p = jnp.log(
        jnp.broadcast_to(jnp.array([certain(0), certain(2), certain(1), certain(3)]), (64, 4, 4))
    )
    raw = jnp.log(jnp.broadcast_to(jnp.array(raw, jnp.float32), (64, 4, 4)))
    run = functools.partial(verify.bild, KEYS, draft, log_p, raw_log_p=raw)
    assert_verdict(run(tau2=1.0), [0, 1], [0, 2], tested=2)  # −log 0.3 = 1.2
    assert_verdict(run(tau2=1.3), [0, 1, 2, 3], [0, 0, 0, 3], tested=3)
    assert_verdict(run(tau2=0.5), [0], [0], tested=1)


# --- exact distributions ---------------------------------------------------------------------


def stop_table():
    """Contexts after which drafting ends; it depends on the prefix only."""
    return np.random.Generator(np.random.Philox(3)).random(len(laws.tables()[0])) < 0.3


RAGGED = functools.partial(tree_laws.tree_draft, sampling=WITHOUT_REPLACEMENT, stop=stop_table())
RAGGED_IID = functools.partial(
    tree_laws.tree_draft, branching=(4, 1, 1), sampling=IID, stop=stop_table()
)
PAIRS = {
    "specinfer": (verify.specinfer, {**tree_laws.LAWS, "ragged": RAGGED}),
    "match": (verify.match, {**tree_laws.LAWS, "ragged": RAGGED}),
    "spectr": (
        verify.spectr,
        {name: tree_laws.LAWS[name] for name in ("iid", "k chains")} | {"ragged": RAGGED_IID},
    ),
}


@pytest.mark.parametrize(
    ("rule", "draft_name"), [(rule, name) for rule, (_, drafts) in PAIRS.items() for name in drafts]
)
def test_a_lossless_tree_rule_emits_p(rule, draft_name):
    verify_rule, drafts = PAIRS[rule]
    assert tree_laws.tree_p_value(verify_rule, drafts[draft_name]) > laws.ALPHA


def test_the_acceptance_rate_of_spectr_is_its_formula():
    draft_fn = functools.partial(tree_laws.tree_draft, branching=(4,), sampling=IID)
    _, accepted = tree_laws.rule_counts(verify.spectr, draft_fn, laws.tables())
    p, q = (x[:1].astype(np.float64) for x in laws.tables())
    _, beta = solve_rho(jnp.asarray(p), jnp.asarray(q), jnp.array([4.0]))
    want = 1 - (1 - float(beta[0])) ** 4
    assert 0.05 < want < 0.99
    assert abs(accepted.mean() - want) < 5 * (want * (1 - want) / laws.SAMPLES) ** 0.5


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_rho_of_spectr_solves_its_equation(k):
    p, q = (jnp.asarray(x) for x in laws.tables())
    rho, beta = map(np.asarray, solve_rho(p, q, jnp.full(len(p), float(k))))
    some = 1 - (1 - beta.astype(np.float64)) ** k
    np.testing.assert_allclose(some, rho * beta, atol=2e-6)
    assert (rho >= 1).all() and (rho <= k).all()


# --- mutants: each is a plausible mistake, and the same test must catch it --------------------


def one_level(sampling=WITHOUT_REPLACEMENT, count=2):
    return functools.partial(tree_laws.tree_draft, branching=(count,), sampling=sampling)


def reordered(keys, p, q, *, by):
    draft, log_p = one_level()(keys, p, q)
    lq = jnp.take_along_axis(draft.log_q[:, 0], draft.tokens[:, 1:], axis=1)
    order = jnp.argsort(by(jnp.where(draft.valid[:, 1:], lq, -jnp.inf)), axis=1)
    return tree_laws.reorder_siblings(draft, log_p, order)


def claims(sampling, drawn):
    """A draft function that samples in one way and labels the draft with another."""

    def draft_fn(keys, p, q):
        draft, log_p = tree_laws.LAWS[drawn](keys, p, q)
        return draft.replace(sampling=sampling), log_p

    return draft_fn


def longest_of_independent_runs(keys, draft, log_p):
    """Speculative sampling on each of 4 chains of 3, then the longest result."""
    runs = []
    for chain in range(4):
        nodes = np.array([0, *range(1 + chain, draft.tokens.shape[1], 4)])
        rows = np.array([draft.q_row[n] for n in nodes[1:]])
        alone = Draft.chain(
            draft.tokens[:, nodes[1:]], draft.log_q[:, rows], valid=draft.valid[:, nodes[1:]]
        )
        fresh = jax.vmap(jax.random.fold_in, (0, None))(keys, chain)
        runs.append(verify.speculative(fresh, alone, log_p[:, nodes]))
    best = jnp.argmax(jnp.stack([run.num_accepted for run in runs]), axis=0)
    return jax.tree.map(lambda *xs: jnp.stack(xs)[best, jnp.arange(len(best))], *runs)


def redraw_per_child(keys, draft, log_p):
    """Sample-and-match with a fresh draw of the target for every child of the root."""
    nodes = jnp.broadcast_to(jnp.arange(1, draft.tokens.shape[1]), draft.tokens[:, 1:].shape)
    u = probs.uniforms(keys, Purpose.ACCEPT, nodes)
    y = probs.sample(jnp.exp(log_p[:, :1]), u)
    hit = (y == draft.tokens[:, 1:]) & draft.valid[:, 1:]
    found = hit.any(1)
    node = jnp.where(found, 1 + jnp.argmax(hit, 1), 0).astype(jnp.int32)
    fresh = tree_verdict(keys, draft, node, 1 * found, jnp.exp(probs.at_node(log_p, node)), 1)
    none = path_verdict(draft, 0 * node, 0 * node, y[:, -1], 1 + 0 * node)

    def pick(a, b):
        return jnp.where(found.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, fresh, none)


MUTANTS = {
    "siblings sorted by probability": (
        verify.specinfer,
        functools.partial(reordered, by=lambda lq: -lq),
    ),
    "siblings in reverse": (verify.specinfer, functools.partial(reordered, by=lambda lq: lq)),
    "q keeps rejected siblings": (verify.specinfer, claims(IID, "without replacement")),
    "q loses siblings it could draw again": (
        verify.specinfer,
        claims(WITHOUT_REPLACEMENT, "iid"),
    ),
    "longest of k independent runs": (longest_of_independent_runs, tree_laws.LAWS["k chains"]),
    "a draw per path": (redraw_per_child, one_level()),
    "spectr on drafts without replacement": (
        verify.spectr,
        claims(IID, "without replacement"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    rule, draft_fn = MUTANTS[name]
    assert tree_laws.tree_p_value(rule, draft_fn) < laws.ALPHA


def plain_residual(p, q):
    left = jnp.maximum(p - q, 0.0)
    return jnp.where(left.sum(-1, keepdims=True) > 0, left, p)


PATCHES = {  # the rule, its drafts, the function that is replaced, and its replacement
    "no residual between siblings": ("specinfer", "iid", "residual", lambda p, q: p),
    "block without a residual": ("block", None, "residual", lambda p, q: p),
    "spectr's residual without its share": (
        "spectr",
        "k chains",
        "k_seq_residual",
        lambda p, q, rho, beta, k: plain_residual(p, jnp.minimum(q, p / rho[:, None])),
    ),
    "spectr's residual of the chain": (
        "spectr",
        "k chains",
        "k_seq_residual",
        lambda p, q, rho, beta, k: plain_residual(p, q),
    ),
    "spectr with ρ = 1": (
        "spectr",
        "k chains",
        "solve_rho",
        lambda p, q, k: (jnp.ones_like(k), jnp.minimum(p, q).sum(-1)),
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patched_rule_is_caught(name, monkeypatch):
    rule, draft_name, attribute, mistake = PATCHES[name]
    home = (
        probs if attribute == "residual" else sys.modules[getattr(verify, rule).verify.__module__]
    )
    monkeypatch.setattr(home, attribute, mistake)
    draft_fn = laws.chain_draft if draft_name is None else tree_laws.LAWS[draft_name]
    assert tree_laws.tree_p_value(getattr(verify, rule), draft_fn) < laws.ALPHA


# --- mentored decoding -----------------------------------------------------------------------


def random_rows(vocab, rows, seed):
    """(log p, log q, D) in float32: p and q from nearly equal to far apart, with zeros in both."""
    g = np.random.Generator(np.random.Philox(seed))
    p = g.normal(size=(rows, vocab)) * g.uniform(0.3, 4, (rows, 1))
    q = p * g.random((rows, 1)) + g.normal(size=p.shape) * g.uniform(0, 3, (rows, 1))
    for x in (p, q):
        x[(g.random(p.shape) < 0.15) & (g.random((rows, 1)) < 0.5)] = -np.inf
        x[np.isinf(x).all(1)] = 0
    log_p, log_q = (np.asarray(jax.nn.log_softmax(jnp.asarray(x, jnp.float32))) for x in (p, q))
    bound = np.where(g.random(rows) < 0.1, 0, 10 ** g.uniform(-6, 0.5, rows))
    return log_p, log_q, bound.astype(np.float32)


def mentored_distribution(log_p, log_q, log_alpha, b):
    """π of the rule with these levels, its KL(p‖π) and the rejected mass, in float64."""
    p, q = (np.exp(x.astype(np.float64)) for x in (log_p, log_q))
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    with np.errstate(invalid="ignore", divide="ignore"):
        # float32, as in the rule. −inf − −inf occurs where p and q both exclude the token.
        ratio = np.nan_to_num(log_p - log_q, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        excess = np.minimum(ratio.astype(np.float64) - log_alpha[:, None], 0)
        rejected = -(q * np.expm1(excess)).sum(-1, keepdims=True)
        left = np.maximum(b[:, None].astype(np.float64) * p - q, 0)
        left = np.where(left.sum(-1, keepdims=True) > 0, left, p)
        law = q * np.exp(excess) + rejected * left / left.sum(-1, keepdims=True)
        kl = np.where(p > 0, p * np.log(p / law), 0).sum(-1)
    return law, kl, rejected[:, 0]


@pytest.mark.parametrize(("vocab", "rows"), [(2, 4000), (5, 4000), (50, 2000), (152_064, 6)])
def test_mentored_keeps_its_bound(vocab, rows):
    log_p, log_q, bound = random_rows(vocab, rows, seed=vocab)
    log_alpha, b = map(np.asarray, jax.jit(mentor_levels)(log_p, log_q, bound))
    law, kl, rejected = mentored_distribution(log_p, log_q, log_alpha, b)
    slack = np.maximum(1e-3 * bound, 1e-6)
    assert np.isfinite(log_alpha).all() and ((b >= 0) & (b <= 1)).all()
    assert (kl <= bound + slack).all()
    said = np.asarray(jax.jit(mentored_kl)(log_p, log_q, log_alpha, b))
    np.testing.assert_allclose(said[rejected > 1e-5], kl[rejected > 1e-5], rtol=1e-3, atol=2e-6)
    assert (law[np.isinf(log_p)] == 0).all()
    np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
    with np.errstate(invalid="ignore"):
        shared = np.isfinite(log_p) & np.isfinite(log_q)
        all_accepted = -log_alpha >= np.where(shared, log_q - log_p, 0).max(-1)
    # If less than 1e-5 is rejected, one ulp of log α moves the KL by more than the slack.
    assert (np.abs(kl - bound) <= slack)[~all_accepted & (rejected > 1e-5)].all()
    assert (~all_accepted).mean() > 0.3


def test_mentored_acceptance_rises_with_the_bound():
    log_p, log_q, _ = random_rows(20, 500, seed=1)
    mass = []
    for bound in (0.0, 1e-3, 0.01, 0.1, 1.0, 10.0):
        levels = jax.jit(mentor_levels)(log_p, log_q, np.full(500, bound, np.float32))
        mass.append(mentored_distribution(log_p, log_q, *map(np.asarray, levels))[2])
    mass = np.array(mass)
    overlap = 1 - np.minimum(np.exp(log_p), np.exp(log_q)).sum(-1)
    np.testing.assert_allclose(mass[0], overlap, atol=1e-5)  # D = 0: speculative sampling
    assert (np.diff(mass, axis=0) < 1e-6).all() and (mass[3] < mass[0] - 1e-3).mean() > 0.8


def test_mentored_at_zero_is_speculative():
    keys = jax.random.split(jax.random.key(9), 20_000)
    draft, log_p = jax.jit(laws.chain_draft)(keys, *map(jnp.asarray, laws.tables()))
    exact = jax.jit(verify.speculative.verify)(keys, draft, log_p)
    zero = jax.jit(verify.mentored.verify)(keys, draft, log_p, max_kl=jnp.float32(0))
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(zero), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("token", "is_solved"), [(2, False), (0, True)])
def test_mentored_solves_only_where_a_token_is_not_accepted_plainly(monkeypatch, token, is_solved):
    """The paper's §6: a token with u ≤ min(1, p/q) needs no levels. Token 2 has p > q."""
    steps = []
    loop = jax.lax.while_loop

    def counting(goes_on, step, start):
        end = loop(goes_on, step, start)
        if isinstance(end, mentored_decoding._AlphaSearch):
            steps.append(int(end.step))
        return end

    monkeypatch.setattr(jax.lax, "while_loop", counting)
    log_q = jnp.log(jnp.tile(jnp.array([0.5, 0.3, 0.2]), (8, 2, 1)))
    log_p = jnp.log(jnp.tile(jnp.array([0.2, 0.3, 0.5]), (8, 3, 1)))
    draft = Draft.chain(jnp.full((8, 2), token, jnp.int32), log_q, sampling=IID)
    keys = jax.random.split(jax.random.key(3), 8)
    verdict = verify.mentored.verify(keys, draft, log_p, max_kl=jnp.float32(0.1))
    (count,) = steps
    assert (count > 0) == is_solved
    assert (np.asarray(verdict.num_accepted) == 2).all() != is_solved


def test_the_shortcut_of_mentored_is_timed(monkeypatch, capsys):
    measure = tools.load("measure_mentored")
    for name, value in (("VOCAB", 500), ("ROWS", 2), ("DRAWS", 2)):
        monkeypatch.setattr(measure, name, value)
    measure.shortcut()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["1 rows", "2 rows"]
    assert all(line.endswith(" of the whole solve") for line in lines[1:])
    log_p, log_q = measure.law_pair(measure.Sampling(1.0))
    assert not measure.rejected_plainly(log_p, log_p, 0).any()
    assert 0.1 < measure.rejected_plainly(log_p, log_q, 0).mean() < 0.9


@pytest.mark.parametrize("tiny", [-80.0, -100.0, -800.0])
def test_mentored_counts_tokens_whose_probability_underflows(tiny):
    """q = (0.32, 0.68), p = (1, e^tiny): with D ≥ KL(p‖q) = 1.14 nats all may be accepted."""
    log_p, log_q = np.float32([[0.0, tiny]]), np.log(np.float32([[0.32, 0.68]]))
    log_alpha, _ = mentor_levels(log_p, log_q, jnp.full(1, 2.0))
    accepted = np.exp(np.minimum(log_p - log_q - np.asarray(log_alpha)[:, None], 0))
    np.testing.assert_allclose(accepted, 1, atol=1e-4)


def test_a_rule_called_alone_compiles_once_per_shape():
    traced = []

    @sj.rule(accepts=(POINT_MASS,), lossless=True, chain_only=False, settings=("unused",))
    def counting(keys, draft, log_p, *, unused):
        """``match``, counting its traces."""
        traced.append(unused)
        return verify.match.verify(keys, draft, log_p)

    draft, log_p = build([9, 1, 2], [0, 0], [[0.1, 0.2, 0.3, 0.4]] * 3)
    for value in (0.1, 0.2, 0.3):
        verdict = counting(KEYS, draft, log_p, unused=value)
    assert len(traced) == 1 and isinstance(verdict.tokens, jax.Array)
    jax.tree.map(np.testing.assert_array_equal, verdict, verify.match(KEYS, draft, log_p))
    counting(KEYS[:3], jax.tree.map(lambda x: x[:3], draft), log_p[:3], unused=0.1)
    assert len(traced) == 2


@pytest.mark.parametrize("bound", [pytest.param(0.02, marks=pytest.mark.slow), 0.3])
def test_mentored_emits_its_distribution(bound):
    p, q = (x[:1] for x in laws.tables(zeros=False))
    levels = mentor_levels(*map(jnp.log, (p, q)), jnp.full(1, bound))
    law, kl, _ = mentored_distribution(np.log(p), np.log(q), *map(np.asarray, levels))
    assert kl[0] <= bound * 1.001
    counts, _ = tree_laws.rule_counts(
        verify.mentored, laws.chain_draft, laws.tables(zeros=False), max_kl=bound
    )
    first = counts.reshape(laws.VOCAB, -1).sum(1)
    assert laws.p_value(first, law[0] / law[0].sum()) > laws.ALPHA
    assert laws.p_value(first, p[0].astype(float) / p[0].sum()) < laws.ALPHA, "lossy by design"


# --- edges -----------------------------------------------------------------------------------

EDGE_CASES = {  # p and q of every context
    "equal": ([0.2, 0.5, 0.3], [0.2, 0.5, 0.3]),
    "disjoint": ([1, 0, 0], [0, 0.5, 0.5]),
    "both sure and equal": ([0, 1, 0], [0, 1, 0]),
    "both sure and apart": ([0, 1, 0], [0, 0, 1]),
    "p within q": ([0.5, 0.5, 0], [0.2, 0.3, 0.5]),
    "q within p": ([0.2, 0.3, 0.5], [0.5, 0.5, 0]),
    "tiny": ([1e-30, 1, 0], [1, 1e-30, 0]),
    "nearly equal": ([0.2, 0.5, 0.3], [0.2000001, 0.5, 0.2999999]),
}
EDGE_RULES = {
    "block": (verify.block, laws.chain_draft, {}),
    "mentored": (verify.mentored, laws.chain_draft, {"max_kl": 0.1}),
    "mentored wide": (verify.mentored, laws.chain_draft, {"max_kl": 50.0}),
    "joint": (verify.joint, tree_laws.LAWS["iid"], {"tau": 0.0}),
    "match": (verify.match, tree_laws.LAWS["without replacement"], {}),
    "specinfer": (verify.specinfer, tree_laws.LAWS["without replacement"], {}),
    "specinfer iid": (verify.specinfer, tree_laws.LAWS["iid"], {}),
    "spectr": (verify.spectr, tree_laws.LAWS["k chains"], {}),
}


@pytest.mark.parametrize("rule", EDGE_RULES)
def test_edge_cases_never_emit_what_p_excludes(rule):
    verify_rule, draft_fn, settings = EDGE_RULES[rule]
    contexts = len(laws.tables()[0])

    @jax.jit
    def run(keys, p, q):
        draft, log_p = draft_fn(keys, p, q)
        return verify_rule(keys, draft, log_p, **settings)

    keys = jax.random.split(jax.random.key(4), 512)
    for name, rows in EDGE_CASES.items():
        p, q = (jnp.tile(jnp.array(row, jnp.float32), (contexts, 1)) for row in rows)
        verdict = run(keys, p, q)
        real = np.arange(verdict.tokens.shape[1]) < np.asarray(verdict.num_tokens)[:, None]
        emitted = np.asarray(verdict.tokens)[real]
        assert ((emitted >= 0) & (emitted < laws.VOCAB)).all(), name
        assert (np.array(rows[0])[emitted] > 0).all(), name
        if name in ("equal", "both sure and equal") and rule != "match":
            assert (np.asarray(verdict.num_accepted) == verdict.path.shape[1] - 1).all(), name
