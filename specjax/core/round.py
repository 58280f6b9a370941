"""One round of speculative decoding: draft, verify in one target pass, commit.

It does not know which drafter, target distribution and rule take part. The end of the round is in
:mod:`specjax.core.commit`.

Axis legend: B rows, N draft nodes, P probes, L auxiliary layers, D draft depth, V vocabulary. In
``aux_states`` D is the size of a hidden state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from specjax._util.arguments import DRAFTER, RULE, TARGET_DIST, validate_fields
from specjax._util.errors import OptionError, PairError
from specjax.core import probs, vocabulary
from specjax.core.commit import Cost, DraftOutcome, draft_depth, finish_round, path_logprobs
from specjax.core.grammar_tables import under_grammars
from specjax.core.net import Net
from specjax.core.protocols import (
    Drafter,
    Method,
    Proposal,
    Rule,
    TargetDist,
    check_sampling,
)
from specjax.core.scoring import score
from specjax.core.tree import cut_chain
from specjax.core.types import NO_NODE, DecodeState, Draft, Inputs, Verdict
from specjax.models.cache import commit_path

NARROW = 4  # nodes of a small target pass: with more, a CPU's kernels slow down
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DraftVerify(Method):
    """A drafter, a target distribution and a rule as one method.

    Raises:
      OptionError: a part is missing, not hashable, or has an unknown ``sampling``.
      PairError: the rule is not made for the drafter's sampling or tree.
    """

    drafter: Drafter
    target: TargetDist
    rule: Rule

    def __post_init__(self):
        validate_fields(self, drafter=DRAFTER, target=TARGET_DIST, rule=RULE)
        for role, part in (("drafter", self.drafter), ("target distribution", self.target)):
            check_hashable(role, part)
        check_pair(self.drafter, self.target, self.rule)

    @property
    def name(self) -> str:
        """The names of drafter and rule, such as ``chain+match``."""
        return f"{self.drafter.name}+{self.rule.name}"

    @property
    def depth(self) -> int:
        """The most draft tokens that a round accepts."""
        return self.drafter.shape.depth

    @property
    def follows_paths(self) -> bool:
        """Whether the target distribution and the rule both follow each node's path."""
        # A rule that reads the unwarped target could accept what the settings ban.
        return self.target.follows_paths and "raw_log_p" not in self.rule.extras

    @property
    def passes(self) -> tuple[int, ...]:
        """Tokens per row of each target pass of a round: nodes and probes."""
        return (self.drafter.shape.nodes + self.drafter.num_probes,)

    @property
    def extra_positions(self) -> int:
        """Cache positions that the target's ``init`` may fill, beyond a row's own tokens."""
        return self.target.extra_positions

    @property
    def round_positions(self) -> int:
        """Cache positions that one round may write: the widest pass, and what the target adds."""
        in_draft = max(*self.passes, self.drafter.round_positions)
        return in_draft + 1 + self.extra_positions

    @property
    def lookback(self) -> int:
        """How many tokens before the root the draft reads again."""
        # A head reads the target's hidden state at a token together with the token after it.
        return 1 if self.drafter.needs_head else 0

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return state.replace(
            cache=inputs.target.cache(*state.tokens.shape),
            target_state=self.target.init(inputs, state),
            drafter_state=self.drafter.init(inputs, state),
        )

    def prefill_chunk(self, inputs, state, tokens, start) -> DecodeState:
        aux_layers = self.drafter.aux_layers(inputs)
        cache, aux_states = inputs.target.prefill_chunk(state.cache, tokens, start, aux_layers)
        return state.replace(
            cache=cache,
            target_state=self.target.prefill_chunk(inputs, state.target_state, tokens, start),
            drafter_state=self.drafter.prefill_chunk(inputs, state, tokens, start, aux_states),
        )

    @property
    def splits_vocabulary(self) -> bool:
        """Whether every part can do with a share of the vocabulary on each device."""
        parts = (self.drafter, self.target, self.rule)
        return all(part.splits_vocabulary for part in parts)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        # Settings of paths have counts of all ids, and grammars masks of them.
        needs_all = inputs.warp.path is not None or inputs.grammars is not None
        splits = self.splits_vocabulary and not needs_all
        with vocabulary.split_over(inputs.target.config.shards if splits else 1):
            return self.conclude(inputs, state, keys, self.propose(inputs, state, keys))

    def conclude(
        self, inputs: Inputs, state: DecodeState, keys: Key[Array, "B"], proposal: Proposal
    ) -> DecodeState:
        """The round from its draft on: verified, committed, counted."""
        proposal = proposal._replace(draft=under_grammars(inputs, state, proposal.draft))
        verified = self._verify(inputs, state, keys, proposal.draft)
        draft = proposal.draft.replace(aux_states=verified.aux_states)
        verdict = verified.verdict

        target_calls = 1 + self.target.target_calls
        extra_draft_calls = self.target.draft_calls
        cost = Cost(
            target_calls=target_calls,
            passes=target_calls + proposal.passes + extra_draft_calls,
            draft_calls=proposal.calls + extra_draft_calls,
        )
        outcome = DraftOutcome(draft_depth(draft), verdict.num_tested, verdict.num_accepted)
        after = finish_round(inputs, state, verdict, verified.logprobs, cost, outcome)
        return after.replace(
            cache=verified.cache,
            target_state=self.target.commit(inputs, state, verified.target_state, draft, verdict),
            drafter_state=self.drafter.update(
                inputs, state, proposal.state, draft, verdict, verified.probe_logits
            ),
        )

    def propose(self, inputs: Inputs, state: DecodeState, keys: Key[Array, "B"]) -> Proposal:
        """The round's draft."""
        with jax.named_scope("draft"):
            return self.drafter.propose(inputs, state, keys)

    def pass_sizes(self, target: Net) -> tuple[int, ...]:
        """Nodes of each target pass that may be run. The smallest that holds the drafts is run."""
        nodes = self.drafter.shape.nodes
        if self.drafter.ends_early and nodes > NARROW:
            return (NARROW, nodes)
        return (nodes,)

    def _verify(self, inputs, state, keys, draft: Draft) -> Verified:
        """One target pass over the draft, as large as the longest live draft needs.

        Results for nodes past a small pass are 0: no live draft has such nodes.
        """
        # Passes up to this size cost the accelerator the same.
        smallest = min(inputs.target.padded_width(state.length.shape[0]), draft.shape.nodes)
        sizes = tuple(size for size in self.pass_sizes(inputs.target) if size >= smallest)
        if len(sizes) == 1:
            return self._verify_nodes(inputs, state, keys, draft)

        # Every size must give the same shapes, those of the whole pass.
        whole = jax.eval_shape(self._verify_nodes, inputs, state, keys, draft)
        result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole)
        result = result._replace(cache=state.cache, target_state=state.target_state)
        longest = jnp.max(jnp.where(state.done, 0, draft.valid.sum(-1)))
        # Exactly one of the sizes is run: the smallest that holds the longest draft.
        below = -1
        for size in sizes:
            fits = (longest <= size) | (size == sizes[-1])
            part = draft if size == draft.shape.nodes else cut_chain(draft, size)

            def run(result: Verified, part=part) -> Verified:
                now = state.replace(cache=result.cache, target_state=result.target_state)
                return self._verify_nodes(inputs, now, keys, part).padded_to(whole)

            result = cond_in_place((longest > below) & fits, run, result)
            below = size
        return result

    def _verify_nodes(self, inputs: Inputs, state: DecodeState, keys, draft: Draft) -> Verified:
        """One target pass over all nodes of a draft, and the rule's verdict."""
        start = state.length - 1  # the cache position of the root
        aux_layers = self.drafter.aux_layers(inputs)
        with jax.named_scope("target_pass"):
            scores, cache, aux_states = score(inputs.target, state.cache, start, draft, aux_layers)
        draft = draft.replace(aux_states=aux_states)
        nodes = draft.shape.nodes
        logits = scores[:, :nodes]
        probe_logits = None if draft.probes is None else scores[:, nodes:]
        log_p, target_state = self.target.log_p(inputs, state, draft, logits)
        with jax.named_scope("rule"):
            verdict = self._apply_rule(inputs, state, keys, draft, log_p, logits)
        if not draft.shape.is_chain:
            # A chain's accepted tokens are side by side in the cache. A tree's path is moved there.
            cache = commit_path(cache, start, verdict.path)
        logprobs = None if state.logprobs is None else path_logprobs(logits, verdict)
        return Verified(verdict, logprobs, cache, target_state, aux_states, probe_logits)

    def on_slot_reuse(self, before, state):
        return state.replace(drafter_state=self.drafter.on_slot_reuse(before, state))

    def _apply_rule(
        self,
        inputs: Inputs,
        state: DecodeState,
        keys: Key[Array, "B"],
        draft: Draft,
        log_p: Float[Array, "B N V"],
        logits: Float[Array, "B N V"],
    ) -> Verdict:
        """The rule's verdict, with its settings and the extras that it asks for."""
        arguments: dict[str, Any] = {name: inputs.settings[name] for name in self.rule.settings}
        if "raw_log_p" in self.rule.extras:
            arguments["raw_log_p"] = probs.log_softmax(logits)
        if "joint_raw" in self.rule.extras:
            arguments["joint_raw"] = self.drafter.raw_rows(inputs)
        if "written" in self.rule.extras:
            arguments["written"] = state.length - state.prompt_length
            keys = state.keys
        arrays = jax.tree.map(jnp.asarray, draft)  # a constant tree is numpy until here
        return self.rule(keys, arrays, log_p, **arguments)


