"""What ``/metrics`` says, in Prometheus' form."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from infer.serve.engine_thread import EngineThread, Submission
from specjax.runtime.output import Generation

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class PrometheusMetrics:
    """Counters and gauges of one server."""

    def __init__(self):
        self.registry = CollectorRegistry()

        def made(kind, name, said, labels=(), **more):
            return kind(f"specjax_{name}", said, labels, registry=self.registry, **more)

        self._answers = made(Counter, "answers", "Answers by their status", ["path", "status"])
        self._rows = made(Counter, "rows", "Rows that ended", ["method", "reason"])
        self._left = made(Counter, "rows_left", "Rows whose client went away")
        said = "Prompt tokens of the rows that ended"
        self._prompt = made(Counter, "prompt_tokens", said, ["method"])
        said = "Prompt tokens that were not fed, for their caches were kept"
        self._cached = made(Counter, "cached_tokens", said, ["method"])
        self._written = made(Counter, "written_tokens", "Tokens written", ["method"])
        said = "Draft tokens that the target tested"
        self._tested = made(Counter, "tested_tokens", said, ["method"])
        self._accepted = made(Counter, "accepted_tokens", "Draft tokens accepted", ["method"])
        said = "Target passes of rows"
        self._passes = made(Counter, "target_passes", said, ["method"])
        said = "From the request to the end of a row"
        self._seconds = made(Histogram, "row_seconds", said, ["method"], buckets=SECONDS)
        self._gauges = [
            (made(Gauge, "rows_waiting", "Rows that wait for a seat"), "waiting"),
            (made(Gauge, "rows_in_flight", "Rows that have a seat"), "in_flight"),
            (made(Gauge, "flights", "Methods that hold memory for their rows"), "flights"),
        ]

    def watch(self, scheduler: EngineThread) -> None:
        """Reads the gauges off this scheduler."""
        for gauge, name in self._gauges:
            gauge.set_function(lambda name=name: getattr(scheduler, name))

    def answered(self, path: str, status: int) -> None:
        self._answers.labels(path, status).inc()

    def ended(self, work: Submission, row: Generation) -> None:
        """A row has ended; ``row`` is of it alone."""
        name, stats = work.variant.name, row.stats
        self._rows.labels(name, row.finish_reasons[0]).inc()
        self._prompt.labels(name).inc(row.prompt_tokens[0])
        self._cached.labels(name).inc(row.cached_tokens[0])
        self._written.labels(name).inc(len(row.tokens[0]))
        self._tested.labels(name).inc(int(stats["tested"][0]))
        self._accepted.labels(name).inc(int(stats["accepted"][0]))
        self._passes.labels(name).inc(int(stats["target_calls"][0]))
        self._seconds.labels(name).observe(time.perf_counter() - work.arrived)

    def left(self, rows: int) -> None:
        """So many rows were dropped, for nobody waits for them."""
        self._left.inc(rows)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
