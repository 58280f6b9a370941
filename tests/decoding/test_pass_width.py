"""With ``pass_width``, a token's logits do not depend on the number of tokens in its pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.demo.heldout import held_out_functions
from support import variants
from support.variant_models import build

WIDTH, PROMPT, NEW = 8, 12, 6
SWEEP = pytest.mark.sweep
MODELS = ("codellama", "gemma2", "bloom")  # plain, sliding windows and caps, ALiBi


@functools.cache
def net(name, pass_width):
    cfg, params, _ = build(name)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
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
