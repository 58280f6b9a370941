"""Warping: temperature, then top-k, then top-p, then renormalize; target and draft alike.

Settings are arrays, so no value recompiles, and the vocabulary is never sorted: where it is cut is
searched for, a few values at a time. Off the TPU, whose top-k is dear, the 64 largest logits decide
almost every row first.

Axis legend: B rows, N nodes, R = B·N, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import ArgSpec, validate_fields
from specjax.core import probs
from specjax.core.types import Warp

TOP = 64  # the fast path looks at this many of the largest logits
LEAST = 1e-30  # a top_p: in float32 what is far below would be 0, and keep nothing
# What the search for a cut does before it looks whether one logit is left: a pass over the
# vocabulary splits what is left into so many parts, or on a CPU, where sums are what costs, halves.
PARTS, HALVES = 8, 12
PASSES = 64  # more than any finite logits need; logits of +inf must not hang the device
SEARCHING, COUNTING = "top-p search", "top-k search"  # its loops' names in a compiled program
COLDEST = 1e-20  # below, quotients may overflow; at it, all but ties is a point mass already


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: ``temperature`` ≥ 0 (0 is greedy), ``top_k`` ≥ 0 (0 is off),
    ``top_p`` in (0, 1] (1 is off)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        hottest, most = 1e38, 2**31 - 1  # what float32 and int32 hold
        validate_fields(self, temperature=ArgSpec(float, low=0, high=hottest))
        validate_fields(
            self, top_k=ArgSpec(int, low=0, high=most), top_p=ArgSpec(float, above=0, high=1)
        )

    def arrays(self, batch: int) -> Warp:
        """The settings as arrays for ``batch`` rows."""
        return stacked([self] * batch)


def stacked(rows: Sequence[Sampling]) -> Warp:
    """Settings of each row's own as arrays."""
    return Warp(
        jnp.array([row.temperature for row in rows], jnp.float32),
        jnp.array([row.top_k for row in rows], jnp.int32),
        jnp.array([max(row.top_p, LEAST) for row in rows], jnp.float32),
    )


