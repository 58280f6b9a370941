"""The one thread that owns the device: requests wait in lanes, and flights take turns.

A lane serves one :class:`Variant`. So many decode at a time, a look at each in turn; where others
wait, the one that has decoded longest takes no new rows, and they get its place when it is empty.
Nothing here knows of HTTP.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np

from infer import scoring
from infer.scoring import Scores
from specjax.core.warp import Sampling
from specjax.runtime.engine import Engine, Row
from specjax.runtime.generate import make_rows
from specjax.runtime.output import Generation, Piece
from specjax.runtime.scheduler import Bounds, Flight

VARIANTS = 32  # whose compiled programs are kept: processes may map so many
ROUNDS = 1  # between looks: new text is shown, seats are freed and taken at each


class Busy(Exception):
    """Too many rows wait already."""


class Closed(Exception):
    """The scheduler takes nothing more."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """What rows that share a flight have in common: a method bound to its options."""

    name: str
    engine: Engine
    logprobs: bool

    @property
    def key(self) -> Hashable:
        """Equal where one flight serves both."""
        settings = tuple(sorted(self.engine.settings.items()))
        return self.name, self.engine.method, settings, self.logprobs


@dataclasses.dataclass(frozen=True)
class ScoredPiece(Piece):
    """A row's last piece, with the scores of its prompt and what it wrote."""

    scores: Scores | None = None


@dataclasses.dataclass(eq=False)
class Work:
    """One request: what its rows are made of, and whom their pieces go to.

    ``tell`` gets the number of a row and its next piece, or the error that ended it. It is called
    in the scheduler's thread and must return at once. Of rows that are ``scored`` the last piece is
    a :class:`ScoredPiece`.
    """

    variant: Variant
    prompts: list[np.ndarray]
    budgets: list[int]
    samples: int
    seed: int
    sampling: Sampling
    stop: Sequence[str]
    tell: Callable[[int, Piece | Exception], None]
    scored: bool = False
    arrived: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def size(self) -> int:
        """How many rows it has."""
        return len(self.prompts) * self.samples

    def rows(self, first: int) -> list[Row]:
        """Its rows, numbered from ``first``: those of ``sj.generate`` with the same arguments."""
        target, asked = self.variant.engine.target, [{}] * len(self.prompts)
        made = make_rows(target, self.prompts, asked, None, self.seed, self.samples, self.budgets)
        own = {"sampling": self.sampling, "stop": self.stop}
        return [dataclasses.replace(row, case=first + i, **own) for i, row in enumerate(made)]


class Meter(Protocol):
    """Who counts what the scheduler does."""

    def ended(self, work: Work, row: Generation) -> None: ...

    def left(self, rows: int) -> None: ...


