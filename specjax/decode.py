"""The one loop: prompts in, rounds of a method, tokens out.

A method's step is pure; :func:`run_rounds` wraps it in one jitted ``while_loop`` per bucket
of slots. End of sequence, budget, counters and growth exist here and nowhere else.

Axis legend: B rows, N draft nodes, P probes, D draft depth, S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import probs, tree
from specjax.compat import check_pair
from specjax.mesh import spread
from specjax.models import ModelConfig, init_cache
from specjax.models.cache import bucket, commit_path, grow
from specjax.models.forward import prefill
from specjax.protocols import Drafter, Method, Rule, TargetDist
from specjax.scoring import score, score_as_needed
from specjax.stopping import is_eos
from specjax.types import (
    FROM_DRAFT,
    FROM_TARGET,
    RUNNING,
    STOP_EOS,
    STOP_LENGTH,
    STOP_TEXT,
    DecodeState,
    Draft,
    Inputs,
    Stats,
    Verdict,
)
from specjax.warp import limit_vocabulary


@dataclasses.dataclass(frozen=True)
class DraftVerify:
    """A drafter, a target distribution and a rule as one method.

    Raises:
      PairError: the rule is not made for the drafter's law or tree.
    """

    model: ModelConfig
    drafter: Drafter
    target: TargetDist
    rule: Rule
    reserves = False

    def __post_init__(self):
        check_pair(self.drafter, self.target, self.rule)

    @property
    def depth(self) -> int:
        """Bins of the histogram of accepted depths, less one."""
        return self.drafter.shape.depth

    @property
    def passes(self) -> tuple[int, ...]:
        """Tokens per row of each target pass of a round: nodes and probes."""
        return (self.drafter.shape.nodes + self.drafter.num_probes,)

    @property
    def width(self) -> int:
        return max(*self.passes, getattr(self.drafter, "slots", 0)) + 1

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> DecodeState:
        rows, slots = state.tokens.shape
        cache = init_cache(self.model, rows, slots, inputs.target["embed"].dtype)
        cache = prefill(self.model, inputs.target, cache, state.tokens, state.length, chunk)
        return state.replace(
            cache=cache,
            target=self.target.init(inputs, state, chunk),
            drafter=self.drafter.init(inputs, state, chunk),
        )

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        start = state.length - 1
        draft, drafter, calls, passes = self.drafter.propose(inputs, state, keys)
        arguments = self.model, inputs.target, state.cache, start, draft
        if getattr(self.drafter, "ends_early", False):
            scores, cache = score_as_needed(*arguments, ~state.done)
        else:
            scores, cache = score(*arguments)
        logits = scores[:, : draft.shape.nodes]
        probe_logits = None if draft.probes is None else scores[:, draft.shape.nodes :]
        log_p, target = self.target.log_p(inputs, state, draft, logits)
        arrays = jax.tree.map(jnp.asarray, draft)  # a constant tree is numpy until here
        verdict = self.rule(keys, arrays, log_p, **self._rule_arguments(inputs, logits))

        emitted, finish = clip(inputs, state, verdict)
        if not draft.shape.is_chain:
            cache = commit_path(cache, start, verdict.path)
        extra = self.target.draft_calls
        stats = count(state, draft, verdict, emitted, calls + extra, passes + extra)
        logprobs = None if state.logprobs is None else path_logprobs(logits, verdict)
        return emit(state, verdict, emitted, finish, logprobs).replace(
            cache=cache,
            target=self.target.commit(inputs, state, target, draft, verdict),
            drafter=self.drafter.update(inputs, state, drafter, draft, verdict, probe_logits),
            stats=stats,
        )

    def finalize(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return state

    def _rule_arguments(self, inputs: Inputs, logits: Float[Array, "B N V"]) -> dict[str, Any]:
        """The rule's settings, and what it reads beside the draft and log p."""
        arguments = {name: inputs.settings[name] for name in self.rule.settings}
        if "raw_log_p" in self.rule.extras:
            known = limit_vocabulary(logits, self.target.vocab_limit)
            arguments["raw_log_p"] = probs.log_softmax(known)
        if "joint_raw" in self.rule.extras:
            raw_rows = getattr(self.drafter, "raw_rows", None)
            arguments["joint_raw"] = raw_rows(inputs) if raw_rows else False
        return arguments


def draft_verify(drafter: Drafter, target: TargetDist, rule: Rule, model: ModelConfig) -> Method:
    """The method that drafts, verifies with one pass of ``model``, and commits."""
    return DraftVerify(model, drafter, target, rule)


def clip(
    inputs: Inputs, state: DecodeState, verdict: Verdict
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """How many of the verdict's tokens are kept, and whether the row ends with them.

    The budget and an end-of-sequence token cut what is emitted, never what is drafted. A
    finished row keeps 0.
    """
    at = jnp.arange(verdict.tokens.shape[1])
    real = at < verdict.num_tokens[:, None]
    ends = is_eos(verdict.tokens, inputs.eos_ids) & real
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


def emit(
    state: DecodeState,
    verdict: Verdict,
    emitted: Int[Array, "B"],
    finish: Int[Array, "B"],
    logprobs: Float[Array, "B D+1"] | None,
) -> DecodeState:
    """Writes the verdict's tokens behind each row; those past ``emitted`` stay scratch."""
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
    )


