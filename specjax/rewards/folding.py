"""Rewards inside the device loop: folds over the generated tokens.

Axis legend: B rows, K lanes, M tokens of a lane.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Fold(Protocol):
    """A reward as a fold over the tokens that one row has generated, in order.

    Written for a single row, without batch axes; the loop maps it over rows and lookaheads.
    Frozen and hashable; arrays come in as ``shared`` (the same for every row, such as a table
    over the vocabulary) and ``own`` (this row's, such as the words it needs). Whatever it keeps
    of the tokens has a fixed size, so a lookahead costs its own length and never the row's.
    """

    def init(self, shared: Any, own: Any) -> Any:
        """What it knows before the first generated token."""

    def advance(self, shared: Any, own: Any, carry: Any, token: Int[Array, ""]) -> Any:
        """What it knows after one more token."""

    def value(self, shared: Any, own: Any, carry: Any) -> Float[Array, ""]:
        """float32, higher is better; NaN counts as −inf."""


class Data(NamedTuple):
    """A fold's arrays; those in ``own`` have a leading axis of B rows."""

    shared: Any
    own: Any


@dataclasses.dataclass(frozen=True)
class Together:
    """Several folds as one: their sum, or their product."""

    parts: tuple[Fold, ...]
    product: bool = False

    def init(self, shared, own):
        return tuple(p.init(s, o) for p, s, o in zip(self.parts, shared, own, strict=True))

    def advance(self, shared, own, carry, token):
        each = zip(self.parts, shared, own, carry, strict=True)
        return tuple(part.advance(s, o, c, token) for part, s, o, c in each)

    def value(self, shared, own, carry):
        each = zip(self.parts, shared, own, carry, strict=True)
        values = jnp.stack([jnp.asarray(p.value(s, o, c), jnp.float32) for p, s, o, c in each])
        total = jnp.prod(values) if self.product else jnp.sum(values)
        # −inf · 0 and −inf + inf would be NaN anyway: what one part refuses is refused.
        refused = jnp.any(jnp.isnan(values) | (values == -jnp.inf))
        return jnp.where(refused, -jnp.inf, total)


def start_all(fold: Fold, data: Data, rows: int) -> Any:
    """The fold of every row before its first token."""
    carry = jax.vmap(fold.init, in_axes=(None, 0), axis_size=rows)(data.shared, data.own)
    return jax.tree.map(jnp.asarray, carry)


def advance_all(
    fold: Fold, data: Data, carry: Any, tokens: Int[Array, "B K M"], count: Int[Array, "B K"]
) -> Any:
    """The folds ``[B, K, ...]`` of each row's ``carry`` after the first ``count`` tokens."""
    longest = jnp.max(count)

    def lane(own, carry, tokens, count):
        def push(i, carry):
            after = fold.advance(data.shared, own, carry, tokens[i])
            return jax.tree.map(lambda new, old: jnp.where(i < count, new, old), after, carry)

        return jax.lax.fori_loop(0, longest, push, carry)

    lanes = jax.vmap(lane, in_axes=(None, None, 0, 0))
    return jax.vmap(lanes)(data.own, carry, tokens, count)


def values_of(fold: Fold, data: Data, carry: Any) -> Float[Array, "B K"]:
    """The rewards of folds ``[B, K, ...]``; NaN becomes −inf."""
    value = jax.vmap(fold.value, in_axes=(None, None, 0))
    values = jax.vmap(value, in_axes=(None, 0, 0))(data.shared, data.own, carry)
    values = values.astype(jnp.float32)
    return jnp.where(jnp.isnan(values), -jnp.inf, values)
