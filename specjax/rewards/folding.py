"""Rewards computed token by token on the device, inside the jitted loop.

A lookahead search asks for the reward of several candidate continuations of each row.

Axis legend: B rows, K continuations of a row, M tokens of one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Fold(Protocol):
    """A reward computed token by token on the device, as ``functools.reduce`` would.

    It is written for a single row, without batch axes; the loop maps it over rows and their
    continuations. It is frozen and hashable, because it is static in the compiled loop. Its arrays
    are arguments:

    - ``shared``: the same for every row, such as a table over the vocabulary.
    - ``own``: of one row, such as the words that it must contain.
    - ``carry``: what the reward keeps of the tokens so far. Its size is fixed, so a continuation
      costs its own length, and not the length of the completion before it.
    """

    def init(self, shared: Any, own: Any) -> Any:
        """The carry before the first generated token."""

    def advance(self, shared: Any, own: Any, carry: Any, token: Int[Array, ""]) -> Any:
        """The carry after one more token."""

    def value(self, shared: Any, own: Any, carry: Any) -> Float[Array, ""]:
        """The reward of the tokens so far, float32; higher is better, NaN counts as −inf."""
        ...


class Data(NamedTuple):
    """The arrays of a :class:`Fold` for a batch."""

    shared: Any  # the same for every row
    own: Any  # with a leading axis of B rows


@dataclasses.dataclass(frozen=True)
class Together:
    """Several folds computed together, as one: their sum, or their product."""

    parts: tuple[Fold, ...]
    product: bool = False

    def init(self, shared, own):
        """Each part's carry before the first token."""
        each = zip(self.parts, shared, own, strict=True)
        return tuple(part.init(s, o) for part, s, o in each)

    def advance(self, shared, own, carry, token):
        """Each part's carry after one more token."""
        each = zip(self.parts, shared, own, carry, strict=True)
        return tuple(part.advance(s, o, c, token) for part, s, o, c in each)

    def value(self, shared, own, carry):
        """The sum or product of the parts' scores, float32; −inf if a part is −inf or NaN."""
        each = zip(self.parts, shared, own, carry, strict=True)
        values = [jnp.asarray(part.value(s, o, c), jnp.float32) for part, s, o, c in each]
        values = jnp.stack(values)
        total = jnp.prod(values) if self.product else jnp.sum(values)
        # If a part is −inf or NaN, the total is −inf. Plain arithmetic would give NaN for −inf · 0
        # and −inf + inf.
        refused = jnp.any(jnp.isnan(values) | (values == -jnp.inf))
        return jnp.where(refused, -jnp.inf, total)


def start_all(fold: Fold, data: Data, rows: int) -> Any:
    """The carry of every row before its first token, ``[B, ...]``."""
    carry = jax.vmap(fold.init, in_axes=(None, 0), axis_size=rows)(data.shared, data.own)
    return jax.tree.map(jnp.asarray, carry)


def advance_all(
    fold: Fold, data: Data, carry: Any, tokens: Int[Array, "B K M"], count: Int[Array, "B K"]
) -> Any:
    """The carries ``[B, K, ...]`` after the first ``count`` tokens of each continuation.

    All continuations of a row start from its ``carry``, ``[B, ...]``.
    """
    # One loop bound for all: under vmap, a bound per continuation would run to the longest anyway.
    longest = jnp.max(count)

    def advance_one(own, carry, tokens, count):
        def push(i, carry):
            after = fold.advance(data.shared, own, carry, tokens[i])
            return jax.tree.map(lambda new, old: jnp.where(i < count, new, old), after, carry)

        return jax.lax.fori_loop(0, longest, push, carry)

    advance_all_of_row = jax.vmap(advance_one, in_axes=(None, None, 0, 0))
    return jax.vmap(advance_all_of_row)(data.own, carry, tokens, count)


def values_of(fold: Fold, data: Data, carry: Any) -> Float[Array, "B K"]:
    """The rewards ``[B, K]`` of the carries ``[B, K, ...]``, float32; NaN becomes −inf."""
    values_of_row = jax.vmap(fold.value, in_axes=(None, None, 0))
    values_of_all = jax.vmap(values_of_row, in_axes=(None, 0, 0))
    values = values_of_all(data.shared, data.own, carry).astype(jnp.float32)
    return jnp.where(jnp.isnan(values), -jnp.inf, values)
