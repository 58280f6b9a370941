"""Draft sizes chosen by cost: how large the next draft is, from the rounds before it.

A *form* is the number of children per node, level by level: ``b₁, b₂, …``. One of b siblings is
accepted with probability A(b). So a draft of this form yields
``1 + A(b₁) + A(b₁)·A(b₂) + …`` tokens on average. For a chain with acceptance rate λ that is
``(1 − λ^{γ+1}) / (1 − λ)`` (Leviathan et al. 2023, equation (1)). It costs one draft pass per level
and one target pass over its nodes.

The whole batch drafts the form with the most tokens per cost, out of a few static ones. A is
estimated from past rounds; the costs are an argument. The choice reads what is written so far and
nothing that is drawn in the present round, so a lossless rule stays lossless.

Some drafters know how good their next draft is: what follows a match of three tokens is accepted
far more often than what follows a match of one. Such a drafter gives each row a *confidence*
(:class:`specjax.core.protocols.Drafter`), and A is estimated for each confidence.

In a mixture of experts a target pass costs what its tokens' experts do. Rounds that are timed
therefore verify tokens that differ (:class:`TimeableRound`). For T of them about
E · (1 − (1 − k/E)^T) of E experts are active, if each token chooses k. With a draft that repeats
one token it would be k.

How costs are measured is not known here: see :mod:`specjax.runtime.round_costs`.

Axis legend: B rows, n forms, D levels, c confidences, w numbers of siblings (1, 2, … w).
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

# How many tested tokens the prior counts for: the drafter's acceptance rates before anything is
# known. A prior that is too high costs one or two failed drafts. With one that is too low, a good
# draft model would never be tried.
PRIOR_WEIGHT = 1.5

# A draft must promise this fraction more tokens per cost than a plain round: a measured cost may be
# some percent too low, and then drafts that look just good enough lose.
MARGIN = 0.05

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

    ``tested`` and ``accepted`` count tree levels, by their confidence and number of siblings. Older
    ones count less. ``streak`` is, for each confidence that a row's draft began with, the number of
    rounds in a row without a draft, or minus the number of rounds in a row with one.
    """

    tested: Float[Array, "B c w"]
    accepted: Float[Array, "B c w"]
    streak: Int[Array, "B c"]
    retry_after: Int[Array, "B c"]  # rounds without a draft until drafts are tried again
    draft_cached: Int[Array, "B"]  # tokens of each row that the draft model's cache holds

    @classmethod
    def begin(cls, rows: int, confidences: int = 1, siblings: int = 1) -> AcceptanceHistory:
        """The history before the first round: c confidences, at most w ``siblings``."""
        return cls(
            tested=jnp.zeros((rows, confidences, siblings), jnp.float32),
            accepted=jnp.zeros((rows, confidences, siblings), jnp.float32),
            streak=jnp.zeros((rows, confidences), jnp.int32),
            retry_after=jnp.full((rows, confidences), initial_retry_after(rows), jnp.int32),
            draft_cached=jnp.zeros((rows,), jnp.int32),
        )

    def rates(self, priors: Sequence[float]) -> Float[Array, "c w"]:
        """A(1), A(2), …: how often one of so many siblings is accepted, in the batch.

        ``priors`` are the c acceptance rates that a drafter expects.
        """
        siblings = jnp.arange(1.0, self.tested.shape[2] + 1)
        # Siblings resemble each other: the prior counts b of them as √b independent ones.
        prior = 1 - (1 - jnp.array(priors, jnp.float32)[:, None]) ** jnp.sqrt(siblings)
        tested = self.tested.sum(0)
        accepted = self.accepted.sum(0)
        rates = (accepted + prior * PRIOR_WEIGHT) / (tested + PRIOR_WEIGHT)

        # A single child is accepted at most as often as one of several: A(1) ≤ A(b). And each
        # further sibling helps at most as much as the first: A(b) ≤ 1 − (1 − A(1))^b. So the counts
        # of one number of siblings bound the rates of the others, also of those never tried.
        single = rates.min(axis=1, keepdims=True)
        return jnp.minimum(rates, 1 - (1 - single) ** siblings)

    def record_round(
        self,
        before: DecodeState,
        state: DecodeState,
        confidence: Int[Array, "B"],
        drafted: Bool[Array, ""],
        form: Int[Array, "D"],
    ) -> AcceptanceHistory:
        """The history with the round that led from ``before`` to ``state``.

        Args:
          confidence: of each row's draft, −1 for a row that had nothing to draft.
          drafted: whether the round had a draft.
          form: the siblings of each level; 0 past the draft's depth.
        """
        accepted = state.stats.accepted - before.stats.accepted
        # Unless the whole draft is accepted, one more level was tested: the one that was rejected.
        tested = accepted + (accepted < state.stats.drafted - before.stats.drafted)
        new_tested = self._count_levels(tested, confidence, form)
        new_accepted = self._count_levels(accepted, confidence, form)

        # The sign changes when the batch goes from drafts to plain rounds or back.
        begun = jnp.any(confidence[:, None] == jnp.arange(self.streak.shape[1]), axis=0)
        next_streak = jnp.where(
            drafted, jnp.minimum(self.streak, 0) - 1, jnp.maximum(self.streak, 0) + 1
        )
        streak = jnp.where(begun, next_streak, self.streak)
        retry = streak >= self.retry_after
        # A retry forgets all counts. A plain round has none to add, and lets none decay.
        kept = jnp.where(retry, 0.0, jnp.where(drafted, DECAY, 1.0))[..., None]
        # The rows' counts are summed, so each row gets its share of the penalty.
        penalty = jnp.where(retry, RETRY_PENALTY / len(retry), 0.0)[..., None]

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

    def _count_levels(
        self, levels: Int[Array, "B"], confidence: Int[Array, "B"], form: Int[Array, "D"]
    ) -> Float[Array, "B c w"]:
        """The first ``levels`` levels of each row's draft, by confidence and number of siblings."""
        num_confidences, num_siblings = self.tested.shape[1:]
        of_level = level_confidences(confidence, len(form), num_confidences)
        is_confidence = of_level[..., None] == jnp.arange(num_confidences)  # [B, D, c]
        is_siblings = form[:, None] == 1 + jnp.arange(num_siblings)  # [D, w]
        is_counted = jnp.arange(len(form)) < levels[:, None]  # [B, D]
        kind = is_counted[..., None, None] & is_confidence[..., None] & is_siblings[:, None]
        return kind.sum(1).astype(jnp.float32)


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


