"""The jitted programs of decoding: prompts in, rounds of a method, tokens out.

A method's ``step`` is pure; :func:`run_rounds` wraps it in a jitted ``while_loop``. All programs
that change a state are here. :mod:`specjax.runtime.scheduler` decides when they run.

Shapes: S comes from a short list of capacity buckets (:func:`specjax.models.cache.bucket`), and a
program is traced once per bucket. So requests of any length need few programs, and a round does
not read many positions that no request uses.

Donation: a program that changes a state donates it, so that XLA updates the KV cache in place.
The caller must not use the old state again. Inputs are never donated: they hold the models.

Axis legend: B rows, S cache positions, G requests being prefilled (one per device of the mesh's
data axis).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from specjax.core.mesh import is_cache, program
from specjax.core.path_logits import begin_counts
from specjax.core.protocols import Method
from specjax.core.types import RUNNING, STOP_LENGTH, STOP_TEXT, DecodeState, Inputs, Stats
from specjax.models.cache import bucket, resize

NO_SLOT = -1  # in place of a batch slot's number: a device has no request to put into one


class CachedByMethod:
    """Like ``functools.cache``, but :func:`forget` can drop what was made for one method."""

    def __init__(self, make: Callable[..., Any]):
        self.made: dict[Method, dict[tuple, Any]] = {}
        self._make = make
        functools.update_wrapper(self, make)

    def __call__(self, method: Method, *rest: Any, **named: Any) -> Any:
        of_method = self.made.setdefault(method, {})
        key = (rest, tuple(named.items()))
        if key not in of_method:
            of_method[key] = self._make(method, *rest, **named)
        return of_method[key]


def forget(method: Method) -> None:
    """Drops the programs of a method that are made here, so that their memory can be freed.

    They compile again if they are needed again.
    """
    for programs in (
        prefill_prompts,
        begin_prefill,
        prefill_chunks,
        empty_state,
        fill_slots,
        run_rounds,
        resize_state,
        with_counts,
        with_grammar_states,
    ):
        programs.made.pop(method, None)


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
    """The state after a prefill of whole prompts, ready for rounds.

    Args:
      prompts: int32 token ids of each row, at least one each.
      budget: most new tokens per row.
      keys: the rows' own keys.
      logprobs: whether the state keeps log-probabilities.
      chunk: tokens of each row per prefill pass.
      capacity: S; by default the smallest bucket that is enough.
    """
    tokens, lengths = pack(prompts)
    capacity = capacity or first_capacity(method, int(lengths.max()), int(budget.max()), chunk)
    tokens = np.pad(tokens, ((0, 0), (0, capacity - tokens.shape[1])))
    return prefill_prompts(method, chunk, logprobs)(inputs, tokens, lengths, lengths + budget, keys)


def pack(prompts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """int32 tokens ``[n, longest]``, left-aligned and zero-padded, and their lengths ``[n]``."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths


