"""The programs of decoding: prompts in, rounds of a method, tokens out.

A method's step is pure; :func:`run_rounds` wraps it in one jitted ``while_loop`` per bucket
of positions. Beginning, feeding, filling a batch slot, resizing and running exist here and nowhere
else; :mod:`specjax.runtime.scheduler` says when.

Axis legend: B rows, S cache positions, G prefilled requests: one per device of the mesh's data
axis.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from specjax.core.mesh import program
from specjax.core.protocols import Method
from specjax.core.types import RUNNING, STOP_LENGTH, STOP_TEXT, DecodeState, Inputs, Stats
from specjax.models import KVCache
from specjax.models.cache import bucket, resize


def start(
    method: Method,
    inputs: Inputs,
    prompts: list[np.ndarray],
    budget: Int[np.ndarray, "B"],
    keys: Key[Array, "B"],
    *,
    logprobs: bool = False,
    chunk: int,
    capacity: int | None = None,
) -> DecodeState:
    """The state after the prompts: tokens left-aligned in a bucket, caches filled."""
    tokens, lengths = pack(prompts)
    capacity = capacity or first_capacity(method, int(lengths.max()), int(budget.max()), chunk)
    tokens = np.pad(tokens, ((0, 0), (0, capacity - tokens.shape[1])))
    return prefill_prompts(method, chunk, logprobs)(inputs, tokens, lengths, lengths + budget, keys)


def pack(prompts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """int32 tokens ``[n, longest]``, zeros behind each prompt, and lengths ``[n]``."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths


