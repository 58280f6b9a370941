"""Running requests: requests in, rounds on the device, pieces of text out.

When a row ends, the next request takes its batch slot while the others go on. It prepares arrays,
calls the programs of :mod:`specjax.core.loop`, and turns what comes back into text. The device is
polled when a row has ended or a caller wants to see pieces, never once per token, and nothing here
waits for it in between.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import loop
from specjax.core.types import FINISH_REASONS, RUNNING, DecodeState, Inputs
from specjax.core.warp import Sampling
from specjax.draft.auto_length import COSTS
from specjax.models.cache import bucket, bucket_below
from specjax.runtime.engine import Engine, Request, keys_of
from specjax.runtime.output import Generation, Piece, Reader
from specjax.runtime.prefill import Prefill
from specjax.runtime.round_costs import round_costs
from specjax.search.drivers import advance_on_host

# Rounds between polls on several devices: each runs its own rows, and none waits for another's.
SPREAD_ROUNDS = 8
SLACK = 64  # positions that the next smaller bucket must have left before the state moves there


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What no request of a job exceeds: tokens of a prompt, and of a prompt and its budget."""

    prompt: int
    total: int

    @classmethod
    def of(cls, rows: Sequence[Request]) -> Bounds:
        """Of all rows of a job."""
        lengths = [len(row.tokens) for row in rows]
        return cls(max(lengths), max(n + row.budget for n, row in zip(lengths, rows, strict=True)))


@dataclasses.dataclass
class Slot:
    """A row in scheduler, and what has been read of it."""

    row: Request
    reader: Reader
    began: float  # when its turn came
    length: int  # tokens so far
    cached: int = 0  # tokens of its prompt that were not prefilled
    passes: int = 0  # of the scheduler, when it took its batch slot
    prefill: float = 0.0
    first: float = 0.0
    share: float = 0.0


