"""The lowest value that a truncation keeps, found without sorting the vocabulary.

A search narrows two bounds around it. On CPUs and GPUs the 64 largest logits decide almost every
row without a search. On a TPU finding them costs more than the search.

Axis legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax._util.platform import platform
from specjax.core import probs, vocabulary

# The search narrows two bounds around the cut until one logit is left between them. Each
# iteration splits the range into PARTS in one pass over the vocabulary. On a CPU each sum costs a
# pass, so there an iteration halves the range HALVES times instead.
PARTS = 8
HALVES = 12
ITERATIONS = 64  # more than any finite logits need; logits of +inf must not hang the device
# Names of the search's loops in a compiled program.
SEARCHING = "top-p search"
COUNTING = "top-k search"


def kth_largest(x: Float[Array, "R V"], k: Int[Array, "R"]) -> Float[Array, "R"]:
    """The k-th largest logit; −inf if top-k is off. A small k reads it from the largest logits."""
    on = k > 0
    lowest = vocabulary.least(jnp.where(x > probs.NEVER, x, jnp.inf))

    @jax.named_scope(COUNTING)
    def search(rows, highest):
        return find_floor(x, jnp.ones_like, k.astype(jnp.float32), (lowest, highest), rows)

    def near(largest):
        count = largest.shape[-1]
        floor = probs.at_index(largest, jnp.clip(k, 1, count) - 1)
        return floor, on & (k <= count)

    return jnp.where(on, _near_or_far(x, near, search, on), probs.NEVER)


def nucleus_floor(x: Float[Array, "R V"], p: Float[Array, "R"]) -> Float[Array, "R"]:
    """The smallest logit that top-p keeps; −inf if it is off."""
    on = p < 1
    goal = p * vocabulary.total(jnp.exp(x))

    @jax.named_scope(SEARCHING)
    def search(rows, highest):
        # All tokens below this together have less than 1 − p of the mass: the floor is above it.
        lowest = jnp.log((1 - p) / vocabulary.size(x.shape[-1])) - 1
        return find_floor(x, jnp.exp, goal, (lowest, highest), rows)

    def near(largest):
        mass = jnp.exp(largest)
        above = jnp.cumsum(mass, axis=-1) - mass
        floor = jnp.min(jnp.where(above < goal[:, None], largest, jnp.inf), axis=-1)
        return floor, on & (mass.sum(-1) >= goal)

    return jnp.where(on, _near_or_far(x, near, search, on), probs.NEVER)


def _near_or_far(x, near, search, on: Bool[Array, "R"]) -> Float[Array, "R"]:
    """Each row's floor: from its largest logits if they decide it, else by a search.

    ``near(largest)`` returns floors, and the rows where they are right. ``search(rows, highest)``
    returns those of ``rows``, given an upper bound per row. Which of the two a row uses depends on
    that row alone.
    """
    count = min(platform().largest_logits, vocabulary.size(x.shape[-1]))
    if count == 0:
        return search(on, jnp.zeros_like(x[:, 0]))
    largest = vocabulary.top_k(x, count, jax.lax.top_k)[0]
    floor, known = near(largest)
    far = on & ~known

    def beyond():
        return jnp.where(far, search(far, largest[:, -1]), floor)

    return jax.lax.cond(jnp.any(far), beyond, lambda: floor)


def find_floor(
    x: Float[Array, "R V"],
    weight: Callable[[Array], Array],
    goal: Float[Array, "R"],
    bounds: tuple[Float[Array, "R"], Float[Array, "R"]],
    rows: Bool[Array, "R"],
) -> Float[Array, "R"]:
    """The least logit in ``bounds`` with less than ``goal`` of ``weight(x)`` strictly above it.

    Only for ``rows``; other rows get any number. The search ends when one logit is left between
    the bounds. For logits that were bfloat16 that takes three or four iterations of
    :data:`PARTS`. A row that is done does not change any more.
    """
    split = _halve if platform().halves_search else _part

    def more(carry):
        return (carry[0] < ITERATIONS) & jnp.any(carry[-1])

    def narrow(carry):
        iteration, low, high, open_ = carry  # the floor is above low and at most high
        above = jnp.where(x > low[:, None], x, jnp.inf)
        below = jnp.where(x <= high[:, None], x, -jnp.inf)
        least, most = _reduce_vocabulary(jnp.max, -jnp.inf, [-above, below]).T
        least = -least
        found = least >= most
        new_low, new_high = split(x, weight(x), goal, low, high)
        low = jnp.where(open_ & ~found, new_low, low)
        high = jnp.where(open_, jnp.where(found, most, jnp.minimum(new_high, most)), high)
        return iteration + 1, low, high, open_ & ~found

    lowest, highest = bounds
    # The floor may be the lowest logit itself, and it must lie strictly above ``low``.
    start = (jnp.int32(0), jnp.nextafter(lowest, -jnp.inf), highest, rows)
    return jax.lax.while_loop(more, narrow, start)[2]


def _part(x, mass, goal, low, high):
    """The bounds after one pass that sums the weight above each of ``PARTS − 1`` values."""
    at = low[:, None] + (high - low)[:, None] * jnp.arange(1, PARTS) / PARTS
    above = _reduce_vocabulary(jnp.sum, 0.0, [jnp.where(x > v[:, None], mass, 0.0) for v in at.T])
    higher = above >= goal[:, None]
    low = jnp.max(jnp.where(higher, at, low[:, None]), axis=-1)
    return low, jnp.min(jnp.where(higher, high[:, None], at), axis=-1)


def _reduce_vocabulary(
    reduce: Callable[..., Array], neutral: float, arrays: Sequence[Float[Array, "R V"]]
) -> Float[Array, "R n"]:
    """Each array reduced over the vocabulary; ``neutral`` changes no result."""
    blocks = platform().vocab_blocks
    if blocks == 1:
        reduced = jnp.stack([reduce(x, axis=-1) for x in arrays], axis=-1)
        return vocabulary.across(reduce, reduced)

    rows, vocab = arrays[0].shape
    size = -(-vocab // blocks)  # rounded up
    padding = ((0, 0), (0, blocks * size - vocab))

    def by_block(x):
        padded = jnp.pad(x, padding, constant_values=neutral)
        return reduce(padded.reshape(rows, blocks, size), axis=-1)

    reduced = reduce(jnp.stack([by_block(x) for x in arrays], axis=1), axis=-1)
    return vocabulary.across(reduce, reduced)


def _halve(x, mass, goal, low, high):
    """The bounds after ``HALVES`` passes that each sum the weight above the middle."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        higher = vocabulary.total(jnp.where(x > middle[:, None], mass, 0.0)) >= goal
        return jnp.where(higher, middle, low), jnp.where(higher, high, middle)

    return jax.lax.fori_loop(0, HALVES, halve, (low, high))
