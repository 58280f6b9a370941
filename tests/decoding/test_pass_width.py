"""With ``pass_width``, a token's logits do not depend on the number of tokens in its pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.core import tree
from specjax.core.tree import NO_PARENT
from specjax.demo.heldout import held_out_functions
from specjax.models.quantized_cache import weighted_values
from support import variants
from support.variant_models import build

WIDTH, PROMPT, NEW = 8, 12, 6
SWEEP = pytest.mark.sweep
MODELS = ("codellama", "gemma2", "bloom")  # plain, sliding windows and caps, ALiBi


@functools.cache
def net(name, pass_width, dtype=jnp.bfloat16):
    cfg, params, _ = build(name)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    return sj.from_params(cfg, params, pass_width=pass_width).net


RUN = jax.jit(lambda net, cache, tokens, start: net.logits(cache, tokens, start))


@functools.cache
def prefilled(name, pass_width, at_once):
    """Logits after each of ``NEW`` tokens, with ``at_once`` tokens per pass."""
    model, rows = net(name, pass_width), variants.tokens()
    tokens = jnp.pad(rows[:, : PROMPT + NEW], ((0, 0), (0, 128 - PROMPT - NEW)))
    begin = jnp.zeros((len(rows),), jnp.int32)
    cache, _ = jax.jit(
        lambda net: net.prefill_chunk(net.cache(*tokens.shape), tokens[:, :PROMPT], begin)
    )(model)
    logits = []
    for first in range(PROMPT, PROMPT + NEW, at_once):
        piece = tokens[:, first : first + at_once]
        new, cache, _ = RUN(model, cache, piece, jnp.full((len(rows),), first))
        logits.append(new)
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("at_once", [2, 3, 6])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_are_the_same_bits_however_many_tokens_a_pass_has(name, at_once):
    np.testing.assert_array_equal(prefilled(name, WIDTH, at_once), prefilled(name, WIDTH, 1))


def test_they_are_not_where_passes_are_as_wide_as_their_tokens():
    """Without padding the bits differ; otherwise the test above could not fail."""
    assert any((prefilled(name, 1, 6) != prefilled(name, 1, 1)).any() for name in MODELS)


PARENTS = np.array([[NO_PARENT, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]] * 2)  # branching 2, 2, 1
TREE_WIDTH = 16


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_the_nodes_of_a_tree_have_the_bits_of_plain_decoding(name, dtype, static):
    """Each path, token by token; the cache's own places would give two thirds other bits."""
    model = net(name, TREE_WIDTH, dtype)
    tokens = np.random.Generator(np.random.Philox(3)).integers(5, 60, (2, 61))
    nodes = np.random.Generator(np.random.Philox(4)).integers(5, 60, PARENTS.shape)
    start = jnp.full((2,), tokens.shape[1])
    cache, _ = jax.jit(
        lambda net: net.prefill_chunk(net.cache(2, 128), jnp.asarray(tokens), start * 0)
    )(model)

    def of_tree(net, cache, parents):
        visible = tree.ancestors(PARENTS if static else parents, 4)
        positions = start[:, None] + tree.depths(visible)
        return net.logits(cache, jnp.asarray(nodes), start, positions, visible).logits

    got = np.asarray(jax.jit(of_tree)(model, cache, jnp.asarray(PARENTS)))
    for leaf in (7, 8, 9, 10):
        path = [leaf]
        while path[0] != 0:
            path.insert(0, PARENTS[0, path[0]])
        after = cache
        for depth, node in enumerate(path):
            want, after, _ = RUN(model, after, nodes[:, node, None], start + depth)
            np.testing.assert_array_equal(got[:, node], want[:, 0], err_msg=f"node {node}")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_gaps_between_keys_change_no_bit_of_a_sum_one_by_one(dtype):
    """At any place: a matrix product sums blocks of 256 or every fourth key apart."""
    random = np.random.Generator(np.random.Philox(5))
    weights, values = random.random((1, 2, 16, 640)), random.standard_normal((1, 2, 640, 16))
    add = jax.jit(functools.partial(weighted_values, dtype=jnp.float32, one_by_one=True))
    for last in range(200, 620, 3):
        chain = np.where(np.arange(640) <= last, weights, 0)
        tree, moved = chain.copy(), values.copy()
        tree[..., last] = 0
        tree[..., last + 7] = chain[..., last]
        moved[:, :, last + 7] = values[:, :, last]
        want = add(jnp.asarray(chain, dtype), jnp.asarray(values, dtype))
        got = add(jnp.asarray(tree, dtype), jnp.asarray(moved, dtype))
        np.testing.assert_array_equal(got, want, err_msg=f"last key at {last}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [("specinfer", {"branching": (2, 2, 1)}), ("spectr", {"chains": 2, "gamma": 4})],
)
def test_greedy_bfloat16_rows_of_trees_are_plain_decodings(method, options):
    load = functools.partial(sj.load, dtype="bfloat16", pass_width=TREE_WIDTH)
    target, draft = load("demo"), load("demo-draft")
    prompts = [function.prompt for function in held_out_functions(8)[0]]
    run = functools.partial(sj.generate, target, prompts, max_new_tokens=24, batch_size=8)
    got, want = run(method=method, draft=draft, options=options), run()
    assert list(map(list, got.tokens)) == list(map(list, want.tokens))
    assert got.stats["rounds"].sum() < want.stats["rounds"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["speculative", pytest.param("lookup", marks=SWEEP)])
def test_greedy_bfloat16_rows_are_plain_decodings(method):
    """Token for token: passes of eight tokens, reused batch slots, prompts of all lengths."""
    load = functools.partial(sj.load, dtype="bfloat16", pass_width=WIDTH)
    target = load("demo")
    draft = load("demo-draft") if sj.method(method).needs_draft else None
    prompts = [function.prompt for function in held_out_functions(16)[0]]
    run = functools.partial(sj.generate, target, prompts, max_new_tokens=32, batch_size=8)
    got, want = run(method=method, draft=draft, options={"gamma": WIDTH - 1}), run()
    assert list(map(list, got.tokens)) == list(map(list, want.tokens))
    assert got.stats["rounds"].sum() < want.stats["rounds"].sum()


@pytest.mark.parametrize("name", MODELS)
def test_a_wide_pass_changes_nothing_but_rounding(name):
    cfg, params, _ = build(name)
    wide, narrow = (sj.from_params(cfg, params, pass_width=width).net for width in (WIDTH, 1))
    tokens, start = jnp.asarray(variants.tokens()[:, :3]), jnp.zeros((2,), jnp.int32)
    last = jnp.full((2, 1), 2)
    for at in (None, last):
        got, want = (m.logits(m.cache(2, 128), tokens, start, at=at) for m in (wide, narrow))
        np.testing.assert_allclose(got[0], want[0], atol=1e-4)
        for ours, theirs in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("width", [0, 129, 2.5, "wide"])
def test_a_width_that_is_none_is_refused(width):
    with pytest.raises(sj.OptionError, match="pass_width"):
        sj.load("demo", pass_width=width)
