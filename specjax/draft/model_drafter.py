"""What drafters with a draft model share: the first pass of a round, chains, levels of a tree.

Which tokens are drawn is not known here: the drafters decide that.

Axis legend: B rows, n new tokens, T nodes of the tree so far, V vocabulary, v the ids that the
draft model has logits for (the target's, unless it is a head with a vocabulary of its own).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.core import probs
from specjax.core.net import Net
from specjax.core.path_logits import path_logits, unless_empty
from specjax.core.protocols import Drafter
from specjax.core.types import DecodeState, Inputs
from specjax.models import KVCache

DRAFTING = "drafting"  # the name of the loop of draft passes in a compiled program


class ModelDrafter(Drafter):
    """A drafter that runs the draft model; its state is that model's KV cache."""

    needs_draft = True

    def init(self, inputs: Inputs, state: DecodeState) -> Any:
        return draft_net(inputs).cache(*state.tokens.shape)

    def prefill_chunk(self, inputs, state, tokens, start, aux_states) -> Any:
        return draft_net(inputs).prefill_chunk(state.drafter_state, tokens, start)[0]

    def can_draft(self, state: DecodeState) -> Bool[Array, "B"]:
        """Rows that draft in this round."""
        return ~state.done

    def first_logits(self, inputs: Inputs, state: DecodeState) -> tuple[Float[Array, "B v"], Any]:
        """Logits after each row's last token, and the carry for the next pass."""
        last = last_two(state)
        return run_last_two(draft_net(inputs), state.drafter_state, last, state.length - 2)

    def next_logits(
        self,
        inputs: Inputs,
        state: DecodeState,
        carry: Any,
        token: Int[Array, "B 1"],
        depth: Int[Array, ""],
    ) -> tuple[Float[Array, "B v"], Any]:
        """Logits after one more token of a chain, which is ``depth`` below the root."""
        logits, cache, _ = draft_net(inputs).logits(carry, token, state.length - 1 + depth)
        return logits[:, 0], cache

    def level_logits(
        self,
        inputs: Inputs,
        state: DecodeState,
        carry: Any,
        tokens: Int[Array, "B n"],
        ancestors: Bool[Array | np.ndarray, "B T T"],
        parent_index: Int[Array | np.ndarray, "B n"],
    ) -> tuple[Float[Array, "B n v"], Any]:
        """Logits after one level of a tree: the last n of the T nodes so far.

        Args:
          tokens: of the level's nodes.
          ancestors: of all T nodes, as :func:`specjax.core.tree.ancestors`; the root is the first.
          parent_index: each node's parent, as its place in the level above.
        """
        first = ancestors.shape[-1] - tokens.shape[1]
        return run_level(draft_net(inputs), carry, tokens, state.length - 1, first, ancestors)

    def to_target_ids(self, inputs: Inputs, drafted: Int[Array, "..."]) -> Int[Array, "..."]:
        """Drafted ids as ids of the target."""
        return drafted

    def to_draft_vocab(self, inputs: Inputs, rows: Float[Array, "... V"]) -> Float[Array, "... v"]:
        """Logits over the target's ids at those that it can draft."""
        return rows

    def with_path_settings(
        self,
        inputs: Inputs,
        state: DecodeState,
        logits: Float[Array, "B n v"],
        paths: Int[Array, "B n D"] | None,
    ) -> Float[Array, "B n v"]:
        """The draft's logits under the settings that the target has at the same nodes.

        ``paths``: as :func:`specjax.core.path_logits.path_logits` reads them; None where no row
        has such settings.
        """
        if paths is None:
            return logits
        changed = path_logits(inputs, state, self.to_target_vocab(inputs, logits), paths)
        return unless_empty(self.to_draft_vocab(inputs, changed), logits)

    def to_target_vocab(self, inputs: Inputs, rows: Float[Array, "... v"]) -> Float[Array, "... V"]:
        """Logits or log-probabilities over the target's ids; −inf at those it cannot draft."""
        return rows


def draft_net(inputs: Inputs) -> Net:
    """The draft model of a method that needs one."""
    assert inputs.draft is not None, "a method that needs a draft model is refused without one"
    return inputs.draft


def last_two(state: DecodeState) -> Int[Array, "B 2"]:
    """Each row's last two tokens; the first is scratch where the row has only one."""
    at = jnp.maximum(state.length[:, None] + jnp.arange(-2, 0), 0)
    return jnp.take_along_axis(state.tokens, at, axis=1)


