"""Beam search and beam sampling over the target, as transformers' ``num_beams``.

Axis legend: B rows, W beams, C candidates of a step, S cache positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax._util.arguments import COUNT, validate_fields
from specjax._util.checks import Check
from specjax.core import probs
from specjax.core.commit import Cost, count_round
from specjax.core.probs import Purpose
from specjax.core.protocols import Method
from specjax.core.types import FROM_TARGET, STOP_EOS, STOP_LENGTH, DecodeState, Inputs
from specjax.core.warp import draw_joint, tempered, truncate, warp
from specjax.draft.beam import JOINTS
from specjax.models import KVCache

SAMPLED = (*JOINTS, "transformers")
LOST = -1e9  # below every score that a hypothesis can have


@struct.dataclass
class Hypotheses:
    """``W`` sequences per row: the prompt, then what was generated; best first."""

    tokens: Int[Array, "B W S"]
    logprobs: Float[Array, "B W S"]  # of each token, unwarped
    score: Float[Array, "B W"]  # running: the sum; finished: the mean per token

    def take(self, index: Int[Array, "B n"]) -> Hypotheses:
        return jax.tree.map(lambda x: _take(x, index), self)


@struct.dataclass
class BeamState:
    cache: KVCache  # of B·W rows
    running: Hypotheses
    finished: Hypotheses
    is_finished: Bool[Array, "B W"]
    lengths: Int[Array, "B W"]  # of the finished ones, tokens generated
    generated: Int[Array, "B"]
    improvable: Bool[Array, "B"]


@dataclasses.dataclass(frozen=True)
class BeamSearch(Method):
    """``beams`` hypotheses by total log-probability, ranked at the end by the mean per token.

    As transformers with ``length_penalty=1`` and ``early_stopping=False``. A sampled row draws
    its continuations without replacement from their ``joint``, and the first W drawn go on:

    * ``raw``: that of the model's own conditionals, warped as a whole (Qin et al. 2024, eq. 2).
    * ``warped``: the product of warped conditionals.
    * ``transformers``: its rule with ``do_sample``. The product of tempered and truncated
      conditionals that are not renormalized; the likeliest W go on of (1 + E)·W drawn, for E
      ends of sequence (one where there is none).
    """

    beams: int = 4
    joint: str = "raw"
    round_positions = 1
    needs_full_length = True

    def __post_init__(self):
        validate_fields(self, beams=COUNT, joint=Check(str, choices=SAMPLED))

    def ready(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        tokens = jnp.repeat(state.tokens[:, None], self.beams, axis=1)
        rows = tokens.shape[0]
        shape = (rows, self.beams)
        # One beam is open at first, or all would say the same.
        lost = jnp.full(shape, LOST, jnp.float32)  # a weak dtype would trace the loop twice
        score = jnp.where(jnp.arange(self.beams) == 0, 0.0, lost)
        logprobs = jnp.zeros(tokens.shape, jnp.float32)
        return state.replace(
            cache=(),
            method_state=BeamState(
                cache=jax.tree.map(lambda x: jnp.repeat(x, self.beams, axis=0), state.cache),
                running=Hypotheses(tokens, logprobs, score),
                finished=Hypotheses(tokens + 0, logprobs + 0, lost + 0),
                is_finished=jnp.zeros(shape, bool),
                lengths=jnp.zeros(shape, jnp.int32),
                generated=jnp.zeros((rows,), jnp.int32),
                improvable=jnp.ones((rows,), bool),
            ),
        )

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        beam = state.method_state
        logits, cache = self._logits(inputs, state)
        candidates, rank, source, ended = self._continue(inputs, state, logits)
        order = jax.lax.top_k(jnp.where(ended, LOST, rank), self.beams)[1]
        parent = _take(source, order)
        flat = jnp.arange(parent.shape[0])[:, None] * self.beams + parent
        finished, is_finished, lengths = self._merge(beam, candidates, ended)
        running = candidates.take(order)
        running = running.replace(score=jnp.where(_take(ended, order), LOST, running.score))
        generated = beam.generated + 1
        best = running.score.max(-1, keepdims=True)  # drawn ones are not in order
        worst = jnp.where(is_finished, finished.score.min(-1, keepdims=True), LOST)
        better = (best > LOST / 2) & (best / generated[:, None] > worst)
        improvable = beam.improvable & jnp.any(better, axis=-1)
        after = BeamState(
            cache=jax.tree.map(lambda x: x[flat.reshape(-1)], cache),
            running=running,
            finished=finished,
            is_finished=is_finished,
            lengths=lengths,
            generated=generated,
            improvable=improvable,
        )
        done = ~improvable | ended.all(-1)
        return self._close(inputs, state.replace(method_state=after), done & ~state.done)

    def _logits(self, inputs, state):
        """Logits after every running beam, ``[B, W, V]``; row r of the cache is beam r mod W."""
        beam = state.method_state
        at = jnp.repeat(state.length - 1 + beam.generated, self.beams)
        last = probs.at_token(beam.running.tokens.reshape(at.shape[0], -1), at)[:, None]
        logits, cache, _ = inputs.target.logits(beam.cache, last, at)
        return logits.reshape(-1, self.beams, logits.shape[-1]), cache

    def _continue(self, inputs, state, logits):
        """The C best, or first drawn, continuations of all beams: enough to leave W that go on.

        Returns the hypotheses, by what W of them are chosen to go on, the beams they continue,
        and which of them end.
        """
        beam = state.method_state
        rows, _, vocab = logits.shape
        plain = probs.log_softmax(logits)
        total = beam.running.score[..., None] + self._conditional(inputs, logits, plain)
        total = total.reshape(rows, -1)
        keys = probs.draw_keys(probs.round_keys(state.keys, state.stats.rounds), Purpose.SEARCH, 0)
        drawn = draw_joint(keys, total, inputs.warp, whole=self.joint == "raw")
        count = min((1 + inputs.eos_ids.shape[0]) * self.beams, total.shape[1])
        rank, flat = jax.lax.top_k(drawn, count)
        source, token = flat // vocab, (flat % vocab).astype(jnp.int32)
        score = jnp.take_along_axis(total, flat, axis=1)
        if self.joint == "transformers":
            rank = jnp.where(jnp.arange(count) < _spared(inputs) * self.beams, score, probs.NEVER)
        at = (state.length + beam.generated)[:, None]
        here = jnp.arange(state.capacity) == at[:, :, None]
        logprob = jnp.take_along_axis(plain.reshape(rows, -1), flat, axis=1)
        known = beam.running.take(source)
        candidates = Hypotheses(
            tokens=jnp.where(here, token[..., None], known.tokens),
            logprobs=jnp.where(here, logprob[..., None], known.logprobs),
            score=jnp.where(rank > probs.NEVER, score, probs.NEVER),
        )
        full = beam.generated + 1 >= state.max_length - state.length
        return candidates, rank, source, inputs.is_eos(token) | full[:, None]

    def _conditional(self, inputs, logits, plain):
        """What each next token adds to a hypothesis' score, ``[B, W, V]``."""
        if self.joint == "raw":
            return plain
        if self.joint == "warped":
            sampled = warp(logits, inputs.warp)
        else:
            # As its logits processors: however few top-k and top-p leave, one goes on.
            scaled = tempered(plain, inputs.warp)
            fewest = min(1 + inputs.eos_ids.shape[0], scaled.shape[-1])
            largest = jax.lax.top_k(scaled, fewest)[0]
            floor = jnp.take(largest, _spared(inputs) - 1, axis=-1, mode="clip")[..., None]
            kept = (truncate(scaled, inputs.warp) > probs.NEVER) | (scaled >= floor)
            sampled = jnp.where(kept, scaled, probs.NEVER)
        return jnp.where(inputs.warp.greedy[:, None, None], plain, sampled)

    def _merge(self, beam: BeamState, candidates: Hypotheses, ended):
        """The W best finished hypotheses; only the W best candidates of a step may finish."""
        count = ended.shape[1]
        closing = ended & (jnp.arange(count) < self.beams) & beam.improvable[:, None]
        mean = candidates.score / (beam.generated + 1)[:, None]
        offered = candidates.replace(score=jnp.where(closing, mean, LOST))
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), beam.finished, offered)
        order = jax.lax.top_k(both.score, self.beams)[1]
        new = jnp.broadcast_to((beam.generated + 1)[:, None], closing.shape)
        lengths = jnp.concatenate([beam.lengths, new], axis=1)
        flags = jnp.concatenate([beam.is_finished, closing], axis=1)
        return both.take(order), _take(flags, order), _take(lengths, order)

    def _close(self, inputs, state: DecodeState, done: Bool[Array, "B"]) -> DecodeState:
        """Rows that are done get their best hypothesis, all of it at once."""
        beam = state.method_state
        count = beam.lengths[:, 0]
        end = state.length + jnp.where(done, count, 0)
        last = probs.at_token(beam.finished.tokens[:, 0], jnp.maximum(end - 1, 0))
        reason = jnp.where(inputs.is_eos(last), STOP_EOS, STOP_LENGTH)
        # A row that is done stays as it is: its beams go on, unread.
        mine = done[:, None] & (jnp.arange(state.capacity) >= state.length[:, None])
        logprobs = state.logprobs
        if logprobs is not None:
            logprobs = jnp.where(mine, beam.finished.logprobs[:, 0], logprobs)
        stats = count_round(state, jnp.where(done, count, 0), Cost(self.beams, 1))
        return state.replace(
            tokens=jnp.where(mine, beam.finished.tokens[:, 0], state.tokens),
            origin=jnp.where(mine, FROM_TARGET, state.origin).astype(state.origin.dtype),
            logprobs=logprobs,
            length=end,
            finish=jnp.where(done, reason, state.finish).astype(jnp.int32),
            stats=stats,
        )


def _spared(inputs: Inputs) -> Int[Array, ""]:
    """So many continuations of a beam leave one that goes on; two at least."""
    return 1 + jnp.maximum(jnp.sum(inputs.eos_ids >= 0), 1)


def _take(x: Array, index: Int[Array, "B n"]) -> Array:
    """``x[b, index[b]]``."""
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)
