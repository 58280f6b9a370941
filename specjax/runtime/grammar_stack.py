"""Grammars that are tables, stacked into arrays that rounds read.

Sizes are rounded up and never shrink, so another grammar compiles nothing. A row's grammar is an
index into the stack.

Axis legend: B rows, Q states of all grammars, C classes of tokens, G grammars, V vocabulary,
W = ⌈V/32⌉ words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.core.types import NO_TOKEN, GrammarTables
from specjax.text.automaton import OUT, Automaton

# The least sizes. Larger ones are powers of two.
STATES = 512
CLASSES = 128
GRAMMARS = 8


class GrammarStack:
    """The automata of a batch's rows. Those of rows that have ended stay while there is room."""

    def __init__(self):
        self._automata: list[Automaton] = []
        self._firsts: list[int] = []  # the state at the beginning of each automaton
        self._arrays: dict[str, Int[Array, "..."]] = {}
        self._sizes = STATES, CLASSES, GRAMMARS

    @classmethod
    def like(cls, tables: GrammarTables) -> GrammarStack:
        """A stack without automata whose arrays have the sizes of these."""
        stack = cls()
        stack._arrays = {
            name: getattr(tables, name)
            for name in ("next_state", "token_class", "allowed", "forced")
        }
        stack._sizes = *tables.next_state.shape, tables.token_class.shape[0]
        return stack

    def tables(self, rows: Sequence[Automaton | None]) -> GrammarTables | None:
        """What rounds read for rows with these automata; None: no row has ever had one."""
        wanted = {id(row): row for row in rows if row is not None}
        missing = [row for key, row in wanted.items() if key not in map(id, self._automata)]
        if missing:
            self._stack([*self._automata, *missing], list(wanted.values()))
        if not self._arrays:
            return None
        place = {id(automaton): number for number, automaton in enumerate(self._automata)}
        numbers = [-1 if row is None else place[id(row)] for row in rows]
        firsts = [0 if number < 0 else self._firsts[number] for number in numbers]
        return GrammarTables(
            **self._arrays,
            grammar=jnp.asarray(np.array(numbers, np.int32) + 1),
            first=jnp.asarray(np.array(firsts, np.int32)),
        )

    def _stack(self, all_automata: list[Automaton], wanted: list[Automaton]) -> None:
        """Stacks all automata, or where they would need more room, the wanted ones."""
        fit = all(
            need <= size for need, size in zip(_needed(all_automata), self._sizes, strict=True)
        )
        self._automata = all_automata if fit else wanted
        self._sizes = tuple(
            max(size, _round_up(need))
            for need, size in zip(_needed(self._automata), self._sizes, strict=True)
        )
        states, classes, grammars = self._sizes
        example = self._automata[0]
        # State 0 allows everything and stays, and so does grammar 0.
        next_state = np.zeros((states, classes), np.int32)
        token_class = np.zeros((grammars, len(example.token_class)), np.int32)
        allowed = np.zeros((states, example.allowed.shape[1]), np.int32)
        allowed[0] = -1
        forced = np.full(states, NO_TOKEN, np.int32)
        self._firsts = []
        first = 1
        for number, automaton in enumerate(self._automata, 1):
            size, used = automaton.next_state.shape
            own = slice(first, first + size)
            after = automaton.next_state
            next_state[own, :used] = np.where(after == OUT, 0, after + first)
            token_class[number] = automaton.token_class
            allowed[own] = automaton.allowed
            forced[own] = automaton.forced
            self._firsts.append(first)
            first += size
        self._arrays = {
            "next_state": jnp.asarray(next_state),
            "token_class": jnp.asarray(token_class),
            "allowed": jnp.asarray(allowed),
            "forced": jnp.asarray(forced),
        }


def _needed(automata: Sequence[Automaton]) -> tuple[int, int, int]:
    """States, classes and grammars of a stack, with the one that allows everything."""
    shapes = [automaton.next_state.shape for automaton in automata]
    states = 1 + sum(states for states, _ in shapes)
    return states, max(classes for _, classes in shapes), 1 + len(automata)


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length()
