"""The scheduler: which request gets a batch slot when, and how many rounds run until a poll.

States of a request, and the methods that move it:

                  _begin_prefill              _fill_slots             _read_results
    waiting ────────────────────▶ prefilling ─────────────▶ running ────────────────▶ finished
       │                                                       ▲
       └───────────────────────────────────────────────────────┘
                             _start_batch

  - waiting: taken from the caller's source, nothing is computed yet.
  - prefilling: one request per device, in a state of its own, chunk by chunk
    (:mod:`specjax.runtime.prefill`). The running requests get rounds in between.
  - running: it has a batch slot, and every round adds tokens
    (:mod:`specjax.runtime.runner`).
  - finished: it ended, its generation is made (:mod:`specjax.runtime.results`), and its slot is
    free.

If nothing runs and the prompts have little in common, _start_batch prefills all batch slots in
one program, except where a token's bits must not depend on it (Engine.batch_invariant). Prompts
that are much longer than the others are prefilled after it, one by one. A dropped request leaves
from waiting or running (_free_dropped); one that is prefilling takes its slot first.

One poll is _admit, _run_rounds, _read_results, _free_dropped. The device is polled when a request
has ended or the caller wants to see pieces, never once per token. In between, the host does not
wait for it.

Axis legend: B batch slots.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from specjax._util.platform import platform
from specjax.core.loop import NO_SLOT
from specjax.core.sampling import Sampling
from specjax.core.types import Inputs
from specjax.models.cache import bucket
from specjax.runtime.detokenizer import Detokenizer
from specjax.runtime.engine import Engine, Request
from specjax.runtime.output import Piece
from specjax.runtime.prefill import Prefill
from specjax.runtime.results import ResultReader, Slot
from specjax.runtime.runner import BatchRunner

# Most rounds between polls on several devices. Each device runs its own rows and does not wait for
# the others, so rounds do not end early when a request ends. Polls come this often instead.
MAX_ROUNDS_ON_MESH = 8


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits of every request: tokens of a prompt, and of a prompt and its new tokens."""

    prompt: int
    total: int

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Bounds:
        """The smallest limits that hold for all of these requests."""
        prompt = max(len(request.tokens) for request in requests)
        total = max(len(request.tokens) + request.budget for request in requests)
        return cls(prompt, total)