def draft_verify(drafter: Drafter, target: TargetDist, rule: Rule) -> Method:
    """The method that drafts, verifies with one pass of the target model, and commits.

    It is lossless if the rule is: the output then has exactly the target distribution.

    Raises:
      OptionError: a part is missing, not hashable, or has an unknown ``sampling``.
      PairError: the rule is not made for the drafter's sampling or tree.
    """
    return DraftVerify(drafter, target, rule)


def check_pair(drafter: Drafter, target: TargetDist, rule: Rule) -> None:
    """Refuses a rule that is not made for the drafter's sampling or shape.

    Raises:
      OptionError: the drafter's ``sampling`` is no label of :mod:`specjax.core.types`.
      PairError: says what the rule needs and what the drafter offers.
    """
    check_sampling(f"drafter {drafter.name} has sampling", drafter.sampling)
    rule.check_draft(drafter.sampling, drafter.shape, f"drafter {drafter.name} proposes")
    if target.needs_draft_logits and not drafter.keep_logits:
        raise PairError(
            f"target distribution {type(target).__name__.lower()} needs the draft's logits at "
            f"every node, which drafter {drafter.name} does not give"
        )


def check_hashable(role: str, part: object) -> None:
    """Refuses a part that cannot be a static choice of a compiled program.

    Raises:
      OptionError: names the part's class.
    """
    try:
        hash(part)
    except TypeError:
        raise OptionError(
            f"{role} {type(part).__name__} is not hashable: make it a frozen dataclass whose "
            "fields are numbers, texts and tuples"
        ) from None


