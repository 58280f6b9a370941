"""The thread that decides what the device does, and the queues of requests in front of it.

  HTTP handlers (event loop)              the engine's thread (EngineThread._run)

  submit(submission) ── inbox ──────────► _receive           → VariantQueue.waiting
  cancel(submission) ── canceled ───────► _receive           → Scheduler.drop
                                          _assign_schedulers : which queues may run
                                          _start_work        : workers poll queues, score rows
  Submission.on_output ◄───────────────── _deliver           : one call per piece of text

There is one :class:`VariantQueue` for each :class:`Variant`. At most ``max_methods`` of them have a
scheduler, and so batch slots on the device. Worker threads poll these, one round each in turn: if
one has to compile a program, which takes seconds, the others go on. While a worker polls a queue,
nobody else touches its scheduler. If another queue waits for a scheduler, the longest running one
drains: it starts no new requests, and gives up its scheduler when it is empty.

A variant is *new* until a row of it has ended: it has programs to compile. One new variant runs at
a time, and the others wait (:class:`Programs`). A request whose :class:`Shape` is new needs further
programs of its variant. It is held back until a worker has compiled them in the background, so
that the variant's other requests go on.

A *row* is one completion of a submission: a prompt with ``n`` samples has ``n`` rows. This file
does not know HTTP, JSON or OpenAI's protocol.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from infer import scoring
from infer.scoring import PromptScores
from infer.serve.fairness import QueueFull, fits
from infer.serve.hosts import Followers
from infer.serve.log import LOG
from infer.serve.programs import MAX_COMPILATIONS, Programs, Shape
from infer.serve.variants import Submission, Variant, VariantQueue, request_message
from specjax._util.memory import return_memory
from specjax.core.types import Inputs
from specjax.models.cache import chunk_sizes
from specjax.runtime.engine import Request
from specjax.runtime.output import Generation, Piece
from specjax.runtime.scheduler import Bounds
from specjax.runtime.warmup import warm_up_all_lengths, warm_up_in_background


class Closed(Exception):
    """The engine accepts no more requests."""


@dataclasses.dataclass(frozen=True)
class ScoredPiece(Piece):
    """The last piece of a row, with the scores of its prompt and completion."""

    scores: PromptScores | None = None


class EngineMetrics(Protocol):
    """Counts what the engine does."""

    def ended(self, submission: Submission, row: Generation) -> None:
        """A row has ended."""

    def left(self, rows: int) -> None:
        """Unfinished rows were dropped, because their client went away."""


@dataclasses.dataclass(eq=False)
class Compilation:
    """Programs for requests of some shape, which a worker compiles beside the running ones.

    ``batch`` and ``capacity`` are of the batch that a request joins, as
    :func:`warm_up_in_background` takes them.
    """

    variant: Variant
    request: Request
    shape: Shape
    batch: Inputs | None = None
    capacity: int = 0


@dataclasses.dataclass
class Scoring:
    """A row that has ended, and the passes that compute its scores."""

    piece: Piece
    tokens: list[int]  # of its prompt and its completion
    passes: Iterator[list[PromptScores] | None]
    begun: bool = False
    working: bool = False  # a worker runs a pass


Job = VariantQueue | Compilation | Scoring  # what a worker works on


class EngineThread:
    """Decodes submissions: up to ``max_methods`` variants, each with ``size`` batch slots.

    A client's rows wait in a turn of its own, and take at most half of what others leave free.

    Args:
      size: batch slots of each scheduler.
      bounds: the most tokens of a prompt, and of a prompt with its completion.
      max_methods: schedulers at the same time.
      max_waiting: rows that may wait for a batch slot.
      metrics: counts ended and dropped rows.
      workers: threads that run the device; 1 if programs may not be started side by side.
      followers: the other processes of the model; None: there are none.
    """

    def __init__(
        self,
        size: int,
        bounds: Bounds,
        max_methods: int,
        max_waiting: int,
        metrics: EngineMetrics,
        workers: int,
        followers: Followers | None = None,
    ):
        self._size = size
        self._bounds = bounds
        self._max_methods = max_methods
        self._max_waiting = max_waiting
        self._metrics = metrics

        self._workers = workers
        self._followers = followers or Followers()

        # Shared between threads; ``_change`` guards these and what waits in the queues.
        self._change = threading.Condition()
        self._inbox: list[Submission] = []
        self._canceled: list[Submission] = []
        self._done: list[tuple[Job, Any]] = []  # what workers got, or an error
        self._waiting: Counter[Hashable] = Counter()  # rows that wait, by client
        self._programs = Programs()
        self._ahead: deque[Compilation] = deque()  # that no request waits for yet
        self._closed = False

        # Only the engine's thread changes these.
        self._queues: dict[Hashable, VariantQueue] = {}  # the one that waited longest comes first
        self._owners: dict[int, tuple[Submission, int]] = {}  # by request id: its request, row
        self._scorings: deque[Scoring] = deque()  # a worker may have the first one
        self._compilation: Compilation | None = None  # that a worker has
        self._next_id = 0

        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- called from any thread ----------------------------------------------------------------

    def submit(self, submission: Submission) -> None:
        """Queues a request and returns at once.

        Raises:
          QueueFull: too many rows would wait, of this client or of all.
          TooManyNew: too many variants wait to be compiled, of this client or of all.
          Closed: after :meth:`close`.
        """
        client = submission.client
        with self._change:
            if self._closed:
                raise Closed
            mine = self._waiting[client]
            if not fits(submission.size, mine, self.num_waiting - mine, self._max_waiting):
                raise QueueFull
            self._programs.expect(submission.variant.programs, client)
            self._waiting[client] += submission.size
            self._inbox.append(submission)
            self._change.notify()

    def cancel(self, submission: Submission) -> None:
        """Drops the rows of a request that have not ended, e.g. when its client went away."""
        with self._change:
            self._canceled.append(submission)
            self._change.notify()

    def warm_up(self, submission: Submission) -> None:
        """Compiles all programs of a submission's variant, and keeps them.

        No request may run meanwhile. The submission itself is not decoded.
        """
        variant = submission.variant
        if self._followers.exist:
            self._followers.tell("warm_up", **request_message(submission))
        warm_up_all_lengths(
            variant.engine,
            self._size,
            self._bounds,
            submission.sampling,
            logprobs=variant.logprobs,
            prefixes=variant.prefixes,
        )
        with self._change:
            self._programs.pin(variant.programs, submission.kinds)

    def compile_ahead(self, submission: Submission) -> None:
        """Compiles in the background what other short prompts of a variant run; returns at once.

        They are those that fit into the submission's cache positions. A row of the variant must
        have ended. With one worker nothing is compiled in the background.
        """
        variant = submission.variant
        request = submission.requests(0)[0]
        kinds = submission.kinds
        shape = variant.shape(request, kinds, kinds, 0)
        if self._workers == 1 or shape is None:
            return
        engine = variant.engine
        longest = min(self._bounds.prompt, shape.capacity - engine.method.round_positions)
        jobs = {}
        for chunk in chunk_sizes(engine.chunk_size(longest, engine.data_parallel_size)):
            tokens = np.zeros(min(chunk, longest), np.int32)
            example = dataclasses.replace(request, tokens=tokens)
            shape = variant.shape(example, kinds, kinds, 0)
            jobs[shape] = Compilation(variant, example, shape)
        with self._change:
            self._ahead.extend(jobs.values())
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
        return self._waiting.total()

    @property
    def num_running(self) -> int:
        """Rows that have a batch slot, or are about to get one."""
        # A submission in the inbox counts as waiting, but owns no rows yet: this could be below 0.
        return max(0, len(self._owners) - self.num_waiting)

    @property
    def num_schedulers(self) -> int:
        """Variants that have a scheduler, and so memory on the device."""
        return len(self._open_queues())

    # --- the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(self._workers, "worker") as pool:
                while self._receive():
                    self._assign_schedulers()
                    self._start_work(pool)
        except Exception as error:
            self._fail_all(error)

    def _open_queues(self) -> list[VariantQueue]:
        """Queues that have a scheduler. A copy of the dict, since other threads ask for it too."""
        return [queue for queue in list(self._queues.values()) if queue.scheduler]

    def _receive(self) -> bool:
        """Reads what other threads sent, and waits for it; returns False once the engine is closed.

        Each queue that can decode is with a worker by now, so there is nothing else to do.
        """
        with self._change:
            while not (self._inbox or self._canceled or self._done or self._closed):
                if self._ahead and self._compilation is None:
                    break
                self._change.wait()
            inbox = self._inbox
            canceled = self._canceled
            done = self._done
            self._inbox = []
            self._canceled = []
            self._done = []
            for submission in inbox:
                self._enqueue(submission)

        for submission in canceled:
            self._remove(submission)
        for job, result in done:
            if isinstance(job, Scoring):
                self._finish_scoring(job, result)
            elif isinstance(job, Compilation):
                self._finish_compilation(job, result)
            else:
                self._finish_poll(job, result)
        return not self._closed

    def _start_work(self, pool: ThreadPoolExecutor) -> None:
        """Gives workers what can be done: polls of queues, a scoring pass, a compilation."""
        for queue in self._open_queues():
            if queue.can_poll and not queue.working:
                queue.working = True
                pool.submit(self._work, queue, functools.partial(self._poll, queue))

        if self._compilation is None:
            self._compilation = self._next_compilation()
            if self._compilation is not None:
                compile_in_background = functools.partial(self._compile, self._compilation)
                pool.submit(self._work, self._compilation, compile_in_background)

        while self._scorings and not self._scorings[0].working:
            scoring = self._scorings[0]
            if scoring.piece.index in self._owners:
                scoring.working = True
                pool.submit(self._work, scoring, functools.partial(self._score, scoring))
            else:  # the request was canceled
                self._scorings.popleft()

    def _work(self, job: Job, function: Callable[[], Any]) -> None:
        """Runs a job's function in a worker, and hands its result or its error back."""
        try:
            result = function()
        except Exception as error:
            result = error
        with self._change:
            self._done.append((job, result))
            self._change.notify()
        # The traceback of an error refers to this frame, and a server seldom collects such circles.
        del result

    def _enqueue(self, submission: Submission) -> None:
        first_id = self._next_id
        requests = submission.requests(first_id)
        self._next_id += len(requests)
        for number, request in enumerate(requests):
            self._owners[request.request_id] = (submission, number)

        variant = submission.variant
        queue = self._queues.setdefault(variant.key, VariantQueue(variant, first_id))
        if self._followers.exist:
            message = request_message(submission)
            self._followers.note("submit", first_id=first_id, queue=queue.number, **message)
        queue.waiting.extend(submission.client, requests)

    def _remove(self, submission: Submission) -> None:
        """Drops a canceled request's rows, waiting or running; ended ones are not there."""
        ids = {i for i, (owner, _) in self._owners.items() if owner is submission}
        if not ids:
            return

        queue = self._queues.get(submission.variant.key)
        if queue is not None:  # it may be gone while the last rows are being scored
            with self._change:
                waited = queue.waiting.drop(lambda request: request.request_id in ids)
                waited += queue.held.drop(lambda request: request.request_id in ids)
                self._count_out(submission.client, waited)
                queue.dropped |= ids
                for request_id in ids:
                    del queue.compilations_of[request_id]
        for request_id in ids:
            del self._owners[request_id]
        self._followers.note("cancel", requests=sorted(ids))
        self._metrics.left(len(ids))

    def _poll(self, queue: VariantQueue) -> list[Piece]:
        """Runs a queue's next round, in a worker."""
        with self._change:
            dropped = queue.dropped
            queue.dropped = set()
            if not queue.running and (queue.draining or not len(queue.waiting)):
                return []
        self._followers.tell("poll", queue=queue.number, dropped=sorted(dropped))
        if dropped:
            queue.scheduler.drop(dropped)
        return queue.poll(self._next_request)

    def _score(self, scoring: Scoring) -> list[PromptScores] | None:
        """Runs the next pass of a scoring, in a worker."""
        self._followers.tell("score", tokens=None if scoring.begun else scoring.tokens)
        scoring.begun = True
        return next(scoring.passes)

    def _finish_poll(self, queue: VariantQueue, result: list[Piece] | Exception) -> None:
        queue.working = False
        if isinstance(result, Exception):  # whatever failed, the other queues go on
            self._fail(queue, result)
            return
        for piece in result:
            if piece.row is not None:
                with self._change:
                    self._programs.compiled(queue.variant.programs)
            self._deliver(piece)

    def _next_request(self, queue: VariantQueue) -> Request | None:
        """The next request for the queue's scheduler; called by a worker."""
        # Under the lock, so that no request is reported as canceled in between.
        with self._change:
            request = self._pop_request(queue)
            self._followers.tell("request", request=None if request is None else request.request_id)
        return request

    def _pop_request(self, queue: VariantQueue) -> Request | None:
        """Takes the next request; ``_change`` is held."""
        while not queue.draining and len(queue.waiting):
            client, request = queue.waiting.pop()
            if not self._can_run(queue, request):
                queue.held.extend(client, [request])
                continue
            del queue.compilations_of[request.request_id]
            self._count_out(client, 1)
            return request
        return None

    # --- programs for further lengths and settings -----------------------------------------------

    def _can_run(self, queue: VariantQueue, request: Request) -> bool:
        """Whether a request may run now: it compiles no programs then, or has waited enough."""
        key = queue.variant.programs
        if self._is_compiled(queue, request):
            return True
        begun = queue.compilations_of[request.request_id]
        if self._workers > 1 and begun < MAX_COMPILATIONS and not self._programs.is_new(key):
            return False
        # They compile where it runs.
        shape = self._shape(queue, request)
        assert shape is not None, "without a shape there is nothing to wait for"
        self._programs.add_shape(key, shape)
        return True

    def _shape(self, queue: VariantQueue, request: Request) -> Shape | None:
        """The shape of a request that joins the queue's batch."""
        submission, _ = self._owners[request.request_id]
        return queue.variant.shape(request, submission.kinds, queue.kinds, queue.capacity)

    def _is_compiled(self, queue: VariantQueue, request: Request) -> bool:
        """Whether the programs for a request's shape have been compiled."""
        shape = self._shape(queue, request)
        if shape is None:
            return True
        key = queue.variant.programs
        if queue.running:  # what the batch runs now is compiled
            self._programs.add_rounds(key, queue.capacity, queue.kinds)
        shapes = [shape]
        if queue.scheduler is None or queue.scheduler.is_idle:  # it may start a batch anew
            shapes.append(shape._replace(batch_capacity=shape.capacity))
        return all(self._programs.has_shape(key, shape) for shape in shapes)

    def _next_compilation(self) -> Compilation | None:
        """Programs for a request that is held back; queues and their clients take turns.

        If none is held back, those of :meth:`compile_ahead`.
        """
        with self._change:
            holding = [queue for queue in self._queues.values() if len(queue.held)]
            if holding:
                queue = min(holding, key=lambda queue: queue.compilations)
                queue.compilations += 1
                client, request = queue.held.pop()
                queue.held.extend(client, [request])  # until it is compiled, behind its others
                queue.compilations_of[request.request_id] += 1
                return self._compilation_for(queue, request)
            while self._ahead:
                job = self._ahead.popleft()
                key = job.variant.programs
                if not (self._programs.is_new(key) or self._programs.has_shape(key, job.shape)):
                    return job
        return None

    def _compilation_for(self, queue: VariantQueue, request: Request) -> Compilation:
        """What a request that is held back needs."""
        shape = self._shape(queue, request)
        assert shape is not None, "a request without a shape is not held back"
        if shape.kinds == shape.batch_kinds == queue.kinds:
            return Compilation(queue.variant, request, shape, capacity=queue.capacity)
        # The batch's rounds change with the request's settings, so they compile as well.
        batch = None if queue.scheduler is None else queue.scheduler.inputs
        return Compilation(queue.variant, request, shape, batch, queue.capacity)

    def _compile(self, job: Compilation) -> None:
        """Compiles programs in a worker."""
        variant = job.variant
        warm_up_in_background(
            variant.engine,
            self._size,
            self._bounds,
            job.request,
            job.batch,
            job.capacity,
            logprobs=variant.logprobs,
            prefixes=variant.prefixes,
        )

    def _finish_compilation(self, job: Compilation, error: Exception | None) -> None:
        """Lets the requests of that shape run. If it failed, they fail where they run."""
        self._compilation = None
        if error is not None:
            LOG.error("compiling method %s failed", job.variant.name, exc_info=error)
        key = job.variant.programs
        with self._change:
            self._programs.add_shape(key, job.shape)
            for queue in self._queues.values():  # one for each of their settings
                if queue.variant.programs == key:
                    queue.release(functools.partial(self._can_run, queue))

    def _count_out(self, client: Hashable, rows: int) -> None:
        """Subtracts rows that wait no longer; ``_change`` is held."""
        self._waiting[client] -= rows
        if not self._waiting[client]:
            del self._waiting[client]

    def _deliver(self, piece: Piece) -> None:
        """Passes a piece to its request; the last piece of a scored row waits for its scores."""
        owner = self._owners.get(piece.index)
        if owner is None:  # the request was canceled
            return
        submission, number = owner

        ended = piece.row is not None
        if ended and submission.scored and not isinstance(piece, ScoredPiece):
            row = [*submission.prompt_of(number), *piece.row.tokens[0]]
            tokens = [int(token) for token in row]
            passes = scoring.passes(submission.variant.engine.target, [tokens])
            self._scorings.append(Scoring(piece, tokens, passes))
            return

        if ended:
            del self._owners[piece.index]
            self._metrics.ended(submission, piece.row)
        submission.on_output(number, piece)

    def _finish_scoring(self, scoring: Scoring, result: list[PromptScores] | Exception | None):
        """Passes the scores on, once all passes are done. Rounds of other rows come in between."""
        scoring.working = False
        if result is None:  # there are more passes to run
            return
        self._scorings.popleft()
        if not isinstance(result, Exception):
            (row_scores,) = result
            self._deliver(ScoredPiece(**vars(scoring.piece), scores=row_scores))
            return

        LOG.error("scoring failed", exc_info=result)
        self._followers.end()
        owner = self._owners.pop(scoring.piece.index, None)
        if owner is not None:
            submission, number = owner
            submission.on_output(number, result)

    # --- failures ------------------------------------------------------------------------------

    def _fail(self, queue: VariantQueue, error: Exception) -> None:
        """Ends all rows of a queue with an error. Only the log gets the traceback."""
        LOG.error("method %s failed", queue.variant.name, exc_info=error)
        self._followers.end()
        key = queue.variant.key
        with self._change:
            queue.release(lambda request: True)
            while len(queue.waiting):
                client, _ = queue.waiting.pop()
                self._count_out(client, 1)
        for request_id, (submission, number) in list(self._owners.items()):
            if submission.variant.key == key:
                del self._owners[request_id]
                submission.on_output(number, error)
        queue.close()  # it and its scheduler refer to each other
        del self._queues[key]

    def _fail_all(self, error: Exception) -> None:
        """Ends every row with an error, so that no client waits for a dead thread."""
        LOG.error("the engine's thread failed", exc_info=error)
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
            if queue.draining and not (queue.running or queue.working):
                # It is empty now. Its waiting requests go behind the other queues.
                self._close(queue)
                self._queues[key] = self._queues.pop(key)
            elif queue.scheduler is None and not queue.busy:
                del self._queues[key]
                self._followers.note("leave", queue=queue.number)

        self._forget_unused_programs()
        closed = [queue for queue in self._queues.values() if queue.scheduler is None]
        for queue in closed:
            if not len(queue.waiting):  # all its requests are held back
                continue
            if self._programs.is_new(queue.variant.programs) and self._runs_new_variant():
                continue
            if self.num_schedulers >= self._max_methods and not self._free_scheduler():
                return
            queue.open(self._size, self._bounds)

    def _close(self, queue: VariantQueue) -> None:
        queue.close()
        self._followers.note("close", queue=queue.number)

    def _runs_new_variant(self) -> bool:
        """Whether a variant decodes that has programs to compile."""
        return any(
            queue.busy and self._programs.is_new(queue.variant.programs)
            for queue in self._open_queues()
        )

    def _forget_unused_programs(self) -> None:
        """Drops programs of variants that no queue has, if there are many."""
        used = {queue.variant.programs for queue in self._open_queues()}
        with self._change:
            busy = {queue.variant.programs for queue in self._queues.values() if queue.busy}
            busy |= {submission.variant.programs for submission in self._inbox}
            if self._compilation is not None:  # it may go on although its client has left
                busy.add(self._compilation.variant.programs)
            freed = self._programs.keep(used, busy)
        if freed:
            return_memory()

    def _free_scheduler(self) -> bool:
        """Closes an idle scheduler; if all are busy, the longest running one begins to drain.

        Returns whether one was closed.
        """
        open_queues = self._open_queues()
        idle = [queue for queue in open_queues if not queue.busy]
        if idle:
            self._close(min(idle, key=lambda queue: queue.opened))
            return True

        if not any(queue.draining for queue in open_queues):
            # A queue that has a scheduler but has not run yet must get its turn first.
            running = [queue for queue in open_queues if queue.running]
            if running:
                min(running, key=lambda queue: queue.opened).draining = True
        return False
