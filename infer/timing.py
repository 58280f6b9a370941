"""Timing: methods over prompts, the verify curve v(T), the draft's relative cost c.

Everything is warmed up first, so no time holds a compilation. Repeats of the methods are
interleaved: a machine that slows down slows all of them, and ratios of one repeat stay fair.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from infer.bench.energy import Meter
from specjax import probs
from specjax.models import ModelConfig, forward, hidden_states, init_cache, logits_of
from specjax.models.cache import bucket

CURVE = (1, 2, 4, 8, 16, 32, 64)
STEPS = 24  # passes per timing of the curve
CONTEXT = 192  # committed tokens the passes of the curve see
TIMINGS = 16
DRAFT_PASSES = 3  # draft passes between two target passes where c is measured

# One round of a timing: models, each with its tokens per pass and its passes.
Round = Sequence[tuple[sj.LM, int, int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table: a method under one sampling at one batch size."""

    method: str
    options: Mapping[str, Any]
    sampling: sj.Sampling
    batch_size: int
    swept: str = ""  # the option whose values tell this case from its neighbours

    @property
    def label(self) -> str:
        return (
            f"{self.method} {self.swept}={self.options[self.swept]}" if self.swept else self.method
        )

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
    origins: list[np.ndarray] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)
    joules: list[float] = dataclasses.field(default_factory=list)  # prefill included
    accepted_hist: list[int] = dataclasses.field(default_factory=list)  # rounds by accepted drafts

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
    meter: Meter | None = None,
) -> list[Result]:
    """All cases over all prompts, ``repeats`` times in turn.

    ``between(repeat)`` runs once per repeat: a peer's turn. ``meter`` reads the energy.
    """
    results = []
    for case in cases:
        warm = run_case(target, draft, prompts, case, budget)  # compiles every bucket
        counters = {n: int(v.sum()) for n, v in warm.stats.items() if v.ndim == 1}
        hist = warm.stats["accepted_hist"].sum(0).tolist()
        results.append(
            Result(
                case, [], [], [], counters, warm.tokens, warm.origins, warm.text, accepted_hist=hist
            )
        )
    for repeat in range(repeats):
        for result in results:
            before = meter.joules() if meter else 0.0
            out = run_case(target, draft, prompts, result.case, budget)
            if meter:
                result.joules.append(meter.joules() - before)
            firsts = np.unique(out.batch, return_index=True)[1]  # one row of every batch
            seconds = sum(out.decode_seconds[i] for i in firsts)
            prefill = sum(out.prefill_seconds[i] for i in firsts)
            result.tokens_per_second.append(float(out.lengths.sum() / seconds))
            result.whole_tokens_per_second.append(float(out.lengths.sum() / (prefill + seconds)))
            result.first_token_s.append(float(np.median(out.first_token_seconds)))
        between(repeat)
    return results


def costs(
    target: sj.LM, draft: sj.LM | None, widths: Sequence[int] = CURVE
) -> tuple[dict[int, float], float | None]:
    """The verify curve v(T) by width, and c, or None without a draft. ``widths`` hold 1.

    v(T) = time of a target pass over T tokens / over one. c = what one draft pass adds to a
    round / the time of a target step. It is measured between target passes: a small draft
    timed alone would keep its weights in the processor's cache, which the target's empty in
    every round of decoding.
    """
    rounds: list[Round] = [[(target, width, 1)] for width in widths]
    if draft:
        # The first draft pass feeds two tokens, the others one, see specjax.draft.chain.
        rounds.append([(target, 1, 1), (draft, 2, 1), (draft, 1, DRAFT_PASSES - 1)])
    turns = np.array(round_seconds(rounds))
    relative = np.median(turns / turns[:, [widths.index(1)]], axis=0).tolist()
    v = dict(zip(widths, relative, strict=False))
    return v, (relative[-1] - 1) / DRAFT_PASSES if draft else None


def round_seconds(rounds: Sequence[Round]) -> list[list[float]]:
    """Seconds of each round, once per turn: ratios within one stand though the machine drifts."""
    loops = [_round_loop(models) for models in rounds]
    for loop in loops:
        loop()  # compiles
    turns: list[list[float]] = []
    for _ in range(TIMINGS):
        turns.append([])
        for loop in loops:
            began = time.perf_counter()
            loop()
            turns[-1].append((time.perf_counter() - began) / STEPS)
    return turns


