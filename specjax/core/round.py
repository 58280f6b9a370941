"""One round: draft, verify, commit; and how every method's round ends.

End of sequence, budget, emission and counters exist here and nowhere else.

Axis legend: B rows, N draft nodes, P probes, D draft depth, S cache positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import DRAFTER, RULE, TARGET_DIST, validate_fields
from specjax._util.errors import PairError
from specjax.core import probs, tree
from specjax.core.protocols import Drafter, Method, Proposal, Rule, TargetDist
from specjax.core.scoring import score
from specjax.core.tree import cut_chain
from specjax.core.types import (
    FROM_DRAFT,
    FROM_TARGET,
    NO_NODE,
    RUNNING,
    STOP_EOS,
    STOP_LENGTH,
    DecodeState,
    Draft,
    Inputs,
    Stats,
    Verdict,
)
from specjax.models.cache import commit_path

NARROW = 4  # nodes of a narrow pass: a CPU's kernels slow down beyond


@dataclasses.dataclass(frozen=True)
class DraftVerify(Method):
    """A drafter, a target distribution and a rule as one method.

    Raises:
      OptionError: a part is none.
      PairError: the rule is not made for the drafter's sampling or tree.
    """

    drafter: Drafter
    target: TargetDist
    rule: Rule

    def __post_init__(self):
        validate_fields(self, drafter=DRAFTER, target=TARGET_DIST, rule=RULE)
        check_pair(self.drafter, self.target, self.rule)

    @property
    def depth(self) -> int:
        return self.drafter.shape.depth

    @property
    def passes(self) -> tuple[int, ...]:
        """Tokens per row of each target pass of a round: nodes and probes."""
        return (self.drafter.shape.nodes + self.drafter.num_probes,)

    @property
    def round_positions(self) -> int:
        return max(*self.passes, self.drafter.round_positions) + 1

    @property
    def lookback(self) -> int:
        return int(self.drafter.needs_head)  # a head reads a token with the one behind it

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return state.replace(
            cache=inputs.target.cache(*state.tokens.shape),
            target_state=self.target.init(inputs, state),
            drafter_state=self.drafter.init(inputs, state),
        )

    def prefill_chunk(self, inputs, state, tokens, start) -> DecodeState:
        drafter = self.drafter
        aux_layers = drafter.aux_layers(inputs)
        cache, aux_states = inputs.target.prefill_chunk(state.cache, tokens, start, aux_layers)
        return state.replace(
            cache=cache,
            target_state=self.target.prefill_chunk(inputs, state.target_state, tokens, start),
            drafter_state=drafter.prefill_chunk(inputs, state, tokens, start, aux_states),
        )

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        draft, drafter_state, calls, passes = self.propose(inputs, state, keys)
        found = self._found(inputs, state, keys, draft)
        verdict, extra = found.verdict, self.target.draft_calls
        draft = draft.replace(aux_states=found.aux_states)
        cost = Cost(1, 1 + passes + extra, calls + extra)
        tested = Tested(draft_depth(draft), verdict.num_tested, verdict.num_accepted)
        return finish_round(inputs, state, verdict, found.logprobs, cost, tested).replace(
            cache=found.cache,
            target_state=self.target.commit(inputs, state, found.target_state, draft, verdict),
            drafter_state=self.drafter.update(
                inputs, state, drafter_state, draft, verdict, found.probe_logits
            ),
        )

    def propose(self, inputs: Inputs, state: DecodeState, keys: Key[Array, "B"]) -> Proposal:
        """The round's draft."""
        return self.drafter.propose(inputs, state, keys)

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Nodes of the passes one of which verifies a draft, as many as that needs."""
        nodes = self.drafter.shape.nodes
        return (NARROW, nodes) if self.drafter.ends_early and nodes > NARROW else (nodes,)

    def _found(self, inputs, state, keys, draft: Draft) -> Found:
        """What the target makes of the draft: one pass, as wide as the longest live draft needs.

        What lies past a narrow pass is 0: no draft is there.
        """
        free = min(inputs.target.narrow(state.length.shape[0]), draft.shape.nodes)
        widths = tuple(width for width in self.pass_sizes if width >= free)
        if len(widths) == 1:
            return self._verified(inputs, state, keys, draft)
        whole = jax.eval_shape(self._verified, inputs, state, keys, draft)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole)
        found = blank._replace(cache=state.cache, target_state=state.target_state)
        longest = jnp.max(jnp.where(state.done, 0, draft.valid.sum(-1)))
        below = -1
        for width in widths:
            due = (longest > below) & ((longest <= width) | (width == widths[-1]))
            part = draft if width == draft.shape.nodes else cut_chain(draft, width)

            def turn(found: Found, part=part) -> Found:
                now = state.replace(cache=found.cache, target_state=found.target_state)
                return self._verified(inputs, now, keys, part).widened(whole)

            found, below = cond_in_place(due, turn, found), width
        return found

    def _verified(self, inputs: Inputs, state: DecodeState, keys, draft: Draft) -> Found:
        """One target pass over the draft, and the rule's verdict."""
        start, aux_layers = state.length - 1, self.drafter.aux_layers(inputs)
        scores, cache, aux_states = score(inputs.target, state.cache, start, draft, aux_layers)
        draft = draft.replace(aux_states=aux_states)
        logits = scores[:, : draft.shape.nodes]
        probe_logits = None if draft.probes is None else scores[:, draft.shape.nodes :]
        log_p, target_state = self.target.log_p(inputs, state, draft, logits)
        arrays = jax.tree.map(jnp.asarray, draft)  # a constant tree is numpy until here
        with jax.named_scope("rule"):
            arguments = self._rule_arguments(inputs, state, logits)
            own = state.keys if "written" in arguments else keys
            verdict = self.rule(own, arrays, log_p, **arguments)
        if not draft.shape.is_chain:
            cache = commit_path(cache, start, verdict.path)
        logprobs = None if state.logprobs is None else path_logprobs(logits, verdict)
        return Found(verdict, logprobs, cache, target_state, aux_states, probe_logits)

    def on_slot_reuse(self, before, state):
        return state.replace(drafter_state=self.drafter.on_slot_reuse(before, state))

    def _rule_arguments(
        self, inputs: Inputs, state: DecodeState, logits: Float[Array, "B N V"]
    ) -> dict[str, Any]:
        """The rule's settings, and what it reads beside the draft and log p."""
        arguments = {name: inputs.settings[name] for name in self.rule.settings}
        if "raw_log_p" in self.rule.extras:
            arguments["raw_log_p"] = probs.log_softmax(logits)
        if "joint_raw" in self.rule.extras:
            arguments["joint_raw"] = self.drafter.raw_rows(inputs)
        if "written" in self.rule.extras:
            arguments["written"] = state.length - state.prompt_length
        return arguments


