"""Statistics for the tests: synthetic conditional tables and exact-joint chi-square.

A table gives p(· | prefix) and q(· | prefix) for every prefix of fewer than L tokens over a tiny
vocabulary. So the distribution (law) of the emitted sequence is known exactly. A rule runs one
round over 2·10⁵ rows, and tokens past the round are drawn from p. Then the joint of the first L
tokens is compared with its law. Axis legend: B rows, N nodes, L tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.platform import ROUNDED
from specjax.core import loop, probs
from specjax.core.probs import Purpose
from specjax.core.types import Draft
from specjax.core.warp import warp
from specjax.laws import ALPHA, SAMPLES, histogram, joint, p_value
from support.variant_models import logits_jit

__all__ = ["ALPHA", "SAMPLES", "histogram", "joint", "p_value"]  # re-exported from the library

VOCAB, GAMMA = 3, 3
LENGTH = GAMMA + 1


@functools.cache
def tables(seed: int = 7, zeros: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """p and q, float32 ``[contexts, V]``, one row per prefix of length 0 … L − 1.

    Some entries are zero in p, some in q: truncated distributions are the hard case.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    contexts = sum(VOCAB**n for n in range(LENGTH))
    p, q = generator.dirichlet(np.ones(VOCAB) * 0.8, (2, contexts))
    if zeros:
        p[generator.random(contexts) < 0.2, 0] = 0
        q[generator.random(contexts) < 0.2, 1] = 0
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    return p.astype(np.float32), q.astype(np.float32)


def child(context, token):
    """The index of the prefix ``context`` extended by ``token``; the root is 0."""
    return context * VOCAB + token + 1


def chain_draft(keys, p, q, *, stop=None, log_q=None) -> tuple[Draft, jax.Array]:
    """A chain drawn from q with the library's random streams, and log p at its nodes.

    ``stop``: contexts at which the row stops drafting; they depend on the prefix only.
    ``log_q``: the q that the draft reports, if a mutant reports a wrong one.
    """
    rows = keys.shape[0]
    context = jnp.zeros((rows,), jnp.int32)
    tokens, rows_q = [jnp.zeros((rows,), jnp.int32)], []
    contexts, valid = [context], [jnp.ones((rows,), bool)]
    for i in range(GAMMA):
        alive = valid[-1] if stop is None else valid[-1] & ~jnp.asarray(stop)[context]
        u = probs.uniforms(keys, Purpose.DRAFT, jnp.full((rows, 1), i + 1))[:, 0]
        x = probs.sample(q[context], u)
        rows_q.append(jnp.log((q if log_q is None else log_q)[context]))
        context = child(context, x)
        tokens.append(x)
        contexts.append(context)
        valid.append(alive)
    below, valid = jnp.stack(tokens[1:], 1), jnp.stack(valid[1:], 1)
    draft = Draft.chain(below, jnp.stack(rows_q, 1), root=tokens[0], valid=valid)
    return draft, jnp.log(p[jnp.stack(contexts, 1)])


def complete(keys, verdict, p) -> jax.Array:
    """The first L tokens ``[B, L]``: the verdict's, then draws from p."""
    rows = keys.shape[0]
    context, out = jnp.zeros((rows,), jnp.int32), []
    for i in range(LENGTH):
        u = probs.uniforms(keys, Purpose.SEARCH, jnp.full((rows, 1), i))[:, 0]
        fresh = probs.sample(p[context], u)
        given = verdict.tokens[:, i] if i < verdict.tokens.shape[1] else fresh
        token = jnp.where(i < verdict.num_tokens, given, fresh)
        context = child(context, token)
        out.append(token)
    return jnp.stack(out, 1)


def exact_joint(p: np.ndarray) -> np.ndarray:
    """The law of the first L tokens under p, float64 ``[V**L]``."""

    def next_p(prefixes):
        context = np.zeros(len(prefixes), np.int64)
        for tokens in prefixes.T:
            context = child(context, tokens)
        return p[context]

    return joint(next_p, VOCAB, LENGTH).reshape(-1)


