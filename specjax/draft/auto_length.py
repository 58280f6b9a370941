"""Drafts sized by their cost: how large the next draft is, from the rounds before it.

A draft of a form, ``b₁, b₂, …`` children a level, writes ``1 + A(b₁) + A(b₁)·A(b₂) + …`` tokens
where one of b siblings is accepted with probability A(b); of a chain that is
``(1 − λ^{γ+1}) / (1 − λ)`` (Leviathan et al. 2023, equation (1)). It costs a draft pass a level and
a target pass over its nodes. The form with the most tokens per cost is taken, for the whole batch,
from a few static ones; A is that of past rounds, the costs are an argument. Nothing of the present
round is read, so a rule that is lossless stays so.

Axis legend: B rows, n forms, D levels, w numbers of siblings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax._util.errors import PairError
from specjax.core.protocols import Proposal
from specjax.core.round import DraftVerify, cond_in_place
from specjax.core.types import POINT_MASS, DecodeState, Inputs
from specjax.draft.none import NoDraft
from specjax.draft.tree import Tree

Form = tuple[int, ...]  # children of a node, level by level

LENGTHS = 0, 1, 2, 3, 5, 7  # that a draft may have
CHAINS: tuple[Form, ...] = tuple((1,) * length for length in LENGTHS)
TREES: tuple[Form, ...] = (), (1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 2, 2)  # of 1, 4, 7, 16, 29 nodes
# Nodes of the target passes that verify chains, each of them a program to compile. Accelerators
# run no fewer than 8 anyway.
WIDTHS = 4, 8
COSTS = "costs"  # the setting: relative time of a round of each form, float32 [n]

# λ before anything is known, and how many tested tokens that belief weighs. Too much hope costs a
# draft or two; too little, and what is good would never be tried. Of drafts that were given up a
# part of a refused token stays: the next ones are shorter.
PRIOR_ACCEPTANCE, PRIOR_WEIGHT, RETRY_PENALTY = 0.85, 1.5, 0.2
DECAY = 0.98  # of the counts, from one round with a draft to the next
# Rounds without a draft after which the past is forgotten and drafts are tried again: few, for bad
# luck looks like bad drafts, but more where many rows had it, and four times as many after each
# trial that fails.
RETRY_AFTER, MAX_RETRY_AFTER, ROWS_PER_RETRY = 8, 512, 4
RELIABLE_AFTER = 16  # rounds with drafts in a row after which patience is that of the beginning
CATCH_UP = 16  # tokens a row of a pass of the draft model over what it has missed


@struct.dataclass
class AcceptanceHistory:
    """What the past says; the rows of a batch share what they know.

    ``tested`` and ``accepted`` count levels of so many siblings, the older ones worth less.
    ``streak`` are rounds without a draft, or, negative, rounds with one. The draft model has read
    ``read`` tokens of each row.
    """

    tested: Float[Array, "B w"]
    accepted: Float[Array, "B w"]
    streak: Int[Array, "B"]
    retry_after: Int[Array, "B"]
    read: Int[Array, "B"]

    @classmethod
    def begin(cls, rows: int, siblings: int = 1) -> AcceptanceHistory:
        tested, accepted = jnp.zeros((2, rows, siblings), jnp.float32)
        streak, read = jnp.zeros((2, rows), jnp.int32)
        retry_after = jnp.full((rows,), first_retry_after(rows), jnp.int32)
        return cls(tested, accepted, streak, retry_after, read)

    def rates(self) -> Float[Array, "w"]:
        """A of 1, 2, … siblings, in the batch.

        One more sibling is accepted no more often than the first, and never makes it worse: what
        was seen of one number bounds the others.
        """
        siblings = jnp.arange(1.0, self.tested.shape[1] + 1)
        prior = 1 - (1 - PRIOR_ACCEPTANCE) ** jnp.sqrt(siblings)
        tested, accepted = self.tested.sum(0), self.accepted.sum(0)
        rates = (accepted + prior * PRIOR_WEIGHT) / (tested + PRIOR_WEIGHT)
        one = rates.min()
        return jnp.minimum(rates, 1 - (1 - one) ** siblings)

    def after(
        self, before: DecodeState, state: DecodeState, drafted: Bool[Array, ""], form: Array
    ) -> AcceptanceHistory:
        """With the round that led from one state to the other; it ``drafted``, or did not.

        ``form``: int32 ``[D]``, siblings a level, 0 beyond the draft's depth.
        """
        accepted = state.stats.accepted - before.stats.accepted
        tested = accepted + (accepted < state.stats.drafted - before.stats.drafted)
        kind = (form[:, None] == 1 + jnp.arange(self.tested.shape[1])).astype(jnp.float32)
        counted = [
            (jnp.arange(len(form)) < count[:, None]).astype(jnp.float32) @ kind
            for count in (tested, accepted)
        ]
        streak = jnp.where(
            drafted, jnp.minimum(self.streak, 0) - 1, jnp.maximum(self.streak, 0) + 1
        )
        again = streak >= self.retry_after
        kept = jnp.where(again, 0.0, jnp.where(drafted, DECAY, 1.0))[:, None]
        penalty = jnp.where(again, RETRY_PENALTY / len(again), 0.0)[:, None]
        longer = jnp.minimum(4 * self.retry_after, MAX_RETRY_AFTER)
        first = first_retry_after(len(streak))
        retry_after = jnp.where(streak <= -RELIABLE_AFTER, first, self.retry_after)
        return AcceptanceHistory(
            tested=kept * self.tested + penalty + counted[0],
            accepted=kept * self.accepted + counted[1],
            streak=jnp.where(again, 0, streak),
            retry_after=jnp.where(again, longer, retry_after),
            read=jnp.where(drafted, state.length - 2, self.read),
        )


def first_retry_after(rows: int) -> int:
    """Of so many rows, which try drafts together."""
    return RETRY_AFTER * max(1, rows // ROWS_PER_RETRY)


def padded(forms: Sequence[Form]) -> np.ndarray:
    """int32 ``[n, D]``: the forms, 0 beyond their depth."""
    depth = max(map(len, forms))
    return np.array([(*form, *(0,) * (depth - len(form))) for form in forms], np.int32)


def best_shape(
    rates: Float[Array, "w"], forms: Sequence[Form], costs: Float[Array, "n"]
) -> Int[Array, ""]:
    """The number of the form that writes the most tokens per cost."""
    levels = padded(forms)
    accepted = jnp.where(levels > 0, rates[np.maximum(levels, 1) - 1], 0.0)
    return jnp.argmax((1 + jnp.cumprod(accepted, axis=1).sum(1)) / costs)


@dataclasses.dataclass(frozen=True)
class AutoLength(DraftVerify):
    """A drafter, a target distribution and a rule, each draft of the form that pays the most.

    The setting ``costs`` holds the relative time of a round of each of ``forms``, of which the
    first is no draft: a round of plain decoding, in which the draft model does not run; it reads
    what it has missed before it drafts again. Now and then the past is forgotten, so that drafts
    that have become good are found out. Each device of a mesh decides for its own rows.
    """

    forms: ClassVar[tuple[Form, ...]]

    @property
    def draft_can_rest(self) -> bool:
        """Whether there is a draft model that need not run in every round."""
        drafter = self.drafter
        model = drafter.needs_draft and not (drafter.needs_head or self.target.needs_draft)
        return model and POINT_MASS in self.rule.accepts

    def init(self, inputs, state):
        record = AcceptanceHistory.begin(state.length.shape[0], padded(self.forms).max())
        return super().init(inputs, state).replace(method_state=record)

    def ready(self, inputs, state):
        return state.replace(method_state=state.method_state.replace(read=state.length - 1))

    def on_slot_reuse(self, before, state):
        """What was learned in a seat stays."""
        known = before.method_state.replace(read=state.method_state.read)
        return super().on_slot_reuse(before, state).replace(method_state=known)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        form = best_shape(state.method_state.rates(), self.forms, inputs.settings[COSTS])
        drafts = form > 0 if self.draft_can_rest else jnp.bool_(True)
        after = cond_in_place(drafts, functools.partial(self._drafting, inputs, form), state)
        if self.draft_can_rest:
            after = cond_in_place(~drafts, functools.partial(self._plain, inputs), after)
        levels = jnp.asarray(padded(self.forms))[form]
        return after.replace(method_state=state.method_state.after(state, after, drafts, levels))

    def _drafting(self, inputs: Inputs, form: Int[Array, ""], state: DecodeState) -> DecodeState:
        """A round whose draft is of that form."""
        raise NotImplementedError

    def _plain(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """A round without a draft; the drafter does not know of it."""
        plain = DraftVerify(NoDraft(), self.target, self.rule)
        after = plain.step(inputs, state.replace(drafter_state=()))
        return after.replace(drafter_state=state.drafter_state)

    def _caught_up(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """With a draft model that has read all but a row's last two tokens, a draft's beginning."""
        end = jnp.where(state.done, 0, state.length - 2)

        def turn(carry):
            read, drafter_state = carry
            start = jnp.minimum(jnp.minimum(read, state.length), state.capacity - CATCH_UP)
            at = start[:, None] + jnp.arange(CATCH_UP, dtype=jnp.int32)
            tokens = jnp.take_along_axis(state.tokens, at, axis=1)
            now = state.replace(drafter_state=drafter_state)
            return start + CATCH_UP, self.drafter.prefill_chunk(inputs, now, tokens, start, None)

        begin = jnp.maximum(state.method_state.read, 0), state.drafter_state
        read = jax.lax.while_loop(lambda carry: jnp.any(carry[0] < end), turn, begin)[1]
        return state.replace(drafter_state=read)


@dataclasses.dataclass(frozen=True)
class AutoLengthChain(AutoLength):
    """:class:`AutoLength` chains of :data:`LENGTHS`; the drafter's own γ is the longest.

    Raises:
      PairError: drafts are no chains of at least the longest length.
    """

    forms = CHAINS

    def __post_init__(self):
        super().__post_init__()
        shape = self.drafter.shape
        if not shape.is_chain or self.drafter.num_probes or shape.depth < max(LENGTHS):
            raise PairError(
                f"gamma=auto sizes chains of up to {max(LENGTHS)} tokens, and drafter "
                f"{self.drafter.name} makes others; give a number, as --set gamma=4"
            )

    @property
    def pass_sizes(self):
        return WIDTHS if self.draft_can_rest else (1, *WIDTHS)

    def _drafting(self, inputs, form, state):
        gamma = jnp.asarray(LENGTHS, jnp.int32)[form]
        inputs = inputs.replace(settings=inputs.settings | {"gamma": gamma})
        state = self._caught_up(inputs, state) if self.draft_can_rest else state
        return DraftVerify.step(self, inputs, state)

    def propose(self, inputs, state, keys) -> Proposal:
        made = self.drafter.propose(inputs, state, keys)
        short = jnp.arange(made.draft.shape.nodes) <= inputs.settings["gamma"]
        return made._replace(draft=made.draft.replace(valid=made.draft.valid & short))


@dataclasses.dataclass(frozen=True)
class AutoLengthTree(AutoLength):
    """:class:`AutoLength` trees: :data:`TREES`; the drafter's own branching is the largest.

    Raises:
      PairError: drafts are no trees of a draft model that can rest.
    """

    forms = TREES

    def __post_init__(self):
        super().__post_init__()
        tree = isinstance(self.drafter, Tree) and self.drafter.branching == self.forms[-1]
        if not (tree and self.draft_can_rest):
            raise PairError(
                "branching=auto sizes trees of a draft model that may rest, and here are drafter "
                f"{self.drafter.name}, rule {self.rule.name} and target distribution "
                f"{type(self.target).__name__.lower()}; give numbers, as --set branching=4,2,2"
            )

    def _drafting(self, inputs, form, state):
        state = self._caught_up(inputs, state)
        for number, branching in enumerate(self.forms[1:], 1):
            drafter = dataclasses.replace(self.drafter, branching=branching)
            method = DraftVerify(drafter, self.target, self.rule)
            state = cond_in_place(form == number, functools.partial(method.step, inputs), state)
        return state
