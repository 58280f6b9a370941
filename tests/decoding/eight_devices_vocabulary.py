"""Drawing tokens by shares of the vocabulary, on eight simulated devices.

test_mesh.py runs this file in a subprocess that has eight devices.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import specjax as sj
from conftest import tiny_lm
from specjax import verify
from specjax.core import loop, probs, vocabulary
from specjax.core.mesh import net_specs
from specjax.core.warp import warp
from specjax.models.sharding import PARTIAL_SUMS
from specjax.registry import Context
from specjax.runtime.engine import Engine
from support import laws, tree_laws

sys.path.append(str(Path(__file__).parents[2] / "docs/tools"))
from tpu_cycles import exchanged

ROWS = 30_000
PLAIN = sj.Sampling(1.0)
TRUNCATED = sj.Sampling(0.9, top_k=2, top_p=0.9)
RULES = {
    "speculative": (verify.speculative, laws.chain_draft),
    "block": (verify.block, laws.chain_draft),
    "match": (verify.match, laws.chain_draft),
    "mentored": (functools.partial(verify.mentored, max_kl=0.0), laws.chain_draft),
    "specinfer": (verify.specinfer, tree_laws.tree_draft),
}


def by_shares(count, function):
    """``function(x, *whole)`` where each of ``count`` devices has its share of all but ``x``."""

    def on_device(x, *whole):
        with vocabulary.split_over(count):
            return function(x, *map(vocabulary.own_share, whole))

    whole = PartitionSpec()
    mesh = sj.make_mesh(model=count)
    return jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    )


def warped(table, sampling):
    return jnp.exp(warp(jnp.log(table)[:, None], sampling.arrays(len(table)))[:, 0])


@functools.cache
def emitted(name, count, sampling):
    """The first tokens of many rows after one round, as :func:`laws.rule_p_value` has them."""
    rule, draft_fn = RULES[name]

    def run(keys, p, q):
        p, q = warped(p, sampling), warped(q, sampling)
        draft, log_p = draft_fn(keys, p, q)
        return laws.complete(keys, rule(keys, draft, log_p), p)

    keys = jax.random.split(jax.random.key(1), ROWS)
    return np.asarray(by_shares(count, run)(keys, *laws.tables()))


def p_value(tokens, sampling):
    law = laws.exact_joint(np.asarray(warped(jnp.asarray(laws.tables()[0]), sampling)))
    return laws.p_value(laws.histogram(tokens, laws.VOCAB), law)


# Of three ids, two devices have two each, one of them padding. The last of four has only padding.
SHARES = [(4, TRUNCATED)]
SHARES += [
    pytest.param(*case, marks=pytest.mark.slow) for case in ((2, PLAIN), (2, TRUNCATED), (4, PLAIN))
]


@pytest.mark.parametrize(("count", "sampling"), SHARES)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_by_shares_emits_the_law_of_p(name, count, sampling):
    assert p_value(emitted(name, count, sampling), sampling) > laws.ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_by_shares_emits_the_tokens_of_one_device(name, count):
    for sampling in (PLAIN, TRUNCATED):
        one, many = emitted(name, 1, sampling), emitted(name, count, sampling)
        # Sums run in another order: a draw may lie within their rounding.
        assert (one != many).any(axis=1).sum() <= 1


def mutants():
    first_id, gathered = vocabulary.first_id, vocabulary.gathered
    return {
        "a share's mass is forgotten": ("gathered", lambda x: gathered(x).at[1].set(0)),
        "each share sums by itself": ("across", lambda reduce, x: x),
        "ids begin one too late": ("first_id", lambda width: first_id(width) + 1),
    }


@pytest.mark.parametrize("name", mutants())
def test_mutants_fail(name, monkeypatch):
    monkeypatch.setattr(vocabulary, *mutants()[name])
    tokens = np.clip(emitted.__wrapped__("speculative", 2, PLAIN), 0, laws.VOCAB - 1)
    assert p_value(tokens, PLAIN) < laws.ALPHA


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_a_share_has_the_logits_of_its_ids(split):
    """Of a target with 98 ids on four devices, two of them padding, and a draft with 61."""
    target, draft = tiny_lm(1), tiny_lm(2, layers=1, vocab=60)
    mesh = sj.make_mesh(model=4)
    target, draft = sj.on_mesh(target, mesh), sj.on_mesh(draft, mesh, split=split)
    nets = target.net, draft.net.over(target.net)
    tokens = jnp.arange(6)[None] * 9

    def shares(nets):
        with vocabulary.split_over(4):
            own = [net.rescore(tokens) for net in nets]
        return own, [net.rescore(tokens) for net in nets]

    pieces = PartitionSpec(None, None, "model"), PartitionSpec()
    own, whole = jax.jit(
        jax.shard_map(
            shares,
            mesh=mesh,
            in_specs=([net_specs(net) for net in nets],),
            out_specs=pieces,
            check_vma=False,
        )
    )(list(nets))
    for joined, logits in zip(own, whole, strict=True):
        assert joined.shape[-1] == 100 and logits.shape[-1] == 98
        np.testing.assert_allclose(joined[..., :98], logits, atol=1e-4)
        assert (joined[..., 98:] == probs.NEVER).all()


def bytes_to_draw(name, whole, vocab=128_000):
    """Bytes that exchanges bring each of two devices in a round of eight rows, without the sums."""
    mesh = sj.make_mesh(model=2)
    target, draft = (sj.on_mesh(tiny_lm(n, layers=1, vocab=vocab), mesh) for n in (1, 2))
    spec = sj.method(name)
    draft = draft if spec.needs_draft else None
    method, settings = spec.build(Context(target, draft), {})
    if whole:
        rule = dataclasses.replace(method.rule, splits_vocabulary=False)
        method = dataclasses.replace(method, rule=rule)
    inputs = Engine(target, draft, method, settings).inputs(
        sj.Sampling(0.9, top_k=40, top_p=0.9), 8
    )
    keys, budget = jax.random.split(jax.random.key(0), 8), np.full(8, 10, np.int32)
    state = loop.start(method, inputs, [np.arange(5)] * 8, budget, keys, chunk=16)
    text = loop.run_rounds(method).lower(inputs, state, np.int32(5)).compile().as_text()
    return exchanged(text, lambda path: 4, without=PARTIAL_SUMS, loop=True).bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoregressive", "speculative", "block"])
def test_a_round_exchanges_a_twentieth_of_the_logits(name):
    before, after = (bytes_to_draw(name, whole) for whole in (True, False))
    nodes, passes = (5, 4) if name != "autoregressive" else (1, 0)
    assert before >= 8 * (nodes + passes) * 128_000 * 4
    assert after * 20 <= before
