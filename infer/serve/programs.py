"""Which variants have compiled programs, which wait to compile, and which are dropped again.

Static options are part of a program, so each new set of them compiles for seconds and takes 100 MB.
Clients choose them freely. So only few may wait to compile, and only few stay in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import NamedTuple

from infer.serve.fairness import fits
from specjax.core.protocols import Method
from specjax.runtime.grammar_rounds import forget

MAX_NEW = 8  # variants that wait to compile, or do so
MAX_COMPILATIONS = 3  # in the background for one request; after them it compiles where it runs
MAX_COMPILED = 6  # variants whose programs stay in memory, unless more have a scheduler

Key = tuple[Method, bool]  # the method, and whether it returns log-probabilities


class Shape(NamedTuple):
    """What of a request determines its compiled programs. Requests of one shape run the same ones.

    Attributes:
      chunk: tokens of its largest prefill chunk, 0 if nothing is prefilled.
      kinds: of its sampling settings (:meth:`Engine.kinds`).
      capacity: its first cache positions, if it starts a batch.
      batch_capacity: those of the batch that it joins, or as many as it needs if these are more.
      batch_kinds: the kinds of that batch, this request included.
    """

    chunk: int
    kinds: frozenset[str]
    capacity: int
    batch_capacity: int
    batch_kinds: frozenset[str]


class TooManyNew(Exception):
    """Too many variants wait to be compiled."""


class Programs:
    """The variants that have run, and those that have not. Callers hold a lock."""

    def __init__(self):
        self._new: dict[Key, Hashable] = {}  # with the client that asked first
        self._compiled: dict[Key, None] = {}  # the one that was used longest ago comes first
        self._begun: set[Key] = set()  # what may have programs, whether a row has ended or not
        # What has been compiled: prefills by chunk and kinds, rounds by capacity and kinds.
        self._prefills: dict[Key, set[tuple[int, frozenset[str]]]] = {}
        self._rounds: dict[Key, set[tuple[int, frozenset[str]]]] = {}
        self._pinned: dict[Key, frozenset[str]] = {}  # with the kinds whose programs stay
        self._freed = False  # whether there may be memory to give back

    def is_new(self, key: Key) -> bool:
        """Whether no row of the variant has ended yet."""
        return key not in self._compiled

    def expect(self, key: Key, client: Hashable) -> None:
        """Notes that a client asks for a variant.

        Raises:
          TooManyNew: it is one more to compile than the client may have.
        """
        if key in self._new or not self.is_new(key):
            return
        mine = list(self._new.values()).count(client)
        if not fits(1, mine, len(self._new) - mine, MAX_NEW):
            raise TooManyNew
        self._new[key] = client
        self.begin(key)

    def begin(self, key: Key) -> None:
        """Notes that programs of the variant may be compiled from now on."""
        self._begun.add(key)

    def compiled(self, key: Key) -> None:
        """Notes that a row of the variant has ended."""
        self._freed |= self.is_new(key)  # compiling takes more than it leaves
        self._new.pop(key, None)
        self._compiled.pop(key, None)
        self._compiled[key] = None

    def has_shape(self, key: Key, shape: Shape) -> bool:
        """Whether the variant's programs for requests of this shape have been compiled."""
        if self._pinned.get(key) == shape.kinds == shape.batch_kinds:
            return True
        prefill = shape.chunk, shape.kinds
        rounds = shape.batch_capacity, shape.batch_kinds
        return prefill in self._prefills.get(key, ()) and rounds in self._rounds.get(key, ())

    def add_shape(self, key: Key, shape: Shape) -> None:
        """Notes that the programs for this shape are compiled, or will be at once."""
        self._freed = True  # compiling takes more than it leaves
        self._prefills.setdefault(key, set()).add((shape.chunk, shape.kinds))
        for capacity in (shape.capacity, shape.batch_capacity):
            self.add_rounds(key, capacity, shape.batch_kinds)

    def add_rounds(self, key: Key, capacity: int, kinds: frozenset[str]) -> None:
        """Notes that a batch of the variant runs, or can run, with these cache positions."""
        self._rounds.setdefault(key, set()).add((capacity, kinds))

    def pin(self, key: Key, kinds: frozenset[str]) -> None:
        """Keeps the variant's programs for ever.

        Those for all lengths have been compiled, for requests with these kinds of settings.
        """
        self._freed = True
        self._pinned[key] = kinds

    def keep(self, used: Collection[Key], busy: Collection[Key]) -> bool:
        """Forgets variants that nobody asks for any more, and drops programs of old ones.

        Programs of a variant whose client left before a row ended, or that failed, are dropped.

        Args:
          used: variants that have a scheduler.
          busy: variants that have requests.

        Returns:
          Whether there may be memory to give back to the system.
        """
        self._new = {key: client for key, client in self._new.items() if key in busy}
        needed = {*used, *busy, *self._pinned}
        unused = [key for key in self._compiled if key not in needed]
        spare = max(0, MAX_COMPILED - len(used))
        for key in unused[: max(0, len(unused) - spare)]:
            del self._compiled[key]
        kept = {*needed, *self._compiled}
        dropped = self._begun - kept
        self._begun -= dropped
        # With log-probabilities and without, a method's programs are dropped together.
        in_use = {method for method, _ in kept}
        forgotten = {method for method, _ in dropped} - in_use
        if forgotten:
            forget(forgotten, in_use)
            self._freed = True
        for compiled in (self._prefills, self._rounds):
            for key in compiled.keys() - self._compiled.keys() - self._new.keys():
                del compiled[key]
        freed = self._freed
        self._freed = False
        return freed
