"""What a job may run, compiled before it is, for those who time it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.core import loop
from specjax.core.warp import Sampling
from specjax.models.cache import bucket, bucket_below
from specjax.runtime.engine import Engine, Request
from specjax.runtime.scheduler import Bounds, Scheduler


def warm_up(
    engine: Engine, size: int, sampling: Sampling, rows: Sequence[Request], kept: int = 0
) -> None:
    """Compiles what decoding these rows, ``size`` at a time, may run, whenever each ends.

    Rounds of methods that the host drives compile as they are needed.
    """
    scheduler = Warmup(engine, size, sampling, Bounds.of(rows), kept=kept)
    scheduler.first_rounds(rows)
    scheduler.beginnings(rows)
    if len(rows) > size or kept:
        scheduler.prefill(rows[0])
    scheduler.buckets(rows)


class Warmup(Scheduler):
    """A scheduler that runs each of its programs once, for the sake of their compilation."""

    def first_rounds(self, rows: Sequence[Request]) -> None:
        """All rows, ended after one round or two."""
        short = (dataclasses.replace(row, budget=1 + i % 2) for i, row in enumerate(rows))
        for _ in self.run(short, rounds=1):
            pass

    def beginnings(self, rows: Sequence[Request]) -> None:
        """A prefill of all batch slots for each width of a pass and each bucket that there may
        be."""
        begins = {}
        for tokens, row in {len(row.tokens): row for row in rows}.items():
            chunk = self._engine.chunk_size(tokens, self._size)
            begins[chunk, loop.first_capacity(self._method, tokens, row.budget, chunk)] = row
        for row in begins.values():
            self._start([row])

    def prefill(self, row: Request) -> None:
        """Pieces of every width, of a prefilled request whose prompt is partly known, too."""
        self._prefill.warm_up(row, self._largest_chunk)

    def buckets(self, rows: Sequence[Request]) -> None:
        """A prefilled request and no round in every bucket that rows may need, up and down."""
        least = bucket(min(len(row.tokens) for row in rows) + self._method.round_positions)
        most = bucket(Bounds.of(rows).total + self._method.round_positions)
        for capacity in (self._full_length,) * 2 if self._full_length else (least, most, least):
            while True:
                self._bucket()
                if self._state.capacity == capacity:
                    break
                up = capacity > self._state.capacity
                self._move(
                    bucket(self._state.capacity + 1) if up else bucket_below(self._state.capacity)
                )

    def _bucket(self) -> None:
        if self._prefill.state is not None:
            row = np.zeros(self._engine.shares, np.int32)
            fill_slots = loop.fill_slots(self._method)
            self._state = fill_slots(self._prefill.inputs, self._state, self._prefill.state, row)
        if not self._method.host_driven:
            run, seen = loop.run_rounds(self._method), np.zeros(self._size, bool)
            self._state = run(self._inputs, self._state, np.int32(0), seen)