@jax.named_scope("draw")
def warp(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Warped float32 log-probabilities; −inf where a token cannot be drawn.

    Temperature 0 gives a point mass on the argmax, the lowest id on a tie. A logit of −inf is a
    probability of 0.
    """
    flat, settings = _rows(logits, settings)
    greedy = settings.greedy[:, None]

    def argmax(x):
        return probs.one_hot_log(jnp.argmax(x, axis=-1), x.shape[-1])

    def sampled(x):
        top = jnp.max(x, axis=-1, keepdims=True)
        x = (x - top) / _divisor(settings)[:, None]
        kept = _truncate(x, settings)
        drawn = kept - jnp.log(jnp.sum(jnp.exp(kept), axis=-1, keepdims=True))
        # In a mixed batch both kinds of row are computed and each keeps its own.
        return jax.lax.cond(
            jnp.any(greedy), lambda: jnp.where(greedy, argmax(x), drawn), lambda: drawn
        )

    return jax.lax.cond(jnp.all(greedy), argmax, sampled, flat).reshape(logits.shape)


def draw_joint(
    keys: Key[Array, "B"], log_joint: Float[Array, "B n"], settings: Warp, whole: bool
) -> Float[Array, "B n"]:
    """What hypotheses are ranked by: the first n of a sampled row are n draws of their joint.

    ``log_joint`` with Gumbel noise, so draws without replacement; itself in greedy rows.
    ``whole`` warps it first, as :func:`warp_joint`.
    """
    if whole:
        log_joint = warp_joint(log_joint, settings)
    return log_joint + probs.gumbel(keys, log_joint.shape[1], ~settings.greedy)


def warp_joint(log_joint: Float[Array, "B n"], settings: Warp) -> Float[Array, "B n"]:
    """The joint of a row's hypotheses warped as one distribution over them.

    T ∘ p_beam of Qin et al. 2024, eq. 2; ``log_joint`` itself in greedy rows.
    """
    warped = warp(log_joint[:, None], settings)[:, 0]
    return jnp.where(settings.greedy[:, None], log_joint, warped)


def tempered(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Logits over the temperature; as they are in greedy rows."""
    return logits / _divisor(settings)[:, None, None]


def _divisor(settings: Warp) -> Float[Array, "R"]:
    return jnp.where(settings.greedy, 1.0, jnp.maximum(settings.temperature, COLDEST))


def _rows(logits: Float[Array, "B N V"], settings: Warp) -> tuple[Float[Array, "R V"], Warp]:
    """A row of one matrix per node: beside a short axis of nodes a TPU leaves its lanes empty."""
    nodes, vocab = logits.shape[1:]
    flat = logits.astype(jnp.float32).reshape(-1, vocab)
    return flat, jax.tree.map(lambda x: jnp.repeat(x, nodes), settings)


def truncate(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Top-k, then top-p on the renormalized rest; what is cut becomes −inf.

    Top-k keeps every token ≥ the k-th logit. Top-p keeps a token while the mass strictly
    above it is below p: the one that crosses p included, at least one.
    """
    x, settings = _rows(logits, settings)
    kept = _truncate(x - jnp.max(x, axis=-1, keepdims=True), settings) > probs.NEVER
    return jnp.where(kept.reshape(logits.shape), logits, probs.NEVER)


def _truncate(logits: Float[Array, "R V"], settings: Warp) -> Float[Array, "R V"]:
    """:func:`truncate` of rows whose largest logit is 0."""

    def cut(x, on, floor_of):
        def keep():
            # Where the cut lies has no gradient, and the search for it no derivative.
            floor = floor_of(jax.lax.stop_gradient(x))
            return jnp.where(x >= floor[:, None], x, probs.NEVER)

        return jax.lax.cond(jnp.any(on), keep, lambda: x)

    k, p = settings.top_k, settings.top_p
    limited = cut(logits, k > 0, lambda x: _kth_largest(x, k))
    return cut(limited, p < 1, lambda x: _nucleus_floor(x, p))


def _kth_largest(x: Float[Array, "R V"], k: Int[Array, "R"]) -> Float[Array, "R"]:
    """The k-th largest logit: read off where k is small; −inf where top-k is off."""
    on, lowest = k > 0, jnp.min(jnp.where(x > probs.NEVER, x, jnp.inf), axis=-1)

    @jax.named_scope(COUNTING)
    def search(rows, highest):
        return _floor(x, jnp.ones_like, k.astype(jnp.float32), (lowest, highest), rows)

    def near(largest):
        return probs.at_token(largest, jnp.clip(k, 1, TOP) - 1), on & (k <= largest.shape[-1])

    return jnp.where(on, _near_or_far(x, near, search, on), probs.NEVER)


def _nucleus_floor(x: Float[Array, "R V"], p: Float[Array, "R"]) -> Float[Array, "R"]:
    """The smallest logit kept by top-p, −inf where it is off."""
    on, goal = p < 1, p * jnp.exp(x).sum(-1)

    @jax.named_scope(SEARCHING)
    def search(rows, highest):
        # What lies below this is a share of less than 1 − p, so the floor is above it.
        lowest = jnp.log((1 - p) / x.shape[-1]) - 1
        return _floor(x, jnp.exp, goal, (lowest, highest), rows)

    def near(largest):
        mass = jnp.exp(largest)
        above = jnp.cumsum(mass, axis=-1) - mass
        floor = jnp.min(jnp.where(above < goal[:, None], largest, jnp.inf), axis=-1)
        return floor, on & (mass.sum(-1) >= goal)

    return jnp.where(on, _near_or_far(x, near, search, on), probs.NEVER)


def _near_or_far(x, near, search, on: Bool[Array, "R"]) -> Float[Array, "R"]:
    """``near(largest)`` and where it is known, else ``search(rows, highest)``: its upper bounds.

    Each row decides by its own path alone.
    """
    if jax.default_backend() == "tpu":
        return search(on, jnp.zeros_like(x[:, 0]))
    largest = jax.lax.top_k(x, min(TOP, x.shape[-1]))[0]
    floor, known = near(largest)
    far = on & ~known

    def beyond():
        return jnp.where(far, search(far, largest[:, -1]), floor)

    return jax.lax.cond(jnp.any(far), beyond, lambda: floor)


def _floor(
    x: Float[Array, "R V"],
    weight: Callable[[Array], Array],
    goal: Float[Array, "R"],
    bounds: tuple[Float[Array, "R"], Float[Array, "R"]],
    rows: Bool[Array, "R"],
) -> Float[Array, "R"]:
    """The least logit in ``bounds`` with less than ``goal`` of ``weight(x)`` strictly above it.

    In ``rows``; elsewhere anything. The search ends when one logit is left between the bounds:
    after three or four turns of :data:`PARTS` for logits that came of bfloat16. A row that is done
    does not move.
    """
    split = _halve if jax.default_backend() == "cpu" else _part

    def more(carry):
        return (carry[0] < PASSES) & jnp.any(carry[-1])

    def narrow(carry):
        turn, low, high, open_ = carry  # the floor is above low and at most high
        least = jnp.min(jnp.where(x > low[:, None], x, jnp.inf), axis=-1)
        most = jnp.max(jnp.where(x <= high[:, None], x, -jnp.inf), axis=-1)
        found = least >= most
        new_low, new_high = split(x, weight(x), goal, low, high)
        low = jnp.where(open_ & ~found, new_low, low)
        high = jnp.where(open_, jnp.where(found, most, jnp.minimum(new_high, most)), high)
        return turn + 1, low, high, open_ & ~found

    lowest, highest = bounds
    start = jnp.int32(0), jnp.nextafter(lowest, -jnp.inf), highest, rows
    return jax.lax.while_loop(more, narrow, start)[2]


def _part(x, mass, goal, low, high):
    """The bounds after a pass that weighs what lies above each of ``PARTS − 1`` values."""
    at = low[:, None] + (high - low)[:, None] * jnp.arange(1, PARTS) / PARTS
    above = [jnp.sum(jnp.where(x > v[:, None], mass, 0.0), -1) for v in at.T]
    higher = jnp.stack(above, -1) >= goal[:, None]
    low = jnp.max(jnp.where(higher, at, low[:, None]), axis=-1)
    return low, jnp.min(jnp.where(higher, high[:, None], at), axis=-1)


def _halve(x, mass, goal, low, high):
    """The bounds after ``HALVES`` passes that weigh what lies above their middle."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        higher = jnp.sum(jnp.where(x > middle[:, None], mass, 0.0), -1) >= goal
        return jnp.where(higher, middle, low), jnp.where(higher, high, middle)

    return jax.lax.fori_loop(0, HALVES, halve, (low, high))
