"""The one thread that owns the device: requests wait in queues, and schedulers take turns.

A queue serves one :class:`Variant`. So many decode at a time, a poll of each in turn; where others
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
from infer.scoring import PromptScores
from specjax.core.warp import Sampling
from specjax.runtime.engine import Engine, Request
from specjax.runtime.generate import make_rows
from specjax.runtime.output import Generation, Piece
from specjax.runtime.scheduler import Bounds, Scheduler

VARIANTS = 32  # whose compiled programs are kept: processes may map so many
ROUNDS = 1  # between polls: new text is shown, batch slots are freed and filled at each


class QueueFull(Exception):
    """Too many rows wait already."""


class Closed(Exception):
    """The scheduler takes nothing more."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """What rows that share a scheduler have in common: a method bound to its options."""

    name: str
    engine: Engine
    logprobs: bool

    @property
    def key(self) -> Hashable:
        """Equal where one scheduler serves both."""
        settings = tuple(sorted(self.engine.settings.items()))
        return self.name, self.engine.method, settings, self.logprobs


@dataclasses.dataclass(frozen=True)
class ScoredPiece(Piece):
    """A row's last piece, with the scores of its prompt and what it wrote."""

    scores: PromptScores | None = None


@dataclasses.dataclass(eq=False)
class Submission:
    """One request: what its rows are made of, and whom their pieces go to.

    ``on_output`` gets the number of a row and its next piece, or the error that ended it. It is
    called in the scheduler's thread and must return at once. Of rows that are ``scored`` the last
    piece is a :class:`ScoredPiece`.
    """

    variant: Variant
    prompts: list[np.ndarray]
    budgets: list[int]
    samples: int
    seed: int
    sampling: Sampling
    stop: Sequence[str]
    on_output: Callable[[int, Piece | Exception], None]
    scored: bool = False
    arrived: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def size(self) -> int:
        """How many rows it has."""
        return len(self.prompts) * self.samples

    def rows(self, first: int) -> list[Request]:
        """Its rows, numbered from ``first``: those of ``sj.generate`` with the same arguments."""
        target, asked = self.variant.engine.target, [{}] * len(self.prompts)
        made = make_rows(target, self.prompts, asked, None, self.seed, self.samples, self.budgets)
        own = {"sampling": self.sampling, "stop": self.stop}
        return [dataclasses.replace(row, request_id=first + i, **own) for i, row in enumerate(made)]


class EngineMetrics(Protocol):
    """Who counts what the scheduler does."""

    def ended(self, work: Submission, row: Generation) -> None: ...

    def left(self, rows: int) -> None: ...


