"""Two ways to run a search that asks for rewards in the middle of a round.

A search's ``round`` is written once over a driver. :class:`DeviceDriver` makes one traced step of
it, rewards included; :class:`HostDriver` calls its stages one by one, each jitted, and scores in
between with Python rewards: a callback under jit would break the compilation cache and lose
exceptions.

Axis legend: B rows, K lanes, M tokens of a lane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.mesh import program
from specjax.core.types import DecodeState, Inputs
from specjax.models import KVCache
from specjax.rewards.folding import Fold, advance_all, start_all, values_of


@struct.dataclass
class Lanes:
    """Continuations of each row that a reward is asked about; those past ``count`` are scratch."""

    tokens: Int[Array, "B K M"]
    count: Int[Array, "B K"]
    asked: Bool[Array, "B"]  # rows whose answer will be read


@struct.dataclass
class LookaheadState:
    """What a lookahead search keeps between rounds, in ``state.method_state``.

    ``draft`` is the draft model's cache, ``carry`` the reward's fold over the tokens generated
    so far; either is () where there is none.
    """

    draft: KVCache | tuple
    carry: Any


class Driver(Protocol):
    """Runs the stages of a round. ``wanted`` gives a ``[B]`` bool array of the carried values."""

    def stage(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(inputs, *args)``; a state that comes first is used up."""

    def judge(self, state: DecodeState, lanes: Lanes) -> Float[Array, "B K"]:
        """The reward of each lane; −inf for NaN."""

    def commit(
        self, state: DecodeState, tokens: Int[Array, "B M"], count: Int[Array, "B"]
    ) -> DecodeState:
        """Moves the reward's fold over the tokens that the round decided on."""

    def run_once(
        self, wanted: Callable[..., Bool[Array, "B"]], body: Callable, carried: Any
    ) -> Any:
        """``body(carried)`` if any row wants it."""

    def repeat(self, wanted: Callable[..., Bool[Array, "B"]], body: Callable, carried: Any) -> Any:
        """``body`` for as long as any row wants it."""


class DeviceDriver:
    """The driver of one traced step; the reward is a :class:`specjax.rewards.Fold`."""

    def __init__(self, reward, inputs: Inputs):
        self._reward, self._inputs = reward, inputs

    def stage(self, function, *args):
        return function(self._inputs, *args)

    def judge(self, state, lanes):
        carry, data = state.method_state.carry, self._inputs.reward
        ends = advance_all(self._reward, data, carry, lanes.tokens, lanes.count)
        return values_of(self._reward, data, ends)

    def commit(self, state, tokens, count):
        carry, data = state.method_state.carry, self._inputs.reward
        ends = advance_all(self._reward, data, carry, tokens[:, None], count[:, None])
        carry = jax.tree.map(lambda x: x[:, 0], ends)
        return state.replace(method_state=state.method_state.replace(carry=carry))

    def run_once(self, wanted, body, carried):
        return jax.lax.cond(jnp.any(wanted(carried)), body, lambda c: c, carried)

    def repeat(self, wanted, body, carried):
        return jax.lax.while_loop(lambda c: jnp.any(wanted(c)), body, carried)


class HostDriver:
    """The driver of a host-driven round; ``score(state, lanes) -> float32 [B, K]`` is Python."""

    def __init__(self, score: Callable[[DecodeState, Lanes], np.ndarray], inputs: Inputs):
        self._score, self._inputs = score, inputs

    def stage(self, function, *args):
        donated = isinstance(args[0], DecodeState)
        return _jitted(function.__self__, function.__func__, donated)(self._inputs, *args)

    def judge(self, state, lanes):
        return self._score(state, lanes)

    def commit(self, state, tokens, count):
        return state

    def run_once(self, wanted, body, carried):
        return body(carried) if np.asarray(wanted(carried)).any() else carried

    def repeat(self, wanted, body, carried):
        while np.asarray(wanted(carried)).any():
            carried = body(carried)
        return carried


@functools.cache
def _jitted(method, function, donated: bool):
    """One program per method and stage; a state, argument 1, is donated."""
    donate = (1,) if donated else ()
    return program(functools.partial(function, method), donate_argnums=donate)


def start_lookahead(
    inputs: Inputs, state: DecodeState, reward: Fold | None, drafts: bool
) -> DecodeState:
    """The state before the prompt: caches empty, the draft model's where it ``drafts``.

    No token is generated yet, so nothing is folded.
    """
    shape = state.tokens.shape
    carry = () if reward is None else start_all(reward, inputs.reward, shape[0])
    draft = inputs.draft.cache(*shape) if drafts else ()
    cache = inputs.target.cache(*shape)
    return state.replace(cache=cache, method_state=LookaheadState(draft, carry))


def prefill_lookahead(
    inputs: Inputs, state: DecodeState, tokens: Int[Array, "B N"], start: Int[Array, "B"]
) -> DecodeState:
    """The state after N more tokens of each row's prompt."""
    kept = state.method_state
    if isinstance(kept.draft, KVCache):
        kept = kept.replace(draft=inputs.draft.prefill_chunk(kept.draft, tokens, start)[0])
    return state.replace(
        cache=inputs.target.prefill_chunk(state.cache, tokens, start)[0], method_state=kept
    )


def advance_on_host(
    method,
    inputs: Inputs,
    state: DecodeState,
    rounds: int,
    seen: np.ndarray,
    score: Callable[[DecodeState, Lanes], np.ndarray],
) -> DecodeState:
    """Up to ``rounds`` host-driven rounds, as :func:`specjax.core.loop.run_rounds`."""
    driver = HostDriver(score, inputs)
    for _ in range(rounds):
        full = int(state.length.max()) + method.round_positions > state.capacity
        done = np.asarray(state.done)
        if full or done.all() or (done & ~seen).any():
            break
        state = method.round(driver, state)
    return state
