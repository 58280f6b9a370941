"""Chain drafting: a draft model draws γ tokens one after another (Leviathan et al. 2023 §2).

Axis legend: B rows, N = γ + 1 nodes, S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import probs, tree
from specjax.draft.feeding import feed_pair, feed_token, last_two
from specjax.errors import PairError
from specjax.models import KVCache, ModelConfig, init_cache
from specjax.models.forward import prefill
from specjax.probs import Purpose
from specjax.protocols import Proposal
from specjax.stopping import is_eos
from specjax.types import IID, Draft, TreeShape
from specjax.warp import limit_vocabulary, warp

# When a row's draft ends early: never, before or after a token that the draft is unsure of.
NEVER_STOPS, STOPS_BEFORE, STOPS_AFTER = "never", "before", "after"


@dataclasses.dataclass(frozen=True)
class Chain:
    """γ tokens drawn from a draft model with the target's warp, or none (``warped=False``).

    The first draft pass feeds the row's last two tokens, every other the one just drawn (on a
    CPU two tokens cost half as much again as one). A row's chain ends at its first
    end-of-sequence token; with ``stop``, also where the draft's largest probability, unwarped,
    is below the setting ``tau1`` (BiLD's fallback, Kim et al. 2023 §3.2; lossless under a
    lossless rule, for it reads the prefix alone). The loop ends when every row's chain has.
    """

    model: ModelConfig
    vocab: int  # the target's V
    vocab_limit: int
    gamma: int = 4
    stop: str = NEVER_STOPS
    warped: bool = True
    keep_logits: bool = False
    name = "chain"
    law = IID
    num_probes = 0

    def __post_init__(self):
        if self.keep_logits and self.stop == STOPS_AFTER:
            raise PairError(
                "a chain that stops after an unsure token has no logits behind it, "
                "which this target distribution needs: use stop=before"
            )

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chain(self.gamma)

    @property
    def ends_early(self) -> bool:
        return self.stop != NEVER_STOPS

    def init(self, inputs, state, chunk):
        rows, slots = state.tokens.shape
        cache = init_cache(self.model, rows, slots, inputs.draft["embed"].dtype)
        return prefill(self.model, inputs.draft, cache, state.tokens, state.length, chunk)

    def propose(self, inputs, state, keys):
        rows = state.length.shape[0]
        start = _Drawing(
            step=jnp.int32(0),
            cache=state.drafter,
            window=jnp.pad(last_two(state), ((0, 0), (0, self.gamma))),
            valid=jnp.zeros((rows, self.gamma), bool),
            log_q=jnp.full((rows, self.gamma, self.vocab), probs.NEVER, jnp.float32),
            logits=self._no_logits(rows),
            alive=~state.done,
            calls=jnp.zeros((rows,), jnp.int32),
        )
        steps = self.gamma + self.keep_logits  # the bonus leaf's logits cost one call more

        def more(d):
            return (d.step < steps) & jnp.any(d.alive)

        def follow(d):
            fed = d.window[:, d.step + 1]
            at = state.length - 1 + d.step
            logits = feed_token(self.model, inputs.draft, d.cache, fed, at, self.vocab)
            return self._draw(inputs, keys, d, *logits)

        first = feed_pair(
            self.model, inputs.draft, start.cache, start.window, state.length - 2, 0, self.vocab
        )
        end = jax.lax.while_loop(more, follow, self._draw(inputs, keys, start, *first))
        draft = Draft(
            tokens=end.window[:, 1:],
            parents=tree.chain_parents(rows, self.gamma + 1),
            valid=jnp.concatenate([jnp.ones((rows, 1), bool), end.valid], axis=1),
            log_q=end.log_q,
            logits=end.logits,
            shape=self.shape,
            q_row=(0, *range(self.gamma)),
            law=self.law,
        )
        return Proposal(draft, end.cache, end.calls, end.step)

    def _no_logits(self, rows):
        if not self.keep_logits:
            return None
        return jnp.zeros((rows, self.gamma + 1, self.vocab), jnp.float32)

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        return carried

    def _draw(
        self, inputs, keys, d: _Drawing, logits: Float[Array, "B V"], cache: KVCache
    ) -> _Drawing:
        """The token drawn after one draft pass: node ``step + 1``.

        Writes past γ (the pass that only scores the bonus leaf) are dropped.
        """
        q = self._law(inputs, logits)
        drawn = d.alive & self._sure(inputs, logits) if self.stop == STOPS_BEFORE else d.alive
        node = jnp.broadcast_to(d.step + 1, (q.shape[0], 1))
        x = probs.sample(jnp.exp(q), probs.uniforms(keys, Purpose.DRAFT, node)[:, 0])
        x = jnp.where(drawn, x, 0)
        going = drawn & ~is_eos(x, inputs.eos_ids)
        return _Drawing(
            step=d.step + 1,
            cache=cache,
            window=d.window.at[:, d.step + 2].set(x, mode="drop"),
            valid=d.valid.at[:, d.step].set(drawn, mode="drop"),
            log_q=d.log_q.at[:, d.step].set(q, mode="drop"),
            logits=None if d.logits is None else d.logits.at[:, d.step].set(logits),
            alive=going & self._sure(inputs, logits) if self.stop == STOPS_AFTER else going,
            calls=d.calls + d.alive,
        )

    def _law(self, inputs, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        if self.warped:
            return warp(logits[:, None], inputs.warp, self.vocab_limit)[:, 0]
        return probs.log_softmax(limit_vocabulary(logits, self.vocab_limit))

    def _sure(self, inputs, logits: Float[Array, "B V"]) -> Bool[Array, "B"]:
        """Whether the draft's largest probability, at temperature 1, reaches ``tau1``."""
        known = limit_vocabulary(logits, self.vocab_limit)
        return jnp.exp(probs.log_softmax(known).max(-1)) >= inputs.settings["tau1"]


class _Drawing(NamedTuple):
    """The draft loop's carry. ``window`` holds the last two committed tokens, then the draft."""

    step: Int[Array, ""]
    cache: KVCache
    window: Int[Array, "B γ+2"]
    valid: Bool[Array, "B γ"]
    log_q: Float[Array, "B γ V"]
    logits: Float[Array, "B γ+1 V"] | None
    alive: Bool[Array, "B"]
    calls: Int[Array, "B"]
