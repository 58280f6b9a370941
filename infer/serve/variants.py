"""Variants of the server, what clients ask of them, and the queue of each.

A :class:`Submission` is one HTTP request. Its rows wait in the :class:`VariantQueue` of its
:class:`Variant`, which has a scheduler while :class:`~infer.serve.engine_thread.EngineThread` gives
it one.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from infer.serve.fairness import RoundRobinQueue
from infer.serve.programs import Shape
from infer.serve.schemas import Body
from specjax.core.protocols import Method
from specjax.core.sampling import Sampling
from specjax.models.cache import bucket
from specjax.runtime.engine import Engine, Request
from specjax.runtime.generate import make_rows
from specjax.runtime.output import Piece
from specjax.runtime.scheduler import Bounds, Scheduler

# Rounds between two polls. At each poll new text is sent and batch slots are freed and filled.
ROUNDS_PER_POLL = 1


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method bound to its options, with log-probabilities or without.

    Requests of the same variant share a scheduler and its compiled programs. Its prefix cache keeps
    ``prefixes`` prompts.
    """

    name: str
    engine: Engine
    logprobs: bool
    prefixes: int

    @property
    def key(self) -> Hashable:
        """Two variants with equal keys can share a scheduler."""
        settings = tuple(sorted(self.engine.settings.items()))
        return self.name, *self.programs, settings

    @property
    def programs(self) -> tuple[Method, bool]:
        """Two variants with equal values run the same compiled programs."""
        return self.engine.method, self.logprobs

    def shape(
        self, request: Request, kinds: frozenset[str], batch: frozenset[str], batch_capacity: int
    ) -> Shape | None:
        """What of a request determines its compiled programs.

        None for methods whose programs do not compile in the background: those with one capacity
        for all requests, and those that measure the costs of rounds.

        Args:
          kinds: those of its settings.
          batch: the kinds of settings of the running batch.
          batch_capacity: the cache positions of its batch slots; 0: there are none yet.
        """
        engine = self.engine
        if engine.method.needs_full_length or engine.auto_length:
            return None
        length = len(request.tokens)
        chunk = 0  # a prompt's last token is not prefilled
        if length > 1:
            chunk = engine.chunk_size(length, engine.data_parallel_size)
        capacity = bucket(length + engine.method.round_positions)
        return Shape(chunk, kinds, capacity, max(capacity, batch_capacity), kinds | batch)


@dataclasses.dataclass(eq=False)
class Submission:
    """One HTTP request: the settings of its rows, and the function that gets their text.

    ``on_output`` is called with the number of a row and its next piece, or with the error that
    ended it. The engine's thread calls it, so it must return at once. If ``scored`` is set, the
    last piece of each row is a :class:`ScoredPiece`. Rows of different ``client`` take turns.
    ``body`` is what the client sent, ``kinds`` those of the sampling settings.
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
    client: Hashable = None
    body: Body | None = None
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    kinds: frozenset[str] = dataclasses.field(init=False)
    _rows: list[Request] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Makes the requests here and not where they are queued, which all clients wait for."""
        self.kinds = self.variant.engine.kinds(self.sampling)
        constraints = [{}] * len(self.prompts)
        rows = make_rows(
            self.variant.engine.target,
            self.prompts,
            constraints,
            None,
            self.seed,
            self.samples,
            self.budgets,
            with_text=False,  # only rewards read it
        )
        of_submission = {"sampling": self.sampling, "stop": self.stop}
        self._rows = [dataclasses.replace(row, **of_submission) for row in rows]

    @property
    def size(self) -> int:
        """The number of its rows."""
        return len(self.prompts) * self.samples

    def prompt_of(self, number: int) -> np.ndarray:
        """The token ids of a row's prompt; samples of one prompt are neighbors."""
        return self.prompts[number // self.samples]

    def requests(self, first_id: int) -> list[Request]:
        """One request per row, with ids from ``first_id``; as ``sj.generate`` makes them."""
        return [
            dataclasses.replace(row, request_id=first_id + number)
            for number, row in enumerate(self._rows)
        ]


def request_message(submission: Submission) -> dict[str, Any]:
    """What another process needs to make the same submission."""
    body = submission.body
    if body is None:
        return {}
    fields = body.model_dump(by_alias=True, exclude_unset=True) | {"seed": submission.seed}
    kind = type(body).__name__
    return {"kind": kind, "body": fields, "prefixes": submission.variant.prefixes}


class VariantQueue:
    """The requests of one variant: those that wait, and a scheduler while it has one.

    ``number`` tells it from all other queues of the server, earlier ones too.
    """

    def __init__(self, variant: Variant, number: int):
        self.variant = variant
        self.number = number
        self.waiting: RoundRobinQueue[Request] = RoundRobinQueue()
        # Requests that wait until programs for their shape are compiled.
        self.held: RoundRobinQueue[Request] = RoundRobinQueue()
        self.compilations = 0  # in the background, for its held requests
        self.compilations_of: collections.Counter[int] = collections.Counter()  # by request id
        self.dropped: set[int] = set()  # ids of canceled requests that the scheduler still has
        self.working = False  # a worker polls it; nobody else may touch its scheduler
        self.draining = False  # it starts no new requests, because another queue waits to run
        self.scheduler: Scheduler | None = None
        self.opened = 0.0
        self._polls: Iterator[list[Piece]] | None = None

    @property
    def running(self) -> bool:
        """Whether its scheduler has requests."""
        return self._polls is not None

    @property
    def can_poll(self) -> bool:
        """Whether a poll would do anything."""
        return self.running or len(self.waiting) > 0

    @property
    def busy(self) -> bool:
        """Whether any of its requests waits or runs."""
        return self.working or self.can_poll or len(self.held) > 0

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of settings that its scheduler's batch has."""
        return frozenset() if self.scheduler is None else self.scheduler.kinds

    @property
    def capacity(self) -> int:
        """The cache positions of its batch slots, whether requests have them or not; 0: none."""
        return 0 if self.scheduler is None else self.scheduler.capacity

    def release(self, is_ready: Callable[[Request], bool]) -> None:
        """Lets held requests wait for a batch slot that are ready for one."""
        held = self.held
        self.held = RoundRobinQueue()
        while len(held):
            client, request = held.pop()
            queue = self.waiting if is_ready(request) else self.held
            queue.extend(client, [request])

    def open(self, size: int, bounds: Bounds) -> None:
        """Makes its scheduler, with ``size`` batch slots."""
        self.scheduler = Scheduler(
            self.variant.engine,
            size,
            Sampling(),  # each request has its own
            bounds,
            logprobs=self.variant.logprobs,
            prefixes=self.variant.prefixes,
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