class VariantQueue:
    """The rows of one variant: those that wait, and a scheduler while it has one."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.waiting: deque[Request] = deque()
        self.draining = False  # takes no new rows, for another queue waits for its place
        self.scheduler: Scheduler | None = None
        self.opened = 0.0
        self._polls: Iterator[list[Piece]] | None = None

    @property
    def running(self) -> bool:
        return self._polls is not None

    @property
    def busy(self) -> bool:
        """Whether it has rows of any kind."""
        return self.running or bool(self.waiting)

    def open(self, size: int, bounds: Bounds, kept: int) -> None:
        """Gives it a scheduler."""
        engine, logprobs = self.variant.engine, self.variant.logprobs
        self.scheduler = Scheduler(
            engine, size, Sampling(), bounds, logprobs=logprobs, prefixes=kept
        )
        self.opened = time.perf_counter()

    def close(self) -> None:
        """Takes its scheduler away, and the memory with it."""
        self.scheduler, self._polls, self.draining = None, None, False

    def poll(self, take: Callable[[VariantQueue], Request | None]) -> list[Piece]:
        """A round, and what it gave; ``take`` hands over the next row."""
        if self._polls is None:
            if self.draining or not self.waiting:
                return []
            self._polls = self.scheduler.polls(iter(lambda: take(self), self), ROUNDS)
        pieces = next(self._polls, None)
        if pieces is None:
            self._polls = None
        return pieces or []


class EngineThread:
    """Decodes what is submitted, ``size`` rows of a variant and ``schedulers`` variants at a time.

    ``bounds`` hold for every request, ``most_waiting`` rows may wait for their batch slots, and
    each scheduler keeps ``kept`` prompts.
    """

    def __init__(
        self,
        size: int,
        bounds: Bounds,
        kept: int,
        flights: int,
        most_waiting: int,
        meter: EngineMetrics,
    ):
        self._size, self._bounds, self._kept = size, bounds, kept
        self._max_schedulers, self._most_waiting, self._meter = flights, most_waiting, meter
        self._change = threading.Condition()  # guards the next four
        self._inbox: list[Submission] = []
        self._cancelled: list[Submission] = []
        self._waiting = 0
        self._closed = False
        self._queues: dict[Hashable, VariantQueue] = {}  # the queue that has waited longest first
        self._rows: dict[int, tuple[Submission, int]] = {}
        self._scorings: deque[tuple[Piece, Iterator[list[PromptScores] | None]]] = deque()
        self._next_case = 0
        self._compiled: set[Hashable] = set()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    # --- from any thread -----------------------------------------------------------------------

    def submit(self, work: Submission) -> None:
        """Takes a request.

        Raises:
          Busy: its rows and those that wait are too many.
          Closed: after :meth:`close`.
        """
        with self._change:
            if self._closed:
                raise Closed
            if self._waiting + work.size > self._most_waiting:
                raise QueueFull
            self._waiting += work.size
            self._inbox.append(work)
            self._change.notify()

    def leave(self, work: Submission) -> None:
        """Nobody waits for this request any more; nothing happens where all of it has ended."""
        with self._change:
            self._cancelled.append(work)
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
        """Rows that wait for their batch slots."""
        return self._waiting

    @property
    def in_flight(self) -> int:
        """Rows that have a batch slot, or are about to take it."""
        return max(0, len(self._rows) - self._waiting)

    @property
    def flights(self) -> int:
        """Variants that hold memory for their rows."""
        return sum(queue.scheduler is not None for queue in list(self._queues.values()))

    # --- the device's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                self._assign()
                for queue in [queue for queue in self._queues.values() if queue.scheduler]:
                    self._poll(queue)
                self._score()
        except Exception as error:
            self._give_up(error)

    def _poll(self, queue: VariantQueue) -> None:
        try:
            pieces = queue.poll(self._take)
        except Exception as error:  # whatever it is, other queues go on
            self._fail(queue, error)
            return
        for piece in pieces:
            self._deliver(piece)

    def _receive(self) -> bool:
        """Takes what was submitted, waiting for it where there is nothing else to do."""
        with self._change:
            busy = bool(self._scorings) or any(queue.busy for queue in self._queues.values())
            while not (busy or self._inbox or self._cancelled or self._closed):
                self._change.wait()
            inbox, canceled = self._inbox, self._cancelled
            self._inbox, self._cancelled = [], []
            going = not self._closed
        for work in inbox:
            self._enter(work)
        for work in canceled:
            self._remove(work)
        return going

    def _enter(self, work: Submission) -> None:
        rows = work.rows(self._next_case)
        self._next_case += len(rows)
        self._rows |= {row.request_id: (work, i) for i, row in enumerate(rows)}
        queue = self._queues.setdefault(work.variant.key, VariantQueue(work.variant))
        queue.waiting.extend(rows)

    def _remove(self, work: Submission) -> None:
        request_ids = {request_id for request_id, (owner, _) in self._rows.items() if owner is work}
        if not request_ids:
            return
        queue = self._queues[work.variant.key]
        staying = deque(row for row in queue.waiting if row.request_id not in request_ids)
        self._count_out(len(queue.waiting) - len(staying))
        queue.waiting = staying
        if queue.scheduler:
            queue.scheduler.drop(request_ids)
        for request_id in request_ids:
            del self._rows[request_id]
        self._meter.left(len(request_ids))

    def _take(self, queue: VariantQueue) -> Request | None:
        """The queue's next row, for its scheduler."""
        if queue.draining or not queue.waiting:
            return None
        self._count_out(1)
        return queue.waiting.popleft()

    def _count_out(self, rows: int) -> None:
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
        work.on_output(number, piece)

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
            work.on_output(number, error)
            scores = []
        if scores is None:
            return
        self._scorings.popleft()
        for row in scores:
            self._deliver(ScoredPiece(**vars(piece), scores=row))

    def _fail(self, queue: VariantQueue, error: Exception) -> None:
        """Ends all rows of a queue with an error; the log gets the traceback, nobody else."""
        traceback.print_exception(error, file=sys.stderr)
        mine = {c: w for c, w in self._rows.items() if w[0].variant.key == queue.variant.key}
        self._count_out(len(queue.waiting))
        for request_id, (work, number) in mine.items():
            del self._rows[request_id]
            work.on_output(number, error)
        del self._queues[queue.variant.key]

    def _give_up(self, error: Exception) -> None:
        """Nobody is to wait for a thread that has ended."""
        traceback.print_exception(error, file=sys.stderr)
        with self._change:
            self._closed, inbox = True, self._inbox
        waiting = [(work, number) for work in inbox for number in range(work.size)]
        for work, number in [*self._rows.values(), *waiting]:
            work.on_output(number, error)

    # --- which queues have schedulers
    # --------------------------------------------------------------

    def _assign(self) -> None:
        """Gives queues whose rows wait a scheduler, as far as there may be more."""
        for key, queue in list(self._queues.items()):
            if queue.draining and not queue.running:  # it is empty now: its turn comes again
                queue.close()
                self._queues[key] = self._queues.pop(key)
            elif queue.scheduler is None and not queue.waiting:
                del self._queues[key]
        for queue in [queue for queue in self._queues.values() if queue.scheduler is None]:
            if self.flights >= self._max_schedulers and not self._make_room():
                return
            self._count_programs(queue.variant.key)
            queue.open(self._size, self._bounds, self._kept)

    def _make_room(self) -> bool:
        """Closes a scheduler that has no rows; where all have some, the oldest gets no new ones."""
        open_lanes = [queue for queue in self._queues.values() if queue.scheduler]
        idle = [queue for queue in open_lanes if not queue.busy]
        if idle:
            min(idle, key=lambda queue: queue.opened).close()
        elif not any(queue.draining for queue in open_lanes):
            running = [queue for queue in open_lanes if queue.running]  # others have yet to begin
            for queue in sorted(running, key=lambda queue: queue.opened)[:1]:
                queue.draining = True
        return bool(idle)

    def _count_programs(self, key: Hashable) -> None:
        """Forgets compiled programs where too many variants were asked for; disks have them."""
        self._compiled.add(key)
        if len(self._compiled) > VARIANTS:
            jax.clear_caches()
            self._compiled = {key}
