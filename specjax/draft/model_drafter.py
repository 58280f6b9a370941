"""What drafters with a model of their own share: feeding the row's end, and levels of a tree.

Axis legend: B rows, n new tokens, T tokens of the tree so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core import probs
from specjax.core.net import Net
from specjax.core.protocols import Drafter
from specjax.core.types import DecodeState, Inputs
from specjax.models import KVCache

DRAFTING = "drafting"  # the name of the loop of draft passes in a compiled program


class ModelDrafter(Drafter):
    """A drafter that runs the draft model; its state is that model's cache."""

    needs_draft = True

    def init(self, inputs, state):
        return inputs.draft.cache(*state.tokens.shape)

    def prefill_chunk(self, inputs, state, tokens, start, aux_states):
        return inputs.draft.prefill_chunk(state.drafter_state, tokens, start)[0]

    def ready(self, state: DecodeState) -> Bool[Array, "B"]:
        """Rows that draft."""
        return ~state.done

    def begin(self, inputs: Inputs, state: DecodeState) -> tuple[Float[Array, "B v"], Any]:
        """Logits after each row's last token, and what the next step goes on from.

        v are the ids that it drafts (:meth:`named`): the target's.
        """
        return run_pair(inputs.draft, state.drafter_state, last_two(state), state.length - 2)

    def follow(
        self,
        inputs: Inputs,
        state: DecodeState,
        carry: Any,
        token: Int[Array, "B 1"],
        depth: Int[Array, ""],
    ) -> tuple[Float[Array, "B v"], Any]:
        """Logits after one token more of a chain, which lies at ``depth`` below the root."""
        logits, cache, _ = inputs.draft.logits(carry, token, state.length - 1 + depth)
        return logits[:, 0], cache

    def level(
        self,
        inputs: Inputs,
        state: DecodeState,
        carry: Any,
        tokens: Int[Array, "B n"],
        bits: Bool[Array, "B T T"],
        above: Int[Array, "B n"],
    ) -> tuple[Float[Array, "B n v"], Any]:
        """Logits after a level of a tree, its last n nodes so far.

        ``bits`` are the ancestors of all T nodes, the root being the first; ``above`` says which
        one of the level before each hangs below.
        """
        first = bits.shape[-1] - tokens.shape[1]
        return run_level(inputs.draft, carry, tokens, state.length - 1, first, bits)

    def named(self, inputs: Inputs, drafted: Int[Array, "..."]) -> Int[Array, "..."]:
        """The target's ids of ids that it drafts."""
        return drafted

    def over_target(self, inputs: Inputs, rows: Float[Array, "... v"]) -> Float[Array, "... V"]:
        """Logits or log-probabilities over the target's ids: −inf where it drafts none."""
        return rows


def last_two(state: DecodeState) -> Int[Array, "B 2"]:
    """Each row's last two tokens; the first is scratch where the row has only one."""
    at = jnp.maximum(state.length[:, None] + jnp.arange(-2, 0), 0)
    return jnp.take_along_axis(state.tokens, at, axis=1)


def run_pair(
    net: Net, cache: KVCache, last: Int[Array, "B 2"], first: Int[Array, "B"]
) -> tuple[Float[Array, "B V"], KVCache]:
    """Logits after two tokens at positions ``first`` and ``first + 1``.

    What begins a round: the cache may then be one token short, so a fully accepted draft
    leaves no hole in it. A row of one token (``first = −1``) feeds that one first.
    """
    start = jnp.maximum(first, 0)
    inside = (start - first)[:, None] + jnp.arange(2, dtype=jnp.int32)
    tokens = jnp.take_along_axis(last, inside, axis=1, mode="clip")
    logits, cache, _ = net.logits(cache, tokens, start, at=(first + 1 - start)[:, None])
    return logits[:, 0], cache


class Drawn(NamedTuple):
    """A chain as it is drawn. ``window`` holds two known tokens, then the draft."""

    step: Int[Array, ""]
    cache: Any  # what the drafter goes on from
    window: Int[Array, "B 2+γ"]
    alive: Bool[Array, "B"]  # rows that go on
    calls: Int[Array, "B"]
    more: Any  # what else :func:`draw_chain`'s ``draw`` keeps


def draw_chain(
    begun: tuple[Float[Array, "B v"], Any],
    follow: Callable[..., tuple],
    last: Int[Array, "B 2"],
    alive: Bool[Array, "B"],
    gamma: int,
    draw: Callable[..., tuple],
    more: Any,
    passes: int | None = None,
) -> Drawn:
    """γ tokens one after another behind each row's ``last`` two.

    ``begun`` are the logits after those and what goes on from them; ``follow(carry, token[B, 1],
    depth)`` feeds the token just drawn. ``draw(step, logits[B, v], alive, more)`` returns the next
    token, who goes on, and the next ``more``. The loop ends when no row does, or after ``passes``:
    γ by default; what a further pass draws is dropped.
    """
    rows = last.shape[0]

    def push(d: Drawn, logits, cache) -> Drawn:
        token, going, more = draw(d.step, logits, d.alive, d.more)
        window = d.window.at[:, d.step + 2].set(token, mode="drop")
        return Drawn(d.step + 1, cache, window, going, d.calls + d.alive, more)

    def turn(d: Drawn) -> Drawn:
        token = jax.lax.dynamic_index_in_dim(d.window, d.step + 1, axis=1)
        return push(d, *follow(d.cache, token, d.step))

    window = jnp.pad(last, ((0, 0), (0, gamma)))
    logits, carry = begun
    start = Drawn(jnp.int32(0), carry, window, alive, jnp.zeros((rows,), jnp.int32), more)
    first = push(start, logits, carry)
    steps = gamma if passes is None else passes
    with jax.named_scope(DRAFTING):
        return jax.lax.while_loop(lambda d: (d.step < steps) & jnp.any(d.alive), turn, first)


def run_level(
    net: Net,
    cache: KVCache,
    tokens: Int[Array, "B n"],
    base: Int[Array, "B"],
    first: int,
    bits: Bool[Array, "B T T"],
) -> tuple[Float[Array, "B n V"], KVCache]:
    """Logits after the tree's nodes ``first … first + n − 1``, the levels above being prefilled.

    ``base`` is the root's cache position and token position, ``bits`` the ancestors of all nodes
    so far.
    """
    positions = base[:, None] + bits.sum(-1, dtype=jnp.int32) - 1
    new = slice(first, first + tokens.shape[1])
    start, own, visible = base + first, positions[:, new], bits[:, new]
    logits, cache, _ = net.logits(
        cache, tokens, start, own, visible, base=base, tree_positions=positions
    )
    return logits, cache


def unwarped_in(
    rows: Bool[Array, "B"], logits: Float[Array, "B n V"], log_q: Float[Array, "B n V"]
) -> Float[Array, "B n V"]:
    """``log_q``, but the unwarped log-probabilities in these rows."""
    return jnp.where(rows[:, None, None], probs.log_softmax(logits), log_q)
