"""Rounds under grammars that are tables: no step of them waits for the host.

A row keeps the state of its grammar between rounds. A draft's nodes have the states along their
paths, and what may follow in a state is a mask of the target's logits. So a lossless rule stays
lossless for the target under the grammar.

Axis legend: B rows, N nodes, D depth of the draft, Q states of all grammars, V vocabulary,
W = ⌈V/32⌉ words of 32 bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.core import probs
from specjax.core.protocols import Drafter
from specjax.core.types import (
    IID,
    NO_TOKEN,
    POINT_MASS,
    ROOT,
    DecodeState,
    Draft,
    GrammarTables,
    Inputs,
)


@jax.named_scope("grammar")
def under_grammars(inputs: Inputs, state: DecodeState, draft: Draft) -> Draft:
    """The draft with the tokens that tables force, and with what they allow at its nodes."""
    tables = inputs.grammars
    if tables is None:
        return draft
    assert state.grammar_state is not None, "a state of rows with tables has their states"
    root = tables.first + state.grammar_state
    if takes_forced(draft):
        tokens, valid, is_forced = _forced_chain(tables, root, draft)
        draft = with_forced(draft, tokens, valid, is_forced, inputs.target.vocab)
    allowed = tables.allowed[_node_states(tables, root, draft)]
    if draft.allowed is not None:
        allowed = allowed & draft.allowed
    return draft.replace(allowed=allowed)


def states_after(
    inputs: Inputs, state: DecodeState, tokens: Int[Array, "B n"], emitted: Int[Array, "B"]
) -> Int[Array, "B"] | None:
    """The rows' states after the first ``emitted`` of each row's tokens."""
    tables = inputs.grammars
    if tables is None or state.grammar_state is None:
        return state.grammar_state
    at = tables.first + state.grammar_state
    for place in range(tokens.shape[1]):
        at = jnp.where(place < emitted, _step(tables, at, tokens[:, place]), at)
    # A token that the grammar does not allow would lead to state 0. No rule accepts one.
    return jnp.maximum(at - tables.first, 0)


def takes_forced(draft: Draft | Drafter) -> bool:
    """Whether drafts can be replaced by tokens that a grammar forces.

    Trees cannot, nor drafts whose raw logits a target distribution reads: they are of other tokens.
    """
    has_logits = draft.logits is not None if isinstance(draft, Draft) else draft.keep_logits
    return draft.shape.is_chain and draft.sampling in (IID, POINT_MASS) and not has_logits


def with_forced(
    draft: Draft,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    is_forced: Bool[Array, "B"],
    vocab: int,
) -> Draft:
    """A chain with these tokens and valid nodes. Forced tokens are known: their q is a point
    mass.
    """
    log_q = draft.log_q
    if log_q is not None:
        certain = probs.one_hot_log(tokens[:, 1:], vocab)
        log_q = jnp.where(is_forced[:, None, None], certain, log_q)
    return draft.replace(tokens=tokens, valid=valid, log_q=log_q)


def _forced_chain(
    tables: GrammarTables, root: Int[Array, "B"], draft: Draft
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"], Bool[Array, "B"]]:
    """The draft's tokens and valid nodes, and the rows whose tables force tokens.

    These rows have the forced tokens as their draft.
    """
    at = root
    found = []
    for _ in range(draft.shape.depth):
        token = tables.forced[at]
        found.append(token)
        at = jnp.where(token == NO_TOKEN, 0, _step(tables, at, jnp.maximum(token, 0)))
    if not found:
        return draft.tokens, draft.valid, jnp.zeros(root.shape, bool)
    forced = jnp.stack(found, axis=1)
    is_token = forced != NO_TOKEN
    is_forced = is_token[:, 0]
    own = jnp.concatenate([draft.tokens[:, :1], forced], axis=1)
    own_valid = draft.valid[:, :1] & jnp.pad(is_token, ((0, 0), (1, 0)), constant_values=True)
    use = is_forced[:, None]
    tokens = jnp.where(use & own_valid, own, draft.tokens)
    return tokens, jnp.where(use, own_valid, draft.valid), is_forced


def _node_states(tables: GrammarTables, root: Int[Array, "B"], draft: Draft) -> Int[Array, "B N"]:
    """The state after each node. It is right for nodes of depth d after d iterations."""
    parents = jnp.minimum(jnp.asarray(draft.parents), draft.shape.nodes - 1)
    is_root = jnp.arange(draft.shape.nodes) == ROOT
    states = jnp.broadcast_to(root[:, None], draft.tokens.shape)
    for _ in range(draft.shape.depth):
        after = _step(tables, jnp.take_along_axis(states, parents, axis=1), draft.tokens)
        states = jnp.where(is_root, root[:, None], after)
    return states


def _step(
    tables: GrammarTables, states: Int[Array, "B *n"], tokens: Int[Array, "B *n"]
) -> Int[Array, "B *n"]:
    """The states after one token each."""
    grammar = tables.grammar.reshape(-1, *(1,) * (tokens.ndim - 1))
    return tables.next_state[states, tables.token_class[grammar, tokens]]