class Lane:
    """The rows of one variant: those that wait, and a flight while it has one."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.waiting: deque[Row] = deque()
        self.resting = False  # takes no new rows, for another lane waits for its place
        self.flight: Flight | None = None
        self.opened = 0.0
        self._looks: Iterator[list[Piece]] | None = None

    @property
    def flying(self) -> bool:
        return self._looks is not None

    @property
    def busy(self) -> bool:
        """Whether it has rows of any kind."""
        return self.flying or bool(self.waiting)

    def open(self, size: int, bounds: Bounds, kept: int) -> None:
        """Gives it a flight."""
        engine, logprobs = self.variant.engine, self.variant.logprobs
        self.flight = Flight(engine, size, Sampling(), bounds, logprobs=logprobs, kept=kept)
        self.opened = time.perf_counter()

    def close(self) -> None:
        """Takes its flight away, and the memory with it."""
        self.flight, self._looks, self.resting = None, None, False

    def look(self, take: Callable[[Lane], Row | None]) -> list[Piece]:
        """A round, and what it gave; ``take`` hands over the next row."""
        if self._looks is None:
            if self.resting or not self.waiting:
                return []
            self._looks = self.flight.looks(iter(lambda: take(self), self), ROUNDS)
        pieces = next(self._looks, None)
        if pieces is None:
            self._looks = None
        return pieces or []


class Scheduler:
    """Decodes what is submitted, ``size`` rows of a variant and ``flights`` variants at a time.

    ``bounds`` hold for every request, ``most_waiting`` rows may wait for their seats, and each
    flight keeps ``kept`` prompts.
    """

    def __init__(
        self, size: int, bounds: Bounds, kept: int, flights: int, most_waiting: int, meter: Meter
    ):
        self._size, self._bounds, self._kept = size, bounds, kept
        self._flights, self._most_waiting, self._meter = flights, most_waiting, meter
        self._change = threading.Condition()  # guards the next four
        self._inbox: list[Work] = []
        self._leavers: list[Work] = []
        self._waiting = 0
        self._closed = False
        self._lanes: dict[Hashable, Lane] = {}  # the lane that has waited longest first
        self._rows: dict[int, tuple[Work, int]] = {}
        self._scorings: deque[tuple[Piece, Iterator[list[Scores] | None]]] = deque()
        self._next_case = 0
        self._compiled: set[Hashable] = set()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    # --- from any thread -----------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Takes a request.

        Raises:
          Busy: its rows and those that wait are too many.
          Closed: after :meth:`close`.
        """
        with self._change:
            if self._closed:
                raise Closed
            if self._waiting + work.size > self._most_waiting:
                raise Busy
            self._waiting += work.size
            self._inbox.append(work)
            self._change.notify()

    def leave(self, work: Work) -> None:
        """Nobody waits for this request any more; nothing happens where all of it has ended."""
        with self._change:
            self._leavers.append(work)
            self._change.notify()

    def close(self) -> None:
        """Ends the thread after the round it is in; rows that have not ended are dropped."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Rows that wait for their seats."""
        return self._waiting

    @property
    def in_flight(self) -> int:
        """Rows that have a seat, or are about to take it."""
        return max(0, len(self._rows) - self._waiting)

    @property
    def flights(self) -> int:
        """Variants that hold memory for their rows."""
        return sum(lane.flight is not None for lane in list(self._lanes.values()))

    # --- the device's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                self._assign()
                for lane in [lane for lane in self._lanes.values() if lane.flight]:
                    self._look(lane)
                self._score()
        except Exception as error:
            self._give_up(error)

    def _look(self, lane: Lane) -> None:
        try:
            pieces = lane.look(self._take)
        except Exception as error:  # whatever it is, other lanes go on
            self._fail(lane, error)
            return
        for piece in pieces:
            self._deliver(piece)

    def _receive(self) -> bool:
        """Takes what was submitted, waiting for it where there is nothing else to do."""
        with self._change:
            busy = bool(self._scorings) or any(lane.busy for lane in self._lanes.values())
            while not (busy or self._inbox or self._leavers or self._closed):
                self._change.wait()
            inbox, leavers = self._inbox, self._leavers
            self._inbox, self._leavers = [], []
            going = not self._closed
        for work in inbox:
            self._enter(work)
        for work in leavers:
            self._remove(work)
        return going

    def _enter(self, work: Work) -> None:
        rows = work.rows(self._next_case)
        self._next_case += len(rows)
        self._rows |= {row.case: (work, i) for i, row in enumerate(rows)}
        lane = self._lanes.setdefault(work.variant.key, Lane(work.variant))
        lane.waiting.extend(rows)

    def _remove(self, work: Work) -> None:
        cases = {case for case, (owner, _) in self._rows.items() if owner is work}
        if not cases:
            return
        lane = self._lanes[work.variant.key]
        staying = deque(row for row in lane.waiting if row.case not in cases)
        self._unwait(len(lane.waiting) - len(staying))
        lane.waiting = staying
        if lane.flight:
            lane.flight.drop(cases)
        for case in cases:
            del self._rows[case]
        self._meter.left(len(cases))

    def _take(self, lane: Lane) -> Row | None:
        """The lane's next row, for its flight."""
        if lane.resting or not lane.waiting:
            return None
        self._unwait(1)
        return lane.waiting.popleft()

    def _unwait(self, rows: int) -> None:
        with self._change:
            self._waiting -= rows

    def _deliver(self, piece: Piece) -> None:
        work, number = self._rows.get(piece.index, (None, 0))
        if work is None:  # who asked for it has left
            return
        if work.scored and piece.row is not None and not isinstance(piece, ScoredPiece):
            tokens = [*work.prompts[number // work.samples], *piece.row.tokens[0]]
            passes = scoring.passes(work.variant.engine.target, [tokens])
            self._scorings.append((piece, passes))
            return
        if piece.row is not None:
            del self._rows[piece.index]
            self._meter.ended(work, piece.row)
        work.tell(number, piece)

    def _score(self) -> None:
        """One pass over a row that has ended and is to be scored; others are decoded in between."""
        if not self._scorings:
            return
        piece, passes = self._scorings[0]
        work, number = self._rows.get(piece.index, (None, 0))
        try:
            scores = next(passes) if work else []
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            del self._rows[piece.index]
            work.tell(number, error)
            scores = []
        if scores is None:
            return
        self._scorings.popleft()
        for row in scores:
            self._deliver(ScoredPiece(**vars(piece), scores=row))

    def _fail(self, lane: Lane, error: Exception) -> None:
        """Ends all rows of a lane with an error; the log gets the traceback, nobody else."""
        traceback.print_exception(error, file=sys.stderr)
        mine = {c: w for c, w in self._rows.items() if w[0].variant.key == lane.variant.key}
        self._unwait(len(lane.waiting))
        for case, (work, number) in mine.items():
            del self._rows[case]
            work.tell(number, error)
        del self._lanes[lane.variant.key]

    def _give_up(self, error: Exception) -> None:
        """Nobody is to wait for a thread that has ended."""
        traceback.print_exception(error, file=sys.stderr)
        with self._change:
            self._closed, inbox = True, self._inbox
        waiting = [(work, number) for work in inbox for number in range(work.size)]
        for work, number in [*self._rows.values(), *waiting]:
            work.tell(number, error)

    # --- which lanes have flights --------------------------------------------------------------

    def _assign(self) -> None:
        """Gives lanes whose rows wait a flight, as far as there may be more."""
        for key, lane in list(self._lanes.items()):
            if lane.resting and not lane.flying:  # it is empty now: its turn comes again
                lane.close()
                self._lanes[key] = self._lanes.pop(key)
            elif lane.flight is None and not lane.waiting:
                del self._lanes[key]
        for lane in [lane for lane in self._lanes.values() if lane.flight is None]:
            if self.flights >= self._flights and not self._make_room():
                return
            self._count_programs(lane.variant.key)
            lane.open(self._size, self._bounds, self._kept)

    def _make_room(self) -> bool:
        """Closes a flight that has no rows; where all have some, the oldest gets no new ones."""
        open_lanes = [lane for lane in self._lanes.values() if lane.flight]
        idle = [lane for lane in open_lanes if not lane.busy]
        if idle:
            min(idle, key=lambda lane: lane.opened).close()
        elif not any(lane.resting for lane in open_lanes):
            flying = [lane for lane in open_lanes if lane.flying]  # others have yet to begin
            for lane in sorted(flying, key=lambda lane: lane.opened)[:1]:
                lane.resting = True
        return bool(idle)

    def _count_programs(self, key: Hashable) -> None:
        """Forgets compiled programs where too many variants were asked for; disks have them."""
        self._compiled.add(key)
        if len(self._compiled) > VARIANTS:
            jax.clear_caches()
            self._compiled = {key}
