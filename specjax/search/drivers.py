"""Two ways to run the same round of a search that asks for rewards in the middle of it.

A reward is either a fold of arrays, which can be a part of the compiled program, or Python code
that needs text. For the second kind the round must leave the device between its stages. A callback
under jit would not do: it would break the compilation cache and lose exceptions.

So a search writes its ``round`` once, over a driver. :class:`DeviceDriver` makes one traced step of
it, rewards included. :class:`HostDriver` runs the same stages one by one, each jitted, and calls
the Python reward between them. Both give the same tokens.

What the stages do is not known here, nor how a reward is computed.

Axis legend: B rows, K continuations of a row, M tokens of one.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.mesh import program
from specjax.core.types import DecodeState, Inputs
from specjax.draft.model_drafter import draft_net
from specjax.models import KVCache
from specjax.rewards.folding import Fold, advance_all, start_all, values_of

T = TypeVar("T")


class CandidateContinuations(struct.PyTreeNode):
    """Continuations of each row that a reward is asked about; tokens past ``count`` are scratch."""

    tokens: Int[Array, "B K M"]
    count: Int[Array, "B K"]
    asked: Bool[Array, "B"]  # rows whose rewards will be read


class LookaheadState(struct.PyTreeNode):
    """What a lookahead search keeps between rounds, in ``state.method_state``.

    ``draft`` is the draft model's cache. ``carry`` is the reward's fold over the tokens generated
    so far. Either is () if there is none.
    """

    draft: KVCache | tuple
    carry: Any


class Driver(Protocol):
    """Runs the stages of a round.

    ``wanted`` maps the carried values to a ``[B]`` bool array: the rows that need the next stages.
    """

    @abstractmethod
    def stage(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(inputs, *args)``.

        If the first of ``args`` is a state, do not use it again: the host driver donates it.
        """
        raise NotImplementedError

    @abstractmethod
    def rewards(
        self, state: DecodeState, continuations: CandidateContinuations
    ) -> Float[Array | np.ndarray, "B K"]:
        """The reward of each row's text with each continuation after it; −inf for NaN."""
        raise NotImplementedError

    @abstractmethod
    def commit(
        self, state: DecodeState, tokens: Int[Array, "B M"], count: Int[Array, "B"]
    ) -> DecodeState:
        """The state with the reward's fold advanced over the tokens that the round emits."""
        raise NotImplementedError

    @abstractmethod
    def run_once(
        self, wanted: Callable[[T], Bool[Array, "B"]], body: Callable[[T], T], carried: T
    ) -> T:
        """``body(carried)`` if any row wants it, else ``carried``."""
        raise NotImplementedError

    @abstractmethod
    def repeat(
        self, wanted: Callable[[T], Bool[Array, "B"]], body: Callable[[T], T], carried: T
    ) -> T:
        """Applies ``body`` again and again while any row wants it."""
        raise NotImplementedError


class DeviceDriver(Driver):
    """The driver of one traced step; the reward is a :class:`specjax.rewards.Fold`."""

    def __init__(self, reward: Fold | None, inputs: Inputs):
        assert reward is not None, "without a fold the method is host-driven"
        self._reward = reward
        self._inputs = inputs

    def stage(self, function, *args):
        return function(self._inputs, *args)

    def rewards(self, state, continuations):
        carry = state.method_state.carry
        data = self._inputs.reward
        ends = advance_all(self._reward, data, carry, continuations.tokens, continuations.count)
        return values_of(self._reward, data, ends)

    def commit(self, state, tokens, count):
        carry = state.method_state.carry
        data = self._inputs.reward
        ends = advance_all(self._reward, data, carry, tokens[:, None], count[:, None])
        carry = jax.tree.map(lambda x: x[:, 0], ends)
        return state.replace(method_state=state.method_state.replace(carry=carry))

    def run_once(self, wanted, body, carried):
        return jax.lax.cond(jnp.any(wanted(carried)), body, lambda c: c, carried)

    def repeat(self, wanted, body, carried):
        return jax.lax.while_loop(lambda c: jnp.any(wanted(c)), body, carried)


