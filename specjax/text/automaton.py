"""Regular grammars as tables over tokens: which may follow in each state, and where they lead.

States are those of an automaton over bytes (:mod:`specjax.text.byte_automaton`), so equal states
are equal for every text to come. What a state allows is asked of llguidance, on one way to it.

Axis legend: Q states over bytes, S states that tokens reach, C classes of tokens, V vocabulary,
W = ⌈V/32⌉ words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int

from specjax.text.byte_automaton import OUT, ByteAutomaton

MAX_STATES = 1024
MAX_BYTES = 2**25  # of a table
COMPARED = 64  # tokens from one state to another whose masks are compared
NO_TOKEN = -1


class Automaton(NamedTuple):
    """A grammar as a table. State 0 is its beginning.

    Tokens with equal columns share a class. An end of sequence leaves a state as it is.
    """

    next_state: Int[np.ndarray, "S C"]  # OUT where a token may not follow
    token_class: Int[np.ndarray, "V"]
    allowed: Int[np.ndarray, "S W"]  # a bit for each token that may follow
    forced: Int[np.ndarray, "S"]  # the token of the only text that may follow, or NO_TOKEN


class StateMatcher(Protocol):
    """A place in a grammar: :class:`specjax.text.grammar.Matcher`."""

    def copy(self) -> StateMatcher: ...

    def advance(self, token: int) -> bool: ...

    def back(self, count: int) -> None: ...

    def fill(self, bits: np.ndarray) -> None: ...

    def forced(self) -> list[int]: ...

    def forced_bytes(self) -> bytes: ...


def token_automaton(
    automaton: ByteAutomaton,
    tokens: Sequence[bytes | None],
    eos_ids: Sequence[int],
    matcher: StateMatcher,
) -> Automaton | None:
    """The table over tokens; None: it is too large, or the matcher knows another grammar.

    Where the next bytes are open, the matcher's mask must be that of the automaton: then both read
    the grammar in the same way. Where they are known, the matcher allows only the tokenizer's own
    spelling of them. It may depend on the token before, so there masks are compared after several
    tokens that lead to the state.

    Args:
      tokens: each token's bytes; None: it is no part of any text.
      eos_ids: tokens that may follow where a text may end.
      matcher: at the beginning of the same grammar.
    """
    after = _after_tokens(automaton, tokens)
    explorer = _Explorer(automaton, after, list(eos_ids), matcher)
    if not explorer.run() or not explorer.spellings_agree():
        return None
    next_state, token_class = _classes(np.stack(explorer.next_state))
    allowed = np.stack(explorer.allowed)
    if next_state.nbytes + allowed.nbytes > MAX_BYTES:
        return None
    return Automaton(next_state, token_class, allowed, np.array(explorer.forced, np.int32))


class _Explorer:
    """Goes from state to state with copies of a matcher, by the tokens that it allows.

    Lists have an entry for each state, nearest first.
    """

    def __init__(
        self,
        automaton: ByteAutomaton,
        after: Int[np.ndarray, "Q V"],
        eos_ids: list[int],
        matcher: StateMatcher,
    ):
        self._automaton = automaton
        self._after = after
        self._eos_ids = eos_ids
        self._matchers = [matcher]
        self._number = np.full(len(automaton.accepts), OUT, np.int32)  # of a state over bytes
        self._is_known: list[bool] = []  # whether the next bytes are
        self.next_state: list[Int[np.ndarray, "V"]] = []
        self.allowed: list[Int[np.ndarray, "W"]] = []
        self.forced: list[int] = []

    def run(self) -> bool:
        """Fills the lists; False: the matcher's grammar is another one, or it is too large."""
        states = [0]
        self._number[0] = 0
        for state in states:
            matcher = self._matchers[len(self.allowed)]
            following = self._look(matcher, state)
            if following is None:
                return False
            news, tokens = np.unique(following, return_index=True)
            for new, token in zip(news.tolist(), tokens.tolist(), strict=True):
                if new == OUT or self._number[new] != OUT:
                    continue
                place = matcher.copy()
                if not place.advance(token):
                    return False
                self._number[new] = len(states)
                states.append(new)
                self._matchers.append(place)
            ends = np.isin(np.arange(len(following)), self._eos_ids) & (following == state)
            numbers = np.where(following == OUT, OUT, self._number[following])
            self.next_state.append(np.where(ends, self._number[state], numbers))
        return len(states) <= MAX_STATES

    def _look(self, matcher: StateMatcher, state: int) -> Int[np.ndarray, "V"] | None:
        """Notes what may follow in a state over bytes; returns the states after each token."""
        vocab = self._after.shape[1]
        bits = np.zeros(-(-vocab // 32), np.int32)
        matcher.fill(bits)
        mask = _unpacked(bits, vocab)
        following = self._after[state].copy()
        following[self._eos_ids] = state if self._automaton.accepts[state] else OUT
        in_automaton = following != OUT
        is_known = bool(matcher.forced_bytes())
        if not mask.any() or (mask & ~in_automaton).any():
            return None
        if not is_known and (mask != in_automaton).any():
            return None
        forced = matcher.forced()
        self.allowed.append(bits)
        self.forced.append(forced[0] if forced else NO_TOKEN)
        self._is_known.append(is_known)
        return np.where(mask, following, OUT)

    def spellings_agree(self) -> bool:
        """Whether masks at known bytes are the same after different tokens that lead there."""
        for matcher, following in zip(self._matchers, self.next_state, strict=True):
            for state in np.unique(following):
                if state == OUT or not self._is_known[state]:
                    continue
                tokens = np.flatnonzero(following == state)
                for token in tokens[:: -(-len(tokens) // COMPARED)].tolist():
                    if not self._has_mask_after(matcher, token, self.allowed[state]):
                        return False
        return True

    def _has_mask_after(
        self, matcher: StateMatcher, token: int, mask: Int[np.ndarray, "W"]
    ) -> bool:
        if token in self._eos_ids:
            return True
        bits = np.zeros_like(mask)
        if not matcher.advance(token):
            return False
        matcher.fill(bits)
        matcher.back(1)
        return bool((bits == mask).all())


def _after_tokens(
    automaton: ByteAutomaton, tokens: Sequence[bytes | None]
) -> Int[np.ndarray, "Q V"]:
    """The state over bytes after each token. Common beginnings of tokens are walked once."""
    states = len(automaton.accepts)
    # Bytes that no state tells apart become one byte. So there are few different tokens.
    _, alike = np.unique(automaton.next_state, axis=1, return_inverse=True)
    alike = alike.reshape(-1)
    same_bytes = alike.astype(np.uint8).tobytes()
    step = np.full((states + 1, 256), OUT, np.int16)  # the last row: OUT leads to OUT
    step[:states, alike] = automaton.next_state
    known = {b"": np.arange(states, dtype=np.int16)}
    after = np.full((len(tokens), states), OUT, np.int16)
    for token, text in enumerate(tokens):
        if not text:
            continue
        text = text.translate(same_bytes)
        at = known[b""]
        for size in range(1, len(text) + 1):
            begin = text[:size]
            if begin not in known:
                known[begin] = step[at, begin[-1]]
            at = known[begin]
        after[token] = at
    return np.ascontiguousarray(after.T)


def _classes(
    next_state: Int[np.ndarray, "S V"],
) -> tuple[Int[np.ndarray, "S C"], Int[np.ndarray, "V"]]:
    """The different columns, and which of them each token has."""
    columns = np.ascontiguousarray(next_state.T.astype(np.int32))
    whole = columns.view(np.dtype((np.void, columns.shape[1] * columns.itemsize))).reshape(-1)
    _, first, token_class = np.unique(whole, return_index=True, return_inverse=True)
    return columns[first].T.copy(), token_class.reshape(-1).astype(np.int32)


def _unpacked(bits: Int[np.ndarray, "W"], vocab: int) -> Bool[np.ndarray, "V"]:
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab].astype(bool)
