"""Exact output distributions of the rules, on synthetic tables and end to end, and mutants."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import verify
from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.types import DETERMINISTIC, POINT_MASS, Draft
from specjax.models import ModelConfig, init_params
from specjax.registry import Context
from specjax.runtime.engine import Engine
from specjax.target.contrastive import contrast
from specjax.verify.verdicts import chain_verdict, draft_length, drafted_log_probs, log_q_after
from support import laws

LOSSLESS_CHAIN_RULES = {"speculative": verify.speculative, "block": verify.block}


def stop_table():
    """Contexts before which drafting ends; it depends on the prefix only."""
    return np.random.Generator(np.random.Philox(3)).random(len(laws.tables()[0])) < 0.3


def point_mass_draft(keys, p, q):
    """A chain of q's argmaxes. Its q is a point mass."""
    sure = (q == q.max(-1, keepdims=True)).astype(q.dtype)
    draft, log_p = laws.chain_draft(keys, p, sure)
    return draft.replace(log_q=None, sampling=POINT_MASS), log_p


@pytest.mark.parametrize("name", LOSSLESS_CHAIN_RULES)
@pytest.mark.parametrize(
    "draft_fn",
    [
        laws.chain_draft,
        functools.partial(laws.chain_draft, stop=stop_table()),
        point_mass_draft,
    ],
    ids=["full", "ragged", "point-mass"],
)
def test_lossless_rule_emits_the_law_of_p(name, draft_fn):
    assert laws.rule_p_value(LOSSLESS_CHAIN_RULES[name], draft_fn=draft_fn) > laws.ALPHA


def greedy_draft(keys, p, q):
    """A chain of q's argmaxes that reports q itself, as a draft model's greedy chain does."""
    sure = (q == q.max(-1, keepdims=True)).astype(q.dtype)
    draft, log_p = laws.chain_draft(keys, p, sure, log_q=q)
    return draft.replace(sampling=DETERMINISTIC), log_p


def test_a_token_chosen_by_its_rank_was_not_drawn_from_q():
    assert laws.rule_p_value(verify.specinfer, draft_fn=greedy_draft) > laws.ALPHA


def test_a_joint_of_many_unlikely_tokens_passes_tau_0():
    """float32 has no number as small as exp(−104), and the path is possible all the same."""
    tokens = jnp.zeros((1, 4), jnp.int32)
    draft = Draft.chain(tokens)
    log_p = jnp.log(jnp.array([np.exp(-26.0), 1 - np.exp(-26.0)], jnp.float32))
    law = jnp.broadcast_to(log_p, (1, 5, 2))
    keys = probs.round_keys(jax.random.split(jax.random.key(0), 1), jnp.zeros(1, jnp.int32))
    assert verify.joint(keys, draft, law, tau=0.0).num_accepted.tolist() == [4]
    impossible = law.at[:, 2, 0].set(-jnp.inf)
    assert verify.joint(keys, draft, impossible, tau=0.0).num_accepted.tolist() == [2]


def test_statistic_accepts_the_truth_and_rejects_a_shift():
    law = laws.exact_joint(laws.tables()[0])
    generator = np.random.Generator(np.random.Philox(11))
    true = generator.multinomial(laws.SAMPLES, law)
    assert laws.p_value(true, law) > 1e-3
    shifted = 0.98 * law + 0.02 * np.roll(law, 1)
    wrong = generator.multinomial(laws.SAMPLES, shifted / shifted.sum())
    assert laws.p_value(wrong, law) < laws.ALPHA


# --- mutants of the rule: each is a plausible mistake that the same test must find -----------


