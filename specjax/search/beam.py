"""Beam search and beam sampling in the target, as transformers' ``num_beams``.

Every beam has a cache row of its own. After each step, rows are copied from the beams that go on.
The drafter :mod:`specjax.draft.beam` copies no cache, but its beams end with the draft.

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
from specjax._util.errors import OptionError
from specjax.core import probs
from specjax.core.commit import Cost, count_round
from specjax.core.probs import Purpose
from specjax.core.protocols import Method, Sequences
from specjax.core.types import FROM_TARGET, STOP_EOS, STOP_LENGTH, DecodeState, Inputs
from specjax.core.warp import draw_joint, tempered, truncate, warp
from specjax.draft.beam import JOINTS
from specjax.models import KVCache
from specjax.models.cache import take_rows

SAMPLED = (*JOINTS, "transformers")  # the joints that a sampled row can draw from
NEVER = "never"
EARLY_STOPPING = Check(bool, words=(NEVER,))  # when a search ends
# Score of a place that holds no hypothesis. Below every real score but finite, as in transformers:
# −inf minus −inf would give NaN.
LOST = -1e9


class Hypotheses(struct.PyTreeNode):
    """``W`` sequences per row: the prompt, then what was generated; best first."""

    tokens: Int[Array, "B W S"]
    logprobs: Float[Array, "B W S"]  # of each token, unwarped
    score: Float[Array, "B W"]  # running: the sum; finished: divided by length ** length_penalty

    def gather(self, index: Int[Array, "B n"]) -> Hypotheses:
        return jax.tree.map(lambda x: _gather(x, index), self)


class BeamState(struct.PyTreeNode):
    """What the search keeps between steps, in ``state.method_state``."""

    cache: KVCache  # of B·W rows: row b·W + w is beam w
    running: Hypotheses
    finished: Hypotheses
    is_finished: Bool[Array, "B W"]
    lengths: Int[Array, "B W"]  # of the finished ones, tokens generated
    generated: Int[Array, "B"]  # tokens of each running hypothesis
    improvable: Bool[Array, "B"]  # whether a running hypothesis may still become one of the best W


@dataclasses.dataclass(frozen=True)
class BeamSearch(Method):
    """``beams`` hypotheses by total log-probability, ranked at the end by their lengths, too.

    As transformers: a hypothesis of n tokens has the score ``total / n ** length_penalty``. The
    search ends as ``early_stopping`` says:

    * False: once no running hypothesis, with its length of now, is better than W finished ones.
    * ``never``: the same, but a positive penalty counts with the length that it may still have.
    * True: once W hypotheses have finished.

    A greedy row searches. A sampled row draws its continuations without replacement from their
    ``joint``:

    * ``raw``: the joint of the model's own conditionals, warped as a whole (Qin et al. 2024, eq.
      2). The first W drawn go on.
    * ``warped``: the product of warped conditionals. The first W drawn go on.
    * ``transformers``: its rule with ``do_sample``. The joint is the product of tempered and
      truncated conditionals, not renormalized. (1 + E)·W are drawn, for E end-of-sequence ids
      (E = 1 if there is none), and the likeliest W of them go on.
    """

    beams: int = 4
    joint: str = "raw"
    early_stopping: bool | str = False
    num_return_sequences: int = 1  # of the finished ones; more than one are in ``hypotheses``
    round_positions = 1
    needs_full_length = True
    settings = ("length_penalty",)

    def __post_init__(self):
        validate_fields(
            self,
            beams=COUNT,
            joint=Check(str, choices=SAMPLED),
            early_stopping=EARLY_STOPPING,
            num_return_sequences=COUNT,
        )
        if self.num_return_sequences > self.beams:
            raise OptionError(
                f"num_return_sequences={self.num_return_sequences}: expected at most "
                f"beams={self.beams}"
            )

    @property
    def name(self) -> str:
        return "beam"

    def ready(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """The prompt's cache and tokens, once per beam."""
        tokens = jnp.repeat(state.tokens[:, None], self.beams, axis=1)
        rows = tokens.shape[0]
        shape = (rows, self.beams)
        # Only the first beam runs at first, or all would find the same continuations.
        lost = jnp.full(shape, LOST, jnp.float32)  # a weak dtype would trace the loop twice
        score = jnp.where(jnp.arange(self.beams) == 0, 0.0, lost)
        logprobs = jnp.zeros(tokens.shape, jnp.float32)
        return state.replace(
            cache=(),
            method_state=BeamState(
                cache=jax.tree.map(lambda x: jnp.repeat(x, self.beams, axis=0), state.cache),
                running=Hypotheses(tokens, logprobs, score),
                # Copies: the same buffer must not be donated twice.
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

        # The W best candidates that do not end go on, each with the cache of the beam it continues.
        order = probs.top_k(jnp.where(ended, LOST, rank), self.beams)[1]
        parent = _gather(source, order)
        cache_row = jnp.arange(parent.shape[0])[:, None] * self.beams + parent
        generated = beam.generated + 1
        # The beams of a row have the same prompt. Its last token is the first that is not cached.
        first = jnp.where(state.done, state.capacity, state.length - 1).min()
        last = jnp.where(state.done, 0, state.length - 1 + generated).max()
        penalty = inputs.settings["length_penalty"]
        # Rows that have ended keep what they have found, while others go on.
        closing = ended & ~state.done[:, None]
        finished, is_finished, lengths = self._merge(beam, candidates, closing, penalty)
        running = candidates.gather(order)
        running = running.replace(score=jnp.where(_gather(ended, order), LOST, running.score))

        # A row ends once no running hypothesis can do better: the score of its best running one is
        # compared with the worst of W finished ones. Until there are W, any is better.
        length = generated
        if self.early_stopping == NEVER:
            length = jnp.where(penalty > 0, state.max_length - state.length, generated)
        best = running.score.max(-1, keepdims=True)  # drawn ones are not in order
        worst = jnp.where(is_finished, finished.score.min(-1, keepdims=True), LOST)
        better = (best > LOST / 2) & (_scored(best, length[:, None], penalty) > worst)
        if self.early_stopping is True:
            better &= ~is_finished.all(-1, keepdims=True)
        improvable = beam.improvable & jnp.any(better, axis=-1)
        after = BeamState(
            cache=take_rows(cache, cache_row.reshape(-1), first, last),
            running=running,
            finished=finished,
            is_finished=is_finished,
            lengths=lengths,
            generated=generated,
            improvable=improvable,
        )
        done = ~improvable | ended.all(-1)
        return self._close(inputs, state.replace(method_state=after), done & ~state.done)

    def sequences(self, state: DecodeState) -> Sequences | None:
        if self.num_return_sequences == 1:
            return None
        beam = state.method_state
        count = self.num_return_sequences
        finished = beam.finished
        return Sequences(
            finished.tokens[:, :count], beam.lengths[:, :count], finished.score[:, :count]
        )

    def _logits(self, inputs: Inputs, state: DecodeState) -> tuple[Float[Array, "B W V"], KVCache]:
        """Logits after every running beam."""
        beam = state.method_state
        at = jnp.repeat(state.length - 1 + beam.generated, self.beams)
        last = probs.at_index(beam.running.tokens.reshape(at.shape[0], -1), at)[:, None]
        logits, cache, _ = inputs.target.logits(beam.cache, last, at)
        return logits.reshape(-1, self.beams, logits.shape[-1]), cache

    def _continue(
        self, inputs: Inputs, state: DecodeState, logits: Float[Array, "B W V"]
    ) -> tuple[Hypotheses, Float[Array, "B C"], Int[Array, "B C"], Bool[Array, "B C"]]:
        """The C best, or first drawn, continuations of all beams.

        C is large enough that W of them do not end. Returns the hypotheses, the ranks by which W of
        them are chosen to go on, the beams that they continue, and which of them end.
        """
        beam = state.method_state
        rows, _, vocab = logits.shape
        plain = probs.log_softmax(logits)
        total = beam.running.score[..., None] + self._conditional(inputs, logits, plain)
        total = total.reshape(rows, -1)
        keys = probs.draw_keys(probs.round_keys(state.keys, state.stats.rounds), Purpose.SEARCH, 0)
        drawn = draw_joint(keys, total, inputs.warp, whole=self.joint == "raw")
        # Each beam has at most as many ending continuations as there are end-of-sequence ids.
        count = min((1 + inputs.eos_ids.shape[0]) * self.beams, total.shape[1])
        rank, flat = probs.top_k(drawn, count)
        source = flat // vocab
        token = (flat % vocab).astype(jnp.int32)
        score = jnp.take_along_axis(total, flat, axis=1)
        if self.joint == "transformers":
            # Of those drawn, the likeliest go on: the noise of the draw is dropped.
            num_drawn = _draws_per_beam(inputs) * self.beams
            rank = jnp.where(jnp.arange(count) < num_drawn, score, probs.NEVER)

        at = (state.length + beam.generated)[:, None]
        here = jnp.arange(state.capacity) == at[:, :, None]
        logprob = jnp.take_along_axis(plain.reshape(rows, -1), flat, axis=1)
        known = beam.running.gather(source)
        candidates = Hypotheses(
            tokens=jnp.where(here, token[..., None], known.tokens),
            logprobs=jnp.where(here, logprob[..., None], known.logprobs),
            score=jnp.where(rank > probs.NEVER, score, probs.NEVER),
        )
        # With the last token of the budget every hypothesis ends.
        full = beam.generated + 1 >= state.max_length - state.length
        return candidates, rank, source, inputs.is_eos(token) | full[:, None]

    def _conditional(
        self, inputs: Inputs, logits: Float[Array, "B W V"], plain: Float[Array, "B W V"]
    ) -> Float[Array, "B W V"]:
        """What each next token adds to a hypothesis' score; ``plain`` is the log-softmax."""
        if self.joint == "raw":
            return plain
        if self.joint == "warped":
            sampled = warp(logits, inputs.warp)
        else:
            # As its logits processors: top-k and top-p leave at least so many tokens that one of
            # them does not end.
            scaled = tempered(plain, inputs.warp)
            fewest = min(1 + inputs.eos_ids.shape[0], scaled.shape[-1])
            largest = probs.top_k(scaled, fewest)[0]
            floor = jnp.take(largest, _draws_per_beam(inputs) - 1, axis=-1, mode="clip")[..., None]
            kept = (truncate(scaled, inputs.warp) > probs.NEVER) | (scaled >= floor)
            sampled = jnp.where(kept, scaled, probs.NEVER)
        return jnp.where(inputs.warp.greedy[:, None, None], plain, sampled)

    def _merge(
        self,
        beam: BeamState,
        candidates: Hypotheses,
        ended: Bool[Array, "B C"],
        penalty: Float[Array, ""],
    ) -> tuple[Hypotheses, Bool[Array, "B W"], Int[Array, "B W"]]:
        """The W best finished hypotheses, which of them exist, and their lengths.

        Only the W best candidates of a step may finish, as in transformers.
        """
        count = ended.shape[1]
        closing = ended & (jnp.arange(count) < self.beams) & beam.improvable[:, None]
        score = _scored(candidates.score, (beam.generated + 1)[:, None], penalty)
        offered = candidates.replace(score=jnp.where(closing, score, LOST))
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), beam.finished, offered)
        order = probs.top_k(both.score, self.beams)[1]
        new = jnp.broadcast_to((beam.generated + 1)[:, None], closing.shape)
        lengths = jnp.concatenate([beam.lengths, new], axis=1)
        flags = jnp.concatenate([beam.is_finished, closing], axis=1)
        return both.gather(order), _gather(flags, order), _gather(lengths, order)

    def _close(self, inputs, state: DecodeState, done: Bool[Array, "B"]) -> DecodeState:
        """Rows that are ``done`` get the tokens of their best hypothesis, all at once."""
        beam = state.method_state
        count = beam.lengths[:, 0]
        end = state.length + jnp.where(done, count, 0)
        last = probs.at_index(beam.finished.tokens[:, 0], jnp.maximum(end - 1, 0))
        reason = jnp.where(inputs.is_eos(last), STOP_EOS, STOP_LENGTH)
        # Only in the round in which a row ends: its beams go on after that, but nobody reads them.
        written = done[:, None] & (jnp.arange(state.capacity) >= state.length[:, None])
        logprobs = state.logprobs
        if logprobs is not None:
            logprobs = jnp.where(written, beam.finished.logprobs[:, 0], logprobs)
        stats = count_round(state, jnp.where(done, count, 0), Cost(self.beams, 1))
        return state.replace(
            tokens=jnp.where(written, beam.finished.tokens[:, 0], state.tokens),
            origin=jnp.where(written, FROM_TARGET, state.origin).astype(state.origin.dtype),
            logprobs=logprobs,
            length=end,
            finish=jnp.where(done, reason, state.finish).astype(jnp.int32),
            stats=stats,
        )


def _scored(
    total: Float[Array, "B n"], length: Int[Array, "B 1"], penalty: Float[Array, ""]
) -> Float[Array, "B n"]:
    """The score of hypotheses with these total log-probabilities and this length."""
    return total / length.astype(jnp.float32) ** penalty


def _draws_per_beam(inputs: Inputs) -> Int[Array, ""]:
    """How many continuations of a beam are drawn, so that one does not end; at least two."""
    return 1 + jnp.maximum(jnp.sum(inputs.eos_ids >= 0), 1)


def _gather(x: Array, index: Int[Array, "B n"]) -> Array:
    """``x[b, index[b]]``."""
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)
