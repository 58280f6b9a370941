"""Measures what a round costs at each draft length: once per shape and machine, on the host.

:mod:`specjax.draft.auto_length` chooses the draft length by these costs. The rounds that are timed
run in the program that decodes. If all draft forms but one have an infinite cost, it takes that
one. So nothing is compiled for the measurement. A timed round verifies tokens that differ, for in a
mixture of experts a pass costs as much as its active experts. Costs are kept on disk
(:mod:`specjax.runtime.kept_costs`).
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.processes import broadcast_from_main
from specjax.core.loop import run_rounds
from specjax.core.mesh import is_cache
from specjax.core.types import NO_EOS, RUNNING, DecodeState, Inputs
from specjax.draft.auto_length import APART, COSTS, AutoLength
from specjax.runtime.kept_costs import costs_name, keep_costs, read_costs

CLEARLY = 1.1  # times longer than a larger form: the clock was wrong
ROUNDS = 4  # timed at a time: after a pause the first is slower
REPEATS = 8  # the fastest one counts: whatever else the machine does only ever adds time
LEAST_REPEATS = 2
SECONDS = 2.0  # after which no further repeat begins
PERIOD = 16  # of the repeating text that is decoded, so that drafts by lookup find matches

# By method, models and shapes, as compiled programs are kept.
_MEASURED: dict[Any, tuple[float, ...]] = {}


def round_costs(
    method: AutoLength, inputs: Inputs, state: DecodeState
) -> tuple[tuple[float, ...], DecodeState]:
    """The time of a round with each draft form, relative to the first form; and the state.

    The state is donated and comes back as it was: a second KV cache might not fit in memory. A
    form never costs more than a larger one, whatever the clock says: if a cost is measured too
    high, its form is not used, and nothing corrects the cost.
    """
    sampled = _is_sampled(inputs)
    key = _key(method, inputs, len(state.length))
    if key not in _MEASURED:
        kept = _kept_name(method, inputs, state, sampled)
        costs = _agreed(inputs, read_costs(kept, len(method.forms)), len(method.forms))
        if costs is not None:
            _MEASURED[key] = costs
            return costs, state
        saved = _copy_without_caches(state)
        per_round, state = _measure(method, inputs, state)
        measured = _agreed(inputs, _relative(per_round), len(method.forms))
        assert measured is not None
        if _is_plausible(per_round):
            keep_costs(kept, measured)
        _MEASURED[key] = measured
        state = _with_caches_of(saved, state)
    return _MEASURED[key], state


def known_costs(method: AutoLength, inputs: Inputs, rows: int) -> tuple[float, ...] | None:
    """What :func:`round_costs` would give for a state of so many rows, if this process knows it."""
    return _MEASURED.get(_key(method, inputs, rows))


def _key(method: AutoLength, inputs: Inputs, rows: int) -> tuple:
    dtype = inputs.target.params["embed"].dtype
    return (method, jax.tree.structure(inputs), rows, dtype, _is_sampled(inputs))


def _is_sampled(inputs: Inputs) -> bool:
    return bool((inputs.warp.temperature > 0).any())


def _kept_name(method: AutoLength, inputs: Inputs, state: DecodeState, sampled: bool) -> str:
    """The name of the costs on disk: that of the method, the models' shapes and the slots."""
    models = (inputs.target, inputs.draft)
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(models)]
    configs = str(jax.tree.structure(models))
    return costs_name(method, configs, shapes, state.tokens.shape, str(inputs.mesh), sampled)


def _agreed(
    inputs: Inputs, costs: tuple[float, ...] | None, count: int
) -> tuple[float, ...] | None:
    """The costs of the main process, in all processes of a mesh.

    All must take the same lengths, and measure if one does, or they would wait for each other
    forever.
    """
    if inputs.mesh is None or not inputs.mesh.is_multi_process:
        return costs
    sent = np.array(costs or (np.nan,) * count, np.float32)
    agreed = broadcast_from_main(sent)
    return None if np.isnan(agreed).any() else tuple(agreed.tolist())