def first_capacity(method: Method, longest: int, budget: int, chunk: int) -> int:
    """The capacity of a new batch, from its longest prompt and its largest budget, in tokens.

    The budget counts only if the method needs the full length. Otherwise the state grows later.
    """
    for_rounds = longest + method.round_positions
    if method.needs_full_length:
        for_rounds += budget
    # A prefill pass has a fixed size, so the last chunk needs positions for all of its tokens.
    num_chunks = -(-longest // chunk)
    return bucket(max(for_rounds, num_chunks * chunk))


@CachedByMethod
def prefill_prompts(method: Method, chunk: int, logprobs: bool):
    """``prefill(inputs, tokens[B,S], length[B], max_length[B], keys[B]) -> state``, all in one.

    ``chunk`` tokens of each row per pass. The number of passes is traced, so prompts of all
    lengths share one trace per capacity bucket.
    """

    def prefill(inputs: Inputs, tokens, length, max_length, keys) -> DecodeState:
        def run_pass(carry):
            first, state = carry
            return first + chunk, _prefill_chunk(method, chunk, inputs, state, first)

        # The last token of a prompt is not prefilled: it is the root of the first round.
        end = jnp.max(length) - 1
        state = _new_state(method, logprobs, inputs, tokens, length, max_length, keys)
        carry = jnp.int32(0), state
        _, state = jax.lax.while_loop(lambda carry: carry[0] < end, run_pass, carry)
        return method.ready(inputs, state)

    return program(prefill)


@CachedByMethod
def begin_prefill(method: Method, logprobs: bool):
    """``begin(inputs, tokens[G,S], length[G], max_length[G], keys[G], prefix) -> state``.

    The state is not prefilled. ``prefix`` is None, or a prefilled state of as many rows and
    positions, whose caches are copied: a common beginning is then not prefilled again.
    """

    def begin(inputs: Inputs, tokens, length, max_length, keys, prefix) -> DecodeState:
        state = _new_state(method, logprobs, inputs, tokens, length, max_length, keys)
        if prefix is None:
            return state

        def take_cache(new, old):
            # A copy: prefill_chunks donates the new state, and the prefix cache keeps the old one.
            if is_cache(old):
                return jax.tree.map(jnp.copy, old)
            return new

        # A kept state has no counts; those of the new one stay.
        prefix = prefix.replace(counts=state.counts)
        return jax.tree.map(take_cache, state, prefix, is_leaf=is_cache)

    return program(begin)


@CachedByMethod
def prefill_chunks(method: Method, chunk: int):
    """``run(inputs, state, first[G]) -> state``: one pass over ``chunk`` tokens from ``first``.

    One trace per chunk size. The state is donated.
    """
    return program(functools.partial(_prefill_chunk, method, chunk), donate_argnums=1)


@CachedByMethod
def empty_state(method: Method, logprobs: bool):
    """``empty(inputs, tokens[B,S], keys[B]) -> state``, all of whose rows have ended."""

    def empty(inputs: Inputs, tokens, keys) -> DecodeState:
        length = jnp.ones((tokens.shape[0],), jnp.int32)
        # + 0: the state is donated, and no buffer may be donated twice.
        state = _new_state(method, logprobs, inputs, tokens, length, length + 0, keys)
        return method.ready(inputs, state)

    return program(empty)


@CachedByMethod
def fill_slots(method: Method):
    """``fill(inputs, state, prefilled, slot[G]) -> state``: prefilled requests replace ended rows.

    ``prefilled`` is not yet ready for rounds, and ``inputs`` are the ones of its prefill. Each
    device has one prefilled request; ``slot`` is its batch slot among the device's own, NO_SLOT
    if the device has none. Every array of the row is replaced, so nothing of the ended request
    can reach the new one. Only the cache positions that both states have are written. Any others
    are scratch. One trace per capacity bucket. The state is donated. ``prefilled`` is not, because
    other samples of its prompt may follow.
    """

    def fill(inputs: Inputs, state: DecodeState, prefilled: DecodeState, slot) -> DecodeState:
        rows = state.length.shape[0]
        # Without a request, any valid slot will do: its own contents are written back.
        valid_slot = jnp.maximum(slot[0], 0)

        def take_slot(old):
            if not old.ndim:
                return old  # a scalar belongs to the whole batch: the counter of passes
            entries = old.shape[0] // rows  # some arrays have several entries per row
            return jax.lax.dynamic_slice_in_dim(old, valid_slot * entries, entries)

        def put_slot(old, new):
            if not old.ndim:
                return old
            # Leaf by leaf, because each has its own shape: positions up to the smaller of two
            # capacities, sliding-window layers with fewer, and several entries per row.
            shape = (old.shape[0] // rows, *old.shape[1:])
            value = new[tuple(slice(size) for size in shape)]
            if inputs.mesh is not None:
                value = jnp.where(slot[0] < 0, take_slot(old), value)
            # dynamic_update_slice, not a scatter: it writes in place, and it costs one row.
            start = valid_slot * value.shape[0]
            return jax.lax.dynamic_update_slice_in_dim(old, value, start, axis=0)

        before = jax.tree.map(take_slot, state)
        ready = method.on_slot_reuse(before, method.ready(inputs, prefilled))
        return jax.tree.map(put_slot, state, ready)

    return program(fill, donate_argnums=1)


def _new_state(method, logprobs, inputs, tokens, length, max_length, keys) -> DecodeState:
    """The state of prompts before their prefill."""
    rows = tokens.shape[0]
    zero = jnp.zeros((rows,), jnp.int32)
    accepted_hist = jnp.zeros((rows, method.depth + 1), jnp.int32)
    # + 0: the state is donated, so every counter needs a buffer of its own.
    stats = Stats(
        target_calls=zero + 0,
        draft_calls=zero + 0,
        rounds=zero + 0,
        drafted=zero + 0,
        tested=zero + 0,
        accepted=zero + 0,
        emitted=zero + 0,
        passes=jnp.int32(0),
        accepted_hist=accepted_hist,
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
    return method.init(inputs, state.replace(counts=begin_counts(inputs, state)))


@CachedByMethod
def with_counts(method: Method):
    """``add(inputs, state) -> state`` with counts of its tokens, for settings that need them."""
    return program(lambda inputs, state: state.replace(counts=begin_counts(inputs, state)))


@CachedByMethod
def with_grammar_states(method: Method):
    """``add(inputs, state) -> state`` with every row at the beginning of its grammar."""

    def add(_: Inputs, state: DecodeState) -> DecodeState:
        return state.replace(grammar_state=jnp.zeros_like(state.length))

    return program(add)


def _prefill_chunk(
    method: Method, chunk: int, inputs: Inputs, state: DecodeState, first
) -> DecodeState:
    """One pass over ``chunk`` tokens of each prompt, from ``first`` on (a scalar, or per row).

    A pass has a fixed size, so near the last cache position it begins earlier and some tokens
    are prefilled again. For a row that has fewer tokens left, the positions past its length get
    scratch that later writes replace. It begins at most at the row's length: in a layer of a
    sliding window, scratch further on would overwrite positions that are still in use.
    """
    begin = jnp.minimum(jnp.minimum(first, state.length), state.capacity - chunk)
    positions = begin[:, None] + jnp.arange(chunk, dtype=jnp.int32)
    tokens = jnp.take_along_axis(state.tokens, positions, axis=1)
    return method.prefill_chunk(inputs, state, tokens, begin)


@CachedByMethod
def run_rounds(method: Method):
    """``run(inputs, state, rounds, known_done=None) -> state``: rounds on the device.

    It runs up to ``rounds`` of them. The loop returns early when every row is done, or when the
    next round might not fit the longest row's positions. ``known_done[B]``, bool, marks the rows
    that the caller knows to be done: the loop also returns when any other row is. None: it does
    not. One trace per capacity bucket. The state is donated.
    """

    def run(
        inputs: Inputs, state: DecodeState, rounds: Int[Array, ""], known_done=None
    ) -> DecodeState:
        def goes_on(carry):
            i, state = carry
            fits = jnp.max(state.length) + method.round_positions <= state.capacity
            going = (i < rounds) & ~jnp.all(state.done) & fits
            if known_done is None:
                return going
            return going & ~jnp.any(state.done & ~known_done)

        def run_round(carry):
            i, state = carry
            return i + 1, method.step(inputs, state)

        return jax.lax.while_loop(goes_on, run_round, (jnp.int32(0), state))[1]

    return program(run, donate_argnums=1)


@CachedByMethod
def resize_state(method: Method):
    """``resize(state, capacity) -> state``, with positions enough for every row that is not done.

    One trace per pair of capacities. Each method has a program of its own, so that :func:`forget`
    drops it.
    """
    # Not donated: no buffer of the old capacity can serve the new one.
    return jax.jit(functools.partial(_resized), static_argnums=1)


def _resized(state: DecodeState, capacity: int) -> DecodeState:
    def fit(x: Any) -> Any:
        if x is None:
            return None
        room = ((0, 0), (0, max(0, capacity - state.capacity)))
        return jnp.pad(x[:, :capacity], room)

    return resize(state, capacity).replace(
        tokens=fit(state.tokens),
        origin=fit(state.origin),
        logprobs=fit(state.logprobs),
    )


def advance(method: Method, inputs: Inputs, state: DecodeState, rounds: int) -> DecodeState:
    """Runs up to ``rounds`` more rounds, in a larger bucket if the next round needs one.

    The caller must not use the given state again.
    """
    needed = int(state.length.max()) + method.round_positions
    if needed > state.capacity:
        state = resize_state(method)(state, bucket(needed))
    return run_rounds(method)(inputs, state, np.int32(min(rounds, 2**31 - 1)))


def free_slots(
    state: DecodeState, ended: Bool[np.ndarray, "B"], stopped: Bool[np.ndarray, "B"]
) -> DecodeState:
    """Frees the batch slots of ``ended`` rows; those in ``stopped`` ended at a stop string.

    Only the host sees text, so the device would go on with these. A free slot has length 1, so
    that it does not count for the capacity.
    """
    length, finish = _freed(state.length, state.finish, ended, stopped)
    return state.replace(length=length, finish=finish)


@jax.jit
def _freed(length, finish, ended, stopped):
    """Lengths and finish reasons after :func:`free_slots`."""
    stopped_by_text = stopped & (finish == RUNNING)
    return jnp.where(ended, 1, length), jnp.where(stopped_by_text, STOP_TEXT, finish)
