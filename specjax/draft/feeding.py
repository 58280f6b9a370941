"""What drafters with a model of their own share: feeding the row's end, and levels of a tree.

Axis legend: B rows, n new tokens, T tokens of the tree so far, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models import KVCache, ModelConfig, forward, logits_of
from specjax.types import DecodeState
from specjax.warp import fit_vocabulary


def last_two(state: DecodeState) -> Int[Array, "B 2"]:
    """Each row's last two tokens; the first is scratch where the row has only one."""
    at = jnp.maximum(state.length[:, None] + jnp.arange(-2, 0), 0)
    return jnp.take_along_axis(state.tokens, at, axis=1)


def feed_pair(
    model: ModelConfig,
    params: dict,
    cache: KVCache,
    window: Int[Array, "B w"],
    first: Int[Array, "B"],
    step: Int[Array, ""] | int,
    vocab: int,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Logits after two tokens, ``window[:, step : step + 2]``, at positions ``first, first + 1``.

    What begins a round: the cache may then be one token short, so a fully accepted draft
    leaves no hole in it. A row of one token (``first = −1``) feeds that one first.
    """
    start = jnp.maximum(first, 0)
    two = jnp.arange(2, dtype=jnp.int32)
    inside = step + (start - first)[:, None] + two
    tokens = jnp.take_along_axis(window, inside, axis=1, mode="clip")
    hidden, cache = forward(model, params, cache, tokens, start[:, None] + two, start)
    last = jnp.take_along_axis(hidden, (first + 1 - start)[:, None, None], axis=1)
    logits = logits_of(model, params, last)[:, 0]
    return fit_vocabulary(logits.astype(jnp.float32), vocab), cache


def feed_token(
    model: ModelConfig,
    params: dict,
    cache: KVCache,
    token: Int[Array, "B"],
    at: Int[Array, "B"],
    vocab: int,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Logits after one more token at slot and position ``at``, the row before it being fed."""
    hidden, cache = forward(model, params, cache, token[:, None], at[:, None], at)
    logits = logits_of(model, params, hidden)[:, 0]
    return fit_vocabulary(logits.astype(jnp.float32), vocab), cache


def feed_level(
    model: ModelConfig,
    params: dict,
    cache: KVCache,
    tokens: Int[Array, "B n"],
    base: Int[Array, "B"],
    first: int,
    bits: Bool[Array, "B T T"],
    vocab: int,
) -> tuple[Float[Array, "B n V"], KVCache]:
    """Logits after the tree's nodes ``first … first + n − 1``, the levels above being fed.

    ``base`` is the root's slot and position, ``bits`` the ancestors of all nodes so far.
    """
    positions = base[:, None] + bits.sum(-1, dtype=jnp.int32) - 1
    new = slice(first, first + tokens.shape[1])
    hidden, cache = forward(
        model,
        params,
        cache,
        tokens,
        positions[:, new],
        base + first,
        bits[:, new],
        base=base,
        tree_positions=positions,
    )
    return fit_vocabulary(logits_of(model, params, hidden).astype(jnp.float32), vocab), cache
