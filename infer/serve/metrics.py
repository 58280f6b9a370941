"""The counters and gauges behind ``/metrics``, in Prometheus' text format."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from infer.serve.admission import Admission
from infer.serve.engine_thread import EngineThread
from infer.serve.log import log_request
from infer.serve.variants import Submission
from infer.serve.vllm_metrics import VllmMetrics
from specjax.runtime.output import Generation

SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class PrometheusMetrics:
    """Counters and gauges of one server; an :class:`~infer.serve.engine_thread.EngineMetrics`.

    Args:
      model: the model's name for clients.
    """

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._as_vllm = VllmMetrics(self.registry, model, SECONDS_BUCKETS)
        by_method = ["method"]

        self._answers = self._new(Counter, "answers", "HTTP answers", ["path", "status"])
        self._rows = self._new(Counter, "rows", "Completions that ended", ["method", "reason"])
        self._left = self._new(
            Counter, "rows_left", "Completions dropped because their client disconnected"
        )
        self._prompt = self._new(
            Counter, "prompt_tokens", "Prompt tokens of completions that ended", by_method
        )
        self._cached = self._new(
            Counter, "cached_tokens", "Prompt tokens taken from the prefix cache", by_method
        )
        self._written = self._new(Counter, "written_tokens", "Tokens generated", by_method)
        self._tested = self._new(
            Counter, "tested_tokens", "Draft tokens that the target tested", by_method
        )
        text = "Draft tokens accepted, also those that a limit or a stop cut off"
        self._accepted = self._new(Counter, "accepted_tokens", text, by_method)
        text = "Draft tokens accepted that are part of a completion"
        self._accepted_emitted = self._new(Counter, "accepted_emitted_tokens", text, by_method)
        self._passes = self._new(
            Counter, "target_passes", "Forward passes of the target, per completion", by_method
        )
        self._seconds = self._new(
            Histogram,
            "row_seconds",
            "Seconds from a request's arrival to the end of a completion",
            by_method,
            buckets=SECONDS_BUCKETS,
        )

        self._waiting = self._new(Gauge, "rows_waiting", "Completions that wait for a batch slot")
        self._running = self._new(Gauge, "rows_in_flight", "Completions that have a batch slot")
        self._schedulers = self._new(
            Gauge,
            "schedulers",
            "Variants that have batch slots: methods with their options",
        )
        self._kv_cache_max_bytes = self._new(
            Gauge,
            "kv_cache_max_bytes",
            "The most that batch slots, a prefill and the prefix cache of the default method take",
        )

    def _new(self, kind: type, name: str, text: str, labels=(), **options):
        """Registers one metric, as ``specjax_<name>``."""
        return kind(f"specjax_{name}", text, labels, registry=self.registry, **options)

    def watch(self, engine: EngineThread, admission: Admission) -> None:
        """Reads the gauges from this engine whenever the page is asked for."""
        self._kv_cache_max_bytes.set_function(lambda: admission.kv_cache_max_bytes)
        self._waiting.set_function(lambda: engine.num_waiting)
        self._running.set_function(lambda: engine.num_running)
        self._schedulers.set_function(lambda: engine.num_schedulers)
        self._as_vllm.watch(engine)

    def answered(self, path: str, status: int) -> None:
        """An HTTP request was answered."""
        self._answers.labels(path, status).inc()
        log_request("answer", path=path, status=status)

    def ended(self, submission: Submission, row: Generation) -> None:
        """A row has ended; ``row`` is the generation of this row alone."""
        name = submission.variant.name
        stats = row.stats
        self._rows.labels(name, row.finish_reasons[0]).inc()
        self._prompt.labels(name).inc(row.prompt_tokens[0])
        self._cached.labels(name).inc(row.cached_tokens[0])
        self._written.labels(name).inc(len(row.tokens[0]))
        self._tested.labels(name).inc(int(stats["tested"][0]))
        self._accepted.labels(name).inc(int(stats["accepted"][0]))
        self._accepted_emitted.labels(name).inc(int(row.accepted_emitted[0]))
        self._passes.labels(name).inc(int(stats["target_calls"][0]))
        seconds = time.perf_counter() - submission.arrived
        self._seconds.labels(name).observe(seconds)
        self._as_vllm.ended(row, seconds)
        log_request(
            "completion",
            method=name,
            finish_reason=row.finish_reasons[0],
            prompt_tokens=int(row.prompt_tokens[0]),
            cached_tokens=int(row.cached_tokens[0]),
            completion_tokens=len(row.tokens[0]),
            tested=int(stats["tested"][0]),
            accepted=int(stats["accepted"][0]),
            accepted_emitted=int(row.accepted_emitted[0]),
            target_passes=int(stats["target_calls"][0]),
            seconds=round(seconds, 4),
        )

    def left(self, rows: int) -> None:
        """Unfinished rows were dropped, because their client disconnected."""
        self._left.inc(rows)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
