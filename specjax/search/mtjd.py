"""Multi-token joint decoding (MTJD; Qin et al. 2024, §3). Not the law of single-token sampling.

Axis legend: B rows, K tokens of a block, W beams.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax import probs
from specjax.decode import clip, emit, path_logprobs
from specjax.draft.beam import Beam
from specjax.models import ModelConfig, init_cache
from specjax.models.cache import commit_path
from specjax.models.forward import prefill
from specjax.probs import Purpose
from specjax.scoring import score
from specjax.search.counting import count_targets
from specjax.types import DecodeState, Inputs, Verdict

EXACT = 4096  # up to so many continuations V^K the joint is enumerated


@dataclasses.dataclass(frozen=True)
class MTJD:
    """K tokens at a time from the target's joint ``p(x_{t+1:t+K})``.

    Greedy rows take the likeliest block of ``width`` beams, sampled rows draw one of the
    beams by its joint probability. The search is exact where V^K is small. A block ends with
    the sequence or the budget.
    """

    model: ModelConfig
    vocab_limit: int
    block: int = 4
    beam_width: int = 8
    reserves = False

    @property
    def beams(self) -> Beam:
        vocab = self.model.vocab_size
        exact = vocab**self.block <= EXACT
        return Beam(
            model=self.model,
            vocab=vocab,
            vocab_limit=self.vocab_limit,
            gamma=self.block,
            width=vocab**self.block if exact else self.beam_width,
            drawn=False,
            of_target=True,
        )

    @property
    def width(self) -> int:
        return self.beams.nodes + 1

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> DecodeState:
        rows, slots = state.tokens.shape
        cache = init_cache(self.model, rows, slots, inputs.target["embed"].dtype)
        cache = prefill(self.model, inputs.target, cache, state.tokens, state.length, chunk)
        return state.replace(cache=cache)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        start, left = state.length - 1, state.max_length - state.length
        draft, beams = self.beams.search(inputs, state, keys, state.cache, limit=left)
        u = probs.uniforms(keys, Purpose.SEARCH, jnp.zeros_like(left)[:, None])[:, 0]
        best = jnp.argmax(beams.score, axis=1)
        share = jnp.exp(beams.score - beams.score.max(-1, keepdims=True))
        chosen = jnp.where(inputs.warp.temperature == 0, best, probs.sample(share, u))
        chain, path = self.beams.follow(draft, beams, chosen)
        verdict = Verdict(
            path=jnp.broadcast_to(jnp.arange(self.block + 1), chain.tokens.shape),
            num_accepted=jnp.zeros_like(left),
            num_tested=jnp.zeros_like(left),
            tokens=jnp.roll(chain.tokens, -1, axis=1),
            num_tokens=chain.valid[:, 1:].sum(-1, dtype=jnp.int32),
        )
        emitted, finish = clip(inputs, state, verdict)
        cache, logprobs = commit_path(beams.cache, start, path), None
        if state.logprobs is not None:
            logits, cache = score(self.model, inputs.target, cache, start, chain)
            logprobs = path_logprobs(logits, verdict)
        stats = count_targets(state, emitted, beams.calls, self.block)
        return emit(state, verdict, emitted, finish, logprobs).replace(cache=cache, stats=stats)

    def finalize(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return state
