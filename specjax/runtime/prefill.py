"""Requests being prefilled, before they take a batch slot.

Their prompts are prefilled in chunks, so that the running requests get rounds in between. The
scheduler decides when.

Axis legend: G requests being prefilled (one per device), S cache positions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from specjax._util import steps
from specjax.core import loop
from specjax.core.sampling import Sampling
from specjax.core.types import DecodeState, Inputs
from specjax.models.cache import chunk_sizes
from specjax.runtime.engine import Engine, Request, stack_keys
from specjax.runtime.prefix_cache import PrefixCache


class Prefill:
    """Prefills one request per device, in a state of its own.

    Args:
      sampling: of the requests that have none of their own.
      capacity: S, enough for every prompt to come.
      prefixes: prefilled states that the prefix cache keeps at most.
    """

    def __init__(
        self, engine: Engine, sampling: Sampling, capacity: int, logprobs: bool, prefixes: int
    ):
        self._engine = engine
        self._sampling = sampling
        self._capacity = capacity
        self._logprobs = logprobs
        self.prefix_cache = PrefixCache(prefixes, engine.smallest_ring)
        self.requests: list[Request | None] = []  # one per device; None: it has none
        self._rows: list[Request] = []  # the same, with padding requests instead of None
        self.began = 0.0  # when the requests' prefill began, by time.perf_counter
        self.cached = np.zeros(0, np.int32)  # [G] tokens of each prompt from the prefix cache
        self._state: DecodeState | None = None
        self._inputs: Inputs | None = None
        # [G] each: the next token to prefill, and the prompt's last one. That one is not
        # prefilled: it is the root of the first round.
        self._first = np.zeros(0, np.int32)
        self._last = np.zeros(0, np.int32)

    @property
    def state(self) -> DecodeState:
        """The state of the requests being prefilled."""
        assert self._state is not None, "nothing has been prefilled"
        return self._state

    @property
    def inputs(self) -> Inputs:
        """What the passes of their prefill read."""
        assert self._inputs is not None, "nothing has been prefilled"
        return self._inputs

    @property
    def started(self) -> bool:
        """Whether anything has been prefilled."""
        return self._state is not None

    @property
    def _kept_state(self) -> DecodeState:
        """The state for the prefix cache: without counts, which each request has of its own."""
        return self.state.replace(counts=None)

    @property
    def _num_tokens(self) -> int:
        """Tokens of the prompts of the requests being prefilled."""
        return sum(len(request.tokens) for request in self.requests if request is not None)

    @property
    def done(self) -> bool:
        """Whether the requests can take their batch slots."""
        return bool((self._first >= self._last).all())

    def begin(self, requests: list[Request | None]) -> None:
        """Begins with the next requests, one per device; at least one is not None."""
        repeated = self._state is not None and self._repeats(requests)
        self.requests = requests
        self.began = time.perf_counter()
        self._rows = _pad(requests)

        if repeated:
            # Samples of one prompt: the last prefill serves again, with other keys.
            self._state = self.state.replace(keys=stack_keys(self._rows))
            self.cached = self._last
            return

        if self._inputs is None or self._engine.inputs_depend_on(self._rows):
            self._inputs = self._engine.inputs_for(self._rows, self._sampling)
        prefix_state, self.cached = self.prefix_cache.lookup([row.tokens for row in self._rows])
        self._begin_from(prefix_state)
        self._cache_if_done()

    def run_chunk(self) -> int:
        """Prefills the next chunk; returns its tokens per request."""
        left = int((self._last - self._first).max())
        chunk = self._engine.chunk_size(left, len(self.requests))
        self._run(chunk, self._first)
        # Near the end of the positions a pass begins earlier, and prefills some tokens again.
        self._first = np.minimum(self._first, self._capacity - chunk) + chunk
        self._cache_if_done()
        return chunk

    def warm_up(self, request: Request, largest_chunk: int) -> None:
        """Compiles every chunk size, and the beginning of a prompt with a known prefix."""
        self.begin([request] * self._engine.data_parallel_size)
        self._begin_from(self._kept_state)
        sizes = set()
        for left in chunk_sizes(largest_chunk):
            sizes.add(self._engine.chunk_size(left, len(self.requests)))
        for chunk in sizes:
            self._run(chunk, np.zeros_like(self._first))

    def _repeats(self, requests: Sequence[Request | None]) -> bool:
        """Whether each device has another sample of its last prompt, or no request."""
        for new, old in zip(requests, self.requests, strict=True):
            if new is not None and (old is None or not new.differs_only_in_key(old)):
                return False
        return True

    def _begin_from(self, prefix_state: DecodeState | None) -> None:
        """A new state, with a copy of the caches of ``prefix_state``."""
        tokens, lengths = loop.pack([row.tokens for row in self._rows])
        tokens = np.pad(tokens, ((0, 0), (0, self._capacity - tokens.shape[1])))
        # A cache entry may depend on the tokens after its own, too. Then the last tokens of a
        # cached prefix are prefilled again, because other tokens follow them now.
        self._first = np.maximum(self.cached - self._engine.method.lookback, 0)
        self._last = lengths - 1
        ends = lengths + np.array([row.budget for row in self._rows], np.int32)
        keys = stack_keys(self._rows)
        steps.tell(steps.PREFILL, 0, self._num_tokens)
        begin = loop.begin_prefill(self._engine.method, self._logprobs)
        self._state = None  # the last prompt's memory is free before the new one takes its own
        self._state = begin(self.inputs, tokens, lengths, ends, keys, prefix_state)

    def _run(self, chunk: int, first: np.ndarray) -> None:
        run = loop.prefill_chunks(self._engine.method, chunk)
        self._state = run(self.inputs, self.state, first)

    def _cache_if_done(self) -> None:
        if self.done:
            steps.tell(steps.PREFILL, self._num_tokens, self._num_tokens)
            prompts = [row.tokens for row in self._rows]
            self.prefix_cache.insert(prompts, self.cached, self._kept_state)


def _pad(requests: Sequence[Request | None]) -> list[Request]:
    """The requests. In place of every None stands a request of one token and no budget."""
    example = next(request for request in requests if request is not None)
    padding = dataclasses.replace(example, tokens=np.zeros(1, np.int32), budget=0)
    return [request or padding for request in requests]
