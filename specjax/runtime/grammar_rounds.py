"""Rounds under grammars: the device drafts, the host says what may follow, the device verifies.

This is for grammars that are no tables. Those that are need no host
(:mod:`specjax.core.grammar_tables`); rows of both may be in one batch.

Each round has one exchange. The host gets the tokens of the draft and of the round before. It
returns the draft, with the tokens that a grammar forces in place of a row's own, and a bit for each
token that may follow a node. Masked logits are the target's logits: so a lossless rule stays
lossless for the target under the grammar.

Forced tokens are known before, so their q is a point mass.

Axis legend: B rows, N nodes, D depth of the draft, W = ⌈V/32⌉ words of 32 bits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax._util.errors import OptionError
from specjax.core import loop, probs
from specjax.core.grammar_tables import takes_forced, with_forced
from specjax.core.mesh import program
from specjax.core.protocols import Method, Proposal
from specjax.core.round import DraftVerify
from specjax.core.types import DecodeState, Inputs
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
    if isinstance(method, AutoLength) and method.draft_can_pause:
        raise OptionError(
            "grammar: not supported with gamma=auto or branching=auto of a draft model; give a "
            "number, as gamma=4"
        )
    if not isinstance(method, DraftVerify) or not method.follows_paths:
        raise OptionError(
            "grammar: this method does not support grammars; choose one with a drafter and a "
            "lossless rule"
        )


def longest_drafts(method: DraftVerify) -> DraftVerify:
    """The method with its longest drafts, if their length is automatic.

    How many tokens a grammar forces has nothing to do with past rounds.
    """
    if not isinstance(method, AutoLength):
        return method
    return DraftVerify(method.drafter, method.target, method.rule)


def forget(methods: Collection[Method], kept: Collection[Method]) -> None:
    """Drops all programs of ``methods``, but those that one of ``kept`` runs, too.

    They compile again if they are needed again. A server calls this, for its clients may ask for
    any number of methods.
    """
    for method in _all_run(methods) - _all_run(kept):
        loop.forget(method)
        _programs.made.pop(method, None)


def _all_run(methods: Collection[Method]) -> set[Method]:
    """The methods, and those that run in their place where requests have grammars."""
    longest = {longest_drafts(method) for method in methods if isinstance(method, AutoLength)}
    return {*methods, *longest}


def advance_with_grammars(
    method: DraftVerify,
    inputs: Inputs,
    state: DecodeState,
    rounds: int,
    known_done: np.ndarray,
    places: Sequence[GrammarProgress | None],
) -> DecodeState:
    """Up to ``rounds`` rounds, as :func:`specjax.core.loop.run_rounds`.

    Args:
      known_done: bool ``[B]``, the rows that the caller already knows to be done.
      places: each row's place in its grammar; None: it has none.
    """
    method = longest_drafts(method)
    propose, conclude = _programs(method)
    for _ in range(rounds):
        proposal, recent = propose(inputs, state)
        draft = proposal.draft
        asked = state.length, state.done, recent, draft.tokens, draft.parents, draft.valid
        length, done, recent, tokens, parents, valid = jax.device_get(asked)
        full = int(length.max()) + method.round_positions > state.capacity
        if full or done.all() or (done & ~known_done).any():
            break
        live = [None if ended else place for place, ended in zip(places, done, strict=True)]
        _read_new(live, recent, length)
        tokens, valid, is_forced = _with_forced(method, live, tokens, valid)
        allowed = masks(live, tokens, parents, valid, inputs.target.vocab)
        state = conclude(inputs, state, proposal, tokens, valid, is_forced, allowed)
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
    places: Sequence[GrammarProgress | None],
    recent: Int[np.ndarray, "B D+1"],
    length: Int[np.ndarray, "B"],
) -> None:
    """Moves each row's matcher by the tokens of the round before, the last of ``recent``."""
    for row, place in enumerate(places):
        if place is not None:
            new = int(length[row]) - place.length
            for token in recent[row, recent.shape[1] - new :]:
                place.matcher.advance(int(token))
            place.length = int(length[row])


def _with_forced(
    method: DraftVerify,
    places: Sequence[GrammarProgress | None],
    tokens: Int[np.ndarray, "B N"],
    valid: Bool[np.ndarray, "B N"],
) -> tuple[Int[np.ndarray, "B N"], Bool[np.ndarray, "B N"], Bool[np.ndarray, "B"]]:
    """The draft's tokens and valid nodes, and the rows whose grammar forces tokens.

    These rows have the forced tokens as their draft. Where drafts are trees there are none.
    """
    is_forced = np.zeros(len(places), bool)
    if not takes_forced(method.drafter):
        return tokens, valid, is_forced
    tokens = tokens.copy()
    valid = valid.copy()
    for row, place in enumerate(places):
        if place is None:
            continue
        found = place.matcher.forced()[: method.depth]
        if found:
            is_forced[row] = True
            tokens[row, 1 : 1 + len(found)] = found
            valid[row, 1:] = (np.arange(method.depth) < len(found)) & valid[row, 0]
    return tokens, valid, is_forced


@loop.CachedByMethod
def _programs(method: DraftVerify) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two programs of a round: until the draft is known, and from the masks on."""

    def propose(inputs: Inputs, state: DecodeState) -> tuple[Proposal, Int[Array, "B D+1"]]:
        """The draft, and each row's last tokens, as many as a round can write."""
        keys = probs.round_keys(state.keys, state.stats.rounds)
        at = state.length[:, None] + jnp.arange(-method.depth - 1, 0)
        recent = jnp.take_along_axis(state.tokens, jnp.maximum(at, 0), axis=1)
        return method.propose(inputs, state, keys), recent

    def conclude(
        inputs: Inputs, state: DecodeState, proposal: Proposal, tokens, valid, is_forced, allowed
    ) -> DecodeState:
        keys = probs.round_keys(state.keys, state.stats.rounds)
        draft = proposal.draft.replace(allowed=allowed)
        if takes_forced(draft):
            draft = with_forced(draft, tokens, valid, is_forced, inputs.target.vocab)
        return method.conclude(inputs, state, keys, proposal._replace(draft=draft))

    return program(propose), program(conclude, donate_argnums=1)
