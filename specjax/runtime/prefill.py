"""Requests being prefilled, before they take a batch slot."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from specjax.core import loop
from specjax.core.types import DecodeState, Inputs
from specjax.core.warp import Sampling
from specjax.models.cache import chunk_sizes
from specjax.runtime.engine import Engine, Request, keys_of
from specjax.runtime.prefix_cache import Prefixes


class Prefill:
    """Requests being prefilled, one per device; their prompts are prefilled in pieces."""

    def __init__(
        self, engine: Engine, sampling: Sampling, capacity: int, logprobs: bool, kept: int
    ):
        self._engine, self._sampling = engine, sampling
        self._capacity, self._logprobs = capacity, logprobs
        self.prefixes = Prefixes(kept, engine.ring)
        self.rows: list[Request | None] = []
        self.state: DecodeState | None = None
        self.inputs: Inputs | None = None

    def open(self, rows: list[Request | None]) -> None:
        """Newcomers, None where a device has none."""
        again = self.state is not None and all(
            new is None or (old is not None and new.repeats(old))
            for new, old in zip(rows, self.rows, strict=True)
        )
        self.rows, self.began = rows, time.perf_counter()
        some = next(row for row in rows if row is not None)
        nobody = dataclasses.replace(some, tokens=np.zeros(1, np.int32), budget=0)
        self._all = [row or nobody for row in rows]
        if again:  # samples of one prompt differ in their keys alone
            keys = keys_of(self._all)
            self.state, self.cached = self.state.replace(keys=keys), self._last
            return
        if self.inputs is None or self._engine.tells_apart(self._all):
            self.inputs = self._engine.inputs_of(self._all, self._sampling)
        known, self.cached = self.prefixes.find([row.tokens for row in self._all])
        self._begin(known)
        self._keep_if_fed()

    def _begin(self, known: DecodeState | None) -> None:
        tokens, lengths = loop.pack([row.tokens for row in self._all])
        tokens = np.pad(tokens, ((0, 0), (0, self._capacity - tokens.shape[1])))
        # Of what is known the last token is prefilled again where a cache's positions depend on
        # the next one.
        self._first = np.maximum(self.cached - self._engine.method.lookback, 0)
        self._last = lengths - 1
        ends = lengths + np.array([row.budget for row in self._all], np.int32)
        keys = keys_of(self._all)
        begin = loop.begin_prefill(self._engine.method, self._logprobs)
        self.state = begin(self.inputs, tokens, lengths, ends, keys, known)

    @property
    def done(self) -> bool:
        """Whether the prefilled requests can take their batch slots."""
        return bool((self._first >= self._last).all())

    def run_chunk(self) -> int:
        """Feeds the next piece; returns its width."""
        left = int((self._last - self._first).max())
        chunk = self._engine.chunk_size(left, len(self.rows))
        run = loop.prefill_chunks(self._engine.method, chunk)
        self.state = run(self.inputs, self.state, self._first)
        self._first = np.minimum(self._first, self._capacity - chunk) + chunk
        self._keep_if_fed()
        return chunk

    def warm_up(self, row: Request, largest_chunk: int) -> None:
        """Compiles pieces of each width, and the beginning of a prompt that is partly known."""
        self.open([row] * self._engine.shares)
        self._begin(self.state)
        for chunk in {
            self._engine.chunk_size(left, len(self.rows)) for left in chunk_sizes(largest_chunk)
        }:
            run = loop.prefill_chunks(self._engine.method, chunk)
            self.state = run(self.inputs, self.state, np.zeros_like(self._first))

    def _keep_if_fed(self) -> None:
        if self.done:
            prompts = [row.tokens for row in self._all]
            self.prefixes.keep(prompts, self.cached, self.state)