class Scheduler:
    """Up to ``size`` rows decoded together.

    ``bounds`` hold for every request to come; ``kept`` prompts stay in memory, as a row of cache
    each, for others that begin alike.
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
        kept: int = 0,
    ):
        self._engine, self._method, self._size = engine, engine.method, size
        self._sampling, self._stop, self._logprobs = sampling, stop, logprobs
        self._slots: list[Slot | None] = [None] * size
        self._state: DecodeState | None = None
        self._inputs: Inputs | None = None
        largest_chunk = engine.chunk_size(bounds.prompt, engine.shares)
        needed = max(bounds.prompt, largest_chunk)
        if engine.method.needs_full_length:
            needed = max(needed, bounds.total + engine.method.round_positions)
        self._prefill = Prefill(engine, sampling, bucket(needed), logprobs, kept)
        self._into: list[
            int
        ] = []  # batch slots that the prefilled requests at the prefill will take
        self._full_length = bucket(needed) if engine.method.needs_full_length else None
        self._largest_chunk = largest_chunk  # tokens of a chunk of a prompt
        self._visited: set[int] = set()
        self._dropped: set[int] = set()  # rows that nobody waits for
        self._costs = (
            engine.settings.get(COSTS) if engine.auto_length else ()
        )  # None: to be measured
        self.passes = self._rounds = self._live_rounds = 0
        self._fresh = False  # whether all rows are at their beginning

    @property
    def occupancy(self) -> float:
        """The share of rows that were live, over all rounds."""
        return self._live_rounds / max(1, self._rounds * self._size)

    def run(self, requests: Iterable[Request | None], rounds: int) -> Iterator[Piece]:
        """Decodes, looking at least every ``rounds`` rounds; ends when no request is left.

        A request of None means that there is none now: running requests go on without. A piece's
        index is its row's ``request_id``.
        """
        return itertools.chain.from_iterable(self.polls(requests, rounds))

    def polls(self, requests: Iterable[Request | None], rounds: int) -> Iterator[list[Piece]]:
        """:meth:`run`, poll by poll; none of the rows may have come further in one.

        Where rows are polled every round, one piece of a prefilled request's prompt is prefilled
        between two. Who waits for more rounds at a time waits for as many pieces, and batch slots
        are empty for less.
        """
        self._waiting, self._source = [], iter(requests)
        self._turn = (
            self._largest_chunk * rounds
        )  # tokens that are prefilled between rounds of live rows
        self._polled = time.perf_counter()
        while self._admit():
            self._advance(rounds)
            yield self._poll()
            self._let_go()

    def drop(self, request_ids: Iterable[int]) -> None:
        """Lets rows go that were taken and nobody waits for, before the next round."""
        self._dropped.update(request_ids)

    # --- who is next ---------------------------------------------------------------------------

    def _ahead(self, count: int) -> list[Request]:
        """Up to ``count`` requests that wait."""
        missing = itertools.islice(self._source, max(0, count - len(self._waiting)))
        self._waiting += itertools.takewhile(lambda row: row is not None, missing)
        return self._waiting[:count]

    def _take(self) -> Request | None:
        return self._waiting.pop(0) if self._ahead(1) else None

    def _admit(self) -> bool:
        """Fills batch slots; returns whether there is anything to decode."""
        if any(self._slots) or self._into:
            self._refill(self._turn)
        elif ahead := self._ahead(self._size):
            few = (
                2 * len(ahead) <= self._size
            )  # a prefill of all batch slots would be mostly padding
            if few or self._prefill.prefixes.helps([row.tokens for row in ahead]):
                self._refill(None)
            else:
                self._start([self._take() for _ in ahead])
        return any(self._slots) or bool(self._into)

    def _let_go(self) -> None:
        """Frees the batch slots of dropped rows; one that is still at the prefill takes its batch
        slot first."""
        if not self._dropped:
            return
        self._waiting = [row for row in self._waiting if row.request_id not in self._dropped]
        gone = np.array(
            [bool(slot) and slot.row.request_id in self._dropped for slot in self._slots]
        )
        if gone.any():
            self._state = loop.free_slots(self._state, gone, gone)
            self._slots = [
                None if left else slot for slot, left in zip(self._slots, gone, strict=True)
            ]
        self._dropped &= (
            {row.request_id for row in self._prefill.rows if row} if self._into else set()
        )

    # --- how they get their batch slots
    # --------------------------------------------------------------

    def _start(self, rows: list[Request]) -> None:
        """All batch slots at once: one prefill of whole prompts. What is missing is done at
        once."""
        began = time.perf_counter()
        nobody = dataclasses.replace(rows[0], tokens=np.zeros(1, np.int32), budget=0)
        everyone = rows + [nobody] * (self._size - len(rows))
        self._describe(everyone)
        prompts = [row.tokens for row in everyone]
        self._state = loop.start(
            self._method,
            self._inputs,
            prompts,
            np.array([row.budget for row in everyone], np.int32),
            keys_of(everyone),
            logprobs=self._logprobs,
            chunk=self._engine.chunk_size(max(map(len, prompts)), self._size),
            capacity=self._full_length,
        )
        self._counted = np.zeros(self._size, np.int64), 0
        jax.block_until_ready(self._state)
        prefill = time.perf_counter() - began
        for number, row in enumerate(rows):
            self._take_slot(number, row, began).prefill = prefill
        self._fresh = True

    def _refill(self, budget: int | None) -> None:
        """Seats prefilled requests for as long as fewer than ``budget`` tokens are prefilled; None:
        all."""
        alone, spent = budget is None, 0
        while (alone or spent < budget) and (self._into or self._open()):
            if not self._prefill.done:
                spent += self._prefill.run_chunk()
            if self._prefill.done:
                self._fill_slots(alone)

    def _open(self) -> bool:
        """Lets the next requests in, one for each device that has a free batch slot."""
        each = self._size // self._engine.shares
        free = [
            next((n for n in range(first, first + each) if self._slots[n] is None), -1)
            for first in range(0, self._size, each)
        ]
        rows = [self._take() if slot >= 0 else None for slot in free]
        if not any(rows):
            return False
        self._into = [slot if row else -1 for slot, row in zip(free, rows, strict=True)]
        self._prefill.open(rows)
        return True

    def _fill_slots(self, alone: bool) -> None:
        prefill = self._prefill
        if self._state is None:
            self._state = self._empty()
        self._fit(max(len(row.tokens) for row in prefill.rows if row))
        each = self._size // self._engine.shares
        row = np.array([slot % each if slot >= 0 else -1 for slot in self._into], np.int32)
        fill_slots = loop.fill_slots(self._method)
        self._state = fill_slots(prefill.inputs, self._state, prefill.state, row)
        if alone:  # nobody is kept waiting by the clock
            jax.block_until_ready(self._state)
        for number, request, cached in zip(self._into, prefill.rows, prefill.cached, strict=True):
            if request:
                slot = self._take_slot(number, request, prefill.began)
                slot.cached, slot.prefill = int(cached), time.perf_counter() - prefill.began
                self._counted[0][number] = 0
        self._into, self._fresh = [], self._fresh or alone
        some = next(slot.row for slot in self._slots if slot)
        self._describe([slot.row if slot else some for slot in self._slots])

    def _take_slot(self, number: int, row: Request, began: float) -> Slot:
        stop = self._stop if row.stop is None else row.stop
        reader = Reader(self._engine.target.tokenizer, stop)
        slot = Slot(row, reader, began, len(row.tokens), passes=self.passes)
        self._slots[number] = slot
        return slot

    def _empty(self) -> DecodeState:
        """A state whose batch slots are all free."""
        some = next(row for row in self._prefill.rows if row)
        self._describe([some] * self._size)
        capacity = self._full_length or bucket(len(some.tokens) + self._method.round_positions)
        tokens = np.zeros((self._size, capacity), np.int32)
        keys = jnp.stack([some.key] * self._size)
        self._counted, self._fresh = (np.zeros(self._size, np.int64), 0), True
        return loop.empty_state(self._method, self._logprobs)(self._inputs, tokens, keys)

    def _describe(self, rows: Sequence[Request]) -> None:
        """What rounds read."""
        if self._inputs is None or self._engine.tells_apart(rows):
            self._inputs = self._engine.inputs_of(rows, self._sampling)
            if self._costs:
                self._know_costs()

    def _know_costs(self) -> None:
        settings = self._inputs.settings | {COSTS: jnp.asarray(self._costs, jnp.float32)}
        self._inputs = self._inputs.replace(settings=settings)

    # --- rounds --------------------------------------------------------------------------------

    def _fit(self, request: int = 0) -> None:
        """Moves the state to the bucket that its longest row, or a prefilled request's prompt,
        needs.

        Bucket by bucket, so that few programs are compiled; to a smaller one that was not run yet
        only while rows are waiting, or its compilation would cost more than it saves.
        """
        if self._full_length:
            return
        needed = max([request, *(slot.length for slot in self._slots if slot)])
        capacity, needed = self._state.capacity, needed + self._method.round_positions
        below = bucket(needed + SLACK)
        if needed > capacity:
            self._move(bucket(needed))
        elif below < capacity and (below in self._visited or self._ahead(1)):
            self._move(below)

    def _move(self, capacity: int) -> None:
        while (now := self._state.capacity) != capacity:
            following = bucket(now + 1) if now < capacity else bucket_below(now)
            self._state = loop.resize_state(self._state, following)

    def _advance(self, rounds: int) -> None:
        """Runs until a row ends, or until the next poll."""
        if not any(self._slots):
            return  # prompts are being prefilled
        self._fit()
        self._visited.add(self._state.capacity)
        if self._costs is None:
            method, inputs = self._method, self._inputs
            self._costs, self._state = round_costs(method, inputs, self._state)
            self._know_costs()
        seen = np.array([slot is None for slot in self._slots])
        stops = any(slot.reader.stops for slot in self._slots if slot)
        if self._fresh or stops or self._into or (seen.any() and self._ahead(1)):
            rounds = 1  # it dates first tokens, sees text stops at once, or lets the next one in
        if self._engine.shares > 1:
            rounds, seen = min(rounds, SPREAD_ROUNDS), np.ones_like(seen)
        self._fresh = False
        if self._method.host_driven:
            rows = [slot and slot.row for slot in self._slots]
            self._state = advance_on_host(
                self._method,
                self._inputs,
                self._state,
                rounds,
                seen,
                lambda state, lanes: self._engine.judge.score_lanes(rows, state, lanes),
            )
        else:
            run = loop.run_rounds(self._method)
            self._state = run(self._inputs, self._state, np.int32(rounds), seen)

    # --- what the host sees of them ------------------------------------------------------------

    def _poll(self) -> list[Piece]:
        """What is new, and the rows that ended."""
        state, live = self._state, {n: slot for n, slot in enumerate(self._slots) if slot}
        if not live:
            return []
        finish, length, tokens, origin, logprobs, rounds, passes = jax.device_get(
            (
                state.finish,
                state.length,
                state.tokens,
                state.origin,
                state.logprobs,
                state.stats.rounds,
                state.stats.passes,
            )
        )
        self._count(rounds, int(passes), live)
        pieces, (ended, stopped) = {}, np.zeros((2, self._size), bool)
        for number, slot in live.items():
            fresh = slice(slot.length, int(length[number]))
            done = finish[number] != RUNNING
            if fresh.start == fresh.stop and not done:
                continue
            text, kept = slot.reader.read(tokens[number, fresh], bool(done))
            stopped[number], slot.length = slot.reader.stopped, fresh.stop
            ended[number] = done or slot.reader.stopped
            reason = FINISH_REASONS[finish[number]] if done else None
            new = slice(fresh.start, fresh.start + kept)
            pieces[number] = Piece(
                slot.row.request_id,
                text,
                tokens[number, new],
                origin[number, new],
                "stop" if slot.reader.stopped else reason,
                None if logprobs is None else logprobs[number, new],
            )
        if ended.any():
            self._end(ended, stopped, finish, tokens, origin, logprobs, pieces)
        return list(pieces.values())

    def _count(self, rounds: np.ndarray, passes: int, live: dict[int, Slot]) -> None:
        """Time and rounds since the last poll, shared by the rows that were live."""
        now = time.perf_counter()
        before, passed = self._counted
        spent = np.array([rounds[n] - before[n] for n in live])
        self._rounds += int(spent.max())
        self._live_rounds += int(spent.sum())
        self.passes += passes - passed
        self._counted = np.asarray(rounds, np.int64).copy(), passes
        for slot in live.values():
            slot.share += (now - self._polled) / len(live)
            slot.first = slot.first or now - slot.began
        self._polled = now

    def _end(
        self, ended, stopped, finish, tokens, origin, logprobs, pieces: dict[int, Piece]
    ) -> None:
        """Makes generations of the rows that ended, and frees their batch slots."""
        counters, rows = dict(vars(jax.device_get(self._state.stats))), {}
        counters.pop("passes")
        now = time.perf_counter()
        for number in np.flatnonzero(ended).tolist():
            slot = self._slots[number]
            span = slice(len(slot.row.tokens), len(slot.row.tokens) + slot.reader.count)
            reason = FINISH_REASONS[finish[number]] if finish[number] else "stop"
            own = {name: values[number : number + 1].copy() for name, values in counters.items()}
            own["emitted"] = np.array([slot.reader.count])
            rows[number] = Generation(
                text=[slot.reader.text],
                tokens=[tokens[number, span].copy()],
                finish_reasons=[reason],
                origins=[origin[number, span].copy()],
                logprobs=None if logprobs is None else [logprobs[number, span].copy()],
                prompt_tokens=[len(slot.row.tokens)],
                stats=own,
                prefill_seconds=np.array([slot.prefill]),
                first_token_seconds=np.array([slot.first]),
                decode_seconds=np.array([now - slot.began - slot.prefill]),
                share_seconds=np.array([slot.share]),
                cached_tokens=[slot.cached],
                passes=self.passes - slot.passes,
                occupancy=1.0,
            )
        rewards = self._rewards(rows)
        for number, row in rows.items():
            row = dataclasses.replace(row, rewards=rewards.get(number))
            pieces[number] = dataclasses.replace(pieces[number], row=row)
            self._slots[number] = None
        self._state = loop.free_slots(self._state, ended, stopped)

    def _rewards(self, rows: dict[int, Generation]) -> dict[int, np.ndarray]:
        """Each reward of each whole completion, a stop string and what follows it cut off."""
        judge = self._engine.judge
        if judge is None:
            return {}
        samples = [
            dataclasses.replace(
                judge.sample(self._slots[number].row, row.tokens[0]), text=row.text[0]
            )
            for number, row in rows.items()
        ]
        scores = np.array(judge.scores(samples), np.float64)
        return {number: scores[i : i + 1] for i, number in enumerate(rows)}
