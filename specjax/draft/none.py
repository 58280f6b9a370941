"""No draft: every round is the target's own next token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.core import probs
from specjax.core.protocols import Drafter, Proposal
from specjax.core.types import POINT_MASS, Draft, TreeShape


@dataclasses.dataclass(frozen=True)
class NoDraft(Drafter):
    """The root alone: with any lossless rule this is plain autoregressive decoding."""

    name = "none"
    sampling = POINT_MASS
    usual_rule = "match"
    splits_vocabulary = True
    shape = TreeShape.chain(0)

    def propose(self, inputs, state, keys) -> Proposal:
        root = probs.at_index(state.tokens, state.length - 1)
        nothing = jnp.zeros((root.shape[0], 0), jnp.int32)
        return Proposal(Draft.chain(nothing, root=root, valid=nothing > 0))
