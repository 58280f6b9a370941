"""The thread that owns the device, and the queues of requests in front of it.

  HTTP handlers (event loop)              the device's thread (EngineThread._run)

  submit(submission) ── inbox ──────────► _receive           → VariantQueue.waiting
  cancel(submission) ── canceled ───────► _receive           → Scheduler.drop
                                          _assign_schedulers : which queues may run
                                          VariantQueue.poll  → Scheduler.polls, one round
  Submission.on_output ◄───────────────── _deliver           : one call per piece of text

There is one :class:`VariantQueue` for each :class:`Variant`. At most ``max_methods`` of them have a
scheduler, and so batch slots on the device. The thread polls these in turn, one round each. If
another queue waits for a scheduler, the longest running one drains: it starts no new requests, and
gives up its scheduler when it is empty.

A *row* is one completion of a submission: a prompt with ``n`` samples has ``n`` rows. This file
does not know HTTP, JSON or OpenAI's protocol.
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

# Variants whose compiled programs stay in memory: Linux limits the memory maps of a process.
MAX_COMPILED_VARIANTS = 32
# Rounds between two polls. At each poll new text is sent and batch slots are freed and filled.
ROUNDS_PER_POLL = 1


class QueueFull(Exception):
    """Too many rows are waiting already."""


class Closed(Exception):
    """The engine accepts no more requests."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method bound to its options, with log-probabilities or without.

    Requests of the same variant share a scheduler and its compiled programs.
    """

    name: str
    engine: Engine
    logprobs: bool

    @property
    def key(self) -> Hashable:
        """Two variants with equal keys can share a scheduler."""
        settings = tuple(sorted(self.engine.settings.items()))
        return self.name, self.engine.method, settings, self.logprobs


@dataclasses.dataclass(frozen=True)
class ScoredPiece(Piece):
    """The last piece of a row, with the scores of its prompt and completion."""

    scores: PromptScores | None = None


@dataclasses.dataclass(eq=False)
class Submission:
    """One HTTP request: the settings of its rows, and the function that gets their text.

    ``on_output`` is called with the number of a row and its next piece, or with the error that
    ended it. The device's thread calls it, so it must return at once. If ``scored`` is set, the
    last piece of each row is a :class:`ScoredPiece`.
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
        """The number of its rows."""
        return len(self.prompts) * self.samples

    def prompt_of(self, number: int) -> np.ndarray:
        """The token ids of a row's prompt; samples of one prompt are neighbors."""
        return self.prompts[number // self.samples]

    def requests(self, first_id: int) -> list[Request]:
        """One request per row, with ids from ``first_id``; as ``sj.generate`` makes them."""
        target = self.variant.engine.target
        constraints = [{}] * len(self.prompts)
        rows = make_rows(
            target, self.prompts, constraints, None, self.seed, self.samples, self.budgets
        )

        requests = []
        for number, row in enumerate(rows):
            request = dataclasses.replace(
                row, request_id=first_id + number, sampling=self.sampling, stop=self.stop
            )
            requests.append(request)
        return requests


class EngineMetrics(Protocol):
    """Counts what the engine does."""

    def ended(self, submission: Submission, row: Generation) -> None:
        """A row has ended."""

    def left(self, rows: int) -> None:
        """Unfinished rows were dropped, because their client went away."""


class VariantQueue:
    """The requests of one variant: those that wait, and a scheduler while it has one."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.waiting: deque[Request] = deque()
        self.draining = False  # it starts no new requests, because another queue waits to run
        self.scheduler: Scheduler | None = None
        self.opened = 0.0
        self._polls: Iterator[list[Piece]] | None = None

    @property
    def running(self) -> bool:
        """Whether its scheduler has requests."""
        return self._polls is not None

    @property
    def busy(self) -> bool:
        """Whether any of its requests waits or runs."""
        return self.running or bool(self.waiting)

    def open(self, size: int, bounds: Bounds, kept: int) -> None:
        """Makes its scheduler, with ``size`` batch slots and a prefix cache of ``kept`` prompts."""
        self.scheduler = Scheduler(
            self.variant.engine,
            size,
            Sampling(),  # each request has its own
            bounds,
            logprobs=self.variant.logprobs,
            prefixes=kept,
        )
        self.opened = time.perf_counter()

    def close(self) -> None:
        """Removes its scheduler, which frees the memory of its batch slots."""
        self.scheduler = None
        self._polls = None
        self.draining = False

    def poll(self, next_request: Callable[[VariantQueue], Request | None]) -> list[Piece]:
        """Runs one round and returns the new pieces.

        ``next_request`` returns the request to start next, or None if there is none now.
        """
        if self._polls is None:
            if self.draining or not self.waiting:
                return []
            self._polls = self.scheduler.polls(self._requests(next_request), ROUNDS_PER_POLL)

        pieces = next(self._polls, None)
        if pieces is None:  # all its requests have ended
            self._polls = None
            return []
        return pieces

    def _requests(
        self, next_request: Callable[[VariantQueue], Request | None]
    ) -> Iterator[Request | None]:
        """An endless source: None tells the scheduler that no request is waiting now."""
        while True:
            yield next_request(self)


@dataclasses.dataclass
class Scoring:
    """A row that has ended, and the passes that compute its scores."""

    piece: Piece
    passes: Iterator[list[PromptScores] | None]


class EngineThread:
    """Decodes submissions: up to ``max_methods`` variants, each with ``size`` batch slots.

    Args:
      size: batch slots of each scheduler.
      bounds: the most tokens of a prompt, and of a prompt with its completion.
      kept: prompts in each scheduler's prefix cache.
      max_methods: schedulers at the same time.
      max_waiting: rows that may wait for a batch slot.
      metrics: counts ended and dropped rows.
    """

    def __init__(
        self,
        size: int,
        bounds: Bounds,
        kept: int,
        max_methods: int,
        max_waiting: int,
        metrics: EngineMetrics,
    ):
        self._size = size
        self._bounds = bounds
        self._kept = kept
        self._max_methods = max_methods
        self._max_waiting = max_waiting
        self._metrics = metrics

        # Shared between threads; ``_change`` guards the next four.
        self._change = threading.Condition()
        self._inbox: list[Submission] = []
        self._canceled: list[Submission] = []
        self._num_waiting = 0
        self._closed = False

        # Only the device's thread changes these.
        self._queues: dict[Hashable, VariantQueue] = {}  # the one that waited longest comes first
        self._owners: dict[int, tuple[Submission, int]] = {}  # by request id: its request, row
        self._scorings: deque[Scoring] = deque()
        self._next_id = 0
        self._compiled: set[Hashable] = set()

        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    # --- called from any thread ----------------------------------------------------------------

    def submit(self, submission: Submission) -> None:
        """Queues a request and returns at once.

        Raises:
          QueueFull: more than ``max_waiting`` rows would wait.
          Closed: after :meth:`close`.
        """
        with self._change:
            if self._closed:
                raise Closed
            if self._num_waiting + submission.size > self._max_waiting:
                raise QueueFull
            self._num_waiting += submission.size
            self._inbox.append(submission)
            self._change.notify()

    def cancel(self, submission: Submission) -> None:
        """Drops the rows of a request that have not ended, e.g. when its client went away."""
        with self._change:
            self._canceled.append(submission)
            self._change.notify()

    def close(self) -> None:
        """Ends the thread after its current round; unfinished rows are dropped."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the device's thread still runs."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Rows that wait for a batch slot."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Rows that have a batch slot, or are about to get one."""
        # A submission in the inbox counts as waiting, but owns no rows yet: this could be below 0.
        return max(0, len(self._owners) - self._num_waiting)

    @property
    def num_schedulers(self) -> int:
        """Variants that have a scheduler, and so memory on the device."""
        return len(self._open_queues())

    # --- the device's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                self._assign_schedulers()
                for queue in self._open_queues():
                    self._poll(queue)
                self._score()
        except Exception as error:
            self._fail_all(error)

    def _open_queues(self) -> list[VariantQueue]:
        """Queues that have a scheduler. A copy of the dict, since other threads ask for it too."""
        return [queue for queue in list(self._queues.values()) if queue.scheduler]

    def _receive(self) -> bool:
        """Reads submissions and cancellations; returns False once the engine is closed.

        It waits for them only if there is nothing to decode or score.
        """
        with self._change:
            busy = bool(self._scorings) or any(queue.busy for queue in self._queues.values())
            while not (busy or self._inbox or self._canceled or self._closed):
                self._change.wait()
            inbox = self._inbox
            canceled = self._canceled
            self._inbox = []
            self._canceled = []
            closed = self._closed

        for submission in inbox:
            self._enqueue(submission)
        for submission in canceled:
            self._remove(submission)
        return not closed

    def _enqueue(self, submission: Submission) -> None:
        requests = submission.requests(self._next_id)
        self._next_id += len(requests)
        for number, request in enumerate(requests):
            self._owners[request.request_id] = (submission, number)

        variant = submission.variant
        queue = self._queues.setdefault(variant.key, VariantQueue(variant))
        queue.waiting.extend(requests)

    def _remove(self, submission: Submission) -> None:
        """Drops a canceled request's rows, waiting or running; ended ones are not there."""
        ids = {i for i, (owner, _) in self._owners.items() if owner is submission}
        if not ids:
            return

        queue = self._queues[submission.variant.key]
        staying = deque(request for request in queue.waiting if request.request_id not in ids)
        self._count_out(len(queue.waiting) - len(staying))
        queue.waiting = staying

        if queue.scheduler:
            queue.scheduler.drop(ids)
        for request_id in ids:
            del self._owners[request_id]
        self._metrics.left(len(ids))

    def _poll(self, queue: VariantQueue) -> None:
        try:
            pieces = queue.poll(self._next_request)
        except Exception as error:  # whatever failed, the other queues go on
            self._fail(queue, error)
            return
        for piece in pieces:
            self._deliver(piece)

    def _next_request(self, queue: VariantQueue) -> Request | None:
        """The next request for the queue's scheduler."""
        if queue.draining or not queue.waiting:
            return None
        self._count_out(1)
        return queue.waiting.popleft()

    def _count_out(self, rows: int) -> None:
        """Subtracts rows that wait no longer."""
        with self._change:
            self._num_waiting -= rows

    def _deliver(self, piece: Piece) -> None:
        """Passes a piece to its request; the last piece of a scored row waits for its scores."""
        owner = self._owners.get(piece.index)
        if owner is None:  # the request was canceled
            return
        submission, number = owner

        ended = piece.row is not None
        if ended and submission.scored and not isinstance(piece, ScoredPiece):
            tokens = [*submission.prompt_of(number), *piece.row.tokens[0]]
            passes = scoring.passes(submission.variant.engine.target, [tokens])
            self._scorings.append(Scoring(piece, passes))
            return

        if ended:
            del self._owners[piece.index]
            self._metrics.ended(submission, piece.row)
        submission.on_output(number, piece)

    def _score(self) -> None:
        """Runs one scoring pass. Rounds of other rows come between two passes."""
        if not self._scorings:
            return
        current = self._scorings[0]
        owner = self._owners.get(current.piece.index)
        if owner is None:  # the request was canceled
            self._scorings.popleft()
            return

        try:
            scores = next(current.passes)
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self._scorings.popleft()
            del self._owners[current.piece.index]
            submission, number = owner
            submission.on_output(number, error)
            return
        if scores is None:  # there are more passes to run
            return

        self._scorings.popleft()
        (row_scores,) = scores
        self._deliver(ScoredPiece(**vars(current.piece), scores=row_scores))

    # --- failures ------------------------------------------------------------------------------

    def _fail(self, queue: VariantQueue, error: Exception) -> None:
        """Ends all rows of a queue with an error. Only the log gets the traceback."""
        traceback.print_exception(error, file=sys.stderr)
        key = queue.variant.key
        self._count_out(len(queue.waiting))
        for request_id, (submission, number) in list(self._owners.items()):
            if submission.variant.key == key:
                del self._owners[request_id]
                submission.on_output(number, error)
        del self._queues[key]

    def _fail_all(self, error: Exception) -> None:
        """Ends every row with an error, so that no client waits for a dead thread."""
        traceback.print_exception(error, file=sys.stderr)
        with self._change:
            self._closed = True
            inbox = self._inbox

        for submission, number in self._owners.values():
            submission.on_output(number, error)
        for submission in inbox:
            for number in range(submission.size):
                submission.on_output(number, error)

    # --- which queues have a scheduler ---------------------------------------------------------

    def _assign_schedulers(self) -> None:
        """Opens schedulers for waiting queues, up to ``max_methods`` at the same time."""
        for key, queue in list(self._queues.items()):
            if queue.draining and not queue.running:
                # It is empty now. Its waiting requests go behind the other queues.
                queue.close()
                self._queues[key] = self._queues.pop(key)
            elif queue.scheduler is None and not queue.waiting:
                del self._queues[key]

        for queue in [queue for queue in self._queues.values() if queue.scheduler is None]:
            if self.num_schedulers >= self._max_methods and not self._free_scheduler():
                return
            self._limit_compiled(queue.variant.key)
            queue.open(self._size, self._bounds, self._kept)

    def _free_scheduler(self) -> bool:
        """Closes an idle scheduler; if all are busy, the longest running one begins to drain.

        Returns whether one was closed.
        """
        open_queues = self._open_queues()
        idle = [queue for queue in open_queues if not queue.busy]
        if idle:
            min(idle, key=lambda queue: queue.opened).close()
            return True

        if not any(queue.draining for queue in open_queues):
            # A queue that has a scheduler but has not run yet must get its turn first.
            running = [queue for queue in open_queues if queue.running]
            if running:
                min(running, key=lambda queue: queue.opened).draining = True
        return False

    def _limit_compiled(self, key: Hashable) -> None:
        """Drops all compiled programs after too many variants; the disk cache still has them."""
        self._compiled.add(key)
        if len(self._compiled) > MAX_COMPILED_VARIANTS:
            jax.clear_caches()
            self._compiled = {key}