def run_last_two(
    net: Net, cache: KVCache, last: Int[Array, "B 2"], first: Int[Array, "B"]
) -> tuple[Float[Array, "B V"], KVCache]:
    """Logits after two tokens at positions ``first`` and ``first + 1``.

    A round begins with this pass. After a draft that was accepted whole, the cache lacks the last
    draft token: it was drawn but never passed through the model. The pass over two tokens fills
    that gap. A row of one token has ``first = −1``. It then reads that token at position 0, and a
    scratch token after it.
    """
    start = jnp.maximum(first, 0)
    inside = (start - first)[:, None] + jnp.arange(2, dtype=jnp.int32)
    tokens = jnp.take_along_axis(last, inside, axis=1, mode="clip")
    logits, cache, _ = net.logits(cache, tokens, start, at=(first + 1 - start)[:, None])
    return logits[:, 0], cache


class ChainLoop(NamedTuple):
    """The state of the loop that draws a chain. ``window``: two known tokens, then the draft."""

    step: Int[Array, ""]  # tokens drawn so far
    carry: Any  # the draft model's cache, and what else its next pass needs
    window: Int[Array, "B 2+γ"]
    active: Bool[Array, "B"]  # rows whose chain goes on
    calls: Int[Array, "B"]
    extra: Any  # what else ``draw`` of :func:`draw_chain` keeps


def draw_chain(
    first: tuple[Float[Array, "B v"], Any],
    next_logits: Callable[..., tuple],
    last: Int[Array, "B 2"],
    active: Bool[Array, "B"],
    gamma: int,
    draw: Callable[..., tuple],
    extra: Any,
    passes: int | None = None,
) -> ChainLoop:
    """γ tokens, drawn one after another after each row's ``last`` two.

    The loop ends when no row is active, or after ``passes`` draft passes.

    Args:
      first: the logits after ``last``, and the carry for the next pass.
      next_logits: ``(carry, token[B, 1], depth) -> (logits[B, v], carry)`` runs the draft model on
        the token just drawn.
      last: int32, each row's last two tokens.
      active: rows that draft at all.
      draw: ``(step, logits[B, v], active, extra) -> (token, active, extra)`` returns the next
        token, the rows that go on, and the next ``extra``.
      extra: what ``draw`` keeps from step to step.
      passes: γ by default. One more gives the logits after the last token; its token is dropped.
    """
    rows = last.shape[0]

    def append_token(loop: ChainLoop, logits, carry) -> ChainLoop:
        token, active, extra = draw(loop.step, logits, loop.active, loop.extra)
        # A pass past γ only gives logits: its token falls out of the window and is dropped.
        window = loop.window.at[:, loop.step + 2].set(token, mode="drop")
        return ChainLoop(loop.step + 1, carry, window, active, loop.calls + loop.active, extra)

    def run_step(loop: ChainLoop) -> ChainLoop:
        # After ``step`` draws the newest token is at step + 1, for the window begins with two.
        token = jax.lax.dynamic_index_in_dim(loop.window, loop.step + 1, axis=1)
        logits, carry = next_logits(loop.carry, token, loop.step)
        return append_token(loop, logits, carry)

    window = jnp.pad(last, ((0, 0), (0, gamma)))
    logits, carry = first
    start = ChainLoop(jnp.int32(0), carry, window, active, jnp.zeros((rows,), jnp.int32), extra)
    loop = append_token(start, logits, carry)
    steps = gamma if passes is None else passes

    def goes_on(loop: ChainLoop) -> Bool[Array, ""]:
        return (loop.step < steps) & jnp.any(loop.active)

    with jax.named_scope(DRAFTING):
        return jax.lax.while_loop(goes_on, run_step, loop)


def run_level(
    net: Net,
    cache: KVCache,
    tokens: Int[Array, "B n"],
    base: Int[Array, "B"],
    first: int,
    ancestors: Bool[Array | np.ndarray, "B T T"],
) -> tuple[Float[Array, "B n V"], KVCache]:
    """Logits after the tree's nodes ``first … first + n − 1``; the cache holds the levels above.

    ``base`` is both the cache position and the token position of the root. ``ancestors`` are those
    of all T nodes so far, this level included.
    """
    # Counted from the root, a token position is the depth and a cache position the node's number.
    # Siblings share a token position.
    positions = base[:, None] + ancestors.sum(-1, dtype=jnp.int32) - 1
    level = slice(first, first + tokens.shape[1])
    logits, cache, _ = net.logits(
        cache,
        tokens,
        base + first,
        positions[:, level],
        ancestors[:, level],
        base=base,
        tree_positions=positions,
    )
    return logits, cache


def unwarped_in(
    rows: Bool[Array, "B"], logits: Float[Array, "B n V"], log_q: Float[Array, "B n V"]
) -> Float[Array, "B n V"]:
    """``log_q``, with these rows replaced by the unwarped log-probabilities of ``logits``."""
    return jnp.where(rows[:, None, None], probs.log_softmax(logits), log_q)
