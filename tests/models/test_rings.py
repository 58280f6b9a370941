"""Ring buffers of sliding-window layers give what a cache of all positions gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from conftest import tiny_lm
from specjax._util.platform import CPU
from specjax.core import tree
from specjax.core.tree import NO_PARENT
from specjax.models import (
    ModelConfig,
    cache,
    forward,
    forward_pass,
    hidden_states,
    init_cache,
    logits_of,
    param_shapes,
)
from specjax.models.attention import dense
from specjax.models.cache import commit_path, resize, ring_capacity, row_bytes, take_rows
from specjax.runtime.prefix_cache import common_prefix
from support.variant_models import logits_jit

WINDOW, RING_SPARE, RING = 24, 64, 96
SLIDING = {"sliding_window": WINDOW, "sliding_layers": (True, False)}


@pytest.fixture
def small(monkeypatch):
    """``small(spare)``: rings that wrap around within short sequences."""

    def use(spare=RING_SPARE):
        monkeypatch.setattr(cache, "RING_SPARE", spare)
        small_chunks = dataclasses.replace(CPU, prefill_chunk=spare // 2)
        monkeypatch.setattr(cache, "platform", lambda: small_chunks)
        jax.clear_caches()  # caches are made within programs

    yield use
    monkeypatch.undo()
    jax.clear_caches()


def prefilled(lm, tokens, upto, capacity, dtype, width=16):
    """A cache of rows up to ``upto[B]``, in chunks."""
    held = init_cache(lm.config, len(tokens), capacity, dtype)
    prefill_chunk = jax.jit(lm.net.prefill_chunk)
    for first in range(0, max(upto), width):
        start = np.minimum(first, np.maximum(upto - width, 0)).astype(np.int32)
        held, _ = prefill_chunk(
            held, np.stack([t[s : s + width] for t, s in zip(tokens, start, strict=True)]), start
        )
    return held


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("capacity", [512, 301])  # that a block divides, or not
def test_rows_are_taken_from_where_they_differ(small, capacity, dtype):
    """Pairs of rows with one beginning; the positions are inside of two blocks, and of a ring."""
    small()
    lm = tiny_lm(0, **SLIDING)
    held = init_cache(lm.config, 4, capacity, dtype)
    assert held.is_ring(0) and not held.is_ring(1)
    generator = np.random.default_rng(0)

    def fill(buffer):
        entries = generator.integers(-9, 9, buffer.shape).astype(buffer.dtype)
        entries[1::2, :, :140] = entries[::2, :, :140]
        return jnp.asarray(entries)

    held = jax.tree.map(fill, held)
    source = jnp.asarray([1, 1, 3, 2])
    got = jax.jit(take_rows)(held, source, 140, 300)
    for layer, upto in ((0, RING), (1, 300)):
        taken = (got.k[layer], got.v[layer])
        before = (held.k[layer], held.v[layer])
        for ours, old in zip(jax.tree.leaves(taken), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(ours[:, :, :upto], old[source][:, :, :upto])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_ring_gives_what_a_full_cache_gives(small, dtype):
    """Prefill in chunks, a tree across the ring's end, its accepted path, then a chain."""
    lm = tiny_lm(0, **SLIDING)
    tokens = np.random.default_rng(0).integers(0, 97, (3, 256)).astype(np.int32)
    upto = np.array([93, 190, 16])  # just before the first wrap, before the second, and a short row
    parents = jnp.asarray([[NO_PARENT, 0, 0, 2, 1, 3]] * 3, jnp.int32)
    visible = tree.ancestors(parents, 3)
    positions = jnp.asarray(upto)[:, None] + tree.depths(visible)
    path = jnp.asarray([[0, 2, 3, 5]] * 3, jnp.int32)

    def run(net, held, nodes, after):
        hidden, held, _ = forward(
            net.config, net.params, held, nodes, positions, upto.astype(np.int32), visible
        )
        held = commit_path(held, upto.astype(np.int32), path)
        logits, held, _ = net.logits(held, after, upto.astype(np.int32) + 4)
        return logits_of(net.config, net.params, hidden), logits, held

    nodes, after = tokens[:, 200:206], tokens[:, 220:230]
    results = []
    for spare in (RING_SPARE, 2048):
        small(spare)
        held = prefilled(lm, tokens, upto, 256, dtype)
        assert held.k[0].shape[2] == (RING if spare == RING_SPARE else 256)
        assert held.k[1].shape[2] == 256
        results.append(jax.jit(run)(lm.net, held, nodes, after))
    for ours, whole in zip(results[0][:2], results[1][:2], strict=True):
        np.testing.assert_allclose(ours, whole, atol=2e-3 if dtype == "int8" else 2e-4)
    if dtype == "int8":
        return
    for row, length in enumerate(upto):  # both equal a pass without a cache
        line = np.concatenate([tokens[row, :length], nodes[row, [0, 2, 3, 5]], after[row]])[None]
        at = np.arange(line.shape[1], dtype=np.int32)[None]
        want = logits_jit(lm.config, lm.params, line, at, np.ones_like(line), "dense")
        np.testing.assert_allclose(results[0][1][row], want[0, length + 4 :], atol=2e-4)


