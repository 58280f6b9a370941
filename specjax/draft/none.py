"""No draft: every round is the target's own next token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax import probs, tree
from specjax.protocols import Proposal
from specjax.types import POINT_MASS, Draft, TreeShape


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """The root alone: with any lossless rule this is plain autoregressive decoding."""

    name = "none"
    law = POINT_MASS
    num_probes = 0
    shape = TreeShape.chain(0)

    def init(self, inputs, state, chunk):
        return ()

    def propose(self, inputs, state, keys):
        rows = state.length.shape[0]
        root = probs.at_token(state.tokens, state.length - 1)[:, None]
        draft = Draft(
            tokens=root,
            parents=tree.chain_parents(rows, 1),
            valid=jnp.ones((rows, 1), bool),
            shape=self.shape,
            q_row=(0,),
            law=self.law,
        )
        return Proposal(draft, (), jnp.zeros((rows,), jnp.int32), jnp.int32(0))

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        return ()