class Scheduler:
    """Decodes requests, up to ``size`` at a time.

    Args:
      engine: the method and its models.
      size: B, the number of batch slots; a multiple of the mesh's data axis.
      sampling: of the requests that have none of their own.
      bounds: limits of every request to come.
      stop: stop strings of the requests that have none of their own.
      logprobs: whether pieces have log-probabilities.
      prefixes: prefilled states that the prefix cache keeps at most; each takes the memory of one
        row per device.
    """

    def __init__(
        self,
        engine: Engine,
        size: int,
        sampling: Sampling,
        bounds: Bounds,
        *,
        stop: Sequence[str] = (),
        logprobs: bool = False,
        prefixes: int = 0,
    ):
        largest_chunk = engine.chunk_size(bounds.prompt, engine.data_parallel_size)
        needed = max(bounds.prompt + engine.method.extra_positions, largest_chunk)
        fixed_capacity = None
        if engine.method.needs_full_length:
            needed = max(needed, bounds.total + engine.method.round_positions)
            fixed_capacity = bucket(needed)

        self._engine = engine
        self._size = size
        self._stop = stop
        self._largest_chunk = largest_chunk  # tokens of the largest prefill chunk

        # Waiting.
        self._source: Iterator[Request | None] = iter(())  # None: no request for now
        self._waiting: list[Request] = []  # taken from the source, in its order

        # Prefilling.
        self._prefill = Prefill(engine, sampling, bucket(needed), logprobs, prefixes)
        # The batch slot that each request in prefill will take, NO_SLOT if a device has no
        # request; the list is empty while nothing is prefilling.
        self._prefill_slots: list[int] = []
        self._token_budget = 0  # tokens that may be prefilled between two rounds

        # Running.
        self._runner = BatchRunner(
            engine, size, sampling, logprobs=logprobs, fixed_capacity=fixed_capacity
        )
        self._slots: list[Slot | None] = [None] * size  # None: the batch slot is free
        # Whether all running requests are before their first round. That round is polled, so
        # that the first tokens' times are known.
        self._before_first_round = False

        # Finished or dropped.
        self._results = ResultReader(size, engine.scorer, engine.method.sequences)
        self._dropped: set[int] = set()  # request ids, until their slots are free

    @property
    def passes(self) -> int:
        """Batched forward passes so far."""
        return self._results.passes

    @property
    def occupancy(self) -> float:
        """The share of batch slots that were running, over all rounds."""
        return self._results.occupancy

    @property
    def capacity(self) -> int:
        """Cache positions of each batch slot, 0 if there is no batch; any thread may ask."""
        return self._runner.capacity

    @property
    def is_idle(self) -> bool:
        """Whether no request has a batch slot or is about to get one; any thread may ask."""
        return not (any(self._slots) or self._prefill_slots)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of settings that the batch's programs have; any thread may ask."""
        return self._runner.kinds

    @property
    def inputs(self) -> Inputs | None:
        """What the batch's rounds read, None before the first one; any thread may ask."""
        return self._runner.known_inputs

    def run(self, requests: Iterable[Request | None], rounds: int) -> Iterator[Piece]:
        """Decodes all requests, and polls at least every ``rounds`` rounds.

        If the source yields None, there is no request for now, and the running ones go on. A
        piece's index is the ``request_id`` of its request.
        """
        return itertools.chain.from_iterable(self.polls(requests, rounds))

    def polls(self, requests: Iterable[Request | None], rounds: int) -> Iterator[list[Piece]]:
        """:meth:`run`, poll by poll. A list may be empty: no request has new tokens.

        With ``rounds`` = 1, one prefill chunk runs between two rounds. With more, that many prompt
        chunks are prefilled per poll, and batch slots are free for a shorter time.
        """
        self._source = iter(requests)
        self._waiting = []
        self._token_budget = self._largest_chunk * rounds
        self._results.start_clock()
        while self._admit():
            self._run_rounds(rounds)
            yield self._read_results()
            self._free_dropped()

    def drop(self, request_ids: Iterable[int]) -> None:
        """Ends requests that were taken from the source; takes effect before the next round."""
        self._dropped.update(request_ids)

    # --- waiting -------------------------------------------------------------------------------

    def _peek_waiting(self, count: int) -> list[Request]:
        """Up to ``count`` of the next requests, which go on waiting."""
        while len(self._waiting) < count:
            request = next(self._source, None)
            if request is None:
                break
            self._waiting.append(request)
        return self._waiting[:count]

    def _has_waiting(self) -> bool:
        return bool(self._peek_waiting(1))

    def _pop_waiting(self) -> Request | None:
        """The next request, which waits no longer; None if there is none for now."""
        if not self._has_waiting():
            return None
        return self._waiting.pop(0)

    def _admit(self) -> bool:
        """Moves waiting requests on; returns whether any request is prefilling or running."""
        if not self.is_idle:
            self._prefill_waiting(self._token_budget)
            return True

        waiting = self._peek_waiting(self._size)
        if not waiting:
            return False
        together = self._prefilled_together(waiting)
        batch = [request for number, request in enumerate(waiting) if number in together]
        others = [request for number, request in enumerate(waiting) if number not in together]
        self._waiting[: len(waiting)] = others
        if batch:
            self._start_batch(batch)
        if others:
            self._prefill_waiting(None)
        return True

    @property
    def prefills_together(self) -> bool:
        """Whether all batch slots may be prefilled in one program."""
        return not self._engine.batch_invariant(self._size)

    def _prefilled_together(self, requests: Sequence[Request]) -> set[int]:
        """Which requests one program prefills for all batch slots, if nothing runs beside them.

        That is fastest, unless too much of it is padding, or prompts can share what they have in
        common. All other requests are prefilled each in a program of its own.
        """
        prompts = [request.tokens for request in requests]
        if not self.prefills_together or self._prefill.prefix_cache.saves_a_third(prompts):
            return set()
        shortest_first = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        lengths = [len(prompts[number]) for number in shortest_first]
        return set(shortest_first[: self._cheapest_together(lengths)])

    def _cheapest_together(self, lengths: Sequence[int]) -> int:
        """How many prompts, of ascending ``lengths``, cost least if they are prefilled together.

        Together every row runs to their longest prompt's end, and so do free slots. Alone every
        prompt needs passes of its own. A pass costs its tokens and what reading the weights costs.
        """
        devices = self._engine.data_parallel_size

        def cost(longest: int, rows: int) -> int:
            chunk = self._engine.chunk_size(longest, rows)
            passes = -(-longest // chunk)  # rounded up
            return passes * (rows // devices * chunk + platform().free_tokens)

        alone = 0.0  # of the prompts after the first `count`
        costs = {}
        for count in range(len(lengths), 0, -1):
            costs[count] = alone + cost(lengths[count - 1], self._size)
            alone += cost(lengths[count - 1], devices) / devices
        costs[0] = alone
        return min(costs, key=costs.__getitem__)  # the most prompts, if several cost the same

    def _start_batch(self, requests: list[Request]) -> None:
        """waiting → running: one prefill of whole prompts for all batch slots."""
        began = time.perf_counter()
        self._runner.start(requests)
        self._results.expect_new_state()
        seconds = time.perf_counter() - began
        for number, request in enumerate(requests):
            slot = self._take_slot(number, request, began)
            slot.prefill_seconds = seconds
        self._before_first_round = True

    # --- prefilling ----------------------------------------------------------------------------

    def _prefill_waiting(self, token_budget: int | None) -> None:
        """Prefills requests chunk by chunk, and gives them batch slots.

        No chunk begins once ``token_budget`` tokens are prefilled. None: nothing runs that would
        be delayed, so prefill goes on until no slot is free or no request waits.
        """
        spent = 0
        while token_budget is None or spent < token_budget:
            if not self._prefill_slots and not self._begin_prefill():
                return
            # A prompt may be done from the start: the prefix cache had all of it.
            if not self._prefill.done:
                spent += self._prefill.run_chunk()
            if self._prefill.done:
                self._fill_slots(nothing_delayed=token_budget is None)

    def _begin_prefill(self) -> bool:
        """waiting → prefilling: one request per device that has a free slot; False if none."""
        slots: list[int] = []
        requests: list[Request | None] = []
        for slot in self._first_free_slots():
            request = None
            if slot != NO_SLOT:
                request = self._pop_waiting()
            if request is None:
                slot = NO_SLOT
            slots.append(slot)
            requests.append(request)

        if not any(requests):
            return False
        self._prefill_slots = slots
        self._prefill.begin(requests)
        return True

    def _first_free_slots(self) -> list[int]:
        """Each device's first free batch slot, or NO_SLOT. Devices have equal runs of slots."""
        slots_per_device = self._size // self._engine.data_parallel_size
        first_free = []
        for begin in range(0, self._size, slots_per_device):
            numbers = range(begin, begin + slots_per_device)
            free = (number for number in numbers if self._slots[number] is None)
            first_free.append(next(free, NO_SLOT))
        return first_free

    def _fill_slots(self, nothing_delayed: bool) -> None:
        """prefilling → running: the prefilled requests take their batch slots."""
        prefill = self._prefill
        requests = [request for request in prefill.requests if request]
        if not self._runner.started:
            self._runner.start_empty(requests[0])
            self._results.expect_new_state()
            self._before_first_round = True

        self._fit_capacity(longest_prompt=max(len(request.tokens) for request in requests))
        self._runner.fill_slots(prefill, self._prefill_slots)
        if nothing_delayed:
            # Only for exact prefill times: nothing else runs that would have to wait.
            jax.block_until_ready(self._runner.state)
            self._before_first_round = True

        taken = zip(self._prefill_slots, prefill.requests, prefill.cached, strict=True)
        for number, request, cached in taken:
            if request:
                slot = self._take_slot(number, request, prefill.began)
                slot.cached_tokens = int(cached)
                slot.prefill_seconds = time.perf_counter() - prefill.began
                self._results.expect_new_request(number)
        self._prefill_slots = []
        self._runner.set_inputs(self._requests_in_slots())

    def _take_slot(self, number: int, request: Request, began: float) -> Slot:
        """Gives a request batch slot ``number``; its prefill ``began`` at that time."""
        stop = self._stop
        if request.stop is not None:
            stop = request.stop
        slot = Slot(
            request=request,
            detokenizer=Detokenizer(self._engine.target.tokenizer, stop, request.tokens.tolist()),
            began=began,
            length=len(request.tokens),
            passes_before=self._results.passes,
        )
        self._slots[number] = slot
        return slot

    def _requests_in_slots(self) -> list[Request | None]:
        """The running requests by batch slot; None: the slot is free."""
        requests: list[Request | None] = [None] * self._size
        for number, slot in enumerate(self._slots):
            if slot:
                requests[number] = slot.request
        return requests

    # --- running -------------------------------------------------------------------------------

    def _run_rounds(self, rounds: int) -> None:
        """Runs rounds until a request ends, but at most ``rounds`` of them."""
        if not any(self._slots):
            return  # requests are prefilling, and none is running

        self._fit_capacity()
        if self._must_poll_next_round():
            rounds = 1
        self._before_first_round = False

        # Rows that have ended already do not end the rounds early.
        known_done = np.array([slot is None for slot in self._slots])
        if self._engine.data_parallel_size > 1:
            rounds = min(rounds, MAX_ROUNDS_ON_MESH)
            known_done = np.ones_like(known_done)
        self._runner.run_rounds(rounds, known_done, self._requests_in_slots())

    def _must_poll_next_round(self) -> bool:
        """Whether the next poll comes after one round, however many the caller allows."""
        if self._before_first_round:  # the times of first tokens are taken
            return True
        if any(slot.detokenizer.has_stop_strings for slot in self._slots if slot):
            return True  # the device does not know of them: every further round may be wasted
        if self._prefill_slots:  # the next prefill chunk comes after one round
            return True
        return not all(self._slots) and self._has_waiting()  # a free slot is filled

    def _fit_capacity(self, longest_prompt: int = 0) -> None:
        """Moves the state to the capacity bucket that the longest request needs.

        ``longest_prompt``: of requests that are about to take their batch slots.
        """
        lengths = [slot.length for slot in self._slots if slot]
        self._runner.fit_capacity(max([longest_prompt, *lengths]), self._has_waiting)

    # --- finished ------------------------------------------------------------------------------

    def _read_results(self) -> list[Piece]:
        """running → finished: returns new pieces, and frees the slots of requests that ended."""
        if not any(self._slots):
            return []
        result = self._results.read(self._runner.state, self._slots)
        if result.ended.any():
            self._free(result.ended, result.stopped)
        return result.pieces

    def _free_dropped(self) -> None:
        """Removes dropped requests that wait or run."""
        if not self._dropped:
            return
        self._waiting = [
            request for request in self._waiting if request.request_id not in self._dropped
        ]
        dropped = np.zeros(self._size, bool)
        for number, slot in enumerate(self._slots):
            dropped[number] = slot is not None and slot.request.request_id in self._dropped
        if dropped.any():
            # As if a stop string had ended them: the device would go on with them.
            self._free(dropped, dropped)

        # Requests that are prefilling take their slots first; the next call frees these.
        prefilling = set()
        if self._prefill_slots:
            prefilling = {request.request_id for request in self._prefill.requests if request}
        self._dropped &= prefilling

    def _free(self, ended: np.ndarray, stopped: np.ndarray) -> None:
        """Frees the batch slots of ``ended`` requests, bool ``[B]``; see ``loop.free_slots``."""
        for number in np.flatnonzero(ended).tolist():
            self._slots[number] = None
        self._runner.free_slots(ended, stopped)