def test_resizing_keeps_a_ring_that_has_not_wrapped(small):
    """A ring that has not wrapped has the same cache positions in every larger bucket."""
    small()
    lm = tiny_lm(0, **SLIDING)
    tokens = np.random.default_rng(1).integers(0, 97, (1, 64)).astype(np.int32)
    held = prefilled(lm, tokens, np.array([48]), 64, "float32")
    assert [k.shape[2] for k in held.k] == [64, 64]
    wide = resize(held, 256)
    assert [k.shape[2] for k in wide.k] == [RING, 256]
    back = resize(wide, 64)
    assert jax.tree.all(jax.tree.map(np.array_equal, held, back))
    token, at = tokens[:, 48:49], np.array([48], np.int32)
    ours, whole = (jax.jit(lm.net.logits)(cache, token, at)[0] for cache in (wide, held))
    np.testing.assert_allclose(ours, whole, atol=1e-5)


def generated(target, draft, method, **how):
    """Rows of all lengths, some with a common prefix, in three batch slots."""
    draw = np.random.default_rng(2).integers(0, 97, (5, 180)).tolist()
    prompts = [draw[0][:150], draw[1][:9], draw[0][:60], [*draw[0][:150], 3], draw[2][:100]]
    needs = sj.method(method)
    done = sj.generate(
        target,
        prompts,
        draft=draft if needs.needs_draft else None,
        method=method,
        max_new_tokens=[40, 120, 30, 40, 90],
        batch_size=3,
        reward="length:5-9" if needs.needs_reward else None,
        **how,
    )
    return done.tokens


FAST = "autoregressive", "speculative"


@pytest.mark.parametrize(
    "method", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in sj.methods()]
)
def test_every_method_decodes_in_rings(small, method):
    """Greedy tokens are the same with refilled slots and prefixes cached from other prompts."""
    models = tiny_lm(0, **SLIDING), tiny_lm(2, layers=1, sliding_window=WINDOW)
    small(2048)
    whole = generated(*models, method)
    small()
    for ours, theirs in zip(generated(*models, method), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_pass_wider_than_its_room_is_refused(small):
    small()
    lm, tokens = tiny_lm(0, **SLIDING), np.zeros((1, 80), np.int32)
    with pytest.raises(ValueError, match=r"80 tokens.*72"):
        lm.net.prefill_chunk(
            init_cache(lm.config, 1, 256, "float32"), tokens, np.zeros(1, np.int32)
        )


@pytest.mark.parametrize("fault", ["writes that stop at the end", "a prefix that is gone"])
def test_a_broken_ring_is_noticed(small, monkeypatch, fault):
    models = tiny_lm(0, **SLIDING), tiny_lm(2, layers=1, sliding_window=WINDOW)
    small(2048)
    whole = generated(*models, "speculative", sampling=sj.Sampling(1.0))
    small()
    if fault == "writes that stop at the end":
        rows = cache.write_rows
        monkeypatch.setattr(cache, "write_ring", lambda x, new, at: rows(x, new, at % RING))
    else:
        monkeypatch.setattr(
            "specjax.runtime.prefix_cache.PrefixCache._usable_prefix",
            lambda _, cached, prompt: common_prefix(cached, prompt),
        )
    ours = generated(*models, "speculative", sampling=sj.Sampling(1.0))
    assert any(not np.array_equal(a, b) for a, b in zip(ours, whole, strict=True))


def test_the_bytes_of_a_ring_follow_its_window():
    assert [ring_capacity(n) for n in (None, 4096, 4095, 512)] == [None, 5120, 5120, 1536]
    sizes = {"vocab_size": 10, "hidden_size": 8, "num_layers": 6, "num_heads": 2}
    cfg = ModelConfig.llama(
        **sizes,
        intermediate_size=8,
        sliding_window=512,
        sliding_layers=(True,) * 5 + (False,),
        max_position=32768,
    )
    row_bytes_each = row_bytes(cfg, 1, "float32")
    assert row_bytes(cfg, 32768, "float32") == row_bytes_each // 6 * (32768 + 5 * 1536)


@pytest.mark.parametrize("sliding_first", [True, False])
def test_masks_are_made_in_the_order_of_the_layers(monkeypatch, sliding_first):
    """A set's order differs between processes, and with it the key of the compiled program."""
    made = []
    windowed, of_kind = dense.windowed, forward_pass._attention_of_kind

    def record_window(mask, window, chunked):
        made.append(window)
        return windowed(mask, window, chunked)

    def record_kind(cfg, kind, queries):
        made.append(kind.window)
        return of_kind(cfg, kind, queries)

    monkeypatch.setattr(dense, "windowed", record_window)
    monkeypatch.setattr(forward_pass, "_attention_of_kind", record_kind)
    tokens = jnp.ones((1, 4), jnp.int32)
    positions = jnp.arange(4)[None]
    two_layers = tiny_lm(0).config
    for window in range(2, 10):  # of two kinds a set has the right order by chance
        wanted = [window, None] if sliding_first else [None, window]
        slides = (sliding_first, not sliding_first)
        cfg = dataclasses.replace(two_layers, sliding_window=window, sliding_layers=slides)
        params = param_shapes(cfg)
        jax.eval_shape(functools.partial(hidden_states, cfg), params, tokens, positions, tokens)
        assert made == wanted
        made.clear()
        empty = init_cache(cfg, 1, 32, jnp.float32)
        start = jnp.zeros(1, jnp.int32)
        run = functools.partial(forward, cfg)
        jax.eval_shape(run, params, empty, tokens, positions, start)
        assert made == wanted
        made.clear()
