"""Lookup drafting: copy what followed the same words before (prompt lookup decoding).

Axis legend: B rows, S token positions, γ draft length, n length of the matched n-gram.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax._util.arguments import COUNT, validate_fields
from specjax.core import probs
from specjax.core.protocols import Drafter, Proposal
from specjax.core.types import POINT_MASS, DecodeState, Draft, TreeShape

# How often the token after a match of 1, 2, 3 and more tokens is accepted: about what SmolLM2 gave
# (docs/pages/lookup.md).
ACCEPTANCE_BY_MATCH = (0.15, 0.5, 0.75, 0.85)


@dataclasses.dataclass(frozen=True)
class Lookup(Drafter):
    """The γ tokens after the most recent earlier occurrence of the row's last n tokens.

    n is the largest number up to ``ngram`` for which there is such an occurrence. Without any match
    there is no draft. The tokens are certain, so q is a point mass and no model is run.
    """

    gamma: int = 10
    ngram: int = 3
    name = "lookup"
    sampling = POINT_MASS
    ends_early = True
    # The rule draws each token for its place. So what is written does not depend on the drafts.
    usual_rule = "match"
    splits_vocabulary = True

    def __post_init__(self):
        validate_fields(self, gamma=COUNT, ngram=COUNT)

    @property
    def shape(self) -> TreeShape:
        """A chain of γ nodes."""
        return TreeShape.chain(self.gamma)

    @property
    def prior_acceptance(self) -> tuple[float, ...]:
        """By the length of the match."""
        return ACCEPTANCE_BY_MATCH[: self.ngram]

    def propose(self, inputs, state, keys) -> Proposal:
        end, length = self._match(state)
        at = end[:, None] + 1 + jnp.arange(self.gamma, dtype=jnp.int32)
        drafted = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
        # The first end of sequence is drafted, nothing after it. Tokens past the row's length are
        # scratch.
        ended = inputs.is_eos(drafted)
        after_eos = jnp.cumsum(ended, axis=1) - ended > 0
        valid = (length > 0)[:, None] & (at < state.length[:, None]) & ~after_eos
        root = probs.at_index(state.tokens, state.length - 1)
        draft = Draft.chain(jnp.where(valid, drafted, 0), root=root, valid=valid)
        confidence = jnp.minimum(length, len(self.prior_acceptance)) - 1
        return Proposal(draft, confidence=confidence)

    def _match(self, state: DecodeState) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """The position where the chosen earlier n-gram ends, and n; 0 if there is none."""
        position = jnp.arange(state.capacity, dtype=jnp.int32)
        # Not the row's last position: there the n-gram would match itself.
        earlier = position < (state.length - 1)[:, None]
        same = jnp.ones_like(earlier)
        end = jnp.zeros_like(state.length)
        length = jnp.zeros_like(state.length)
        for n in range(1, self.ngram + 1):
            # `same`: the last n tokens equal those that end at each position. From n − 1 to n only
            # one more token is compared. A longer match replaces a shorter one.
            last = probs.at_index(state.tokens, jnp.maximum(state.length - n, 0))[:, None]
            earlier_token = jnp.roll(state.tokens, n - 1, axis=1)
            same &= (earlier_token == last) & (position >= n - 1)
            hit = same & earlier & (state.length >= n)[:, None]
            any_hit = jnp.any(hit, axis=1)
            newest = jnp.max(jnp.where(hit, position, 0), axis=1)
            end = jnp.where(any_hit, newest, end)
            length = jnp.where(any_hit, n, length)
        return end, length