def write_tokens(buffer: Array, new: Array, start: Int[Array, "B"]) -> Array:
    """Writes ``new[B, n]`` into ``buffer[B, S]`` at each row's own start."""
    at = start[:, None] + jnp.arange(new.shape[1])
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, at].set(new.astype(buffer.dtype), mode="drop")


def count(
    state: DecodeState,
    draft: Draft,
    verdict: Verdict,
    emitted: Int[Array, "B"],
    calls: Int[Array, "B"],
    passes: Int[Array, ""],
) -> Stats:
    """The counters after one round; finished rows count nothing."""
    live = (~state.done).astype(jnp.int32)
    stats = state.stats
    if draft.shape.is_chain:
        depth = draft.valid[:, 1:].sum(-1, dtype=jnp.int32)
    else:
        bits = tree.ancestors(draft.parents, draft.shape.depth)
        depth = jnp.max(jnp.where(draft.valid, tree.depths(bits), 0), axis=-1)
    bins = jnp.arange(stats.accepted_hist.shape[1]) == verdict.num_accepted[:, None]
    return Stats(
        target_calls=stats.target_calls + live,
        draft_calls=stats.draft_calls + live * calls,
        rounds=stats.rounds + live,
        drafted=stats.drafted + live * depth,
        tested=stats.tested + live * verdict.num_tested,
        accepted=stats.accepted + live * verdict.num_accepted,
        emitted=stats.emitted + emitted,
        passes=stats.passes + passes + 1,
        accepted_hist=stats.accepted_hist + live[:, None] * bins,
    )


def start(
    method: Method,
    inputs: Inputs,
    prompts: list[np.ndarray],
    budget: Int[np.ndarray, "B"],
    keys: Key[Array, "B"],
    *,
    logprobs: bool = False,
    chunk: int,
) -> DecodeState:
    """The state after the prompts: tokens left-aligned in a bucket, caches filled."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    room = int(budget.max()) if method.reserves else 0
    longest = int(lengths.max())
    slots = bucket(max(longest + room + method.width, -(-longest // chunk) * chunk))
    tokens = np.zeros((len(prompts), slots), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return prefill_prompts(method, chunk, logprobs)(
        inputs, jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(lengths + budget), keys
    )


@functools.cache
def prefill_prompts(method: Method, chunk: int, logprobs: bool):
    """``fill(inputs, tokens[B,S], length[B], max_length[B], keys[B]) -> state``: caches filled.

    One trace per bucket of slots.
    """
    depth = getattr(method, "depth", 0)  # searches draft nothing

    def fill(inputs: Inputs, tokens, length, max_length, keys) -> DecodeState:
        rows = tokens.shape[0]
        zero = jnp.zeros((rows,), jnp.int32)
        # Stats are donated with the state: every counter needs a buffer of its own.
        stats = Stats(
            *(zero + 0 for _ in range(7)),
            passes=jnp.int32(0),
            accepted_hist=jnp.zeros((rows, depth + 1), jnp.int32),
        )
        state = DecodeState(
            tokens=tokens,
            length=length,
            prompt_length=length + 0,
            max_length=max_length,
            finish=jnp.where(max_length > length, RUNNING, STOP_LENGTH).astype(jnp.int32),
            origin=jnp.zeros(tokens.shape, jnp.int8),
            logprobs=jnp.zeros(tokens.shape, jnp.float32) if logprobs else None,
            keys=keys,
            cache=(),
            target=(),
            drafter=(),
            stats=stats,
        )
        return method.init(inputs, state, chunk)

    return jax.jit(spread(fill))


@functools.cache
def run_rounds(method: Method):
    """``run(inputs, state, rounds) -> state``: up to ``rounds`` rounds on the device.

    One trace per bucket of slots. It returns early when every row is done, or when the
    longest row could outgrow its slots. The state is donated.
    """

    def run(inputs: Inputs, state: DecodeState, rounds: Int[Array, ""]) -> DecodeState:
        def more(carry):
            i, state = carry
            fits = jnp.max(state.length) + method.width <= state.slots
            return (i < rounds) & ~jnp.all(state.done) & fits

        def advance(carry):
            i, state = carry
            return i + 1, method.step(inputs, state)

        return jax.lax.while_loop(more, advance, (jnp.int32(0), state))[1]

    return jax.jit(spread(run), donate_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def grow_state(state: DecodeState, slots: int) -> DecodeState:
    """The state in the next bucket: every array along the slots is padded."""

    def pad(x):
        return x if x is None else jnp.pad(x, ((0, 0), (0, slots - x.shape[1])))

    return grow(state, slots).replace(
        tokens=pad(state.tokens), origin=pad(state.origin), logprobs=pad(state.logprobs)
    )


def advance(method: Method, inputs: Inputs, state: DecodeState, rounds: int) -> DecodeState:
    """Runs up to ``rounds`` more rounds, growing the bucket where the next one needs it."""
    state = make_room(method, state)
    return run_rounds(method)(inputs, state, np.int32(min(rounds, 2**31 - 1)))


def make_room(method: Method, state: DecodeState) -> DecodeState:
    """The state in the next bucket if another round could outgrow this one."""
    needed = int(state.length.max()) + method.width
    return grow_state(state, bucket(needed)) if needed > state.slots else state


@jax.jit
def mark_stopped(state: DecodeState, stopped: Bool[Array, "B"]) -> DecodeState:
    """Ends rows whose text holds a stop string; that is only known outside the device."""
    return state.replace(finish=jnp.where(stopped & ~state.done, STOP_TEXT, state.finish))
