"""Times mentored decoding's solve beside a target pass: python docs/tools/measure_mentored.py

It has 8 rows of γ + 1 = 5 positions at V = 152,064. The target has random weights of
Qwen2.5-0.5B's shape. That is the smallest of its family, so the solve weighs most. It prints ratios
of interleaved timings.

``--shortcut`` times the shortcut of the paper's §6 instead: to solve only at positions whose draft
token is not accepted plainly, u > min(1, p/q). It prints its time over that of solving everywhere.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core import probs
from specjax.core.sampling import Sampling
from specjax.core.warp import warp
from specjax.models import ModelConfig, forward, fuse, init_cache, init_params, logits_of
from specjax.verify.mentored_decoding import mentor_levels

ROWS, GAMMA, VOCAB, SLOTS, CONTEXT, REPEATS = 8, 4, 152_064, 256, 192, 5
BOUND = 0.1  # nats
DRAWS = 30  # of draft tokens and uniforms, for the shortcut


def main() -> None:
    """Prints the medians of REPEATS turns as ratios to the target pass."""
    cfg = ModelConfig.llama(
        vocab_size=VOCAB,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        intermediate_size=4864,
    )
    params = fuse(init_params(cfg, jax.random.key(0)))
    cache = init_cache(cfg, ROWS, SLOTS, jnp.float32)
    start = jnp.full((ROWS,), CONTEXT, jnp.int32)
    positions = start[:, None] + jnp.arange(GAMMA + 1, dtype=jnp.int32)
    tokens = jnp.zeros((ROWS, GAMMA + 1), jnp.int32)

    @jax.jit
    def target_pass(params, cache):
        hidden, *_ = forward(cfg, params, cache, tokens, positions, start)
        return logits_of(cfg, params, hidden)

    bound = jnp.full((ROWS, GAMMA + 1), BOUND)
    solve = jax.jit(lambda p, q: mentor_levels(p, q, bound))
    full, cut = law_pair(Sampling(1.0)), law_pair(Sampling(0.8, 0, 0.9))
    timed = {
        "target pass": lambda: target_pass(params, cache),
        "solve, whole distributions": lambda: solve(*full),
        "solve, temperature 0.8 and top-p 0.9": lambda: solve(*cut),
    }
    seconds = {name: [] for name in timed}
    for turn in range(REPEATS + 1):
        for name, run in timed.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - began)
    whole = seconds.pop("target pass")
    for name, solving in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(solving, whole, strict=True))
        print(f"{name}: {ratio:.3f} of a target pass")


def shortcut() -> None:
    """Prints the time of the shortcut over the whole solve, for one row and for eight."""
    log_p, log_q = law_pair(Sampling(0.8, 0, 0.9))
    solve = jax.jit(mentor_levels)
    for rows in (1, ROWS):
        pair = (log_p[:rows], log_q[:rows])
        everywhere = jnp.full((rows, GAMMA + 1), BOUND)
        ratios = []
        for draw in range(DRAWS + 1):
            where_asked = jnp.where(rejected_plainly(*pair, draw), BOUND, jnp.inf)
            whole = seconds_of(lambda: solve(*pair, everywhere))
            part = seconds_of(lambda: solve(*pair, where_asked))
            if draw:  # the first compiles
                ratios.append(part / whole)
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(f"{rows} rows: {statistics.mean(ratios):.2f} ± {1.96 * error:.2f} of the whole solve")


def rejected_plainly(log_p: jax.Array, log_q: jax.Array, draw: int) -> jax.Array:
    """Where a token drawn from q would be rejected by speculative sampling, bool ``[B, N]``."""
    keys = jax.random.split(jax.random.key(draw))
    token = jax.random.categorical(keys[0], log_q)
    log_ratio = probs.at_token(log_p, token) - probs.at_token(log_q, token)
    return jax.random.uniform(keys[1], token.shape) > jnp.exp(jnp.minimum(log_ratio, 0.0))


def seconds_of(run: Callable[[], Any]) -> float:
    """The seconds that one call takes."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def law_pair(sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """(log p, log q) of every position, peaked like a model's; q is p with noise."""
    keys = jax.random.split(jax.random.key(1))
    shape = ROWS, GAMMA + 1, VOCAB
    logits = 3 * jax.random.normal(keys[0], shape)
    disturbed = logits + jax.random.normal(keys[1], shape)
    log_p, log_q = (warp(x, sampling.arrays(ROWS)) for x in (logits, disturbed))
    print(
        f"mean overlap {float(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)).sum(-1).mean()):.2f}, "
        f"support {float((log_p > probs.NEVER).sum(-1).mean()):.0f} tokens"
    )
    return log_p, log_q


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shortcut", action="store_true")
    if parser.parse_args().shortcut:
        shortcut()
    else:
        main()
