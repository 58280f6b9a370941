"""Lookup drafting: copy what followed the same words before (prompt lookup decoding).

Axis legend: B rows, S token slots, γ draft length, n length of the matched n-gram.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax import probs, tree
from specjax.protocols import Proposal
from specjax.stopping import is_eos
from specjax.types import POINT_MASS, Draft, TreeShape


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The γ tokens after the most recent earlier occurrence of the row's last n tokens.

    The longest n from ``ngram`` down to 1 that occurs decides; without a match there is no
    draft. The tokens are certain, so q is a point mass and no model is run.
    """

    gamma: int = 10
    ngram: int = 3
    name = "lookup"
    law = POINT_MASS
    num_probes = 0
    ends_early = True

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chain(self.gamma)

    def init(self, inputs, state, chunk):
        return ()

    def propose(self, inputs, state, keys):
        rows = state.length.shape[0]
        end, found = self._match(state)
        at = end[:, None] + 1 + jnp.arange(self.gamma, dtype=jnp.int32)
        drafted = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
        ended = is_eos(drafted, inputs.eos_ids)
        after_eos = jnp.cumsum(ended, axis=1) - ended > 0
        valid = found[:, None] & (at < state.length[:, None]) & ~after_eos
        root = probs.at_token(state.tokens, state.length - 1)[:, None]
        draft = Draft(
            tokens=jnp.concatenate([root, jnp.where(valid, drafted, 0)], axis=1),
            parents=tree.chain_parents(rows, self.gamma + 1),
            valid=jnp.concatenate([jnp.ones((rows, 1), bool), valid], axis=1),
            shape=self.shape,
            q_row=(0, *range(self.gamma)),
            law=self.law,
        )
        return Proposal(draft, (), jnp.zeros((rows,), jnp.int32), jnp.int32(0))

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        return ()

    def _match(self, state):
        """The slot where the chosen earlier n-gram ends, and whether there is one."""
        slot = jnp.arange(state.slots, dtype=jnp.int32)
        earlier = slot < (state.length - 1)[:, None]
        same = jnp.ones_like(earlier)
        end = jnp.zeros_like(state.length)
        found = jnp.zeros_like(state.done)
        for n in range(1, self.ngram + 1):
            # The n-th last token against the token n - 1 slots before each slot.
            last = probs.at_token(state.tokens, jnp.maximum(state.length - n, 0))[:, None]
            back = jnp.roll(state.tokens, n - 1, axis=1)
            same &= (back == last) & (slot >= n - 1)
            hit = same & earlier & (state.length >= n)[:, None]
            any_hit = jnp.any(hit, axis=1)
            newest = jnp.max(jnp.where(hit, slot, 0), axis=1)
            end, found = jnp.where(any_hit, newest, end), found | any_hit
        return end, found