class HostDriver(Driver):
    """The driver of a host-driven round.

    ``score(state, continuations) -> float32 [B, K]`` is Python and sees the whole text of a row. So
    :meth:`commit` has no fold to advance.
    """

    def __init__(
        self, score: Callable[[DecodeState, CandidateContinuations], np.ndarray], inputs: Inputs
    ):
        self._score = score
        self._inputs = inputs

    def stage(self, function, *args):
        # A bound method is a new object at each access, so it would miss the cache of programs. Its
        # function and its instance are the key instead.
        donated = isinstance(args[0], DecodeState)
        return _jitted(function.__self__, function.__func__, donated)(self._inputs, *args)

    def rewards(self, state, continuations):
        return self._score(state, continuations)

    def commit(self, state, tokens, count):
        return state

    def run_once(self, wanted, body, carried):
        return body(carried) if np.asarray(wanted(carried)).any() else carried

    def repeat(self, wanted, body, carried):
        while np.asarray(wanted(carried)).any():
            carried = body(carried)
        return carried


@functools.cache
def _jitted(method: object, function: Callable[..., Any], donated: bool) -> Callable[..., Any]:
    """One program per method and stage; with ``donated``, argument 1 (the state) is donated."""
    donate = (1,) if donated else ()
    return program(functools.partial(function, method), donate_argnums=donate)


def start_lookahead(
    inputs: Inputs, state: DecodeState, reward: Fold | None, drafts: bool
) -> DecodeState:
    """The state before the prompt, with empty caches and the reward's fold at its start.

    The draft model has a cache only if the search ``drafts``. The fold sees generated tokens only,
    so the prompt does not advance it.
    """
    shape = state.tokens.shape
    carry = () if reward is None else start_all(reward, inputs.reward, shape[0])
    draft = draft_net(inputs).cache(*shape) if drafts else ()
    cache = inputs.target.cache(*shape)
    return state.replace(cache=cache, method_state=LookaheadState(draft, carry))


def prefill_lookahead(
    inputs: Inputs, state: DecodeState, tokens: Int[Array, "B N"], start: Int[Array, "B"]
) -> DecodeState:
    """The state after N more tokens of each row's prompt."""
    method_state = state.method_state
    if isinstance(method_state.draft, KVCache):
        draft, _ = draft_net(inputs).prefill_chunk(method_state.draft, tokens, start)
        method_state = method_state.replace(draft=draft)
    cache, _ = inputs.target.prefill_chunk(state.cache, tokens, start)
    return state.replace(cache=cache, method_state=method_state)


@runtime_checkable
class HostDriven(Protocol):
    """A method whose rounds the host can drive."""

    round_positions: int

    @abstractmethod
    def round(self, driver: Driver, state: DecodeState) -> DecodeState:
        """One round; rows of the batch may be in different stages of it."""
        raise NotImplementedError


def advance_on_host(
    method: HostDriven,
    inputs: Inputs,
    state: DecodeState,
    rounds: int,
    known_done: np.ndarray,
    score: Callable[[DecodeState, CandidateContinuations], np.ndarray],
) -> DecodeState:
    """Up to ``rounds`` host-driven rounds, as :func:`specjax.core.loop.run_rounds`.

    It stops earlier if the caches are full, if all rows are done, or if a row is newly done.

    Args:
      known_done: bool ``[B]``, the rows that the caller already knows to be done.
      score: ``(state, continuations) -> float32 [B, K]``, as in :class:`HostDriver`.
    """
    driver = HostDriver(score, inputs)
    for _ in range(rounds):
        full = int(state.length.max()) + method.round_positions > state.capacity
        done = np.asarray(state.done)
        newly_done = done & ~known_done
        if full or done.all() or newly_done.any():
            break
        state = method.round(driver, state)
    return state
