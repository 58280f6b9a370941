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
from specjax.cache import prefill
from specjax.models import KVCache, ModelConfig, forward, init_cache, logits_of
from specjax.probs import Purpose
from specjax.protocols import Proposal
from specjax.types import IID, DecodeState, Draft, TreeShape
from specjax.warp import fit_vocabulary, warp


def is_eos(tokens: Int[Array, "..."], eos_ids: Int[Array, "E"]) -> Bool[Array, "..."]:
    """Whether each token ends a sequence."""
    return jnp.any(tokens[..., None] == eos_ids, axis=-1)


@dataclasses.dataclass(frozen=True)
class Chain:
    """γ tokens drawn from a draft model with the target's warp.

    Every draft pass feeds the last two tokens of the row: the one just drawn and the one
    before it. On decoding hardware that costs what one token costs, and it lets the cache
    start a round two tokens short, so that a fully accepted draft leaves no hole in it. A
    row's chain ends at its first end-of-sequence token; the loop ends when every row's has.
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
        rows = state.length.shape[0]
        start = _Drawing(
            step=jnp.int32(0),
            cache=state.drafter,
            window=jnp.pad(_last_two(state), ((0, 0), (0, self.gamma))),
            valid=jnp.zeros((rows, self.gamma), bool),
            log_q=jnp.full((rows, self.gamma, self.vocab), probs.NEVER, jnp.float32),
            logits=self._no_logits(rows),
            alive=~state.done,
            calls=jnp.zeros((rows,), jnp.int32),
        )
        steps = self.gamma + self.keep_logits  # the bonus leaf's logits cost one call more

        def more(d):
            return (d.step < steps) & jnp.any(d.alive)

        end = jax.lax.while_loop(more, lambda d: self._draw(inputs, state, keys, d), start)
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

    def update(self, inputs, state, draft, verdict, probe_logits):
        return state

    def _draw(self, inputs, state, keys, d: _Drawing) -> _Drawing:
        """One draft pass, and the token it draws: node ``step + 1``.

        Writes past γ (the pass that only scores the bonus leaf) are dropped.
        """
        logits, cache = self._pass(inputs, state, d)
        q = warp(logits[:, None], inputs.warp, self.vocab_limit)[:, 0]
        node = jnp.broadcast_to(d.step + 1, (q.shape[0], 1))
        x = probs.sample(jnp.exp(q), probs.uniforms(keys, Purpose.DRAFT, node)[:, 0])
        x = jnp.where(d.alive, x, 0)
        return _Drawing(
            step=d.step + 1,
            cache=cache,
            window=d.window.at[:, d.step + 2].set(x, mode="drop"),
            valid=d.valid.at[:, d.step].set(d.alive, mode="drop"),
            log_q=d.log_q.at[:, d.step].set(q, mode="drop"),
            logits=None if d.logits is None else d.logits.at[:, d.step].set(logits),
            alive=d.alive & ~is_eos(x, inputs.eos_ids),
            calls=d.calls + d.alive,
        )

    def _pass(self, inputs, state, d: _Drawing):
        """Feeds each row's last two tokens; a row of one token feeds that one first."""
        first = state.length - 2 + d.step
        start = jnp.maximum(first, 0)
        two = jnp.arange(2, dtype=jnp.int32)
        inside = d.step + (start - first)[:, None] + two
        tokens = jnp.take_along_axis(d.window, inside, axis=1, mode="clip")
        hidden, cache = forward(
            self.model, inputs.draft, d.cache, tokens, start[:, None] + two, start
        )
        last = jnp.take_along_axis(hidden, (first + 1 - start)[:, None, None], axis=1)
        logits = logits_of(self.model, inputs.draft, last)[:, 0]
        return fit_vocabulary(logits.astype(jnp.float32), self.vocab), cache


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


def _last_two(state: DecodeState) -> Int[Array, "B 2"]:
    """Each row's last two tokens; the first is scratch where the row has only one."""
    at = jnp.maximum(state.length[:, None] + jnp.arange(-2, 0), 0)
    return jnp.take_along_axis(state.tokens, at, axis=1)
