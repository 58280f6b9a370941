"""The batch on the device: its state, what rounds read, and the programs that change both.

:class:`BatchRunner` calls the programs of :mod:`specjax.core.loop`. It does not know which
requests wait or why a request takes a batch slot: :mod:`specjax.runtime.scheduler` decides that.

Axis legend: B batch slots, S cache positions, G requests being prefilled (one per device).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from specjax._util import steps
from specjax.core import loop
from specjax.core.loop import NO_SLOT
from specjax.core.protocols import Method
from specjax.core.round import DraftVerify
from specjax.core.sampling import Sampling, with_path_settings
from specjax.core.types import DecodeState, Inputs
from specjax.draft.auto_length import COSTS, AutoLength
from specjax.models.cache import bucket, bucket_below
from specjax.runtime.engine import Engine, Request, batch_kinds, stack_keys
from specjax.runtime.grammar_rounds import (
    GrammarProgress,
    advance_with_grammars,
    longest_drafts,
)
from specjax.runtime.grammar_stack import GrammarStack
from specjax.runtime.prefill import Prefill
from specjax.runtime.round_costs import known_costs, round_costs
from specjax.search.drivers import HostDriven, advance_on_host
from specjax.text.automaton import Automaton

# Cache positions that a smaller bucket must have to spare before the state shrinks to it. Without
# them, a state that soon grows again would be moved back and forth.
SHRINK_MARGIN = 64


class BatchRunner:
    """Runs rounds of B requests and moves them between capacity buckets.

    Args:
      size: B.
      sampling: of the requests that have none of their own.
      fixed_capacity: S, if the method needs all positions from the start; None otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        size: int,
        sampling: Sampling,
        *,
        logprobs: bool,
        fixed_capacity: int | None,
    ):
        self._engine = engine
        self._method = engine.method
        self._size = size
        self._sampling = sampling
        self._logprobs = logprobs
        self.fixed_capacity = fixed_capacity
        self._state: DecodeState | None = None  # None until the first request runs
        self._inputs: Inputs | None = None  # what rounds read; None until the first request runs
        self._capacities_run: set[int] = set()  # buckets whose rounds have been compiled
        # Places in grammars, and grammars that are tables, by the request's identity.
        self._places: dict[int, tuple[Request, GrammarProgress]] = {}
        self._automata: dict[int, tuple[Request, Automaton | None]] = {}
        self._grammars = GrammarStack()  # those that are tables
        # Relative seconds of a round per draft form, if the draft length follows costs. None:
        # not measured yet; empty: the method has fixed lengths.
        self._costs: float | tuple[float, ...] | None = ()
        if engine.auto_length:
            self._costs = engine.settings.get(COSTS)

    @property
    def started(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def state(self) -> DecodeState:
        """The state of all batch slots. There is one once a request has been started."""
        assert self._state is not None, "no request has been started"
        return self._state

    @property
    def capacity(self) -> int:
        """The state's cache positions, 0 if there is none; any thread may ask."""
        state = self._state  # which the thread that decodes may replace at any time
        return 0 if state is None else state.capacity

    @property
    def inputs(self) -> Inputs:
        """What rounds read. There is none before a request has been started."""
        assert self._inputs is not None, "no request has been started"
        return self._inputs

    @property
    def known_inputs(self) -> Inputs | None:
        """:attr:`inputs`, None before a request has been started; any thread may ask."""
        return self._inputs

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of settings that the batch's programs have; any thread may ask."""
        inputs = self._inputs
        return frozenset() if inputs is None else batch_kinds(inputs)

    def follow(self, inputs: Inputs) -> None:
        """Takes the kinds of settings of another batch, whose programs this one then runs."""
        self._inputs = inputs
        if inputs.grammars is not None:
            self._grammars = GrammarStack.like(inputs.grammars)

    # --- requests take batch slots -------------------------------------------------------------

    def start(self, requests: Sequence[Request]) -> None:
        """Prefills up to B requests into slots 0, 1, …, and waits until they are ready."""
        padding = dataclasses.replace(requests[0], tokens=np.zeros(1, np.int32), budget=0)
        rows = [*requests, *[padding] * (self._size - len(requests))]
        self._state = None  # the last batch's memory is free before the new one takes its own
        self.set_inputs(rows)
        self._take_known_costs()
        prompts = [row.tokens for row in rows]
        num_tokens = sum(len(request.tokens) for request in requests)
        steps.tell(steps.PREFILL, 0, num_tokens)
        self._state = loop.start(
            self._method,
            self.inputs,
            prompts,
            np.array([row.budget for row in rows], np.int32),
            stack_keys(rows),
            logprobs=self._logprobs,
            chunk=self._engine.chunk_size(max(map(len, prompts)), self._size),
            capacity=self.fixed_capacity,
        )
        self._add_grammar_states()
        jax.block_until_ready(self._state)
        steps.tell(steps.PREFILL, num_tokens, num_tokens)

    def start_batch_like(self, request: Request) -> None:
        """Compiles the program with which :meth:`start` would prefill B such requests.

        It prefills nothing: the rows have one token. Afterwards no request has a batch slot.
        """
        chunk = self._engine.chunk_size(len(request.tokens), self._size)
        capacity = self.fixed_capacity or loop.first_capacity(
            self._method, len(request.tokens), request.budget, chunk
        )
        self._state = None
        self._state = loop.start(
            self._method,
            self.inputs,
            [request.tokens[:1]] * self._size,
            np.zeros(self._size, np.int32),
            stack_keys([request] * self._size),
            logprobs=self._logprobs,
            chunk=chunk,
            capacity=capacity,
        )
        self._add_grammar_states()

    def start_empty(self, example: Request) -> None:
        """A state whose batch slots are all free, with room for the prompt of ``example``."""
        self._state = None
        self.set_inputs([example] * self._size)
        capacity = self.fixed_capacity
        if capacity is None:
            capacity = bucket(len(example.tokens) + self._method.round_positions)
        tokens = np.zeros((self._size, capacity), np.int32)
        keys = jnp.stack([example.key] * self._size)
        empty = loop.empty_state(self._method, self._logprobs)
        self._state = empty(self.inputs, tokens, keys)
        self._add_grammar_states()

    def fill_slots(self, prefill: Prefill, slots: Sequence[int]) -> None:
        """Puts prefilled requests into batch slots: one per device, or ``NO_SLOT``."""
        slots_per_device = self._size // self._engine.data_parallel_size
        # The program runs on each device, which numbers only its own slots.
        numbers = np.array(slots, np.int32)
        local = np.where(numbers == NO_SLOT, numbers, numbers % slots_per_device)
        fill = loop.fill_slots(self._method)
        inputs, prefilled = self._with_same_counts(prefill)
        if self.state.grammar_state is not None:
            prefilled = loop.with_grammar_states(self._method)(inputs, prefilled)
        self._state = fill(inputs, self.state, prefilled, local)

    def _with_same_counts(self, prefill: Prefill) -> tuple[Inputs, DecodeState]:
        """The prefilled state, with counts if and only if the batch has them, and its inputs.

        A batch has counts from the first request on whose settings need them.
        """
        inputs, prefilled = prefill.inputs, prefill.state
        if prefilled.counts is not None and self.state.counts is None:
            self._inputs = with_path_settings(self.inputs)
            self._state = loop.with_counts(self._method)(self.inputs, self.state)
        if prefilled.counts is None and self.state.counts is not None:
            inputs = with_path_settings(inputs)
            prefilled = loop.with_counts(self._method)(inputs, prefilled)
        return inputs, prefilled

    def set_inputs(self, requests: Sequence[Request | None]) -> None:
        """Sets what rounds read for the requests of all batch slots; None: the slot is free."""
        # A free slot needs some inputs, too; any request's will do.
        example = next(request for request in requests if request)
        rows = [request or example for request in requests]
        if self._inputs is not None and not self._engine.inputs_depend_on(rows):
            return
        inputs = self._engine.inputs_for(rows, self._sampling, self._inputs)
        automata = [self._automaton_of(row) for row in rows]
        self._automata = {id(row): self._automata[id(row)] for row in rows}
        inputs = inputs.replace(grammars=self._grammars.tables(automata))
        if batch_kinds(inputs) != self.kinds:
            self._capacities_run = set()  # rounds compile anew
        self._inputs = inputs
        self._add_grammar_states()
        if self._costs:
            self._set_costs()

    def _automaton_of(self, request: Request) -> Automaton | None:
        """The request's grammar as a table, which stays the same one for as long as it runs."""
        if id(request) not in self._automata:
            automaton = self._engine.automaton(self._sampling_of(request))
            self._automata[id(request)] = request, automaton
        return self._automata[id(request)][1]

    def _sampling_of(self, request: Request) -> Sampling:
        return request.sampling or self._sampling

    def _add_grammar_states(self) -> None:
        """Gives the state its rows' places in grammars, from the first table on.

        Requests that run before that have none, and new ones are at the beginning of theirs.
        """
        if self._state is None or self.inputs.grammars is None:
            return
        if self._state.grammar_state is None:
            self._state = loop.with_grammar_states(self._method)(self.inputs, self._state)

    def _set_costs(self) -> None:
        settings = self.inputs.settings | {COSTS: jnp.asarray(self._costs, jnp.float32)}
        self._inputs = self.inputs.replace(settings=settings)

    # --- capacity ------------------------------------------------------------------------------

    def fit_capacity(self, longest: int, has_waiting: Callable[[], bool]) -> None:
        """Moves the state to the bucket that a round needs if ``longest`` is the longest request.

        ``has_waiting``: whether more requests wait. It is asked only if the answer matters.
        """
        if self.fixed_capacity is not None:
            return
        needed = longest + self._method.round_positions
        smaller = bucket(needed + SHRINK_MARGIN)
        if needed > self.state.capacity:
            self.resize(bucket(needed))
            return
        # A smaller bucket that is not compiled yet costs more than it saves, unless more requests
        # follow.
        if smaller < self.state.capacity and (smaller in self._capacities_run or has_waiting()):
            self.resize(smaller)

    def resize(self, capacity: int) -> None:
        """Moves the state to ``capacity``, bucket by bucket, so that few programs are compiled."""
        while self.state.capacity != capacity:
            self.resize_one_step(capacity)

    def resize_one_step(self, capacity: int) -> None:
        """Moves the state to the next bucket in the direction of ``capacity``."""
        current = self.state.capacity
        if current < capacity:
            following = bucket(current + 1)
        else:
            following = bucket_below(current)
        self._state = loop.resize_state(self._method)(self.state, following)

    # --- rounds --------------------------------------------------------------------------------

    def run_rounds(
        self, rounds: int, known_done: Bool[np.ndarray, "B"], requests: Sequence[Request | None]
    ) -> None:
        """Runs up to ``rounds`` rounds; does not wait for the device.

        It ends early if a row ends that is not in ``known_done``. ``requests`` are those of the
        batch slots: rewards of host-driven methods read them.
        """
        self._capacities_run.add(self.state.capacity)
        places = self._grammar_places(requests)
        if self._costs is None and not any(places):
            self._measure_costs()
        if self._method.host_driven:
            self._run_on_host(rounds, known_done, requests)
        elif any(places):
            assert isinstance(self._method, DraftVerify), "check_method refuses others"
            self._state = advance_with_grammars(
                self._method, self.inputs, self.state, rounds, known_done, places
            )
        else:
            run = loop.run_rounds(self._method_of(requests))
            self._state = run(self.inputs, self.state, np.int32(rounds), known_done)

    def _method_of(self, requests: Sequence[Request | None]) -> Method:
        """The method of a batch without a request that needs the host."""
        samplings = [self._sampling_of(request) for request in requests if request]
        if not any(sampling.grammar for sampling in samplings):
            return self._method
        assert isinstance(self._method, DraftVerify), "check_method refuses others"
        return longest_drafts(self._method)

    def _grammar_places(self, requests: Sequence[Request | None]) -> list[GrammarProgress | None]:
        """Where each request is in its grammar; None: it has none that needs the host."""
        places: dict[int, tuple[Request, GrammarProgress]] = {}
        by_slot: list[GrammarProgress | None] = []
        for request in requests:
            place = None
            if request is not None:
                sampling = self._sampling_of(request)
                _, place = self._places.get(id(request), (None, None))
                is_new = place is None and bool(sampling.grammar)
                if is_new and self._automaton_of(request) is None:
                    place = GrammarProgress(self._engine.matcher(sampling), len(request.tokens))
            if request is not None and place is not None:
                # The request is kept with it, so that no other one gets its id.
                places[id(request)] = request, place
            by_slot.append(place)
        self._places = places  # those of requests that have ended are dropped
        return by_slot

    def _take_known_costs(self) -> None:
        """Takes the costs before the prompts are read, if an earlier batch has measured them."""
        if self._costs is not None:
            return
        assert isinstance(self._method, AutoLength), "other methods have no costs"
        self._costs = known_costs(self._method, self.inputs, self._size)
        if self._costs is not None:
            self._set_costs()

    def _measure_costs(self) -> None:
        assert isinstance(self._method, AutoLength), "other methods have no costs"
        self._costs, self._state = round_costs(self._method, self.inputs, self.state)
        self._set_costs()

    def _run_on_host(
        self, rounds: int, known_done: Bool[np.ndarray, "B"], requests: Sequence[Request | None]
    ) -> None:
        scorer = self._engine.scorer
        method = self._method
        assert scorer is not None, "a host-driven method has a reward"
        assert isinstance(method, HostDriven), "a host-driven method has rounds of its own"
        self._state = advance_on_host(
            method,
            self.inputs,
            self.state,
            rounds,
            known_done,
            lambda state, continuations: scorer.score_continuations(requests, state, continuations),
        )

    def free_slots(self, ended: Bool[np.ndarray, "B"], stopped: Bool[np.ndarray, "B"]) -> None:
        """Frees the batch slots of ``ended`` requests; a text stop ended those in ``stopped``."""
        self._state = loop.free_slots(self.state, ended, stopped)