class Verified(NamedTuple):
    """What a target pass over a draft gives."""

    verdict: Verdict
    logprobs: Float[Array, "B D+1"] | None  # of its tokens, unwarped target, where asked for
    cache: Any
    target_state: Any
    aux_states: Float[Array, "B N L D"] | None
    probe_logits: Float[Array, "B P V"] | None

    def padded_to(self, whole: Verified) -> Verified:
        """The same with the shapes of a whole pass; missing nodes are 0, NO_NODE in the path."""

        def pad(x, like, fill=0):
            missing = [(0, want - size) for want, size in zip(like.shape, x.shape, strict=True)]
            return jnp.pad(x, missing, constant_values=fill)

        path = pad(self.verdict.path, whole.verdict.path, NO_NODE)
        padded = self._replace(verdict=self.verdict.replace(path=path))
        return jax.tree.map(pad, padded, whole)


def cond_in_place(condition: Bool[Array, ""], function: Callable[[T], T], carry: T) -> T:
    """``function(carry)`` if ``condition`` holds, else ``carry``.

    It is a loop of at most one iteration. ``lax.cond`` would keep a second copy of what it returns,
    and the carry holds caches. The loop counts down, so that a kernel computes its condition. With
    a flag as the condition, rounds that an H100 ran as one CUDA graph wrote wrong tokens.
    """

    def run(loop):
        iterations, carry = loop
        return iterations - 1, function(carry)

    iterations = condition.astype(jnp.int32)
    return jax.lax.while_loop(lambda loop: loop[0] > 0, run, (iterations, carry))[1]
