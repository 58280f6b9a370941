"""Warping: temperature, then top-k, then top-p, then renormalise; target and draft alike.

Settings are arrays, so no value recompiles, and the vocabulary is never fully sorted: the
64 largest logits decide almost every row, a bisection over float bit patterns the rest.

Axis legend: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax import probs
from specjax.arguments import Must, settle
from specjax.types import Warp

TOP = 64  # the fast path looks at this many of the largest logits
LEAST = 1e-30  # a top_p: in float32 what is far below would be 0, and keep nothing
COLDEST = 1e-20  # below, quotients overflow; at it, all but ties is a point mass already


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: ``temperature`` ≥ 0 (0 is greedy), ``top_k`` ≥ 0 (0 is off),
    ``top_p`` in (0, 1] (1 is off)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        hottest, most = 1e38, 2**31 - 1  # what float32 and int32 hold
        settle(self, temperature=Must(float, low=0, high=hottest))
        settle(self, top_k=Must(int, low=0, high=most), top_p=Must(float, above=0, high=1))

    def arrays(self, batch: int) -> Warp:
        """The settings as arrays for ``batch`` rows."""
        return Warp(
            jnp.full((batch,), self.temperature, jnp.float32),
            jnp.full((batch,), self.top_k, jnp.int32),
            jnp.full((batch,), max(self.top_p, LEAST), jnp.float32),
        )


def warp(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Warped float32 log-probabilities; −inf where a token cannot be drawn.

    Temperature 0 gives a point mass on the argmax, the lowest id on a tie. A logit of −inf is a
    probability of 0.
    """
    logits = logits.astype(jnp.float32)
    greedy = (settings.temperature == 0)[:, None, None]

    def argmax(x):
        return probs.one_hot_log(jnp.argmax(x, axis=-1), x.shape[-1])

    def sampled(x):
        x = tempered(x, settings)
        drawn = probs.log_softmax(truncate(x, settings))
        # In a mixed batch both kinds of row are computed and each keeps its own.
        return jax.lax.cond(
            jnp.any(greedy), lambda: jnp.where(greedy, argmax(x), drawn), lambda: drawn
        )

    return jax.lax.cond(jnp.all(greedy), argmax, sampled, logits)


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
    temperature = jnp.where(settings.greedy, 1.0, jnp.maximum(settings.temperature, COLDEST))
    return logits / temperature[:, None, None]


def truncate(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Top-k, then top-p on the renormalised rest; what is cut becomes −inf.

    Top-k keeps every token ≥ the k-th logit. Top-p keeps a token while the mass strictly
    above it is below p: the one that crosses p included, at least one.
    """
    on = jnp.any((settings.top_k > 0) | (settings.top_p < 1))
    return jax.lax.cond(on, lambda x: _truncate(x, settings), lambda x: x, logits)


def _truncate(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    vocab = logits.shape[-1]
    largest = jax.lax.top_k(logits, min(TOP, vocab))[0]
    k = jnp.broadcast_to(
        jnp.where(settings.top_k > 0, settings.top_k, vocab)[:, None], logits.shape[:2]
    )
    p = jnp.broadcast_to(settings.top_p[:, None], logits.shape[:2])
    floor = _kth_largest(logits, largest, jnp.minimum(k, vocab))
    logits = jnp.where(logits >= floor[..., None], logits, probs.NEVER)
    floor = _nucleus_floor(logits, largest, floor, p)
    return jnp.where(logits >= floor[..., None], logits, probs.NEVER)


def _kth_largest(logits, largest, k: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """The k-th largest logit: read off where k is small, else by bisection."""
    top, vocab = largest.shape[-1], logits.shape[-1]
    near = probs.at_token(largest, jnp.minimum(k, top) - 1)
    far = (k > top) & (k < vocab)

    def search():
        def enough(floor):  # at least k logits reach the floor
            return jnp.sum(logits >= floor[..., None], axis=-1) >= k

        return _bisect(enough, largest[..., 0])

    exact = jax.lax.cond(jnp.any(far), search, lambda: near)
    return jnp.where(k >= vocab, probs.NEVER, jnp.where(far, exact, near))


def _nucleus_floor(logits, largest, floor, p: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """The smallest logit kept by top-p; each row decides by its own path alone."""
    total = jax.nn.logsumexp(logits, axis=-1)
    kept = largest >= floor[..., None]
    mass = jnp.where(kept, jnp.exp(largest - total[..., None]), 0.0)
    above = jnp.cumsum(mass, axis=-1) - mass
    near = jnp.min(jnp.where(kept & (above < p[..., None]), largest, jnp.inf), axis=-1)
    # Tokens past the 64 largest are needed where those do not reach p and some are left.
    far = (mass.sum(-1) < p) & (jnp.sum(logits > probs.NEVER, axis=-1) > largest.shape[-1])

    def search():
        share = jnp.exp(logits - total[..., None])

        def outside(value):  # the mass strictly above still reaches p: the floor is higher
            return jnp.sum(jnp.where(logits > value[..., None], share, 0.0), axis=-1) >= p

        return _bisect(outside, largest[..., 0], strict=True)

    exact = jax.lax.cond(jnp.any(far), search, lambda: near)
    return jnp.where(p >= 1, probs.NEVER, jnp.where(far, exact, near))


def _bisect(holds, top: Float[Array, "B N"], strict: bool = False) -> Float[Array, "B N"]:
    """The boundary of a predicate on floats that holds for low values, exact to the bit.

    Returns the largest float ≤ ``top`` that holds, or with ``strict`` the smallest that
    does not. 32 halvings of the order-preserving integer image of float32.
    """

    def halve(_, bounds):
        low, high = bounds  # holds(low), not holds(high), as ordered integers
        # The halves first: low + high would overflow.
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        yes = holds(_from_ordered(middle))
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    low = jnp.full(top.shape, _to_ordered(jnp.float32(-jnp.inf)))
    low, high = jax.lax.fori_loop(0, 33, halve, (low, _to_ordered(top) + 1))
    return _from_ordered(high if strict else low)


def _to_ordered(x: Float[Array, "..."]) -> Int[Array, "..."]:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)