def first_capacity(method: Method, longest: int, budget: int, chunk: int) -> int:
    """The positions of a batch that begins, by its longest prompt and its largest budget."""
    room = budget if method.needs_full_length else 0
    return bucket(max(longest + room + method.round_positions, -(-longest // chunk) * chunk))


@functools.cache
def prefill_prompts(method: Method, chunk: int, logprobs: bool):
    """``fill(inputs, tokens[B,S], length[B], max_length[B], keys[B]) -> state``: ready for rounds.

    ``chunk`` tokens of each row per pass. The number of passes is traced, so prompts of any length
    share one trace per capacity bucket.
    """

    def fill(inputs: Inputs, tokens, length, max_length, keys) -> DecodeState:
        def pass_(carry):
            first, state = carry
            return first + chunk, _prefill_chunk(method, chunk, inputs, state, first)

        end = jnp.max(length) - 1
        begun = _begin(method, logprobs, inputs, tokens, length, max_length, keys)
        carry = jnp.int32(0), begun
        _, state = jax.lax.while_loop(lambda carry: carry[0] < end, pass_, carry)
        return method.ready(inputs, state)

    return program(fill)


@functools.cache
def begin_prefill(method: Method, logprobs: bool):
    """``begin(inputs, tokens[B,S], length[B], max_length[B], keys[B], known) -> state``, not
    prefilled.

    ``known`` is None, or a prefilled state of as many rows and positions: its caches are copied,
    so that what both prompts begin with need not be prefilled again.
    """

    def begin(inputs: Inputs, tokens, length, max_length, keys, known) -> DecodeState:
        state = _begin(method, logprobs, inputs, tokens, length, max_length, keys)
        if known is None:
            return state
        return jax.tree.map(
            lambda new, old: jax.tree.map(jnp.copy, old) if isinstance(old, KVCache) else new,
            state,
            known,
            is_leaf=lambda node: isinstance(node, KVCache),
        )

    return program(begin)


@functools.cache
def prefill_chunks(method: Method, chunk: int):
    """``prefill_chunk(inputs, state, first[B]) -> state``: one pass over the prompts' tokens from
    ``first``.

    The state is donated.
    """
    return program(functools.partial(_prefill_chunk, method, chunk), donate_argnums=1)


@functools.cache
def empty_state(method: Method, logprobs: bool):
    """``empty(inputs, tokens[B,S], keys[B]) -> state`` whose rows have all ended."""

    def empty(inputs: Inputs, tokens, keys) -> DecodeState:
        length = jnp.ones((tokens.shape[0],), jnp.int32)
        state = _begin(method, logprobs, inputs, tokens, length, length + 0, keys)
        return method.ready(inputs, state)

    return program(empty)


@functools.cache
def fill_slots(method: Method):
    """``slot(inputs, state, prefilled, row[G]) -> state``: prefilled requests in the place of
    ended rows.

    ``prefilled`` are prefilled and not yet ready, ``inputs`` theirs; ``row`` counts within the
    device's rows, −1 where a device has no prefilled request. What every array holds of a row is
    replaced, so nothing of the row before can reach the new one: of positions, as many as both
    states have; the others are scratch. One trace per capacity bucket. The state is donated.
    """

    def slot(inputs: Inputs, state: DecodeState, prefilled: DecodeState, row) -> DecodeState:
        rows = state.length.shape[0]

        slot = jnp.maximum(row[0], 0)

        def held(old):
            return jax.lax.dynamic_slice_in_dim(
                old, slot * (old.shape[0] // rows), old.shape[0] // rows
            )

        def put(old, new):
            if not old.ndim:
                return old
            own = new[tuple(slice(size) for size in (old.shape[0] // rows, *old.shape[1:]))]
            if inputs.mesh is not None:
                own = jnp.where(row[0] < 0, held(old), own)
            return jax.lax.dynamic_update_slice_in_dim(old, own, slot * own.shape[0], axis=0)

        before = jax.tree.map(lambda old: held(old) if old.ndim else old, state)
        return jax.tree.map(
            put, state, method.on_slot_reuse(before, method.ready(inputs, prefilled))
        )

    return program(slot, donate_argnums=1)


def _begin(method, logprobs, inputs, tokens, length, max_length, keys) -> DecodeState:
    """The state before the prompts."""
    rows = tokens.shape[0]
    zero = jnp.zeros((rows,), jnp.int32)
    # Stats are donated with the state: every counter needs a buffer of its own.
    stats = Stats(
        *(zero + 0 for _ in range(7)),
        passes=jnp.int32(0),
        accepted_hist=jnp.zeros((rows, method.depth + 1), jnp.int32),
    )
    state = DecodeState(
        tokens=tokens,
        length=length,
        prompt_length=length + 0,
        max_length=max_length,
        finish=jnp.where(max_length > length, RUNNING, STOP_LENGTH).astype(jnp.int32),
        origin=jnp.zeros(tokens.shape, jnp.int8),
        logprobs=jnp.zeros(tokens.shape, jnp.float32) if logprobs else None,
        keys=keys,
        cache=(),
        target_state=(),
        drafter_state=(),
        method_state=(),
        stats=stats,
    )
    return method.init(inputs, state)


def _prefill_chunk(
    method: Method, chunk: int, inputs: Inputs, state: DecodeState, first
) -> DecodeState:
    """One pass over ``chunk`` tokens of each prompt; near the last cache position some are
    prefilled again.

    Each row's last token is the first round's root. Slots past a row's own length hold scratch
    that later writes replace, close behind it: further off it would be another token's cache
    position in a layer whose positions go round.
    """
    start = jnp.minimum(jnp.minimum(first, state.length), state.capacity - chunk)
    at = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)
    return method.prefill_chunk(inputs, state, jnp.take_along_axis(state.tokens, at, axis=1), start)


@functools.cache
def run_rounds(method: Method):
    """``run(inputs, state, rounds, seen=None) -> state``: up to ``rounds`` rounds on the device.

    One trace per capacity bucket. It returns early when every row is done, when a row is done
    that is not in ``seen[B]``, or when the longest row could outgrow its positions. The state is
    donated.
    """

    def run(inputs: Inputs, state: DecodeState, rounds: Int[Array, ""], seen=None) -> DecodeState:
        def more(carry):
            i, state = carry
            fits = jnp.max(state.length) + method.round_positions <= state.capacity
            going = (i < rounds) & ~jnp.all(state.done) & fits
            return going if seen is None else going & ~jnp.any(state.done & ~seen)

        def advance(carry):
            i, state = carry
            return i + 1, method.step(inputs, state)

        return jax.lax.while_loop(more, advance, (jnp.int32(0), state))[1]

    return program(run, donate_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def resize_state(state: DecodeState, capacity: int) -> DecodeState:
    """The state in another bucket, which must hold every row that is not done."""

    def fit(x: Any) -> Any:
        room = ((0, 0), (0, max(0, capacity - state.capacity)))
        return x if x is None else jnp.pad(x[:, :capacity], room)

    return resize(state, capacity).replace(
        tokens=fit(state.tokens), origin=fit(state.origin), logprobs=fit(state.logprobs)
    )


def advance(method: Method, inputs: Inputs, state: DecodeState, rounds: int) -> DecodeState:
    """Runs up to ``rounds`` more rounds, growing the bucket where the next one needs it."""
    needed = int(state.length.max()) + method.round_positions
    if needed > state.capacity:
        state = resize_state(state, bucket(needed))
    return run_rounds(method)(inputs, state, np.int32(min(rounds, 2**31 - 1)))


def free_slots(
    state: DecodeState, ended: Bool[np.ndarray, "B"], stopped: Bool[np.ndarray, "B"]
) -> DecodeState:
    """Empties the batch slots of rows that ended, some of them by a stop string.

    That is only known outside the device. An empty batch slot takes no positions.
    """
    length, finish = _freed(state.length, state.finish, ended, stopped)
    return state.replace(length=length, finish=finish)


@jax.jit
def _freed(length, finish, ended, stopped):
    by_text = stopped & (finish == RUNNING)
    return jnp.where(ended, 1, length), jnp.where(by_text, STOP_TEXT, finish)
