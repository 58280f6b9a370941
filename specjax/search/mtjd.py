"""Multi-token joint decoding (MTJD; Qin et al. 2024, §3.1).

Lossy for K > 1: its output is not distributed as that of token-by-token sampling.

Axis legend: B rows, K tokens of a block, W beams, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from specjax._util.arguments import COUNT, FLAG, validate_fields
from specjax._util.checks import Check
from specjax._util.errors import OptionError
from specjax.core import probs
from specjax.core.commit import Cost, finish_round, path_logprobs
from specjax.core.probs import Purpose
from specjax.core.protocols import Method
from specjax.core.sampling import Sampling
from specjax.core.scoring import score
from specjax.core.types import DecodeState, Inputs, Verdict
from specjax.core.warp import reweigh_draws, warp, warp_joint
from specjax.draft.beam import JOINTS, Beam, Beams, Continuations
from specjax.draft.model_drafter import unwarped_in
from specjax.models.cache import commit_path

ENUMERATED = 4096  # if there are at most this many continuations V^K, all of them are beams


@dataclasses.dataclass(frozen=True)
class Blocks(Beam):
    """W blocks of the target: the likeliest ones, or in rows of :meth:`drawn_rows` W draws.

    ``exact``: all V^K blocks are beams, so nothing needs to be drawn.
    """

    drawn: bool = False
    of_target: bool = True
    exact: bool = False

    def drawn_rows(self, inputs: Inputs, limit: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Rows whose blocks are drawn token by token.

        A joint top-k needs the k likeliest blocks, which only a search can find. A block of one
        token has the warped distribution itself.
        """
        searched = (inputs.warp.top_k > 0) & self.whole_rows(limit)
        return ~inputs.warp.greedy & ~searched & (not self.exact)

    def whole_rows(self, limit: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Rows that warp the joint of several tokens as a whole, and not each token."""
        return (limit > 1) & (self.joint == "raw" and self.gamma > 1)

    def continuations(self, inputs, keys, beams, logits, step) -> Continuations:
        def searched():
            return Beam.continuations(self, inputs, keys, beams, logits, step)

        if self.exact:
            return searched()
        rows = self.drawn_rows(inputs, beams.limit)

        def both():
            by_draw = self._draw(inputs, keys, beams, logits, step)
            return jax.tree.map(lambda a, b: jnp.where(rows[:, None], a, b), by_draw, searched())

        return jax.lax.cond(jnp.any(rows), both, searched)

    def _draw(self, inputs, keys, beams, logits, step) -> Continuations:
        """Each beam continues itself by one token of its own; the first step makes W beams."""
        log_q = unwarped_in(self.whole_rows(beams.limit), logits, warp(logits, inputs.warp))
        count = log_q.shape[1]
        beam = jnp.arange(self.width)
        index = jnp.broadcast_to(step * self.width + beam, (len(log_q), self.width))
        u = probs.uniforms(keys, Purpose.DRAFT, index)

        source = jnp.broadcast_to(beam if count > 1 else 0 * beam, index.shape)
        of_beam = jnp.broadcast_to(log_q, (len(log_q), self.width, log_q.shape[-1]))
        token = probs.sample(jnp.exp(of_beam), u)
        log_q_token = probs.at_token(of_beam, token)
        ended = jnp.broadcast_to(beams.ended, index.shape)
        return Continuations(
            source=source,
            token=token,
            score=beams.score + jnp.where(ended, 0.0, log_q_token),
            log_q=log_q_token,
            possible=jnp.ones_like(ended),
        )


@dataclasses.dataclass(frozen=True)
class MTJD(Method):
    """K tokens at a time from the target's joint ``p(x_{t+1:t+K})``.

    A greedy row takes the likeliest block that a beam search of width W finds. A sampled row draws
    a block from ``T ∘ p(x_{t+1:t+K})`` (eq. 2), the joint warped as a whole, or with ``warped``
    from the product of warped conditionals. A block ends early at an end of sequence or at the
    budget. How a sampled row draws:

    * V^K ≤ :data:`ENUMERATED`: from all blocks, exactly.
    * K = 1, or ``warped``: token by token from the warped distribution, exactly.
    * top-k: from the k likeliest blocks that the search finds, which takes W ≥ k.
    * otherwise: W blocks are drawn from the joint, and one of them by
      :func:`specjax.core.warp.reweigh_draws`. Exact at temperature 1 without top-p.
    """

    block: int = 4
    beam_width: int = 8
    joint: str = "raw"
    exact: bool = False  # all blocks are beams

    def __post_init__(self):
        joint = Check(str, choices=JOINTS)
        validate_fields(self, block=COUNT, beam_width=COUNT, joint=joint, exact=FLAG)

    @property
    def name(self) -> str:
        return "mtjd"

    @classmethod
    def over(cls, vocab: int, block: int, beam_width: int, joint: str) -> MTJD:
        """The method for a vocabulary of ``vocab`` tokens.

        If it is small (:data:`ENUMERATED`), all blocks are beams and the search is exact. Blocks of
        one token need no beams.
        """
        if block == 1:
            return cls(block, 1, joint)
        every = vocab**block
        if every <= ENUMERATED:
            return cls(block, every, joint, exact=True)
        return cls(block, beam_width, joint)

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises OptionError if blocks cannot be drawn with these settings."""
        super().check_sampling(sampling)
        searched = self.joint == "raw" and self.block > 1 and not self.exact
        if not searched or sampling.temperature == 0:
            return
        if sampling.has_cutoffs and not sampling.top_k:
            raise OptionError(
                "mtjd draws blocks from the joint, which has no min_p and no other cutoff: give "
                "top_k, or joint=warped"
            )
        if sampling.top_k > self.beam_width:
            raise OptionError(
                f"mtjd draws from the top_k={sampling.top_k} likeliest blocks, and width="
                f"{self.beam_width} beams find no more than that: raise width, or lower top_k"
            )

    @property
    def beams(self) -> Blocks:
        return Blocks(gamma=self.block, width=self.beam_width, joint=self.joint, exact=self.exact)

    @property
    def round_positions(self) -> int:
        return self.beams.round_positions + 1

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        start = state.length - 1
        left = state.max_length - state.length
        draft, beams = self.beams.search(inputs, state, keys, state.cache, limit=left)

        chosen = self._choose(inputs, keys, beams)
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

    def _choose(self, inputs: Inputs, keys: Key[Array, "B"], beams: Beams) -> Int[Array, "B"]:
        """The beam of each row: the likeliest, or one that is drawn."""
        joint = beams.score
        if self.joint == "raw":
            joint = warp_joint(joint, inputs.warp)
        # Drawn blocks come as often as they are likely, so their weights are those of eq. 2 alone.
        drawn = self.beams.drawn_rows(inputs, beams.limit)
        whole = self.beams.whole_rows(beams.limit)
        reweighed = jnp.where(whole[:, None], reweigh_draws(beams.score, inputs.warp), 0.0)
        joint = jnp.where(drawn[:, None], reweighed, joint)

        # Sampling needs no normalized weights. The best beam has weight 1, so they cannot all be 0.
        u = probs.uniforms(keys, Purpose.SEARCH, jnp.zeros_like(beams.limit)[:, None])[:, 0]
        weights = jnp.exp(joint - joint.max(-1, keepdims=True))
        best = jnp.argmax(beams.score, axis=1)
        return jnp.where(inputs.warp.greedy, best, probs.sample(weights, u))
