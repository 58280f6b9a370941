"""The decoding loop by hand: begin, step, look at everything in between.

:func:`specjax.generate` runs the same programs; here nothing is donated, so every state stays
usable::

    method = sj.draft_verify(sj.draft.Chain(gamma=4), sj.Warped(), sj.verify.speculative)
    inputs = sj.Inputs.of(target, draft, sj.Sampling(0.8), batch=2)
    state = sj.init_state(method, inputs, [[5, 6, 7], [8, 9]], max_new_tokens=32)
    while not state.done.all():
        state = sj.step(method, inputs, state)

Axis legend: B rows, S cache positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.errors import OptionError
from specjax.core import loop, probs
from specjax.core.mesh import program
from specjax.core.protocols import Method
from specjax.core.types import DecodeState, Inputs
from specjax.models.cache import bucket

ALL_ROUNDS = 2**31 - 1


def init_state(
    method: Method,
    inputs: Inputs,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    seed: int = 0,
    logprobs: bool = False,
) -> DecodeState:
    """The state after the prompts, ready for the first round.

    Args:
      method: a :class:`specjax.Method`, as :func:`specjax.draft_verify` makes one.
      inputs: as :meth:`specjax.Inputs.of` makes them, of as many rows as there are prompts.
      prompts: sequences of token ids, each of at least one.
      max_new_tokens: budget of every row.
      seed: row i draws what prompt i draws in :func:`specjax.generate` with this seed.
      logprobs: also keep log-probabilities of the new tokens, nats, unwarped target.

    Returns:
      A :class:`specjax.DecodeState` whose capacity holds all rows to their end. The new tokens of
      row i are ``state.tokens[i, state.prompt_length[i] : state.length[i]]``.

    Raises:
      OptionError: no prompts, an empty one, another number of prompts than rows, or a method that
        the host drives.
    """
    check_steppable(method)
    rows = [np.asarray(prompt, np.int32) for prompt in prompts]
    batch = inputs.warp.temperature.shape[0]
    if len(rows) != batch or any(row.ndim != 1 or row.size == 0 for row in rows):
        raise OptionError(
            f"prompts={len(rows)} sequences: expected {batch}, one per row of the inputs, each "
            "with at least one token id; give Inputs.of(..., batch=number of prompts)"
        )
    # The keys that generate gives to the first sample of each prompt.
    root = probs.seed_key(seed)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(root, jnp.arange(batch))
    longest = max(map(len, rows))
    chunk = inputs.target.chunk_size(longest, batch)
    needed = longest + max_new_tokens + method.round_positions
    return loop.start(
        method,
        inputs,
        rows,
        np.full(batch, max_new_tokens, np.int32),
        keys,
        logprobs=logprobs,
        chunk=chunk,
        capacity=bucket(max(needed, -(-longest // chunk) * chunk)),
    )


def step(method: Method, inputs: Inputs, state: DecodeState) -> DecodeState:
    """One round; every row that is not done gains at least one token, the others gain none.

    Jitted, one trace per shape. The given state stays valid.

    Raises:
      OptionError: the host drives the method's rounds.
    """
    check_steppable(method)
    return _step_program(method)(inputs, state)


def run_rounds(
    method: Method, inputs: Inputs, state: DecodeState, rounds: int = ALL_ROUNDS
) -> DecodeState:
    """Up to ``rounds`` rounds in one device loop; it ends early when every row is done.

    It also ends when the next round could exceed the state's capacity. The given state stays
    valid: the loop works on a copy.

    Raises:
      OptionError: the host drives the method's rounds.
    """
    check_steppable(method)
    copy = jax.tree.map(jnp.copy, state)
    return loop.run_rounds(method)(inputs, copy, np.int32(rounds))


@functools.cache
def _step_program(method: Method) -> Callable[[Inputs, DecodeState], DecodeState]:
    return program(method.step)


def check_steppable(method: Method) -> None:
    """Refuses a method whose rounds need text.

    Raises:
      OptionError: names the method.
    """
    if method.host_driven:
        raise OptionError(
            f"method {method.name} is driven from the host, for its reward reads text; "
            "use specjax.generate"
        )
