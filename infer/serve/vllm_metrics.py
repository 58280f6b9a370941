"""The server's counters under vLLM's names, which dashboards and benchmark clients read.

One completion is one request. Two meanings differ from vLLM's: every round of a method that drafts
counts as a draft, also one without draft tokens, and of a tree the depth counts as draft tokens.
vLLM's scheduler counts accepted tokens before it cuts a completion at its limit or a stop, and so
do these.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from infer.serve.engine_thread import EngineThread
from specjax.runtime.output import Generation

PREFIX = "vllm:"
SPEC = "spec_decode_num_"
ENGINE = "0"  # vLLM's label for one of several engines; here there is one


def acceptance(row: Generation) -> dict[str, Any] | None:
    """How one completion's drafts fared, as vLLM's ``metrics.speculative_decoding``.

    None if nothing was drafted. Numbers by the length of the draft are not kept, so vLLM's
    ``acceptance_histogram_by_draft_length`` is missing.
    """
    drafted = int(row.stats["drafted"][0])
    if not drafted:
        return None
    rounds = int(row.stats["rounds"][0])
    accepted = int(row.stats["accepted"][0])
    histogram = row.stats["accepted_hist"][0].tolist()
    return {
        "mean_acceptance_length": 1 + accepted / rounds,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(histogram) - 1,
    }


class VllmMetrics:
    """Counters and gauges of one server in ``registry``.

    Args:
      model: the model's name for clients, the label ``model_name``.
      buckets: seconds, of the histogram of latencies.
    """

    def __init__(self, registry: CollectorRegistry, model: str, buckets: tuple[float, ...]):
        labels = ("model_name", "engine")

        def new(kind: type, name: str, text: str, *more: str, **options):
            metric = kind(PREFIX + name, text, [*labels, *more], registry=registry, **options)
            return metric if more else metric.labels(model, ENGINE)

        self._model = model
        self._running = new(Gauge, "num_requests_running", "Completions that have a batch slot")
        self._waiting = new(Gauge, "num_requests_waiting", "Completions that wait for one")
        self._prompt = new(Counter, "prompt_tokens", "Prompt tokens of completions that ended")
        self._cached = new(Counter, "prefix_cache_hits", "Of these, from the prefix cache")
        self._written = new(Counter, "generation_tokens", "Tokens generated")
        self._ended = new(Counter, "request_success", "Completions that ended", "finished_reason")
        self._seconds = new(
            Histogram,
            "e2e_request_latency_seconds",
            "Seconds from a request's arrival to the end of a completion",
            buckets=buckets,
        )
        self._drafts = new(Counter, f"{SPEC}drafts", "Rounds of methods that draft")
        self._drafted = new(Counter, f"{SPEC}draft_tokens", "Draft tokens, along a draft's depth")
        self._accepted = new(Counter, f"{SPEC}accepted_tokens", "Draft tokens accepted")
        self._at_position = new(
            Counter,
            f"{SPEC}accepted_tokens_per_pos",
            "Draft tokens accepted at a position of the draft",
            "position",
        )

    def watch(self, engine: EngineThread) -> None:
        """Reads the gauges from this engine whenever the page is asked for."""
        self._waiting.set_function(lambda: engine.num_waiting)
        self._running.set_function(lambda: engine.num_running)

    def ended(self, row: Generation, seconds: float) -> None:
        """A completion has ended; ``row`` is its generation alone."""
        reason = row.finish_reasons[0]
        self._ended.labels(self._model, ENGINE, "stop" if reason == "eos" else reason).inc()
        self._prompt.inc(row.prompt_tokens[0])
        self._cached.inc(row.cached_tokens[0])
        self._written.inc(len(row.tokens[0]))
        self._seconds.observe(seconds)

        stats = row.stats
        if not stats["drafted"][0]:
            return
        self._drafts.inc(int(stats["rounds"][0]))
        self._drafted.inc(int(stats["drafted"][0]))
        self._accepted.inc(int(stats["accepted"][0]))
        # A round that accepts d tokens accepts one at each of the positions 0 to d - 1.
        rounds_by_depth = stats["accepted_hist"][0]
        for position in range(len(rounds_by_depth) - 1):
            count = int(rounds_by_depth[position + 1 :].sum())
            self._at_position.labels(self._model, ENGINE, str(position)).inc(count)
