"""Drafts sized by their cost: how many tokens the next draft has, from the rounds before it.

A round that drafts γ tokens writes ``(1 − λ^{γ+1}) / (1 − λ)`` of them when each is accepted with
probability λ (Leviathan et al. 2023, equation (1)), and costs γ draft passes and a target pass over
γ + 1 tokens, ``cγ + v(γ+1)``. The length with the most tokens per cost is taken, for the whole
batch, from a few static ones; λ is that of past rounds, the costs are an argument. Nothing of the
present round is read, so a rule that is lossless stays so.

Axis legend: B rows, n lengths.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.draft.none import NoDraft
from specjax.errors import PairError
from specjax.protocols import Proposal
from specjax.rounds import DraftVerify, once
from specjax.types import POINT_MASS, DecodeState, Inputs

LENGTHS = 0, 1, 2, 3, 5, 7  # that a draft may have
# Nodes of the target passes that verify them, each of them a program to compile. Accelerators run
# no fewer than 8 anyway.
WIDTHS = 4, 8
COSTS = "costs"  # the setting: relative time of a round of each length, float32 [n]

# λ before anything is known, and how many tested tokens that belief weighs. Too much hope costs a
# draft or two; too little, and what is good would never be tried.
HOPE, WEIGHT = 0.85, 1.5
KEPT = 0.98  # of the counts, from one round to the next
# Rounds without a draft after which the past is forgotten and drafts are tried again: few, for bad
# luck looks like bad drafts, and four times as many after each trial that fails.
PATIENCE, MOST_PATIENCE = 8, 512
SETTLED = 16  # rounds with drafts in a row after which patience is that of the beginning
CATCH_UP = 16  # tokens a row of a pass of the draft model over what it has missed


@struct.dataclass
class Record:
    """What the past says; the rows of a batch share what they know.

    ``tested`` and ``accepted`` are counts of draft tokens, the older ones worth less. ``streak``
    are rounds without a draft, or, negative, rounds with one. The draft model has read ``read``
    tokens of each row.
    """

    tested: Float[Array, "B"]
    accepted: Float[Array, "B"]
    streak: Int[Array, "B"]
    patience: Int[Array, "B"]
    read: Int[Array, "B"]

    @classmethod
    def begin(cls, rows: int) -> Record:
        tested, accepted = jnp.zeros((2, rows), jnp.float32)
        streak, read = jnp.zeros((2, rows), jnp.int32)
        return cls(tested, accepted, streak, jnp.full((rows,), PATIENCE, jnp.int32), read)

    def rate(self) -> Float[Array, ""]:
        """λ of the batch."""
        tested, accepted = self.tested.sum(), self.accepted.sum()
        return (accepted + HOPE * WEIGHT) / (tested + WEIGHT)

    def after(self, before: DecodeState, state: DecodeState, drafted: Array) -> Record:
        """With the round that led from one state to the other; it ``drafted``, or did not."""
        accepted = state.stats.accepted - before.stats.accepted
        tested = accepted + (accepted < state.stats.drafted - before.stats.drafted)
        streak = jnp.where(
            drafted, jnp.minimum(self.streak, 0) - 1, jnp.maximum(self.streak, 0) + 1
        )
        again = streak >= self.patience
        kept = jnp.where(again, 0.0, KEPT)
        longer = jnp.minimum(4 * self.patience, MOST_PATIENCE)
        patience = jnp.where(streak <= -SETTLED, PATIENCE, self.patience)
        return Record(
            tested=kept * self.tested + tested,
            accepted=kept * self.accepted + accepted,
            streak=jnp.where(again, 0, streak),
            patience=jnp.where(again, longer, patience),
            read=jnp.where(drafted, state.length - 2, self.read),
        )


def best_length(rate: Float[Array, ""], costs: Float[Array, "n"]) -> Int[Array, ""]:
    """Of :data:`LENGTHS` the one that writes the most tokens per cost."""
    most = max(LENGTHS)
    tokens = jnp.cumsum(rate ** jnp.arange(most + 1, dtype=jnp.float32))  # 1 + λ + … + λ^γ
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    return lengths[jnp.argmax(tokens[lengths] / costs)]


@dataclasses.dataclass(frozen=True)
class Sized(DraftVerify):
    """A chain drafter, a target distribution and a rule, each draft as long as it pays.

    The drafter's own γ is the longest, the setting ``costs`` holds the relative time of a round of
    each of :data:`LENGTHS`. A round of length 0 is plain decoding, and the draft model does not
    run; it reads what it has missed before it drafts again. Now and then the past is forgotten, so
    that drafts that have become good are found out. Each device of a mesh decides for its own rows.

    Raises:
      PairError: drafts are no chains of at least the longest length.
    """

    def __post_init__(self):
        super().__post_init__()
        shape = self.drafter.shape
        if not shape.is_chain or self.drafter.num_probes or shape.depth < max(LENGTHS):
            raise PairError(
                f"gamma=auto sizes chains of up to {max(LENGTHS)} tokens, and drafter "
                f"{self.drafter.name} makes others; give a number, as --set gamma=4"
            )

    @property
    def rests(self) -> bool:
        """Whether there is a draft model that need not run in every round."""
        drafter = self.drafter
        model = drafter.needs_draft and not (drafter.needs_head or self.target.needs_draft)
        return model and POINT_MASS in self.rule.laws

    @property
    def pass_widths(self):
        return WIDTHS if self.rests else (1, *WIDTHS)

    def init(self, inputs, state):
        return super().init(inputs, state).replace(method_state=Record.begin(state.length.shape[0]))

    def ready(self, inputs, state):
        return state.replace(method_state=state.method_state.replace(read=state.length - 1))

    def succeed(self, before, state):
        """What was learned in a seat stays."""
        known = before.method_state.replace(read=state.method_state.read)
        return super().succeed(before, state).replace(method_state=known)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        drafts = self.length(inputs, state) > 0 if self.rests else jnp.bool_(True)
        after = once(drafts, functools.partial(super().step, inputs), state)
        if self.rests:
            after = once(~drafts, functools.partial(self._plain, inputs), after)
        return after.replace(method_state=state.method_state.after(state, after, drafts))

    def length(self, inputs: Inputs, state: DecodeState) -> Int[Array, ""]:
        """γ of the next round."""
        return best_length(state.method_state.rate(), inputs.settings[COSTS])

    def _plain(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """A round without a draft; the drafter does not know of it."""
        plain = DraftVerify(NoDraft(), self.target, self.rule)
        after = plain.step(inputs, state.replace(drafter_state=()))
        return after.replace(drafter_state=state.drafter_state)

    def propose(self, inputs, state, keys) -> Proposal:
        gamma = self.length(inputs, state)
        if self.rests:
            state = state.replace(drafter_state=self._caught_up(inputs, state))
        inputs = inputs.replace(settings=inputs.settings | {"gamma": gamma})
        made = self.drafter.propose(inputs, state, keys)
        short = jnp.arange(made.draft.shape.nodes) <= gamma
        return made._replace(draft=made.draft.replace(valid=made.draft.valid & short))

    def _caught_up(self, inputs: Inputs, state: DecodeState):
        """The drafter's state after all but each row's last two tokens, a draft's beginning."""
        end = jnp.where(state.done, 0, state.length - 2)

        def turn(carry):
            read, drafter_state = carry
            start = jnp.minimum(read, state.slots - CATCH_UP)
            at = start[:, None] + jnp.arange(CATCH_UP, dtype=jnp.int32)
            tokens = jnp.take_along_axis(state.tokens, at, axis=1)
            now = state.replace(drafter_state=drafter_state)
            return start + CATCH_UP, self.drafter.feed(inputs, now, tokens, start, None)

        begin = jnp.maximum(state.method_state.read, 0), state.drafter_state
        return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < end), turn, begin)[1]
