"""Sampling settings made into a distribution: temperature, top-k, top-p, then renormalized.

Target and draft are warped the same way. Settings are arrays, so no value recompiles. The
vocabulary is never sorted: a search finds the lowest logit that is kept. On CPUs and GPUs the 64
largest logits decide almost every row without a search. On a TPU finding them costs more than the
search.

Axis legend: B rows, N nodes, R = B·N, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import validate_fields
from specjax._util.checks import Check
from specjax._util.platform import platform
from specjax.core import probs
from specjax.core.types import Warp

LEAST = 1e-30  # smallest top_p: far below, float32 makes it 0, which would keep no token
# The search narrows two bounds around the cut until one logit is left between them. Each turn
# splits the range into PARTS in one pass over the vocabulary. On a CPU each sum costs a pass, so
# there a turn halves the range HALVES times instead.
PARTS = 8
HALVES = 12
PASSES = 64  # more turns than any finite logits need; logits of +inf must not hang the device
# Names of the search's loops in a compiled program.
SEARCHING = "top-p search"
COUNTING = "top-k search"
COLDEST = 1e-20  # a lower temperature may overflow; here all but ties are point masses already


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: ``temperature`` ≥ 0 (0 is greedy), ``top_k`` ≥ 0 (0 is off),
    ``top_p`` in (0, 1] (1 is off).

    Raises:
      OptionError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        validate_fields(
            self,
            temperature=Check(float, low=0, high=1e38),  # what float32 holds
            top_k=Check(int, low=0, high=2**31 - 1),  # what int32 holds
            top_p=Check(float, above=0, high=1),
        )

    def arrays(self, batch: int) -> Warp:
        """The settings as arrays for ``batch`` rows."""
        return stacked([self] * batch)


def stacked(rows: Sequence[Sampling]) -> Warp:
    """The settings of each row as arrays."""
    return Warp(
        jnp.array([row.temperature for row in rows], jnp.float32),
        jnp.array([row.top_k for row in rows], jnp.int32),
        jnp.array([max(row.top_p, LEAST) for row in rows], jnp.float32),
    )


@jax.named_scope("draw")
def warp(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Warped float32 log-probabilities; −inf for a token that cannot be drawn.

    Temperature 0 gives a point mass on the argmax, the lowest id on a tie. A logit of −inf is a
    probability of 0. Differentiable in ``logits``; the cut itself is a constant.
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
        # In a batch of both kinds, both are computed and each row keeps its own.
        return jax.lax.cond(
            jnp.any(greedy), lambda: jnp.where(greedy, argmax(x), drawn), lambda: drawn
        )

    return jax.lax.cond(jnp.all(greedy), argmax, sampled, flat).reshape(logits.shape)


def draw_joint(
    keys: Key[Array, "B"], log_joint: Float[Array, "B n"], settings: Warp, whole: bool
) -> Float[Array, "B n"]:
    """Scores to rank hypotheses by: the n best of a sampled row are n draws from their joint.

    They are ``log_joint`` plus Gumbel noise, so the draws are without replacement. In greedy rows
    they are ``log_joint`` itself. ``whole`` warps the joint first, as :func:`warp_joint`.
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


def reweigh_draws(log_joint: Float[Array, "B n"], settings: Warp) -> Float[Array, "B n"]:
    """Log-weights of n draws from a joint, with which one of them is drawn from the warped joint.

    These are importance weights ``p^(1/T − 1)``. At temperature 1 without top-p each draw counts
    once, which is exact. Otherwise it is an approximation that gets better with n. Top-p keeps a
    draw while strictly likelier ones have less than p of the weight, which estimates the joint's
    own mass. Top-k is not read.
    """
    likeliest = jnp.max(log_joint, axis=-1, keepdims=True)
    power = 1.0 / _divisor(settings)[:, None] - 1.0
    weights = power * (log_joint - likeliest)
    share = jax.nn.softmax(weights, axis=-1)
    likelier = log_joint[:, None, :] > log_joint[:, :, None]
    mass_above = jnp.sum(jnp.where(likelier, share[:, None, :], 0.0), axis=-1)
    return jnp.where(mass_above < settings.top_p[:, None], weights, probs.NEVER)


