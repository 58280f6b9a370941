"""Warmup: compiles every program that a job may run, so that its times hold no compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from specjax.core import loop
from specjax.core.sampling import Sampling
from specjax.core.types import Inputs
from specjax.models.cache import bucket, chunk_sizes
from specjax.runtime.engine import Engine, Request
from specjax.runtime.scheduler import Bounds, Scheduler


def warm_up(
    engine: Engine, size: int, sampling: Sampling, requests: Sequence[Request], prefixes: int = 0
) -> None:
    """Compiles what decoding these requests, ``size`` at a time, may run.

    The order in which requests end does not matter: every capacity bucket is visited. The
    exception is the rounds of host-driven methods, which compile when they are first needed.
    """
    scheduler = Warmup(engine, size, sampling, Bounds.of(requests), prefixes=prefixes)
    scheduler.run_first_rounds(requests)
    scheduler.start_batches(requests)
    if len(requests) > size or prefixes or not scheduler.prefills_together:
        scheduler.prefill_chunks(requests[0])
    scheduler.visit_buckets(requests)


def warm_up_in_background(
    engine: Engine,
    size: int,
    bounds: Bounds,
    request: Request,
    batch: Inputs | None = None,
    capacity: int = 0,
    *,
    logprobs: bool,
    prefixes: int,
) -> None:
    """Compiles what a request of this length and these settings adds to a running batch.

    It has a state of its own.

    A thread may call it while another one decodes with the same engine, which then finds the
    programs compiled. For the time of the call there is a second state of ``size`` rows.

    Args:
      size, bounds, logprobs, prefixes: those of the scheduler that decodes.
      request: its prompt is read, and nothing of it decoded.
      batch: what the running batch's rounds read, if the request brings other kinds of settings
        (:meth:`Engine.kinds`); None: it does not, or there is no batch.
      capacity: the cache positions of the running batch; 0: there is none.
    """
    scheduler = Warmup(engine, size, Sampling(), bounds, logprobs=logprobs, prefixes=prefixes)
    scheduler.join_batch(request, batch, capacity)


def warm_up_all_lengths(
    engine: Engine,
    size: int,
    bounds: Bounds,
    sampling: Sampling,
    *,
    logprobs: bool,
    prefixes: int,
) -> None:
    """Compiles what requests of any length within ``bounds`` run, in a state of its own.

    Args:
      size, bounds, logprobs, prefixes: those of the scheduler that decodes.
      sampling: has the kinds of settings of the requests to come.
    """
    scheduler = Warmup(engine, size, sampling, bounds, logprobs=logprobs, prefixes=prefixes)
    scheduler.visit_all_lengths(bounds)


class Warmup(Scheduler):
    """A scheduler that runs each of its programs once, to compile it.

    It subclasses Scheduler because a program is compiled for exact arguments: static options,
    shapes and dtypes. What builds them for the job has to build them here as well.
    """

    def run_first_rounds(self, requests: Sequence[Request]) -> None:
        """Decodes all requests with budgets of one or two tokens, so that slots are reused."""
        short = (
            dataclasses.replace(request, budget=1 + i % 2) for i, request in enumerate(requests)
        )
        for _ in self.run(short, rounds=1):
            pass

    def start_batches(self, requests: Sequence[Request]) -> None:
        """Prefills all batch slots at once, for each pair of chunk size and capacity bucket."""
        if not self.prefills_together:
            return
        one_per_length = {len(request.tokens): request for request in requests}
        one_per_program = {}
        for tokens, request in one_per_length.items():
            chunk = self._engine.chunk_size(tokens, self._size)
            method = self._engine.method
            capacity = loop.first_capacity(method, tokens, request.budget, chunk)
            one_per_program[chunk, capacity] = request
        for request in one_per_program.values():
            self._start_batch([request])

    def prefill_chunks(self, request: Request) -> None:
        """Prefills chunks of every size, and a prompt with a known prefix."""
        self._prefill.warm_up(request, self._largest_chunk)

    def visit_buckets(self, requests: Sequence[Request]) -> None:
        """Moves through all capacity buckets that the requests may need, up and down again.

        Both directions, because growing to a bucket and shrinking to it are two programs.
        """
        round_positions = self._engine.method.round_positions
        shortest = min(len(request.tokens) for request in requests)
        smallest = bucket(shortest + round_positions)
        largest = bucket(Bounds.of(requests).total + round_positions)
        fixed = self._runner.fixed_capacity
        targets = (smallest, largest, smallest) if fixed is None else (fixed, fixed)
        for capacity in targets:
            self._run_programs_of_bucket()
            while self._runner.state.capacity != capacity:
                self._runner.resize_one_step(capacity)
                self._run_programs_of_bucket()

    def join_batch(self, request: Request, batch: Inputs | None = None, capacity: int = 0) -> None:
        """Compiles what runs if the request joins a batch, or starts one.

        Args:
          batch: what the batch's rounds read; None: it has the kinds of settings of ``request``.
          capacity: the batch's cache positions, if they are more than the request needs.
        """
        self._prefill.warm_up(request, self._prefill_chunk(request))
        short = dataclasses.replace(request, tokens=request.tokens[:1])
        plain = dataclasses.replace(short, sampling=Sampling())
        if batch is not None:
            self._runner.follow(batch)
        self._runner.start_empty(short if batch is None else plain)
        smallest = self._runner.state.capacity
        needed = smallest
        if self._runner.fixed_capacity is None:
            needed = bucket(len(request.tokens) + self._engine.method.round_positions)
            self._runner.resize(max(needed, capacity))
        if batch is not None:
            self._fill_slots_of_bucket()  # the request joins, and brings its kinds of settings
            self._runner.set_inputs([short] * self._size)
        self._run_programs_of_bucket()
        if self._runner.state.capacity > needed:
            self._runner.resize(needed)
            self._run_programs_of_bucket()
        if batch is not None:  # requests without settings join later
            self._prefill.begin([plain] * self._engine.data_parallel_size)
            self._fill_slots_of_bucket()
        self._runner.resize(smallest)
        if self.prefills_together:
            self._runner.start_batch_like(request)

    def visit_all_lengths(self, bounds: Bounds) -> None:
        """Compiles what requests of any length run."""
        key = jax.random.key(0)
        capacity = 0
        while capacity < bucket(bounds.total + self._engine.method.round_positions):
            capacity = bucket(capacity + 1)
            longest = capacity - self._engine.method.round_positions
            tokens = np.zeros(max(1, min(bounds.prompt, longest)), np.int32)
            self.join_batch(Request(tokens, 1, key))
        if self.prefills_together:
            for length in chunk_sizes(self._engine.chunk_size(bounds.prompt, self._size)):
                self._runner.start_batch_like(Request(tokens[:length], 1, key))
        longest = Request(tokens, bounds.total - bounds.prompt, key)
        self._runner.start_empty(Request(tokens[:1], 1, key))
        self.visit_buckets([Request(tokens[:1], 1, key), longest])

    def _prefill_chunk(self, request: Request) -> int:
        """Tokens of the largest chunk in which the request's prompt is prefilled."""
        return self._engine.chunk_size(len(request.tokens), self._engine.data_parallel_size)

    def _run_programs_of_bucket(self) -> None:
        """Fills a batch slot on each device, and runs no round."""
        if self._prefill.started:
            self._fill_slots_of_bucket()
        if not self._engine.method.host_driven:
            known_done = np.zeros(self._size, bool)
            self._runner.run_rounds(0, known_done, requests=[None] * self._size)

    def _fill_slots_of_bucket(self) -> None:
        """Fills a batch slot on each device."""
        slots_per_device = self._size // self._engine.data_parallel_size
        self._runner.fill_slots(self._prefill, range(0, self._size, slots_per_device))
