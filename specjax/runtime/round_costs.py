"""What a round costs at each length of its draft: measured once per shape, on the host.

:mod:`specjax.draft.auto_length` decides by it. The rounds timed are those of the program that
decodes, told by their costs which length to take, so nothing is compiled for it.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.processes import of_first
from specjax.core.loop import run_rounds
from specjax.core.types import RUNNING, DecodeState, Inputs
from specjax.draft.auto_length import COSTS, AutoLength
from specjax.models import KVCache

ROUNDS = 4  # timed at a time: after a pause the first is slower
REPEATS = 8  # of which the quickest counts: whatever else runs only ever adds time
PERIOD = 16  # of the text decoded meanwhile: drafts that copy find something to copy

_MEASURED: dict[Any, tuple[float, ...]] = {}  # by method, models and rows, as programs are kept


def round_costs(
    method: AutoLength, inputs: Inputs, state: DecodeState
) -> tuple[tuple[float, ...], DecodeState]:
    """Seconds of a round of each of the forms of its draft over those of the first.

    And the state, which is donated, as it was: a second cache might not fit in memory. A shorter
    draft never counts as dearer: what is measured too high stays behind.
    """
    params = inputs.target.params["embed"]
    sampled = bool((inputs.warp.temperature > 0).any())
    key = method, jax.tree.structure(inputs), state.length.shape, params.dtype, sampled
    if key not in _MEASURED:
        kept = jax.tree.map(
            lambda x: None if _is_cache(x) else jnp.copy(x), state, is_leaf=_is_cache
        )
        measured, state = _measure(method, inputs, state)
        if inputs.mesh is not None and inputs.mesh.is_multi_process:
            # All processes must take the same lengths.
            measured = tuple(of_first(np.float32(measured)).tolist())
        _MEASURED[key] = measured
        state = _with_caches_of(kept, state)
    return _MEASURED[key], state


def _measure(
    method: AutoLength, inputs: Inputs, state: DecodeState
) -> tuple[tuple[float, ...], DecodeState]:
    inputs = inputs.replace(eos_ids=jnp.full_like(inputs.eos_ids, -1))
    idle, quickest = np.inf, [(np.inf, 1)] * len(method.forms)
    begin = _begin(method, state)
    for _ in range(REPEATS):
        for i in range(len(method.forms)):
            alone = np.where(np.arange(len(method.forms)) == i, 1, np.inf).astype(np.float32)
            forced = inputs.replace(settings=inputs.settings | {COSTS: jnp.asarray(alone)})
            spent, _, state = _timed(method, forced, _with_caches_of(begin, state), 0)
            idle = min(idle, spent)
            *timed, state = _timed(method, forced, _with_caches_of(begin, state), ROUNDS)
            quickest[i] = min(quickest[i], tuple(timed), key=lambda pair: pair[0] / pair[1])
    # What starting a program takes is no part of a round; a clock too coarse to tell them apart
    # must not make plain rounds free.
    seconds = [max(spent - idle, spent / 10) / rounds for spent, rounds in quickest]
    relative = np.minimum.accumulate(seconds[::-1])[::-1]
    return tuple((relative / relative[0]).tolist()), state


def _timed(
    method: AutoLength, inputs: Inputs, state: DecodeState, rounds: int
) -> tuple[float, int, DecodeState]:
    """Seconds of up to so many rounds, as many as the positions have room for; these, and the
    state."""
    before = jax.block_until_ready(state).stats.rounds.max()
    began = time.perf_counter()
    state = run_rounds(method)(inputs, state, np.int32(rounds), np.zeros(len(state.length), bool))
    jax.block_until_ready(state)
    spent = time.perf_counter() - began
    return spent, max(1, int(state.stats.rounds.max() - before)), state


def _begin(method: AutoLength, state: DecodeState) -> DecodeState:
    """The state without its caches, every row live and its text periodic.

    Lengths are as they are: rounds write above what the caches hold of each row, but for its last
    two tokens, which every round feeds again.
    """
    # Of the state's own arrays, so that they lie on the devices where those lie.
    return jax.tree.map(
        lambda x: None if _is_cache(x) else jnp.copy(x),
        state.replace(
            tokens=0 * state.tokens + jnp.arange(state.capacity, dtype=jnp.int32) % PERIOD,
            max_length=0 * state.length + state.capacity,
            finish=0 * state.finish + RUNNING,
            method_state=state.method_state.replace(read=state.length - 2),
        ),
        is_leaf=_is_cache,
    )


def _with_caches_of(kept: DecodeState, state: DecodeState) -> DecodeState:
    """``kept``, whose caches are None, with the caches of a state."""
    return jax.tree.map(
        lambda now, then: now if _is_cache(now) else jnp.copy(then),
        state,
        kept,
        is_leaf=_is_cache,
    )


def _is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)