def _measure(
    method: AutoLength, inputs: Inputs, state: DecodeState
) -> tuple[list[float], DecodeState]:
    """Seconds of a round of each form, and the state after the timed rounds."""
    # No token ends a row: all timed rounds run.
    inputs = inputs.replace(eos_ids=jnp.full_like(inputs.eos_ids, NO_EOS))
    begin = _timing_state(state, inputs.target.vocab_limit)
    timed_forms = method.timed_forms(inputs.target)
    idle_seconds = np.inf
    fastest_seconds = [np.inf] * len(method.forms)  # of a run
    fastest_rounds = [1] * len(method.forms)  # of that run

    # The forms take turns, so that a slow second of the machine does not hit one form alone.
    began = time.perf_counter()
    for repeat in range(REPEATS):
        if repeat >= LEAST_REPEATS and time.perf_counter() - began > SECONDS:
            break
        for i in sorted(set(timed_forms)):
            costs = np.where(np.arange(len(method.forms)) == i, 1, np.inf).astype(np.float32)
            settings = inputs.settings | {COSTS: jnp.asarray(costs)}
            forced = inputs.replace(settings=settings)

            start = _with_caches_of(begin, state)
            seconds, _, state = _timed(method, forced, start, 0)
            idle_seconds = min(idle_seconds, seconds)

            start = _with_caches_of(begin, state)
            seconds, rounds, state = _timed(method, forced, start, ROUNDS)
            if seconds / rounds < fastest_seconds[i] / fastest_rounds[i]:
                fastest_seconds[i] = seconds
                fastest_rounds[i] = rounds

    per_round = []
    for i in timed_forms:
        seconds, rounds = fastest_seconds[i], fastest_rounds[i]
        # Starting a program is no part of a round. At least a tenth is left: a clock too coarse to
        # tell the two apart must not make plain rounds free.
        per_round.append(max(seconds - idle_seconds, seconds / 10) / rounds)
    return per_round, state


def _relative(per_round: list[float]) -> tuple[float, ...]:
    """The costs of the forms: none is dearer than a larger form."""
    costs = np.minimum.accumulate(per_round[::-1])[::-1]
    return tuple((costs / costs[0]).tolist())


def _is_plausible(per_round: list[float]) -> bool:
    """Whether no form took clearly longer than a larger one, as on a machine with other work.

    Such times serve one run. Kept, they would mislead all later ones, for nothing corrects them.
    """
    fastest_from = np.minimum.accumulate(per_round[::-1])[::-1]
    return bool((np.array(per_round) <= CLEARLY * fastest_from).all())


def _timed(
    method: AutoLength, inputs: Inputs, state: DecodeState, rounds: int
) -> tuple[float, int, DecodeState]:
    """Runs up to ``rounds`` rounds, as many as the capacity allows.

    Returns their seconds, how many they were (at least 1), and the state.
    """
    before = jax.block_until_ready(state).stats.rounds.max()
    # Given as the scheduler gives it, so that the program is the one that decodes.
    known_done = np.zeros(len(state.length), bool)
    began = time.perf_counter()
    state = run_rounds(method)(inputs, state, np.int32(rounds), known_done)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    return seconds, max(1, int(state.stats.rounds.max() - before)), state


def _timing_state(state: DecodeState, vocab: int) -> DecodeState:
    """The state without its caches, every row running and its text periodic.

    The rows' texts differ: equal tokens would choose the same experts of a mixture. Lengths stay,
    so that the caches stay valid. Rounds write above what the caches hold of a row, but for its
    last two tokens, which every round passes through the models again.
    """
    # Computed from the state's own arrays, so that the results are on the same devices.
    rows = jnp.arange(len(state.tokens), dtype=jnp.int32)[:, None]
    text = (APART * rows + jnp.arange(state.capacity, dtype=jnp.int32) % PERIOD) % vocab
    periodic = state.replace(
        tokens=0 * state.tokens + text,
        max_length=0 * state.length + state.capacity,
        finish=0 * state.finish + RUNNING,
        method_state=state.method_state.replace(draft_cached=state.length - 2),
    )
    return _copy_without_caches(periodic)


def _copy_without_caches(state: DecodeState) -> DecodeState:
    """A copy of the state, with None instead of each KV cache."""

    def copy(node: Any) -> Any:
        if is_cache(node):
            return None
        return jnp.copy(node)

    return jax.tree.map(copy, state, is_leaf=is_cache)


def _with_caches_of(saved: DecodeState, state: DecodeState) -> DecodeState:
    """A copy of ``saved``, which has no caches, with the caches of ``state``."""

    def merge(current: Any, old: Any) -> Any:
        if is_cache(current):
            return current
        return jnp.copy(old)

    return jax.tree.map(merge, state, saved, is_leaf=is_cache)