def level_confidences(
    confidence: Int[Array, "B"], depth: int, num_confidences: int
) -> Int[Array, "B D"]:
    """The confidence of each level of a draft that begins with ``confidence``.

    A level is reached if the one above was accepted. So its own match is one token longer. Without
    a draft (−1) all levels have −1.
    """
    of_level = jnp.minimum(confidence[:, None] + jnp.arange(depth), num_confidences - 1)
    return jnp.where(confidence[:, None] < 0, -1, of_level)


def form_gains(
    rates: Float[Array, "c w"],
    forms: Sequence[Form],
    costs: Float[Array, "n"],
    confidence: Int[Array, "B"] | None = None,
    running: Bool[Array, "B"] | None = None,
) -> Float[Array, "n"]:
    """Expected tokens over cost of a round of each form; drafts lose :data:`MARGIN` of a plain one.

    Args:
      rates: how often one of w siblings is accepted, by confidence.
      costs: relative time of a round of each form. The first form is a plain round.
      confidence: of each row's draft, −1: it has none. By default all rows have the first one.
      running: the rows that count; by default all of them.
    """
    if confidence is None:
        confidence = jnp.zeros((1,), jnp.int32)
    if running is None:
        running = jnp.ones(confidence.shape, bool)
    siblings = level_table(forms)
    of_level = level_confidences(confidence, siblings.shape[1], len(rates))
    level_rates = rates[of_level[:, None], np.maximum(siblings, 1) - 1]  # [B, n, D]
    level_rates = jnp.where((siblings > 0) & (of_level[:, None] >= 0), level_rates, 0.0)
    # A level is reached if all levels above it were accepted: hence the cumulative product. The 1
    # is the token that every round emits, the correction or the bonus token.
    of_row = 1 + jnp.cumprod(level_rates, axis=2).sum(2)
    running = running.astype(jnp.float32)
    expected_tokens = running @ of_row / jnp.maximum(running.sum(), 1)
    gains = expected_tokens / costs
    return gains - MARGIN * gains[0] * (jnp.arange(len(forms)) > 0)


