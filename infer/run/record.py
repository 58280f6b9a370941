"""One generated row as the object that ``--json`` prints."""

from __future__ import annotations

from typing import Any

from specjax.generate import Generation
from specjax.metrics import perplexity, rates, speeds


def record(generation: Generation, row: int, **head: Any) -> dict[str, Any]:
    """The object of one row; ``head`` are its first fields (id, sample, method, prompt …)."""
    tokens = generation.tokens[row]
    entry = head | {
        "text": generation.text[row],
        "token_ids": tokens.tolist(),
        "prompt_tokens": generation.prompt_tokens[row],
        "new_tokens": len(tokens),
        "finish_reason": generation.finish_reasons[row],
        "stats": row_stats(generation, row),
    }
    if generation.logprobs is not None:
        entry["logprobs"] = [round(float(x), 6) for x in generation.logprobs[row]]
        entry["perplexity"] = perplexity(generation.logprobs[row])
    return entry


def row_stats(generation: Generation, row: int) -> dict[str, Any]:
    """Counters, rates and times of one row. Times are those of the batch it ran in."""
    counters = {n: v[row].tolist() for n, v in generation.stats.items()}
    times = (generation.prefill_seconds, generation.first_token_seconds, generation.decode_seconds)
    return counters | rates(counters) | speeds(counters, *(float(t[row]) for t in times))
