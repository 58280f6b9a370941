"""Multi-token joint decoding (MTJD; Qin et al. 2024, §3).

Lossy: its output is not distributed as that of token-by-token sampling.

Axis legend: B rows, K tokens of a block, W beams.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax._util.arguments import COUNT, validate_fields
from specjax._util.checks import Check
from specjax.core import probs
from specjax.core.commit import Cost, finish_round, path_logprobs
from specjax.core.probs import Purpose
from specjax.core.protocols import Method
from specjax.core.scoring import score
from specjax.core.types import DecodeState, Inputs, Verdict
from specjax.core.warp import warp_joint
from specjax.draft.beam import JOINTS, Beam
from specjax.models.cache import commit_path

ENUMERATED = 4096  # if there are at most this many continuations V^K, all of them are beams


@dataclasses.dataclass(frozen=True)
class MTJD(Method):
    """K tokens at a time from the target's joint ``p(x_{t+1:t+K})``.

    A beam search finds ``beam_width`` blocks. A greedy row takes the likeliest. A sampled row draws
    one by its joint probability. With ``raw`` that is the unwarped joint, warped as a whole. With
    ``warped`` it is the product of warped conditionals. A block ends early at an end of sequence
    or at the budget.
    """

    block: int = 4
    beam_width: int = 8
    joint: str = "raw"

    def __post_init__(self):
        validate_fields(self, block=COUNT, beam_width=COUNT, joint=Check(str, choices=JOINTS))

    @classmethod
    def over(cls, vocab: int, block: int, beam_width: int, joint: str) -> MTJD:
        """The method for a vocabulary of ``vocab`` tokens.

        If it is small (:data:`ENUMERATED`), all continuations are beams and the search is exact.
        """
        every = vocab**block
        width = every if every <= ENUMERATED else beam_width
        return cls(block, width, joint)

    @property
    def beams(self) -> Beam:
        return Beam(
            gamma=self.block,
            width=self.beam_width,
            joint=self.joint,
            drawn=False,
            of_target=True,
        )

    @property
    def round_positions(self) -> int:
        return self.beams.round_positions + 1

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        start = state.length - 1
        left = state.max_length - state.length
        draft, beams = self.beams.search(inputs, state, keys, state.cache, limit=left)

        # Sampling needs no normalized weights. The best beam has weight 1, so they cannot all be 0.
        u = probs.uniforms(keys, Purpose.SEARCH, jnp.zeros_like(left)[:, None])[:, 0]
        best = jnp.argmax(beams.score, axis=1)
        joint = warp_joint(beams.score, inputs.warp) if self.joint == "raw" else beams.score
        weights = jnp.exp(joint - joint.max(-1, keepdims=True))
        chosen = jnp.where(inputs.warp.greedy, best, probs.sample(weights, u))
        chain, path = self.beams.beam_as_chain(draft, beams, chosen)

        # The block counts as written by the target: no draft token was tested.
        verdict = Verdict(
            path=jnp.broadcast_to(jnp.arange(self.block + 1), chain.tokens.shape),
            num_accepted=jnp.zeros_like(left),
            num_tested=jnp.zeros_like(left),
            tokens=jnp.roll(chain.tokens, -1, axis=1),
            num_tokens=chain.valid[:, 1:].sum(-1, dtype=jnp.int32),
        )
        cache = commit_path(beams.cache, start, path)
        logprobs = None
        if state.logprobs is not None:
            logits, cache, _ = score(inputs.target, cache, start, chain)
            logprobs = path_logprobs(logits, verdict)
        cost = Cost(beams.calls, self.block)
        return finish_round(inputs, state, verdict, logprobs, cost).replace(cache=cache)
