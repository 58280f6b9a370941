"""How every method's round ends: tokens are cut, written and counted.

No other file handles end of sequence, budget, emission and counters.

Axis legend: B rows, N draft nodes, D draft depth, S cache positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.core import probs, tree
from specjax.core.grammar_tables import states_after
from specjax.core.path_logits import count_new
from specjax.core.types import (
    FROM_DRAFT,
    FROM_TARGET,
    RUNNING,
    STOP_EOS,
    STOP_LENGTH,
    DecodeState,
    Draft,
    Inputs,
    Stats,
    Verdict,
)


class Cost(NamedTuple):
    """What a round cost. Calls are counted per row, passes per batch."""

    target_calls: Int[Array, "B"] | int
    passes: Int[Array, ""] | int
    draft_calls: Int[Array, "B"] | int = 0


class DraftOutcome(NamedTuple):
    """What became of a round's draft: its depth, and the tokens tested and accepted."""

    drafted: Int[Array, "B"]
    tested: Int[Array, "B"]
    accepted: Int[Array, "B"]


def finish_round(
    inputs: Inputs,
    state: DecodeState,
    verdict: Verdict,
    logprobs: Float[Array, "B D+1"] | None,
    cost: Cost,
    outcome: DraftOutcome | None = None,
) -> DecodeState:
    """Writes the verdict's tokens at the end of each row, and updates the counters.

    All tokens of the verdict are written, but ``length`` grows only by those that are kept. What
    lies past it is scratch that the next round overwrites. ``logprobs`` are those of the verdict's
    tokens under the unwarped target; None where nobody asked for them.
    """
    emitted, finish = cut_tokens(inputs, state, verdict)
    place = jnp.arange(verdict.tokens.shape[1])
    from_draft = place < verdict.num_accepted[:, None]
    origin = jnp.where(from_draft, FROM_DRAFT, FROM_TARGET).astype(jnp.int8)
    if logprobs is not None and state.logprobs is not None:
        logprobs = write_tokens(state.logprobs, logprobs, state.length)
    return state.replace(
        tokens=write_tokens(state.tokens, verdict.tokens, state.length),
        origin=write_tokens(state.origin, origin, state.length),
        logprobs=logprobs,
        length=state.length + emitted,
        finish=finish,
        counts=count_new(state.counts, verdict.tokens, emitted),
        grammar_state=states_after(inputs, state, verdict.tokens, emitted),
        stats=count_round(state, emitted, cost, outcome),
    )


def cut_tokens(
    inputs: Inputs, state: DecodeState, verdict: Verdict
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """How many of the verdict's tokens are kept, and each row's new ``finish``.

    The budget and an end-of-sequence token cut what is emitted, never what is drafted. A finished
    row keeps none.
    """
    place = jnp.arange(verdict.tokens.shape[1])
    is_token = place < verdict.num_tokens[:, None]
    ends = inputs.is_eos(verdict.tokens) & is_token
    has_end = ends.any(-1)
    # The end-of-sequence token itself is kept, hence + 1.
    through_eos = jnp.where(has_end, jnp.argmax(ends, axis=-1) + 1, verdict.num_tokens)
    budget = state.max_length - state.length
    emitted = jnp.minimum(through_eos, budget)
    emitted = jnp.where(state.done, 0, emitted).astype(jnp.int32)
    # If the end-of-sequence token is also the last of the budget, the row ended at that token.
    by_eos = has_end & (emitted == through_eos)
    by_budget = jnp.where(emitted == budget, STOP_LENGTH, RUNNING)
    finish = jnp.where(by_eos, STOP_EOS, by_budget)
    return emitted, jnp.where(state.done, state.finish, finish).astype(jnp.int32)


def path_logprobs(logits: Float[Array, "B N V"], verdict: Verdict) -> Float[Array, "B D+1"]:
    """Unwarped log-probabilities of the verdict's tokens, float32, in nats.

    Token i of a verdict follows node ``path[i]``, so it is scored by the logits at that node.
    """
    # Path entries past the accepted depth are out of range; what they read is never kept.
    node = jnp.minimum(verdict.path, logits.shape[1] - 1)
    after_node = jnp.take_along_axis(logits, node[:, :, None], axis=1)
    return probs.at_token(probs.log_softmax(after_node), verdict.tokens)


def write_tokens(buffer: Array, new: Array, start: Int[Array, "B"]) -> Array:
    """Writes ``new[B, n]`` into ``buffer[B, S]`` at each row's own start.

    What does not fit is dropped: ``dynamic_update_slice`` would move the write instead.
    """
    columns = start[:, None] + jnp.arange(new.shape[1])
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, columns].set(new.astype(buffer.dtype), mode="drop")


def draft_depth(draft: Draft) -> Int[Array, "B"]:
    """How deep each row's draft is: its length, if it is a chain."""
    if draft.shape.is_chain:
        return draft.valid[:, 1:].sum(-1, dtype=jnp.int32)
    bits = tree.ancestors(draft.parents, draft.shape.depth)
    return jnp.max(jnp.where(draft.valid, tree.depths(bits), 0), axis=-1)


def count_round(
    state: DecodeState,
    emitted: Int[Array, "B"],
    cost: Cost,
    outcome: DraftOutcome | None = None,
) -> Stats:
    """The counters after one round; finished rows count nothing.

    ``passes`` are the batch's and always count.
    """
    live = (~state.done).astype(jnp.int32)
    stats = state.stats
    stats = stats.replace(
        target_calls=stats.target_calls + live * cost.target_calls,
        draft_calls=stats.draft_calls + live * cost.draft_calls,
        rounds=stats.rounds + live,
        emitted=stats.emitted + emitted,
        passes=stats.passes + cost.passes,
    )
    if outcome is None:
        return stats
    bins = jnp.arange(stats.accepted_hist.shape[1]) == outcome.accepted[:, None]
    return stats.replace(
        drafted=stats.drafted + live * outcome.drafted,
        tested=stats.tested + live * outcome.tested,
        accepted=stats.accepted + live * outcome.accepted,
        accepted_hist=stats.accepted_hist + live[:, None] * bins,
    )