def draft_verify(drafter: Drafter, target: TargetDist, rule: Rule) -> Method:
    """The method that drafts, verifies with one pass of the target model, and commits."""
    return DraftVerify(drafter, target, rule)


def check_pair(drafter: Drafter, target: TargetDist, rule: Rule) -> None:
    """Refuses a rule that is not made for the drafter's sampling or shape.

    Raises:
      PairError: says what the rule needs and what the drafter offers.
    """
    if drafter.sampling not in rule.accepts:
        accepted = " or ".join(sorted(rule.accepts))
        raise PairError(
            f"rule {rule.name} accepts {accepted} drafts, but drafter {drafter.name} makes "
            f"{drafter.sampling} ones; choose another --rule or --drafter"
        )
    if rule.chain_only and not drafter.shape.is_chain:
        raise PairError(
            f"rule {rule.name} verifies a chain, but drafter {drafter.name} makes a tree; choose a "
            "tree rule or a chain drafter"
        )
    if target.needs_draft_logits and not drafter.keep_logits:
        raise PairError(
            f"target distribution {type(target).__name__.lower()} needs the draft's logits at "
            f"every node, which drafter {drafter.name} does not give"
        )


class Found(NamedTuple):
    """What a target pass over a draft has brought."""

    verdict: Verdict
    logprobs: Float[Array, "B D+1"] | None  # of its tokens, unwarped target, where asked for
    cache: Any
    target_state: Any
    aux_states: Float[Array, "B N L D"] | None
    probe_logits: Float[Array, "B P V"] | None

    def widened(self, whole: Found) -> Found:
        """A narrow pass's as one of a whole pass, whose shapes are given."""

        def pad(x, like, fill=0):
            sizes = zip(like.shape, x.shape, strict=True)
            return jnp.pad(x, [(0, size - own) for size, own in sizes], constant_values=fill)

        path = pad(self.verdict.path, whole.verdict.path, NO_NODE)
        return jax.tree.map(pad, self._replace(verdict=self.verdict.replace(path=path)), whole)


def cond_in_place(due: Bool[Array, ""], turn: Callable[[Any], Any], carry: Any) -> Any:
    """``turn(carry)`` where it is ``due``, else ``carry``.

    A loop of at most one turn, for ``lax.cond`` keeps a second copy of what it hands on: caches.
    """
    return jax.lax.while_loop(lambda c: c[0], lambda c: (~c[0], turn(c[1])), (due, carry))[1]


