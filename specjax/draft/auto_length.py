"""Draft sizes chosen by cost: how large the next draft is, from the rounds before it.

A *form* is the number of children per node, level by level: ``b₁, b₂, …``. One of b siblings is
accepted with probability A(b). So a draft of this form yields
``1 + A(b₁) + A(b₁)·A(b₂) + …`` tokens on average. For a chain with acceptance rate λ that is
``(1 − λ^{γ+1}) / (1 − λ)`` (Leviathan et al. 2023, equation (1)). It costs one draft pass per level
and one target pass over its nodes.

The whole batch drafts the form with the most tokens per cost, out of a few static ones. A is
estimated from past rounds; the costs are an argument. The choice reads nothing of the present
round, so a lossless rule stays lossless.

In a mixture of experts a target pass costs what its tokens' experts do. Rounds that are timed
therefore verify tokens that differ (:class:`TimeableRound`). For T of them about
E · (1 − (1 − k/E)^T) of E experts are active, if each token chooses k. With a draft that repeats
one token it would be k.

How costs are measured is not known here: see :mod:`specjax.runtime.round_costs`.

Axis legend: B rows, n forms, D levels, w numbers of siblings (1, 2, … w).
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
from specjax.core.net import Net
from specjax.core.protocols import Proposal
from specjax.core.round import DraftVerify, cond_in_place
from specjax.core.types import POINT_MASS, DecodeState, Draft, Inputs
from specjax.draft.none import NoDraft
from specjax.draft.tree import Tree

Form = tuple[int, ...]  # children of a node, level by level

LENGTHS = (0, 1, 2, 3, 5, 7)  # draft lengths of chains
CHAINS: tuple[Form, ...] = tuple((1,) * length for length in LENGTHS)
# Trees of 1, 4, 7, 16 and 29 nodes.
TREES: tuple[Form, ...] = ((), (1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 2, 2))
# Nodes of the target passes that verify chains. Each size is a program to compile, and accelerators
# run no fewer than 8 tokens anyway.
PASS_SIZES = (4, 8)
# In a mixture of experts every further token costs, so a draft of one token has a pass of its own.
MIXTURE_PASS_SIZES = (2, *PASS_SIZES)
COSTS = "costs"  # the setting: relative time of a round of each form, float32 [n]

# The prior: the acceptance rate before anything is known, and how many tested tokens it counts for.
# A prior that is too high costs one or two failed drafts. With one that is too low, a good draft
# model would never be tried.
PRIOR_ACCEPTANCE = 0.85
PRIOR_WEIGHT = 1.5

# While nothing is known about drafts, a round with one takes at most so many times as long as a
# plain round, if any does. In a mixture of experts the draft that promises most may cost four plain
# rounds, and all but one of them are lost if it is rejected.
FIRST_COST = 2.5

# The counts are weighed by DECAY from one round with a draft to the next. So about the last 50
# rounds count, and the estimate follows a text that becomes easier or harder.
DECAY = 0.98

# Once plain rounds look cheaper, nothing is learned about drafts any more. After RETRY_AFTER plain
# rounds the counts are therefore forgotten and drafts are tried again. The wait is short, because
# a few rejected tokens may be bad luck. It is longer in a large batch (RETRY_AFTER for every
# ROWS_PER_RETRY rows), where bad luck is unlikely. It is four times as long after each retry, up to
# MAX_RETRY_AFTER, for a retry that fails costs time.
RETRY_AFTER = 8
MAX_RETRY_AFTER = 512
ROWS_PER_RETRY = 4
# A retry starts with this fraction of a rejected token in its counts. So its first drafts are
# shorter than those of a new job.
RETRY_PENALTY = 0.2
# After this many rounds in a row with a draft, the retry has succeeded: the wait is short again.
RELIABLE_AFTER = 16

# Between the ids of neighboring tokens in a round that is timed: larger than the ids of one word's
# forms, and prime, so that it divides no vocabulary.
APART = 7919

CATCH_UP = 16  # tokens per row and pass when the draft model reads what it has missed


class AcceptanceHistory(struct.PyTreeNode):
    """What past rounds say about drafts. All rows of a batch share it.

    ``tested`` and ``accepted`` count tree levels, by their number of siblings. Older ones count
    less. ``streak`` is the number of rounds in a row without a draft, or minus the number of rounds
    in a row with one.
    """

    tested: Float[Array, "B w"]
    accepted: Float[Array, "B w"]
    streak: Int[Array, "B"]
    retry_after: Int[Array, "B"]  # rounds without a draft until drafts are tried again
    draft_cached: Int[Array, "B"]  # tokens of each row that the draft model's cache holds

    @classmethod
    def begin(cls, rows: int, siblings: int = 1) -> AcceptanceHistory:
        """The history before the first round; ``siblings`` is the largest number w."""
        return cls(
            tested=jnp.zeros((rows, siblings), jnp.float32),
            accepted=jnp.zeros((rows, siblings), jnp.float32),
            streak=jnp.zeros((rows,), jnp.int32),
            retry_after=jnp.full((rows,), initial_retry_after(rows), jnp.int32),
            draft_cached=jnp.zeros((rows,), jnp.int32),
        )

    def rates(self) -> Float[Array, "w"]:
        """A(1), A(2), …: how often one of so many siblings is accepted, in the batch."""
        siblings = jnp.arange(1.0, self.tested.shape[1] + 1)
        # Siblings resemble each other: the prior counts b of them as √b independent ones.
        prior = 1 - (1 - PRIOR_ACCEPTANCE) ** jnp.sqrt(siblings)
        tested = self.tested.sum(0)
        accepted = self.accepted.sum(0)
        rates = (accepted + prior * PRIOR_WEIGHT) / (tested + PRIOR_WEIGHT)

        # A single child is accepted at most as often as one of several: A(1) ≤ A(b). And each
        # further sibling helps at most as much as the first: A(b) ≤ 1 − (1 − A(1))^b. So the counts
        # of one number of siblings bound the rates of the others, also of those never tried.
        single = rates.min()
        return jnp.minimum(rates, 1 - (1 - single) ** siblings)

    def record_round(
        self, before: DecodeState, state: DecodeState, drafted: Bool[Array, ""], form: Array
    ) -> AcceptanceHistory:
        """The history with the round that led from ``before`` to ``state``.

        Args:
          drafted: whether the round had a draft.
          form: int32 ``[D]``, the siblings of each level; 0 past the draft's depth.
        """
        accepted = state.stats.accepted - before.stats.accepted
        # Unless the whole draft is accepted, one more level was tested: the one that was rejected.
        tested = accepted + (accepted < state.stats.drafted - before.stats.drafted)
        siblings = 1 + jnp.arange(self.tested.shape[1])
        siblings_of_level = (form[:, None] == siblings).astype(jnp.float32)  # [D, w], one-hot

        def by_siblings(levels: Int[Array, "B"]) -> Float[Array, "B w"]:
            """The first ``levels`` levels of each row, counted by their number of siblings."""
            counted = (jnp.arange(len(form)) < levels[:, None]).astype(jnp.float32)
            return counted @ siblings_of_level

        new_tested = by_siblings(tested)
        new_accepted = by_siblings(accepted)

        # The sign changes when the batch goes from drafts to plain rounds or back.
        streak = jnp.where(
            drafted, jnp.minimum(self.streak, 0) - 1, jnp.maximum(self.streak, 0) + 1
        )
        retry = streak >= self.retry_after
        # A retry forgets all counts. A plain round has none to add, and lets none decay.
        kept = jnp.where(retry, 0.0, jnp.where(drafted, DECAY, 1.0))[:, None]
        # The rows' counts are summed, so each row gets its share of the penalty.
        penalty = jnp.where(retry, RETRY_PENALTY / len(retry), 0.0)[:, None]

        # The next wait is longer from the beginning of a retry on: only RELIABLE_AFTER rounds with
        # drafts undo that.
        longer = jnp.minimum(4 * self.retry_after, MAX_RETRY_AFTER)
        initial = initial_retry_after(len(streak))
        retry_after = jnp.where(streak <= -RELIABLE_AFTER, initial, self.retry_after)
        return AcceptanceHistory(
            tested=kept * self.tested + penalty + new_tested,
            accepted=kept * self.accepted + new_accepted,
            streak=jnp.where(retry, 0, streak),
            retry_after=jnp.where(retry, longer, retry_after),
            # A round with a draft begins with each row's last two tokens: the cache may lack both.
            draft_cached=jnp.where(drafted, state.length - 2, self.draft_cached),
        )


def initial_retry_after(rows: int) -> int:
    """Rounds without a draft until a batch of ``rows`` tries drafts again for the first time."""
    return RETRY_AFTER * max(1, rows // ROWS_PER_RETRY)


def level_table(forms: Sequence[Form]) -> np.ndarray:
    """int32 ``[n, D]``: the forms, padded with 0 past their depth."""
    depth = max(map(len, forms))
    table = np.zeros((len(forms), depth), np.int32)
    for index, form in enumerate(forms):
        table[index, : len(form)] = form
    return table


def best_form_index(
    rates: Float[Array, "w"], forms: Sequence[Form], costs: Float[Array, "n"]
) -> Int[Array, ""]:
    """The index of the form with the most expected tokens per cost."""
    return jnp.argmax(_tokens_per_cost(rates, forms, costs))


def next_form_index(
    history: AcceptanceHistory, forms: Sequence[Form], costs: Float[Array, "n"]
) -> Int[Array, ""]:
    """The index of the next round's form.

    It is the best one. But while no token was tested, the first draft is a cheap one
    (:data:`FIRST_COST`): it may be rejected.
    """
    gains = _tokens_per_cost(history.rates(), forms, costs)
    best = jnp.argmax(gains)
    is_draft = jnp.arange(len(forms)) > 0
    cheapest = jnp.where(is_draft, costs, jnp.inf).min()
    is_cheap = is_draft & (costs <= jnp.maximum(FIRST_COST * costs[0], cheapest))
    first = jnp.argmax(jnp.where(is_cheap, gains, -jnp.inf))
    is_unknown = history.tested.sum() < 1
    return jnp.where(is_unknown & (best > 0), first, best)


def _tokens_per_cost(
    rates: Float[Array, "w"], forms: Sequence[Form], costs: Float[Array, "n"]
) -> Float[Array, "n"]:
    """The expected tokens of a round of each form over its cost."""
    siblings = level_table(forms)
    level_rates = jnp.where(siblings > 0, rates[np.maximum(siblings, 1) - 1], 0.0)
    # A level is reached if all levels above it were accepted: hence the cumulative product. The 1
    # is the token that every round emits, the correction or the bonus token.
    expected_tokens = 1 + jnp.cumprod(level_rates, axis=1).sum(1)
    return expected_tokens / costs


@dataclasses.dataclass(frozen=True)
class TimeableRound(DraftVerify):
    """A round that can be timed.

    Costs are being measured if all forms but one have an infinite cost. The round then verifies
    arbitrary distinct tokens instead of the drafted ones, so its output must be discarded.
    """

    def _verify(self, inputs: Inputs, state: DecodeState, keys, draft: Draft):
        apart = (draft.tokens + APART * jnp.arange(draft.shape.nodes)) % inputs.target.vocab_limit
        is_timed = jnp.isinf(inputs.settings[COSTS]).any()
        tokens = jnp.where(is_timed, apart, draft.tokens)
        return super()._verify(inputs, state, keys, draft.replace(tokens=tokens))


@dataclasses.dataclass(frozen=True)
class AutoLength(TimeableRound):
    """A drafter, a target distribution and a rule; each draft has the form that pays the most.

    The setting ``costs`` holds the relative time of a round of each of ``forms``. The first form is
    no draft: a round of plain decoding. The draft model does not run in it, if the method allows
    that, and reads what it has missed before it drafts again. Now and then the counts are
    forgotten, so that drafts that have become good are noticed. Each device of a mesh decides for
    its own rows.
    """

    forms: ClassVar[tuple[Form, ...]]

    @property
    def draft_can_pause(self) -> bool:
        """Whether there is a draft model that need not run in every round.

        A head cannot pause, because it reads the target's hidden states of every round. Nor can a
        draft model that the target distribution itself runs. And the rule must take the draft of a
        plain round, which counts as a point mass.
        """
        drafter = self.drafter
        runs_model = drafter.needs_draft
        runs_every_round = drafter.needs_head or self.target.needs_draft
        return runs_model and not runs_every_round and POINT_MASS in self.rule.accepts

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        rows = state.length.shape[0]
        history = AcceptanceHistory.begin(rows, int(level_table(self.forms).max()))
        return super().init(inputs, state).replace(method_state=history)

    def ready(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """The prompt is prefilled: both caches hold all of it but the last token."""
        cached = jnp.where(self._may_draft(inputs), state.length - 1, 0)
        history = state.method_state.replace(draft_cached=cached)
        return state.replace(method_state=history)

    def _may_draft(self, inputs: Inputs) -> Bool[Array, ""]:
        """Whether a draft would pay if all of its tokens were accepted."""
        if not self.draft_can_pause:
            return jnp.bool_(True)
        rates = jnp.ones(level_table(self.forms).max())
        return best_form_index(rates, self.forms, inputs.settings[COSTS]) > 0

    def prefill_chunk(self, inputs, state, tokens, start) -> DecodeState:
        """The draft model reads a prompt only if drafts may pay."""
        if not self.draft_can_pause:
            return super().prefill_chunk(inputs, state, tokens, start)
        plain = DraftVerify(NoDraft(), self.target, self.rule)
        after = plain.prefill_chunk(inputs, state.replace(drafter_state=()), tokens, start)

        def read(drafter_state):
            now = state.replace(drafter_state=drafter_state)
            return self.drafter.prefill_chunk(inputs, now, tokens, start, None)

        may_draft = self._may_draft(inputs)
        return after.replace(drafter_state=cond_in_place(may_draft, read, state.drafter_state))

    def on_slot_reuse(self, before: DecodeState, state: DecodeState) -> DecodeState:
        """What was learned from a batch slot's earlier requests stays."""
        history = before.method_state.replace(draft_cached=state.method_state.draft_cached)
        return super().on_slot_reuse(before, state).replace(method_state=history)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        form_index = next_form_index(state.method_state, self.forms, inputs.settings[COSTS])
        # Without a draft model that can pause, form 0 is a draft of length 0: no separate branch.
        drafted = form_index > 0 if self.draft_can_pause else jnp.bool_(True)
        with_draft = functools.partial(self._round_with_draft, inputs, form_index)
        after = cond_in_place(drafted, with_draft, state)
        if self.draft_can_pause:
            without_draft = functools.partial(self._round_without_draft, inputs)
            after = cond_in_place(~drafted, without_draft, after)

        form = jnp.asarray(level_table(self.forms))[form_index]
        history = state.method_state.record_round(state, after, drafted, form)
        return after.replace(method_state=history)

    def _round_with_draft(
        self, inputs: Inputs, form_index: Int[Array, ""], state: DecodeState
    ) -> DecodeState:
        """A round whose draft has the form of this index."""
        raise NotImplementedError

    def _round_without_draft(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """A round of plain decoding; the drafter's state stays as it is."""
        plain = DraftVerify(NoDraft(), self.target, self.rule)
        after = plain.step(inputs, state.replace(drafter_state=()))
        return after.replace(drafter_state=state.drafter_state)

    def _catch_up(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """The state once the draft model has read what it missed in plain rounds.

        That is all of each row but its last two tokens, with which a draft begins.
        """
        end = jnp.where(state.done, 0, state.length - 2)

        def read_more(carry):
            cached, drafter_state = carry
            # A chunk near the cache's end starts earlier, for a write past the end would be shifted
            # in silence. Tokens that are read again give the same cache. What a chunk reads past a
            # row's length is scratch that later tokens overwrite.
            start = jnp.minimum(jnp.minimum(cached, state.length), state.capacity - CATCH_UP)
            at = start[:, None] + jnp.arange(CATCH_UP, dtype=jnp.int32)
            tokens = jnp.take_along_axis(state.tokens, at, axis=1)
            now = state.replace(drafter_state=drafter_state)
            return start + CATCH_UP, self.drafter.prefill_chunk(inputs, now, tokens, start, None)

        # A row of one token has length − 2 = −1.
        carry = jnp.maximum(state.method_state.draft_cached, 0), state.drafter_state
        _, drafter_state = jax.lax.while_loop(
            lambda carry: jnp.any(carry[0] < end), read_more, carry
        )
        return state.replace(drafter_state=drafter_state)


@dataclasses.dataclass(frozen=True)
class AutoLengthChain(AutoLength):
    """:class:`AutoLength` with chains of :data:`LENGTHS`; the drafter's own γ is the longest.

    Raises:
      PairError: the drafts are no chains, or too short for the longest of them.
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

    def pass_sizes(self, target: Net) -> tuple[int, ...]:
        sizes = PASS_SIZES if target.config.experts is None else MIXTURE_PASS_SIZES
        if self.draft_can_pause:
            return sizes
        # Here a round without a draft is one with γ = 0: its target pass has the root alone.
        return (1, *sizes)

    def _round_with_draft(self, inputs, form_index, state):
        # One program serves all lengths: the drafter reads γ as a setting and stops there.
        gamma = jnp.asarray(LENGTHS, jnp.int32)[form_index]
        inputs = inputs.replace(settings=inputs.settings | {"gamma": gamma})
        if self.draft_can_pause:
            state = self._catch_up(inputs, state)
        # self.step is AutoLength.step, which has called this. The round itself is DraftVerify's.
        return DraftVerify.step(self, inputs, state)

    def propose(self, inputs, state, keys) -> Proposal:
        """The drafter's chain, cut to the round's γ."""
        proposal = self.drafter.propose(inputs, state, keys)
        draft = proposal.draft
        within_gamma = jnp.arange(draft.shape.nodes) <= inputs.settings["gamma"]
        return proposal._replace(draft=draft.replace(valid=draft.valid & within_gamma))


@dataclasses.dataclass(frozen=True)
class AutoLengthTree(AutoLength):
    """:class:`AutoLength` with :data:`TREES`; the drafter's own branching is the largest.

    Raises:
      PairError: the drafts are no trees of a draft model that can pause.
    """

    forms = TREES

    def __post_init__(self):
        super().__post_init__()
        drafter = self.drafter
        is_largest_tree = isinstance(drafter, Tree) and drafter.branching == self.forms[-1]
        if not (is_largest_tree and self.draft_can_pause):
            raise PairError(
                "branching=auto sizes trees of a draft model that can pause, and here are drafter "
                f"{self.drafter.name}, rule {self.rule.name} and target distribution "
                f"{type(self.target).__name__.lower()}; give numbers, as --set branching=4,2,2"
            )

    def _round_with_draft(self, inputs, form_index, state):
        state = self._catch_up(inputs, state)
        assert isinstance(self.drafter, Tree), "__post_init__ refuses other drafters"
        # Trees differ in the shapes of their passes, so each form is a branch of the program. One
        # of the branches runs.
        for index, branching in enumerate(self.forms[1:], 1):
            drafter = dataclasses.replace(self.drafter, branching=branching)
            method = TimeableRound(drafter, self.target, self.rule)
            step = functools.partial(method.step, inputs)
            state = cond_in_place(form_index == index, step, state)
        return state
