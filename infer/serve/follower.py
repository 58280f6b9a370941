"""A process of a served model that answers no HTTP: it does what process 0 tells it.

It has the queues of process 0's engine, without the requests that wait there: a message names each
request that process 0 starts. See :mod:`infer.serve.hosts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from infer import scoring
from infer.scoring import PromptScores
from infer.serve.admission import Admission
from infer.serve.hosts import END, Message
from infer.serve.programs import Programs
from infer.serve.schemas import ChatBody, CompletionBody
from infer.serve.variants import Submission, VariantQueue
from specjax.runtime.engine import Request
from specjax.runtime.output import Piece
from specjax.runtime.warmup import warm_up_all_lengths

KINDS = {kind.__name__: kind for kind in (ChatBody, CompletionBody)}


class Follower:
    """Does what the messages say.

    Args:
      admission: as in process 0, with no limits of its own.
      receive: returns the next message.
    """

    def __init__(self, admission: Admission, receive: Callable[[], Message]):
        self._admission = admission
        self._receive = receive
        self._queues: dict[int, VariantQueue] = {}  # by process 0's number
        self._requests: dict[int, Request] = {}  # that have not been started, by id
        self._passes: Iterator[list[PromptScores] | None] = iter(())  # of the scoring that runs
        self._programs = Programs()
        self._actions: dict[str, Callable[..., Any]] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "poll": self._poll,
            "score": self._score,
            "warm_up": self._warm_up,
            "close": self._close,
            "leave": self._leave,
        }

    def run(self) -> None:
        """Works until process 0 ends."""
        while True:
            message = self._receive()
            if message["what"] == END:
                return
            self._act(message)

    def _act(self, message: Message) -> None:
        about = dict(message)
        self._actions[about.pop("what")](**about)

    def _submit(self, first_id: int, queue: int, kind: str, body: Message, prefixes: int) -> None:
        submission = self._submission(kind, body, prefixes)
        self._queues.setdefault(queue, VariantQueue(submission.variant, queue))
        self._programs.begin(submission.variant.programs)
        for request in submission.requests(first_id):
            self._requests[request.request_id] = request

    def _submission(self, kind: str, body: Message, prefixes: int) -> Submission:
        """What process 0 submitted; it may have memory for fewer ``prefixes`` than this one."""
        made = self._admission.make_submission(KINDS[kind].model_validate(body), _drop)
        made.variant = dataclasses.replace(made.variant, prefixes=prefixes)
        return made

    def _cancel(self, requests: list[int]) -> None:
        for request_id in requests:
            self._requests.pop(request_id, None)

    def _poll(self, queue: int, dropped: list[int]) -> list[Piece]:
        """Runs a queue's next round, and returns its pieces as process 0's worker gets them."""
        own = self._queues[queue]
        if own.scheduler is None:
            own.open(self._admission.size, self._admission.bounds)
        if dropped:
            own.scheduler.drop(dropped)
        pieces = own.poll(self._next_request)
        if any(piece.row is not None for piece in pieces):
            self._programs.compiled(own.variant.programs)
        return pieces

    def _next_request(self, queue: VariantQueue) -> Request | None:
        """The request that process 0 starts next; other news may come before it."""
        while True:
            message = self._receive()
            if message["what"] == "request":
                number = message["request"]
                return None if number is None else self._requests.pop(number)
            self._act(message)

    def _score(self, tokens: list[int] | None) -> None:
        """Runs a pass that scores tokens; None: the next pass over the same ones."""
        if tokens is not None:
            self._passes = scoring.passes(self._admission.target, [tokens])
        next(self._passes)

    def _warm_up(self, kind: str, body: Message, prefixes: int) -> None:
        submission = self._submission(kind, body, prefixes)
        variant = submission.variant
        warm_up_all_lengths(
            variant.engine,
            self._admission.size,
            self._admission.bounds,
            submission.sampling,
            logprobs=variant.logprobs,
            prefixes=variant.prefixes,
        )
        self._programs.pin(variant.programs, submission.kinds)

    def _close(self, queue: int) -> None:
        """Frees the batch slots of a queue."""
        self._queues[queue].close()

    def _leave(self, queue: int) -> None:
        """Forgets a queue, and programs that no queue has used for long."""
        del self._queues[queue]
        used = {own.variant.programs for own in self._queues.values()}
        self._programs.keep(used, ())


def _drop(number: int, piece: Piece | Exception) -> None:
    """Process 0 sends the pieces."""