class Cost(NamedTuple):
    """What a round cost; calls are counted per row, passes per batch."""

    target_calls: Int[Array, "B"] | int
    passes: Int[Array, ""] | int
    draft_calls: Int[Array, "B"] | int = 0


class Tested(NamedTuple):
    """What became of a round's draft: depth offered, tokens tested and accepted."""

    drafted: Int[Array, "B"]
    tested: Int[Array, "B"]
    accepted: Int[Array, "B"]


def finish_round(
    inputs: Inputs,
    state: DecodeState,
    verdict: Verdict,
    logprobs: Float[Array, "B D+1"] | None,
    cost: Cost,
    tested: Tested | None = None,
) -> DecodeState:
    """Writes the verdict's tokens behind each row and counts; what is cut stays scratch.

    ``logprobs`` are those of the verdict's tokens, unwarped target, where asked for.
    """
    emitted, finish = clip(inputs, state, verdict)
    at = jnp.arange(verdict.tokens.shape[1])
    drafted = at < verdict.num_accepted[:, None]
    origin = jnp.where(drafted, FROM_DRAFT, FROM_TARGET).astype(jnp.int8)
    if logprobs is not None:
        logprobs = write_tokens(state.logprobs, logprobs, state.length)
    return state.replace(
        tokens=write_tokens(state.tokens, verdict.tokens, state.length),
        origin=write_tokens(state.origin, origin, state.length),
        logprobs=logprobs,
        length=state.length + emitted,
        finish=finish,
        stats=tally(state, emitted, cost, tested),
    )


def clip(
    inputs: Inputs, state: DecodeState, verdict: Verdict
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """How many of the verdict's tokens are kept, and whether the row ends with them.

    The budget and an end-of-sequence token cut what is emitted, never what is drafted. A
    finished row keeps 0.
    """
    at = jnp.arange(verdict.tokens.shape[1])
    real = at < verdict.num_tokens[:, None]
    ends = inputs.is_eos(verdict.tokens) & real
    through_eos = jnp.where(ends.any(-1), jnp.argmax(ends, axis=-1) + 1, verdict.num_tokens)
    left = state.max_length - state.length
    emitted = jnp.where(state.done, 0, jnp.minimum(through_eos, left)).astype(jnp.int32)
    by_eos = ends.any(-1) & (emitted == through_eos)
    finish = jnp.where(by_eos, STOP_EOS, jnp.where(emitted == left, STOP_LENGTH, RUNNING))
    return emitted, jnp.where(state.done, state.finish, finish).astype(jnp.int32)


def path_logprobs(logits: Float[Array, "B N V"], verdict: Verdict) -> Float[Array, "B D+1"]:
    """Unwarped log-probabilities of the verdict's tokens."""
    node = jnp.minimum(verdict.path, logits.shape[1] - 1)
    rows = jnp.take_along_axis(logits, node[:, :, None], axis=1)
    return probs.at_token(probs.log_softmax(rows), verdict.tokens)


def write_tokens(buffer: Array, new: Array, start: Int[Array, "B"]) -> Array:
    """Writes ``new[B, n]`` into ``buffer[B, S]`` at each row's own start."""
    at = start[:, None] + jnp.arange(new.shape[1])
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, at].set(new.astype(buffer.dtype), mode="drop")


def draft_depth(draft: Draft) -> Int[Array, "B"]:
    """How deep each row's draft is."""
    if draft.shape.is_chain:
        return draft.valid[:, 1:].sum(-1, dtype=jnp.int32)
    bits = tree.ancestors(draft.parents, draft.shape.depth)
    return jnp.max(jnp.where(draft.valid, tree.depths(bits), 0), axis=-1)


def tally(
    state: DecodeState, emitted: Int[Array, "B"], cost: Cost, tested: Tested | None = None
) -> Stats:
    """The counters after one round; finished rows count nothing."""
    live = (~state.done).astype(jnp.int32)
    stats = state.stats
    stats = stats.replace(
        target_calls=stats.target_calls + live * cost.target_calls,
        draft_calls=stats.draft_calls + live * cost.draft_calls,
        rounds=stats.rounds + live,
        emitted=stats.emitted + emitted,
        passes=stats.passes + cost.passes,
    )
    if tested is None:
        return stats
    bins = jnp.arange(stats.accepted_hist.shape[1]) == tested.accepted[:, None]
    return stats.replace(
        drafted=stats.drafted + live * tested.drafted,
        tested=stats.tested + live * tested.tested,
        accepted=stats.accepted + live * tested.accepted,
        accepted_hist=stats.accepted_hist + live[:, None] * bins,
    )
