"""Rounds under grammars: the device drafts, the host says what may follow, the device verifies.

Each round has one exchange. The host gets the tokens of the draft and of the round before. It
returns, for every node of the draft, a bit per token that may follow, and the tokens that each
grammar forces. Masked logits are the target's logits: so a lossless rule stays lossless for the
target under the grammar.

Forced tokens replace a row's draft where they are: they are known before, so q is a point mass.

Axis legend: B rows, N nodes, D most forced tokens, W = ⌈V/32⌉ words of 32 bits, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax._util.errors import OptionError
from specjax.core import probs
from specjax.core.mesh import program
from specjax.core.protocols import Method, Proposal
from specjax.core.round import DraftVerify
from specjax.core.types import IID, POINT_MASS, DecodeState, Inputs
from specjax.draft.auto_length import AutoLength


class RowMatcher(Protocol):
    """What rounds ask a row's grammar: :class:`specjax.text.grammar.Matcher`."""

    def advance(self, token: int) -> bool: ...

    def back(self, count: int) -> None: ...

    def fill(self, bits: np.ndarray) -> None: ...

    def forced(self) -> list[int]: ...


class GrammarProgress:
    """A row's matcher, and how many of the row's tokens it has read, the prompt included."""

    def __init__(self, matcher: RowMatcher, length: int):
        self.matcher = matcher
        self.length = length


def check_method(method: Method) -> None:
    """Refuses a method whose rounds cannot stop for the host.

    Raises:
      OptionError: names the method and the way out.
    """
    if isinstance(method, AutoLength):
        raise OptionError("grammar: drafts of automatic length have none; give gamma or branching")
    if not isinstance(method, DraftVerify) or not method.follows_paths:
        raise OptionError(
            f"grammar: method {type(method).__name__} has none; take a method with a drafter and a "
            "lossless rule"
        )


def advance_with_grammars(
    method: DraftVerify,
    inputs: Inputs,
    state: DecodeState,
    rounds: int,
    seen: np.ndarray,
    places: Sequence[GrammarProgress | None],
) -> DecodeState:
    """Up to ``rounds`` rounds, as :func:`specjax.core.loop.run_rounds`.

    Args:
      seen: bool ``[B]``, the rows that the caller already knows to be done.
      places: each row's place in its grammar; None: it has none.
    """
    propose, conclude = _programs(method)
    for _ in range(rounds):
        length, done, tokens = jax.device_get((state.length, state.done, state.tokens))
        full = int(length.max()) + method.round_positions > state.capacity
        if full or done.all() or (done & ~seen).any():
            break
        live = [None if ended else place for place, ended in zip(places, done, strict=True)]
        _read_new(live, tokens, length)
        forced = _forced(method, live)
        proposal = propose(inputs, state, forced)
        draft = proposal.draft
        nodes = jax.device_get((draft.tokens, draft.parents, draft.valid))
        allowed = masks(live, *nodes, inputs.target.vocab)
        state = conclude(inputs, state, proposal, allowed)
    return state


def masks(
    places: Sequence[GrammarProgress | None],
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    valid: np.ndarray,
    vocab: int,
) -> Int[np.ndarray, "B N W"]:
    """The tokens that may follow each node, a bit each; all of them where there is no grammar.

    Nodes whose own token may not follow their parent are never reached; all bits are set there.
    """
    bits = np.full((*tokens.shape, -(-vocab // 32)), -1, np.int32)
    for row, place in enumerate(places):
        if place is None:
            continue
        children: dict[int, list[int]] = {}
        for node in np.flatnonzero(valid[row]):
            children.setdefault(int(parents[row, node]), []).append(int(node))
        _fill_below(place.matcher, 0, children, tokens[row], bits[row])
    return bits


def _fill_below(
    matcher: RowMatcher,
    node: int,
    children: dict[int, list[int]],
    tokens: Int[np.ndarray, "N"],
    bits: Int[np.ndarray, "N W"],
) -> None:
    """The masks of a node, at which the matcher is, and of all nodes below it."""
    matcher.fill(bits[node])
    for child in children.get(node, ()):
        if matcher.advance(int(tokens[child])):
            _fill_below(matcher, child, children, tokens, bits)
            matcher.back(1)


def _read_new(
    places: Sequence[GrammarProgress | None], tokens: np.ndarray, length: np.ndarray
) -> None:
    """Moves each row's matcher by the tokens of the round before."""
    for row, place in enumerate(places):
        if place is not None:
            for token in tokens[row, place.length : length[row]]:
                place.matcher.advance(int(token))
            place.length = int(length[row])


def _forced(
    method: DraftVerify, places: Sequence[GrammarProgress | None]
) -> Int[np.ndarray, "B D"]:
    """The tokens that each row's grammar forces, then −1; none where drafts are trees."""
    forced = np.full((len(places), method.depth), -1, np.int32)
    drafter = method.drafter
    if not drafter.shape.is_chain or drafter.sampling not in (IID, POINT_MASS):
        return forced
    for row, place in enumerate(places):
        if place is not None:
            found = place.matcher.forced()[: method.depth]
            forced[row, : len(found)] = found
    return forced


@functools.cache
def _programs(method: DraftVerify) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two programs of a round: until the draft is known, and from the masks on."""

    def propose(inputs: Inputs, state: DecodeState, forced: Int[Array, "B D"]) -> Proposal:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        proposal = method.propose(inputs, state, keys)
        return proposal._replace(draft=_with_forced(proposal.draft, forced, inputs.target.vocab))

    def conclude(inputs: Inputs, state: DecodeState, proposal: Proposal, allowed) -> DecodeState:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        proposal = proposal._replace(draft=proposal.draft.replace(allowed=allowed))
        return method.conclude(inputs, state, keys, proposal)

    return program(propose), program(conclude, donate_argnums=1)


def _with_forced(draft, forced: Int[Array, "B D"], vocab: int):
    """The draft, in rows with forced tokens replaced by them."""
    if not draft.shape.is_chain or not draft.shape.depth:
        return draft
    is_forced = forced >= 0
    any_forced = is_forced[:, :1]
    tokens = jnp.where(any_forced, jnp.maximum(forced, 0), draft.tokens[:, 1:])
    valid = jnp.where(any_forced, is_forced & draft.valid[:, :1], draft.valid[:, 1:])
    log_q = draft.log_q
    if log_q is not None:
        log_q = jnp.where(any_forced[..., None], probs.one_hot_log(tokens, vocab), log_q)
    return draft.replace(
        tokens=draft.tokens.at[:, 1:].set(tokens),
        valid=draft.valid.at[:, 1:].set(valid),
        log_q=log_q,
    )
