"""The one loop: prompts in, rounds of a method, tokens out.

A method's step is pure; :func:`run_rounds` wraps it in one jitted ``while_loop`` per bucket
of slots. Starting, growing and stopping exist here and nowhere else.

Axis legend: B rows, S slots.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from specjax.mesh import spread
from specjax.models.cache import bucket, grow
from specjax.protocols import Method
from specjax.types import RUNNING, STOP_LENGTH, STOP_TEXT, DecodeState, Inputs, Stats


def start(
    method: Method,
    inputs: Inputs,
    prompts: list[np.ndarray],
    budget: Int[np.ndarray, "B"],
    keys: Key[Array, "B"],
    *,
    logprobs: bool = False,
    chunk: int,
    carried: Any = (),
) -> DecodeState:
    """The state after the prompts: tokens left-aligned in a bucket, caches filled.

    ``carried`` is what the batch before in the same job left, by the method's ``carry``.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    slots = first_slots(method, int(lengths.max()), int(budget.max()), chunk)
    tokens = np.zeros((len(prompts), slots), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return prefill_prompts(method, chunk, logprobs)(
        inputs,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        jnp.asarray(lengths + budget),
        keys,
        carried,
    )


def first_slots(method: Method, longest: int, budget: int, chunk: int) -> int:
    """The slots of a batch that begins, by its longest prompt and its largest budget."""
    room = budget if method.reserves else 0
    return bucket(max(longest + room + method.width, -(-longest // chunk) * chunk))


@functools.cache
def prefill_prompts(method: Method, chunk: int, logprobs: bool):
    """``fill(inputs, tokens[B,S], length[B], max_length[B], keys[B], carried) -> state``.

    One trace per bucket of slots.
    """

    def fill(inputs: Inputs, tokens, length, max_length, keys, carried=()) -> DecodeState:
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
            drafter_state=carried,
            method_state=(),
            stats=stats,
        )
        return method.init(inputs, state, chunk)

    return jax.jit(spread(fill))


@functools.cache
def run_rounds(method: Method):
    """``run(inputs, state, rounds) -> state``: up to ``rounds`` rounds on the device.

    One trace per bucket of slots. It returns early when every row is done, or when the
    longest row could outgrow its slots. The state is donated.
    """

    def run(inputs: Inputs, state: DecodeState, rounds: Int[Array, ""]) -> DecodeState:
        def more(carry):
            i, state = carry
            fits = jnp.max(state.length) + method.width <= state.slots
            return (i < rounds) & ~jnp.all(state.done) & fits

        def advance(carry):
            i, state = carry
            return i + 1, method.step(inputs, state)

        return jax.lax.while_loop(more, advance, (jnp.int32(0), state))[1]

    return jax.jit(spread(run), donate_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def grow_state(state: DecodeState, slots: int) -> DecodeState:
    """The state in the next bucket: every array along the slots is padded."""

    def pad(x):
        return x if x is None else jnp.pad(x, ((0, 0), (0, slots - x.shape[1])))

    return grow(state, slots).replace(
        tokens=pad(state.tokens), origin=pad(state.origin), logprobs=pad(state.logprobs)
    )


def advance(method: Method, inputs: Inputs, state: DecodeState, rounds: int) -> DecodeState:
    """Runs up to ``rounds`` more rounds, growing the bucket where the next one needs it."""
    state = make_room(method, state)
    return run_rounds(method)(inputs, state, np.int32(min(rounds, 2**31 - 1)))


def make_room(method: Method, state: DecodeState) -> DecodeState:
    """The state in the next bucket if another round could outgrow this one."""
    needed = int(state.length.max()) + method.width
    return grow_state(state, bucket(needed)) if needed > state.slots else state


@jax.jit
def mark_stopped(state: DecodeState, stopped: Bool[Array, "B"]) -> DecodeState:
    """Ends rows whose text holds a stop string; that is only known outside the device."""
    return state.replace(finish=jnp.where(stopped & ~state.done, STOP_TEXT, state.finish))
