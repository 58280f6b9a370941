"""Regular expressions as deterministic automata over bytes, which outlines-core builds.

Two texts lead to one state only if the same texts may follow both: that is what such an automaton
means. Nothing is guessed from masks of tokens. Those would not tell: after one and after two of a
thousand characters the same tokens may follow.

Axis legend: Q states.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

OUT = -1  # in place of a state: no text of the language begins so
# An expression can have exponentially many states, and only a process can be stopped.
SECONDS = 5.0
MEMORY = 2**31  # bytes of address space of that process
# Single bytes are the vocabulary here, so the index over it is the automaton over bytes.
BUILD = """
import contextlib, pickle, resource, sys
with contextlib.suppress(ValueError):  # macOS has no such limit
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from outlines_core import Index, Vocabulary
single_bytes = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
index = Index(sys.stdin.buffer.read().decode(), single_bytes)
found = index.get_initial_state(), index.get_final_states(), index.get_transitions()
sys.stdout.buffer.write(pickle.dumps(found))
"""

# outlines-core drops what may follow where a text might already end. So every text gets an end that
# no text has: a character that is none, as its neighbor is.
END = "\U0010ffff"
LAST, NEIGHBOR = END.encode()[-1], END.encode()[-1] - 1

Edges = dict[int, dict[int, int]]  # the state after each byte, by state


class ByteAutomaton(NamedTuple):
    """An automaton over bytes; state 0 is its beginning."""

    next_state: Int[np.ndarray, "Q 256"]  # OUT where a byte may not follow
    accepts: Bool[np.ndarray, "Q"]


def byte_automaton(regex: str, most: int) -> ByteAutomaton | None:
    """The smallest automaton of the texts that match as a whole.

    None: it has more than ``most`` states, cannot be built in time, or outlines-core is missing.
    """
    command = [sys.executable, "-c", BUILD, str(MEMORY)]
    try:
        done = subprocess.run(
            command,
            input=f"(?:{regex}){END}".encode(),
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
    except (subprocess.SubprocessError, OSError, UnicodeEncodeError):
        return None
    start, finals, edges = pickle.loads(done.stdout)
    names = {name: state for state, name in enumerate(dict.fromkeys([start, *edges, *finals]))}
    if len(names) > 8 * most:  # joining equal states would take long
        return None
    next_state = np.full((len(names), 256), OUT, np.int32)
    for name, state in names.items():
        for byte, following in edges.get(name, {}).items():
            if byte < 256:
                next_state[state, byte] = names[following]
    is_final = np.array([name in finals for name in names], bool)
    smallest = _joined(_reachable(_trimmed(_without_end(next_state, is_final))))
    return smallest if len(smallest.accepts) <= most else None


def _without_end(
    next_state: Int[np.ndarray, "Q 256"], is_final: Bool[np.ndarray, "Q"]
) -> ByteAutomaton:
    """The automaton of the texts that have END behind them in the given one.

    In a text, END leads where its neighbor does: no expression tells them apart.
    """
    at = np.arange(len(is_final))
    for byte in END.encode():
        at = np.where(at == OUT, OUT, next_state[at, byte])
    accepts = (at != OUT) & is_final[at]
    ends = (next_state[:, LAST] != OUT) & is_final[next_state[:, LAST]]
    next_state = next_state.copy()
    next_state[ends, LAST] = next_state[ends, NEIGHBOR]
    return ByteAutomaton(next_state, accepts)


def _trimmed(automaton: ByteAutomaton) -> ByteAutomaton:
    """The automaton without steps to states that no text leads on from."""
    next_state, accepts = automaton
    alive = accepts
    while True:
        leads_on = alive | ((next_state != OUT) & alive[next_state]).any(1)
        if (leads_on == alive).all():
            break
        alive = leads_on
    return ByteAutomaton(np.where(alive[next_state], next_state, OUT), accepts)


def _reachable(automaton: ByteAutomaton) -> ByteAutomaton:
    """The states that some text leads to."""
    next_state, accepts = automaton
    order = [0]
    seen = {0, OUT}
    for state in order:
        news = set(next_state[state].tolist()) - seen
        seen |= news
        order += sorted(news)
    number = np.full(len(accepts) + 1, OUT, np.int32)  # the last entry is that of OUT
    number[order] = np.arange(len(order))
    return ByteAutomaton(number[next_state[order]], accepts[order])


def _joined(automaton: ByteAutomaton) -> ByteAutomaton:
    """The automaton with equal states joined.

    Moore's algorithm: states are equal until a byte leads them to unequal ones.
    """
    next_state, accepts = automaton
    steps = np.unique(next_state, axis=1)
    parts = accepts.astype(np.int64)
    count = 0
    while parts.max() + 1 > count:
        count = parts.max() + 1
        after = np.where(steps == OUT, OUT, parts[steps])
        rows = np.column_stack([parts, after])
        _, first, parts = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        # Numbered by their first members, so that the beginning stays 0.
        parts = np.argsort(np.argsort(first))[parts.reshape(-1)]
    members = np.sort(first)
    after = next_state[members]
    joined = np.where(after == OUT, OUT, parts[after])
    return ByteAutomaton(joined.astype(np.int32), accepts[members])