def tempered(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Logits divided by the temperature; unchanged in greedy rows."""
    return logits / _divisor(settings)[:, None, None]


def _divisor(settings: Warp) -> Float[Array, "R"]:
    return jnp.where(settings.greedy, 1.0, jnp.maximum(settings.temperature, COLDEST))


def _rows(logits: Float[Array, "B N V"], settings: Warp) -> tuple[Float[Array, "R V"], Warp]:
    """All nodes as rows of one matrix: a short axis of nodes would leave a TPU's lanes empty."""
    nodes, vocab = logits.shape[1:]
    flat = logits.astype(jnp.float32).reshape(-1, vocab)
    return flat, jax.tree.map(lambda x: jnp.repeat(x, nodes), settings)


def truncate(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Top-k, then top-p on the renormalized rest; what is cut becomes −inf.

    Top-k keeps every token with at least the k-th largest logit. Top-p keeps a token while the
    mass strictly above it is below p. So it keeps the token that crosses p, and at least one.
    """
    x, settings = _rows(logits, settings)
    kept = _truncate(x - jnp.max(x, axis=-1, keepdims=True), settings) > probs.NEVER
    return jnp.where(kept.reshape(logits.shape), logits, probs.NEVER)


def _truncate(logits: Float[Array, "R V"], settings: Warp) -> Float[Array, "R V"]:
    """:func:`truncate` of rows whose largest logit is 0."""

    def cut(x, on, floor_of):
        def keep():
            # The floor is a constant for gradients: the search for it has no derivative.
            floor = floor_of(jax.lax.stop_gradient(x))
            return jnp.where(x >= floor[:, None], x, probs.NEVER)

        return jax.lax.cond(jnp.any(on), keep, lambda: x)

    k = settings.top_k
    p = settings.top_p
    limited = cut(logits, k > 0, lambda x: _kth_largest(x, k))
    return cut(limited, p < 1, lambda x: _nucleus_floor(x, p))


def _kth_largest(x: Float[Array, "R V"], k: Int[Array, "R"]) -> Float[Array, "R"]:
    """The k-th largest logit; −inf if top-k is off. A small k reads it from the largest logits."""
    on = k > 0
    lowest = jnp.min(jnp.where(x > probs.NEVER, x, jnp.inf), axis=-1)

    @jax.named_scope(COUNTING)
    def search(rows, highest):
        return _floor(x, jnp.ones_like, k.astype(jnp.float32), (lowest, highest), rows)

    def near(largest):
        count = largest.shape[-1]
        floor = probs.at_token(largest, jnp.clip(k, 1, count) - 1)
        return floor, on & (k <= count)

    return jnp.where(on, _near_or_far(x, near, search, on), probs.NEVER)


def _nucleus_floor(x: Float[Array, "R V"], p: Float[Array, "R"]) -> Float[Array, "R"]:
    """The smallest logit that top-p keeps; −inf if it is off."""
    on = p < 1
    goal = p * jnp.exp(x).sum(-1)

    @jax.named_scope(SEARCHING)
    def search(rows, highest):
        # All tokens below this together have less than 1 − p of the mass: the floor is above it.
        lowest = jnp.log((1 - p) / x.shape[-1]) - 1
        return _floor(x, jnp.exp, goal, (lowest, highest), rows)

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
    count = min(platform().largest_logits, x.shape[-1])
    if count == 0:
        return search(on, jnp.zeros_like(x[:, 0]))
    largest = jax.lax.top_k(x, count)[0]
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

    Only for ``rows``; other rows get any number. The search ends when one logit is left between
    the bounds. For logits that were bfloat16 that takes three or four turns of :data:`PARTS`. A
    row that is done does not change any more.
    """
    split = _halve if platform().halves_search else _part

    def more(carry):
        return (carry[0] < PASSES) & jnp.any(carry[-1])

    def narrow(carry):
        turn, low, high, open_ = carry  # the floor is above low and at most high
        above = jnp.where(x > low[:, None], x, jnp.inf)
        below = jnp.where(x <= high[:, None], x, -jnp.inf)
        least, most = _reduce_vocabulary(jnp.max, -jnp.inf, [-above, below]).T
        least = -least
        found = least >= most
        new_low, new_high = split(x, weight(x), goal, low, high)
        low = jnp.where(open_ & ~found, new_low, low)
        high = jnp.where(open_, jnp.where(found, most, jnp.minimum(new_high, most)), high)
        return turn + 1, low, high, open_ & ~found

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
        return jnp.stack([reduce(x, axis=-1) for x in arrays], axis=-1)

    rows, vocab = arrays[0].shape
    size = -(-vocab // blocks)  # rounded up
    padding = ((0, 0), (0, blocks * size - vocab))

    def by_block(x):
        padded = jnp.pad(x, padding, constant_values=neutral)
        return reduce(padded.reshape(rows, blocks, size), axis=-1)

    return reduce(jnp.stack([by_block(x) for x in arrays], axis=1), axis=-1)


def _halve(x, mass, goal, low, high):
    """The bounds after ``HALVES`` passes that each sum the weight above the middle."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        higher = jnp.sum(jnp.where(x > middle[:, None], mass, 0.0), -1) >= goal
        return jnp.where(higher, middle, low), jnp.where(higher, high, middle)

    return jax.lax.fori_loop(0, HALVES, halve, (low, high))
