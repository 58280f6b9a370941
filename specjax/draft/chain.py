"""Chain drafting: a draft model draws γ tokens one after another (Leviathan et al. 2023 §2).

Axis legend: B rows, N = γ + 1 nodes, S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax import probs, tree
from specjax.cache import prefill
from specjax.models import ModelConfig, forward, init_cache, logits_of
from specjax.probs import Purpose
from specjax.protocols import Proposal
from specjax.types import IID, Draft, TreeShape
from specjax.warp import fit_vocabulary, warp


def is_eos(tokens: Int[Array, "..."], eos_ids: Int[Array, "E"]) -> Bool[Array, "..."]:
    """Whether each token ends a sequence."""
    return jnp.any(tokens[..., None] == eos_ids, axis=-1)


@dataclasses.dataclass(frozen=True)
class Chain:
    """γ tokens drawn from a draft model with the target's warp.

    The draft's cache holds every token before the last two: the first pass of a round feeds
    those two, so a fully accepted draft leaves no hole. A row's chain ends at its first
    end-of-sequence token; the loop ends when every row's has.
    """

    model: ModelConfig
    vocab: int  # the target's V
    vocab_limit: int
    gamma: int = 4
    keep_logits: bool = False
    law = IID
    num_probes = 0

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chain(self.gamma)

    def init(self, inputs, state, chunk):
        rows, slots = state.tokens.shape
        cache = init_cache(self.model, rows, slots, inputs.draft["embed"].dtype)
        return prefill(self.model, inputs.draft, cache, state.tokens, state.length, chunk)

    def propose(self, inputs, state, keys):
        logits, cache = self._catch_up(inputs, state)
        rows = state.length.shape[0]
        tokens = jnp.zeros((rows, self.gamma + 1), jnp.int32)
        tokens = tokens.at[:, 0].set(probs.at_token(state.tokens, state.length - 1))
        valid = jnp.zeros((rows, self.gamma + 1), bool).at[:, 0].set(True)
        log_q = jnp.full((rows, self.gamma, self.vocab), probs.NEVER, jnp.float32)
        kept = jnp.zeros((rows, self.gamma + 1, self.vocab), jnp.float32)
        kept = kept.at[:, 0].set(logits) if self.keep_logits else None
        alive = ~state.done

        def draw(i, logits, tokens, valid, log_q, alive):
            """Node i + 1 from the logits after node i."""
            q = warp(logits[:, None], inputs.warp, self.vocab_limit)[:, 0]
            u = probs.uniforms(keys, Purpose.DRAFT, jnp.broadcast_to(i + 1, (rows, 1)))[:, 0]
            x = probs.sample(jnp.exp(q), u)
            tokens = tokens.at[:, i + 1].set(jnp.where(alive, x, 0))
            valid = valid.at[:, i + 1].set(alive)
            return tokens, valid, log_q.at[:, i].set(q), alive & ~is_eos(x, inputs.eos_ids)

        def more(carry):
            i, *_, alive, _ = carry
            return (i < self.gamma) & jnp.any(alive)

        def extend(carry):
            i, cache, kept, tokens, valid, log_q, alive, calls = carry
            calls = calls + alive
            logits, cache = self._feed(inputs, cache, tokens[:, i], state.length - 1 + i)
            kept = kept if kept is None else kept.at[:, i].set(logits)
            return i + 1, cache, kept, *draw(i, logits, tokens, valid, log_q, alive), calls

        calls = alive.astype(jnp.int32)
        first = draw(0, logits, tokens, valid, log_q, alive)
        carry = (jnp.int32(1), cache, kept, *first, calls)
        i, cache, kept, tokens, valid, log_q, alive, calls = jax.lax.while_loop(more, extend, carry)
        passes = i
        if self.keep_logits:  # the bonus leaf's logits: one call further
            last = probs.at_token(tokens, jnp.full((rows,), self.gamma))
            logits, cache = self._feed(inputs, cache, last, state.length - 1 + self.gamma)
            kept = kept.at[:, self.gamma].set(logits)
            calls, passes = calls + ~state.done, passes + 1
        draft = Draft(
            tokens=tokens,
            parents=tree.chain_parents(rows, self.gamma + 1),
            valid=valid,
            log_q=log_q,
            logits=kept,
            shape=self.shape,
            q_row=(0, *range(self.gamma)),
            law=self.law,
        )
        return Proposal(draft, cache, calls, passes)

    def update(self, inputs, state, draft, verdict, probe_logits):
        return state

    def _catch_up(self, inputs, state):
        """Feeds each row's last two tokens; a one-token row feeds its only one first."""
        start = jnp.maximum(state.length - 2, 0)
        at = start[:, None] + jnp.arange(2, dtype=jnp.int32)
        two = jnp.take_along_axis(state.tokens, at, axis=1)
        hidden, cache = forward(self.model, inputs.draft, state.drafter, two, at, start)
        last = jnp.take_along_axis(hidden, (state.length - 1 - start)[:, None, None], axis=1)
        return self._logits(inputs, last), cache

    def _feed(self, inputs, cache, token, start):
        hidden, cache = forward(
            self.model, inputs.draft, cache, token[:, None], start[:, None], start
        )
        return self._logits(inputs, hidden), cache

    def _logits(self, inputs, hidden):
        logits = logits_of(self.model, inputs.draft, hidden)[:, 0]
        return fit_vocabulary(logits.astype(jnp.float32), self.vocab)
