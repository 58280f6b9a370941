"""Gated adapters: clean tokens are the base's bit for bit, adaptive ones a reference's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.core.scoring import score
from specjax.core.types import Draft, Probes
from specjax.models import ModelConfig, hidden_states, init_params
from specjax.models.adapters import KEY, fuse_adapters
from support.gated import reference, tuned
from support.variant_models import build

SLOW = pytest.mark.slow
CLEAN, K = 9, 3
NAMES = ["tied", "gpt2", "opt-350m", "bloom", "pythia", "gemma3", "qwen3-biases"]


def models(name):
    """(base, base with adapters for ids that its tables do not have); params are not fused."""
    cfg, params, _ = build(name)
    own = dataclasses.replace(cfg, adaptive_ids=(cfg.vocab_size,) * K)
    return (cfg, params), (own, tuned(params, (cfg.vocab_size,)))


@pytest.mark.parametrize("name", ["tied", *[pytest.param(n, marks=SLOW) for n in NAMES[1:]]])
def test_clean_tokens_equal_the_bases_bit_for_bit(name):
    base, own = models(name)
    tokens = np.arange(2 * (CLEAN + K)).reshape(2, -1) % (base[0].vocab_size - 1)
    tokens[:, CLEAN:] = base[0].vocab_size  # past the table, so the base reads its last row instead
    at = np.broadcast_to(np.arange(CLEAN + K), tokens.shape)

    def dense(cfg, params):
        return hidden_states(cfg, params, tokens, at, np.ones_like(tokens)).hidden

    one, two = (np.asarray(dense(*model)) for model in (base, own))
    np.testing.assert_array_equal(one[:, :CLEAN], two[:, :CLEAN])
    assert (one[:, CLEAN:] != two[:, CLEAN:]).any(-1).all()

    def cached(net):
        start, held = jnp.zeros((2,), jnp.int32), CLEAN - 2
        cache, _ = net.prefill_chunk(net.cache(2, 16), tokens[:, :held], start)
        parents = np.tile([[0, 2, 3]], (2, 1))  # the first probe is below the root
        below = jnp.asarray(tokens[:, held + 1 : CLEAN])
        probes = Probes(tokens[:, CLEAN:], parents)
        root, valid = tokens[:, held], jnp.ones(below.shape, bool)
        draft = Draft.chain(below, root=root, valid=valid, probes=probes)
        return score(net, cache, start + held, draft)[:2]

    nets = [sj.from_params(*model).net for model in (base, own)]
    (one, before), (two, after) = map(cached, nets)
    vocab = base[0].vocab_size
    np.testing.assert_array_equal(one[:, :2], two[:, :2, :vocab])
    assert (one[:, 2:] != two[:, 2:]).any(-1).all()
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a[:, :, :CLEAN], b[:, :, :CLEAN])
        assert (a[:, :, CLEAN : CLEAN + K] != b[:, :, CLEAN : CLEAN + K]).any((1, 3)).all()


def test_a_pass_without_adaptive_tokens_is_the_bases_program():
    nets = [sj.from_params(*model).net for model in models("tied")]
    tokens, start = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1,), jnp.int32)
    assert nets[1].adapters and not nets[0].adapters

    def text(run, net):
        return jax.jit(run).lower(net, net.cache(1, 16)).as_text()

    for run in (
        lambda net, cache: net.logits(cache, tokens, start),
        lambda net, cache: net.prefill_chunk(cache, tokens, start),
        lambda net, cache: net.rescore(tokens),
    ):
        assert text(run, nets[0]) == text(run, nets[1])


LLAMA = ModelConfig.llama(
    vocab_size=11,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    intermediate_size=12,
    adaptive_ids=(11, 12),
)
# Two windows, after token 1 and after token 3; nothing outside a window sees it.
TOKENS = [3, 1, 4, 1, 11, 12, 11]
SEES = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5], [0, 1, 2, 3, 6]]
POSITIONS = [0, 1, 2, 3, 2, 3, 4]


def isolated(query, key):
    """The attention mask of SEES, indexed by the tokens' places."""
    table = np.zeros((len(TOKENS),) * 2, bool)
    for i, seen in enumerate(SEES):
        table[i, seen] = True
    return jnp.asarray(table)[query["place"][:, :, None], key["place"][:, None, :]]