def next_form_index(
    history: AcceptanceHistory, gains: Float[Array, "n"], costs: Float[Array, "n"]
) -> Int[Array, ""]:
    """The index of the next round's form: the one that gains most.

    But while no token was tested, the first draft is a cheap one (:data:`FIRST_COST`): it may be
    rejected.
    """
    best = jnp.argmax(gains)
    is_draft = jnp.arange(len(gains)) > 0
    cheapest = jnp.where(is_draft, costs, jnp.inf).min()
    is_cheap = is_draft & (costs <= jnp.maximum(FIRST_COST * costs[0], cheapest))
    first = jnp.argmax(jnp.where(is_cheap, gains, -jnp.inf))
    is_unknown = history.tested.sum() < 1
    return jnp.where(is_unknown & (best > 0), first, best)


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

    @property
    def drafts_are_free(self) -> bool:
        """Whether no model runs for a draft. Its form is then chosen once the draft is known."""
        return not (self.drafter.needs_draft or self.drafter.needs_head)

    def timed_forms(self, target: Net) -> tuple[int, ...]:
        """For each form the index of the form that is timed instead: one that costs the same."""
        return tuple(range(len(self.forms)))

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        rows = state.length.shape[0]
        confidences = len(self.drafter.prior_acceptance)
        history = AcceptanceHistory.begin(rows, confidences, int(level_table(self.forms).max()))
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
        rates = jnp.ones((1, level_table(self.forms).max()))
        return jnp.argmax(form_gains(rates, self.forms, inputs.settings[COSTS])) > 0

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
        if self.drafts_are_free:
            return super().step(inputs, state)
        confidence = jnp.zeros_like(state.length)  # of all drafts: only free ones say more
        form_index = self._choose(inputs, state, confidence)
        # Without a draft model that can pause, form 0 is a draft of length 0: no separate branch.
        drafted = form_index > 0 if self.draft_can_pause else jnp.bool_(True)
        with_draft = functools.partial(self._round_with_draft, inputs, form_index)
        after = cond_in_place(drafted, with_draft, state)
        if self.draft_can_pause:
            without_draft = functools.partial(self._round_without_draft, inputs)
            after = cond_in_place(~drafted, without_draft, after)
        return self._with_round(state, after, confidence, form_index)

    def conclude(self, inputs, state, keys, proposal: Proposal) -> DecodeState:
        """The round from its draft on. A draft that costs nothing is cut to its form only here."""
        if not self.drafts_are_free:
            return super().conclude(inputs, state, keys, proposal)
        has_draft = proposal.draft.valid[:, 1:].any(1) & ~state.done
        confidence = 0 if proposal.confidence is None else proposal.confidence
        confidence = jnp.where(has_draft, confidence, -1)
        form_index = self._choose(inputs, state, confidence)
        draft = self._cut(proposal.draft, form_index)
        after = super().conclude(inputs, state, keys, proposal._replace(draft=draft))
        return self._with_round(state, after, confidence, form_index)

    def _choose(
        self, inputs: Inputs, state: DecodeState, confidence: Int[Array, "B"]
    ) -> Int[Array, ""]:
        """The index of the next round's form."""
        history = state.method_state
        costs = inputs.settings[COSTS]
        rates = history.rates(self.drafter.prior_acceptance)
        gains = form_gains(rates, self.forms, costs, confidence, ~state.done)
        return next_form_index(history, gains, costs)

    def _with_round(
        self,
        before: DecodeState,
        after: DecodeState,
        confidence: Int[Array, "B"],
        form_index: Int[Array, ""],
    ) -> DecodeState:
        """``after``, with the round in its history."""
        form = jnp.asarray(level_table(self.forms))[form_index]
        history = before.method_state.record_round(before, after, confidence, form_index > 0, form)
        return after.replace(method_state=history)

    def _cut(self, draft: Draft, form_index: Int[Array, ""]) -> Draft:
        """The part of the largest draft that has the form of this index."""
        raise NotImplementedError

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

    def timed_forms(self, target: Net) -> tuple[int, ...]:
        if not self.drafts_are_free:
            return super().timed_forms(target)
        # Only the size of the target pass counts.
        sizes = np.array(self.pass_sizes(target))
        size_of_form = np.searchsorted(sizes, np.add(LENGTHS, 1))
        return tuple(int(np.flatnonzero(size_of_form == size)[-1]) for size in size_of_form)

    def _round_with_draft(self, inputs, form_index, state):
        # One program serves all lengths: the drafter reads γ as a setting and stops there.
        gamma = jnp.asarray(LENGTHS, jnp.int32)[form_index]
        inputs = inputs.replace(settings=inputs.settings | {"gamma": gamma})
        if self.draft_can_pause:
            state = self._catch_up(inputs, state)
        # self.step is AutoLength.step, which has called this. The round itself is DraftVerify's.
        return DraftVerify.step(self, inputs, state)

    def propose(self, inputs, state, keys) -> Proposal:
        """The drafter's chain, cut to the round's γ if that is known already."""
        proposal = self.drafter.propose(inputs, state, keys)
        if self.drafts_are_free:
            return proposal
        return proposal._replace(draft=_cut_chain(proposal.draft, inputs.settings["gamma"]))

    def _cut(self, draft, form_index):
        return _cut_chain(draft, jnp.asarray(LENGTHS, jnp.int32)[form_index])


def _cut_chain(draft: Draft, length: Int[Array, ""]) -> Draft:
    """The first ``length`` tokens of each row's chain."""
    is_within = jnp.arange(draft.shape.nodes) <= length
    return draft.replace(valid=draft.valid & is_within)


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