def rule_p_value(rule, *, draft_fn=chain_draft, seed: int = 1, **settings) -> float:
    """p-value of one round of ``rule`` over chains drawn from the table's q."""

    @jax.jit
    def run(keys, p, q):  # the tables are arguments: constants, XLA would fold while compiling
        draft, log_p = draft_fn(keys, p, q)
        return complete(keys, rule(keys, draft, log_p, **settings), p)

    keys = jax.random.split(jax.random.key(seed), SAMPLES)
    return p_value(histogram(np.asarray(run(keys, *tables())), VOCAB), exact_joint(tables()[0]))


# --- end to end: a method's whole loop against an enumeration of its target ------------------

ROWS = 8192


def continuations(lm, length: int) -> np.ndarray:
    """All continuations of ``length`` tokens, in lexicographic order: ``[V**length, length]``."""
    grid = np.meshgrid(*[np.arange(lm.vocab_limit)] * length, indexing="ij")
    return np.stack(grid, -1).reshape(-1, length)


def continuation_logits(lm, prompt, length: int):
    """Every continuation of ``length`` tokens, and the logits before each of its tokens."""
    grid = continuations(lm, length)
    logits = logits_of_texts(lm, texts_after(prompt, grid))
    return grid, logits[:, len(prompt) - 1 : -1].astype(jnp.float32)


def texts_after(prompt, continuations) -> np.ndarray:
    """The prompt before each continuation, int32 ``[n, tokens]``."""
    prompts = np.tile(prompt, (len(continuations), 1))
    return np.concatenate([prompts, continuations], 1).astype(np.int32)


def logits_of_texts(lm, texts) -> jax.Array:
    """The logits after each token of each text, without a cache."""
    at = np.tile(np.arange(texts.shape[1]), (len(texts), 1))
    return logits_jit(lm.config, lm.params, texts, at, np.ones_like(texts), "dense")


def continuation_passes(lm, prompt, length: int):
    """As :func:`continuation_logits`, through a cache and with as many rows as the loop has.

    A bfloat16 product of 64 rows rounds differently than one of 8,192.
    """
    grid = continuations(lm, length)
    rows = np.resize(grid, (ROWS, length)).astype(np.int32)

    @functools.partial(jax.jit, compiler_options=ROUNDED)
    def run(net, rows):
        tokens = jnp.concatenate([jnp.tile(jnp.asarray(prompt), (ROWS, 1)), rows], 1)
        last = len(prompt) - 1
        cache = net.cache(ROWS, tokens.shape[1])
        cache, _ = net.prefill_chunk(cache, tokens[:, :last], jnp.zeros((ROWS,), jnp.int32))
        out = []
        for at in range(last, last + length):
            start = jnp.full((ROWS,), at)
            logits, cache, _ = net.logits(cache, tokens[:, at : at + 1], start)
            out.append(logits[:, 0])
        return jnp.stack(out, 1)

    with optimized():
        return grid, run(lm.net, rows)[: len(grid)]


def continuation_law(lm, grid, logits, sampling) -> np.ndarray:
    """The law of the continuations under the warped logits, float64."""
    log_p = jax.jit(warp)(logits, sampling.arrays(len(grid)))
    chosen = np.take_along_axis(np.asarray(log_p, np.float64), grid[..., None], -1)[..., 0]
    law = np.exp(chosen.sum(-1))
    return law / law.sum()


def continuation_counts(engine, prompt, length: int, sampling) -> np.ndarray:
    """Counts of each continuation; runs only the device loop, without the host's scheduler."""
    inputs, budget = engine.inputs(sampling, ROWS), np.full(ROWS, length, np.int32)
    method, vocab = engine.method, engine.target.vocab_limit
    counts = np.zeros((vocab,) * length, np.int64)
    # Not a capacity bucket, which would be mostly empty.
    capacity = -(-(len(prompt) + length + method.round_positions) // 16) * 16
    how = {"chunk": len(prompt), "capacity": capacity}
    with optimized():
        for seed in range(-(-SAMPLES // ROWS)):
            keys = jax.random.split(jax.random.key(seed), ROWS)
            state = loop.start(method, inputs, [np.array(prompt)] * ROWS, budget, keys, **how)
            state = loop.advance(method, inputs, state, 2**31 - 1)
            counts += histogram(np.asarray(state.tokens[:, len(prompt) :][:, :length]), vocab)
    return counts


@contextlib.contextmanager
def optimized():
    """Compiles with all optimizations: programs that run for seconds are worth it."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