def _round_loop(models: Round) -> Callable[[], None]:
    """Runs STEPS rounds on the device, logits and argmax included, and waits for them."""

    def one_pass(model, width, params, cache, token, at):
        start = jnp.full((1,), at, jnp.int32)
        positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)
        tokens = jnp.full((1, width), token)
        hidden, cache = forward(model.config, params, cache, tokens, positions, start)
        # Every row's argmax counts: a compiler may not skip what a verification needs.
        best = jnp.argmax(logits_of(model.config, params, hidden)[0], axis=-1)
        return cache, jnp.max(best).astype(jnp.int32)

    def many(caches, params):
        def one_round(i, carry):
            caches, token = carry
            out = []
            for (model, width, passes), p, cache in zip(models, params, caches, strict=True):
                cache, token = jax.lax.fori_loop(
                    0,
                    passes,
                    lambda j, c, m=model, w=width, p=p: one_pass(m, w, p, *c, CONTEXT + i + j),
                    (cache, token % model.config.vocab_size),
                )
                out.append(cache)
            return out, token

        return jax.lax.fori_loop(0, STEPS, one_round, (list(caches), jnp.int32(1)))[0]

    run = jax.jit(many, donate_argnums=0)
    params = [model.params for model, *_ in models]
    # The cost of a pass follows the cache's length: one length for every width.
    widest = max(*CURVE, *(width for _, width, _ in models))
    slots = bucket(CONTEXT + STEPS + widest + DRAFT_PASSES)
    caches = [init_cache(model.config, 1, slots, model.dtype) for model, *_ in models]

    def loop():
        nonlocal caches
        caches = jax.block_until_ready(run(caches, params))

    return loop


def output_logprobs(
    target: sj.LM, prompts: Sequence[Sequence[int]], outputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Log-probabilities (nats) of every output token under the unwarped target."""
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        row = padded_row(prompt, output)
        scores = np.asarray(_token_logprobs(target.config, target.params, row))
        found.append(scores[len(prompt) - 1 :][: len(output)])
    return found


def padded_row(*parts: Sequence[int]) -> np.ndarray:
    """The token ids of all parts as one row, ``[1, S]`` int32, in its bucket."""
    text = np.concatenate([np.asarray(part, np.int32) for part in parts])
    row = np.zeros((1, bucket(len(text))), np.int32)
    row[0, : len(text)] = text
    return row


@functools.partial(jax.jit, static_argnums=0)
def _token_logprobs(cfg: ModelConfig, params: dict, row: jax.Array) -> jax.Array:
    """``log p(row[i + 1] | row[: i + 1])`` at every i; one trace per bucket."""
    at = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    hidden = hidden_states(cfg, params, row, at, jnp.ones_like(row))
    log_p = probs.log_softmax(logits_of(cfg, params, hidden)[0, :-1])
    return probs.at_token(log_p, row[0, 1:])


def mismatches(
    target: sj.LM,
    prompts: Sequence[Sequence[int]],
    want: Sequence[np.ndarray],
    got: Sequence[np.ndarray],
) -> list[dict[str, Any]]:
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
    """Difference of the two best logits after ``tokens``."""
    row = padded_row(tokens)
    logits = _logits_at(target.config, target.params, row, np.int32(len(tokens) - 1))
    top = jax.lax.top_k(logits[: target.vocab_limit], 2)[0]
    return float(top[0] - top[1])


@functools.partial(jax.jit, static_argnums=0)
def _logits_at(cfg: ModelConfig, params: dict, row: jax.Array, last: jax.Array) -> jax.Array:
    """Logits at one place; one trace per bucket, however long the text is."""
    slots = row.shape[1]
    cache = init_cache(cfg, 1, slots, params["embed"].dtype)
    at = jnp.arange(slots, dtype=jnp.int32)[None]
    hidden, _ = forward(cfg, params, cache, row, at, jnp.zeros((1,), jnp.int32))
    return logits_of(cfg, params, jax.lax.dynamic_slice_in_dim(hidden, last, 1, axis=1))[0, 0]