def ours(params):
    rows = (np.array([x]) for x in (TOKENS, POSITIONS, [1] * len(TOKENS)))
    how = {"mask_fn": isolated, "meta": {"place": np.arange(len(TOKENS))[None]}}
    return hidden_states(LLAMA, params, *rows, **how).hidden[0]


@pytest.fixture(scope="module")
def params():
    params = init_params(LLAMA, jax.random.key(3))
    params = params | {"layers": jax.tree.map(lambda x: 3 * x, params["layers"])}
    return tuned(params | {"embed": 9 * params["embed"]}, (11, 12))


@SLOW
@pytest.mark.parametrize("matrices", [(), ("q", "down")])
def test_adaptive_tokens_are_those_of_a_reference_with_weights_of_their_own(params, matrices):
    own = tuned({k: v for k, v in params.items() if k != KEY}, (11, 12), matrices=matrices)
    want = reference(LLAMA, own, TOKENS, SEES, POSITIONS)
    np.testing.assert_allclose(ours(own), want, atol=2e-5)


@SLOW
def test_gradients_are_the_references_and_of_clean_tokens_there_is_none(params):
    cotangent = jax.random.normal(jax.random.key(5), (len(TOKENS), 8))

    def through(states):
        def loss(adapters, places):
            return jnp.sum(places[:, None] * cotangent * states(params | {KEY: adapters}))

        return jax.jit(jax.grad(loss))

    def slow(params):
        return reference(LLAMA, params, TOKENS, SEES, POSITIONS)

    adaptive = np.array([token in (11, 12) for token in TOKENS], np.float32)
    got = through(ours)(params[KEY], adaptive)
    want = through(slow)(params[KEY], adaptive)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        largest = float(jnp.abs(b).max())
        assert largest > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * largest)
    for leaf in jax.tree.leaves(through(ours)(params[KEY], 1 - adaptive)):
        assert not leaf.any()


@pytest.mark.parametrize("matrices", [("k", "out"), ("gate", "q", "v"), ()])
def test_joined_adapters_equal_the_parts_side_by_side(params, matrices):
    own = tuned({k: v for k, v in params.items() if k != KEY}, (11, 12), matrices=matrices)[KEY]
    joined, block = fuse_adapters(LLAMA, own)["layers"]["1"], own["layers"]["1"]
    for part, name, sizes in (
        ("attention", "qkv", {"q": 8, "k": 8, "v": 8}),
        ("mlp", "gate_up", {"gate": 12, "up": 12}),
    ):
        pairs = block.get(part, {})
        parts = [
            pairs[n]["up"] @ pairs[n]["down"] if n in pairs else np.zeros((size, 8))
            for n, size in sizes.items()
        ]
        pair = joined.get(part, {}).get(name)
        assert (pair is None) == (not set(sizes) & set(pairs))
        if pair is not None:
            np.testing.assert_allclose(pair["up"] @ pair["down"], np.concatenate(parts), atol=1e-5)
    kept = {n: pair for part, pairs in block.items() for n, pair in pairs.items()}
    for pairs in joined.values():
        for name in {"out", "down"} & set(pairs):
            assert pairs[name] is kept[name]


def test_no_clean_token_attends_to_an_adaptive_one(params):
    """Why gating the updates is enough: other adapters change no output at clean tokens."""
    other = tuned({k: v for k, v in params.items() if k != KEY}, (11, 12), seed=8)
    one, two = ours(params), ours(other)
    np.testing.assert_array_equal(one[:4], two[:4])
    assert (one[4:] != two[4:]).any(-1).all()