def speculative_variant(keys, draft, log_p, *, residual=True, u_purpose=Purpose.ACCEPT, shift=0):
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1) with one mistake at a time."""
    lp, lq = drafted_log_probs(draft, log_p)
    nodes = jnp.broadcast_to(jnp.arange(1, lp.shape[1] + 1), lp.shape)
    u = probs.uniforms(keys, u_purpose, nodes)
    passed = (jnp.log(u) <= lp - lq) & draft.valid[:, 1:]
    accepted = jnp.cumprod(passed, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
    rejected = accepted < draft_length(draft)
    p = jnp.exp(probs.at_node(log_p, jnp.maximum(accepted - shift, 0)))
    q = jnp.exp(log_q_after(draft, accepted, log_p.shape[-1]))
    left = probs.residual(p, q) if residual else p
    return chain_verdict(keys, draft, accepted, rejected, jnp.where(rejected[:, None], left, p))


def stopped_on_drawn_token(keys, p, q):
    """Ends the draft at a drawn token that is unlikely under q, which is not allowed."""
    draft, log_p = laws.chain_draft(keys, p, q)
    sure = probs.at_token(draft.log_q, draft.tokens[:, 1:]) > jnp.log(0.4)
    kept = jnp.cumprod(sure, axis=1, dtype=jnp.int32).astype(bool)
    return draft.replace(valid=draft.valid.at[:, 1:].set(draft.valid[:, 1:] & kept)), log_p


def other_law(keys, p, q):
    """Draws from q but reports a flattened q."""
    flat = jnp.sqrt(q) / jnp.sqrt(q).sum(-1, keepdims=True)
    return laws.chain_draft(keys, p, q, log_q=flat)


def block_without_the_cap(keys, draft, log_p):
    """Block verification (§3) without the cap of min(1, ·) on the running weight."""
    lp, lq = drafted_log_probs(draft, log_p)
    gamma = draft_length(draft)
    weight = jnp.cumprod(jnp.exp(lp - lq), axis=1)
    index = jnp.arange(1, lp.shape[1] + 1)
    p, q = jnp.exp(log_p[:, 1:-1]), jnp.exp(draft.log_q[:, 1:])
    mass = jnp.maximum(weight[:, :-1, None] * p - q, 0).sum(-1)
    chance = jnp.concatenate([mass / (mass + 1 - weight[:, :-1]), weight[:, -1:]], axis=1)
    u = probs.uniforms(keys, Purpose.ACCEPT, jnp.broadcast_to(index, lp.shape))
    accepted = jnp.max(jnp.where(u <= chance, index, 0), axis=1).astype(jnp.int32)
    before = jnp.pad(weight, ((0, 0), (1, 0)), constant_values=1.0)
    p = jnp.exp(probs.at_node(log_p, accepted))
    q = jnp.exp(log_q_after(draft, accepted, log_p.shape[-1]))
    left = probs.residual(probs.at_index(before, accepted)[:, None] * p, q)
    rejected = accepted < gamma
    return chain_verdict(keys, draft, accepted, rejected, jnp.where(rejected[:, None], left, p))


RULE_MUTANTS = {
    "no residual": (functools.partial(speculative_variant, residual=False), laws.chain_draft),
    "wrong position": (functools.partial(speculative_variant, shift=1), laws.chain_draft),
    "reused uniforms": (
        functools.partial(speculative_variant, u_purpose=Purpose.DRAFT),
        laws.chain_draft,
    ),
    "stopped on the drawn token": (verify.speculative, stopped_on_drawn_token),
    "block without the cap": (block_without_the_cap, laws.chain_draft),
    "q is not the law drawn from": (verify.speculative, other_law),
}


def test_block_accepts_no_fewer_in_expectation():
    """One-sided and paired: both rules judge the same drafts with the same uniforms."""
    p, q = map(jnp.asarray, laws.tables())
    keys = jax.random.split(jax.random.key(2), laws.SAMPLES)
    draft, log_p = jax.jit(laws.chain_draft)(keys, p, q)
    one, two = (
        np.asarray(jax.jit(rule.verify)(keys, draft, log_p).num_accepted, float)
        for rule in (verify.speculative, verify.block)
    )
    gain = two - one
    assert gain.mean() > 5 * gain.std() / laws.SAMPLES**0.5, "on these tables the gain is large"
    assert (gain < 0).any(), "in expectation alone: some drafts fare worse"


def test_the_variant_without_a_fault_is_lossless():
    assert laws.rule_p_value(speculative_variant) > laws.ALPHA


@pytest.mark.parametrize("name", RULE_MUTANTS)
def test_mutant_is_caught(name):
    rule, draft_fn = RULE_MUTANTS[name]
    assert laws.rule_p_value(rule, draft_fn=draft_fn) < laws.ALPHA


# --- end to end: a tiny model pair through the whole loop ------------------------------------

V, L = 4, 3
SAMPLING = sj.Sampling(temperature=0.9, top_k=3)


@functools.cache
def tiny_pair(dtype=jnp.float32):
    def make(seed, layers):
        cfg = ModelConfig.llama(
            vocab_size=V,
            hidden_size=8,
            num_layers=layers,
            num_heads=2,
            intermediate_size=16,
            max_position=64,
        )
        params = init_params(cfg, jax.random.key(seed))
        # The scale is large enough that the prefix matters, and small enough that no token is rare.
        params["layers"] = jax.tree.map(lambda x: 12 * x, params["layers"])
        params["embed"] = params["embed"] * 40
        params["norm"] = {"weight": params["norm"]["weight"] / 2}
        return sj.from_params(cfg, jax.tree.map(lambda x: x.astype(dtype), params))

    return make(0, 2), make(5, 1)


PROMPT = (1, 3, 0)
ALPHA_MASK = 0.1  # contrastive α: masks some tokens; the default 0.5 would leave only one


def exact_continuations(lm, amateur=None, logits_of=laws.continuation_logits) -> np.ndarray:
    """The distribution of L tokens after the prompt, by enumeration of all continuations.

    With an amateur, it is that of contrastive decoding at ALPHA_MASK.
    """
    grid, logits = logits_of(lm, PROMPT, L)
    if amateur is not None:
        other = logits_of(amateur, PROMPT, L)[1]
        logits = contrast(logits, other, ALPHA_MASK, 0.5, "improved")
    return laws.continuation_law(lm, grid, logits, SAMPLING)


def end_to_end_counts(method, settings=None, dtype=jnp.float32) -> np.ndarray:
    engine = Engine(*tiny_pair(dtype), method, settings or {})
    return laws.continuation_counts(engine, PROMPT, L, SAMPLING)


def build(name, options):
    return sj.method(name).build(Context(*tiny_pair()), options)[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("autoregressive", {}, marks=pytest.mark.slow),
        ("speculative", {"gamma": 2}),
    ],
)
def test_end_to_end_law(name, options):
    law = exact_continuations(tiny_pair()[0])
    assert np.sum(law > 1e-3) > 15, "the tiny model must leave room for errors to show"
    assert laws.p_value(end_to_end_counts(build(name, options)), law) > laws.ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("block", {"gamma": 2}),
        ("lookup", {"gamma": 2}),
        ("spectr", {"gamma": 2, "chains": 3}),
        ("specinfer", {"branching": (2, 2)}),
        ("specinfer", {"branching": (2, 2), "replacement": True}),
        ("tree-match", {"branching": (3, 1)}),
        ("contrastive", {"alpha": ALPHA_MASK}),
        ("scd", {"gamma": 2, "alpha": ALPHA_MASK}),
        ("scd", {"gamma": 2, "alpha": ALPHA_MASK, "draft_warp": False}),
        ("tree-scd", {"branching": (2, 2), "alpha": ALPHA_MASK}),
    ],
    ids=str,
)
def test_end_to_end_law_of_every_drafter_in_bfloat16(name, options):
    """The expected distribution uses the bfloat16 model's logits; all after them is float32."""
    pair = target, draft = tiny_pair(jnp.bfloat16)
    spec = sj.method(name)
    built, settings = spec.build(Context(*pair), options)
    amateur = draft if spec.target_dist == "contrastive" else None
    law = exact_continuations(target, amateur, laws.continuation_passes)
    counts = end_to_end_counts(built, settings, jnp.bfloat16)
    assert laws.p_value(counts, law) > laws.ALPHA


@pytest.mark.slow
def test_chain_that_stops_early_is_lossless():
    spec = sj.method("speculative")
    options = {"gamma": 3, "stop": "after", "tau1": 0.6}
    built, settings = spec.build(Context(*tiny_pair()), options)
    law = exact_continuations(tiny_pair()[0])
    assert laws.p_value(end_to_end_counts(built, settings), law) > laws.ALPHA


@dataclasses.dataclass(frozen=True)
class SkipsCommit(sj.DraftVerify):
    """A mutant: overwrites the newest cache entry with the entry before it."""

    def step(self, inputs, state):
        after = super().step(inputs, state)
        lost = after.length - 2
        rows = jnp.arange(lost.shape[0])
        cache = jax.tree.map(lambda x: x.at[rows, :, lost].set(x[rows, :, lost - 1]), after.cache)
        return after.replace(cache=cache)


@pytest.mark.slow
def test_skipped_commit_is_caught():
    built = build("speculative", {"gamma": 2})
    mutant = SkipsCommit(built.drafter, built.target, built.rule)
    law = exact_continuations(tiny_pair()[0])
    assert laws.p_value(end_to_end_counts(mutant), law) < laws.ALPHA
