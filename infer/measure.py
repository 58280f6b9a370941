"""Timing: methods over prompts, the verify curve v(T), the draft's relative cost c.

Everything is warmed up first, so no time holds a compilation. Repeats of the methods are
interleaved: a machine that slows down slows all of them, and ratios of one repeat stay fair.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax.cache import bucket
from specjax.models import forward, init_cache, logits_of

CURVE = (1, 2, 4, 8, 16, 32, 64)
STEPS = 24  # passes per timing of the curve
CONTEXT = 192  # committed tokens the passes of the curve see


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table: a method under one sampling at one batch size."""

    method: str
    options: Mapping[str, Any]
    sampling: sj.Sampling
    batch_size: int

    @property
    def mode(self) -> str:
        return "greedy" if self.sampling.temperature == 0 else "sampled"


@dataclasses.dataclass
class Result:
    """What a case gave: one entry per repeat, counters summed over prompts."""

    case: Case
    tokens_per_second: list[float]  # decoding alone
    whole_tokens_per_second: list[float]  # prefill included: what a peer is held against
    first_token_s: list[float]
    counters: dict[str, int]
    tokens: list[np.ndarray]

    @property
    def speed(self) -> float:
        return statistics.median(self.tokens_per_second)


def run_case(
    target: sj.LM, draft: sj.LM | None, prompts: Sequence[Sequence[int]], case: Case, budget: int
) -> sj.Generation:
    """Every prompt once. Prompts go in batches of the case's size."""
    return sj.generate(
        target,
        prompts,
        method=case.method,
        draft=draft,
        options=case.options,
        sampling=case.sampling,
        max_new_tokens=budget,
        batch_size=case.batch_size,
    )


def measure(
    target: sj.LM,
    draft: sj.LM | None,
    prompts: Sequence[Sequence[int]],
    cases: Sequence[Case],
    budget: int,
    repeats: int,
    between: Callable[[int], None] = lambda repeat: None,
) -> list[Result]:
    """All cases over all prompts, ``repeats`` times in turn.

    ``between(repeat)`` runs once per repeat: a peer's turn.
    """
    results = []
    for case in cases:
        warm = run_case(target, draft, prompts, case, budget)  # compiles every bucket
        counters = {n: int(v.sum()) for n, v in warm.stats.items() if v.ndim == 1}
        results.append(Result(case, [], [], [], counters, warm.tokens))
    for repeat in range(repeats):
        for result in results:
            out = run_case(target, draft, prompts, result.case, budget)
            firsts = range(0, len(prompts), result.case.batch_size)
            seconds = sum(out.decode_seconds[i] for i in firsts)
            prefill = sum(out.prefill_seconds[i] for i in firsts)
            result.tokens_per_second.append(float(out.lengths.sum() / seconds))
            result.whole_tokens_per_second.append(float(out.lengths.sum() / (prefill + seconds)))
            result.first_token_s.append(float(np.median(out.first_token_seconds)))
        between(repeat)
    return results


def pass_seconds(lm: sj.LM, width: int, other: sj.LM | None = None, other_passes: int = 0) -> float:
    """Seconds of one pass over ``width`` tokens, logits and argmax included.

    With ``other``, that many of its two-token passes run between: what they add is their
    cost with the caches that decoding leaves them, not with their own weights at hand.
    """
    models = [(lm, width, 1)] + ([(other, 2, other_passes)] if other else [])
    run, caches = _pass_loop(models)
    params, times = [model.params for model, *_ in models], []
    for _ in range(9):
        began = time.perf_counter()
        jax.block_until_ready(run(params, caches, jnp.int32(1)))
        times.append((time.perf_counter() - began) / STEPS)
    return min(times[1:])  # the first one compiles


def _pass_loop(models: Sequence[tuple[sj.LM, int, int]]) -> tuple[Callable, list]:
    """A jitted loop of STEPS rounds of (model, width, passes), and the caches it starts from."""

    def one_pass(model, width, params, cache, token, at):
        start = jnp.full((1,), at, jnp.int32)
        positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)
        tokens = jnp.full((1, width), token)
        hidden, cache = forward(model.config, params, cache, tokens, positions, start)
        logits = logits_of(model.config, params, hidden)[0, -1]
        return cache, jnp.argmax(logits).astype(jnp.int32)

    @jax.jit
    def many(params, caches, token):
        def round_(i, carry):
            caches, token = carry
            out = []
            for (model, width, passes), p, cache in zip(models, params, caches, strict=True):
                cache, token = jax.lax.fori_loop(
                    0,
                    passes,
                    lambda j, c, m=model, w=width, p=p: one_pass(m, w, p, *c, CONTEXT + i + j),
                    (cache, token),
                )
                out.append(cache)
            return out, token

        return jax.lax.fori_loop(0, STEPS, round_, (list(caches), token))

    slots = bucket(CONTEXT + STEPS + max(width + passes for _, width, passes in models))
    return many, [init_cache(model.config, 1, slots, model.dtype) for model, *_ in models]


def verify_curve(target: sj.LM, widths: Sequence[int] = CURVE) -> dict[int, float]:
    """v(T) = time of a pass over T tokens / over one."""
    seconds = {width: pass_seconds(target, width) for width in widths}
    return {width: value / seconds[1] for width, value in seconds.items()}


def draft_cost(target: sj.LM, draft: sj.LM, passes: int = 3) -> float:
    """c = what one draft pass adds to a round / the time of a target step.

    Measured between target passes: a small draft timed alone would keep its weights in the
    processor's cache, which the target's empty in every round of decoding.
    """
    alone = pass_seconds(target, 1)
    return (pass_seconds(target, 1, draft, passes) - alone) / (passes * alone)


def mismatches(
    target: sj.LM, prompts: Sequence[Sequence[int]], want: Sequence[np.ndarray],
    got: Sequence[np.ndarray],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows whose greedy tokens differ, with the target's top-2 gap where they part."""
    found = []
    for row, (prompt, a, b) in enumerate(zip(prompts, want, got, strict=True)):
        length = min(len(a), len(b))
        differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
        if differ.size == 0 and len(a) == len(b):
            continue
        at = int(differ[0]) if differ.size else length
        found.append({"row": row, "position": at, "gap": _top_gap(target, [*prompt, *a[:at]])})
    return found


def _top_gap(target: sj.LM, tokens: Sequence[int]) -> float:
    row = jnp.asarray(tokens, jnp.int32)[None]
    at = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    cache = init_cache(target.config, 1, bucket(row.shape[1]), target.dtype)
    start = jnp.zeros((1,), jnp.int32)
    hidden, _ = forward(target.config, target.params, cache, row, at, start)
    top = jax.lax.top_k(logits_of(target.config, target.params, hidden)[0, -1], 2)[0]
    return float(top[0] - top[1])
