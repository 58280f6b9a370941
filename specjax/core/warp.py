"""Sampling settings made into a distribution: temperature, top-k, top-p, then renormalized.

Target and draft are warped the same way. Settings are arrays, so no value recompiles. The
vocabulary is never sorted: :mod:`specjax.core.floor` finds the lowest logit that is kept. Further
truncations are in :mod:`specjax.core.cutoffs`.

Axis legend: B rows, N nodes, R = B·N, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax.core import probs, vocabulary
from specjax.core.cutoffs import cut_off, top_n_sigma
from specjax.core.floor import kth_largest, nucleus_floor
from specjax.core.types import Warp

COLDEST = 1e-20  # a lower temperature may overflow; here all but ties are point masses already


@jax.named_scope("draw")
def warp(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Warped float32 log-probabilities; −inf for a token that cannot be drawn.

    Temperature 0 gives a point mass on the argmax, the lowest id on a tie. A logit of −inf is a
    probability of 0. Differentiable in ``logits``; the cut itself is a constant.
    """
    flat, settings = _rows(logits, settings)
    greedy = settings.greedy[:, None]

    def argmax(x):
        return probs.one_hot_log(vocabulary.argmax(x), x.shape[-1])

    def sampled(x):
        top = vocabulary.largest(x, keepdims=True)
        x = (x - top) / _divisor(settings)[:, None]
        kept = _truncate(x, settings)
        drawn = kept - jnp.log(vocabulary.total(jnp.exp(kept), keepdims=True))
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
    # The settings of paths have acted before, and have other shapes.
    return flat, jax.tree.map(lambda x: jnp.repeat(x, nodes), settings.replace(path=None))


def truncate(logits: Float[Array, "B N V"], settings: Warp) -> Float[Array, "B N V"]:
    """Top-k, then top-p on the renormalized rest; what is cut becomes −inf.

    Top-k keeps every token with at least the k-th largest logit. Top-p keeps a token while the
    mass strictly above it is below p. So it keeps the token that crosses p, and at least one.
    """
    x, settings = _rows(logits, settings)
    kept = _truncate(x - vocabulary.largest(x, keepdims=True), settings) > probs.NEVER
    return jnp.where(kept.reshape(logits.shape), logits, probs.NEVER)


def _truncate(logits: Float[Array, "R V"], settings: Warp) -> Float[Array, "R V"]:
    """:func:`truncate` of rows whose largest logit is 0, and the cutoffs where there are any."""

    def cut(x, on, floor_of):
        def keep():
            # The floor is a constant for gradients: the search for it has no derivative.
            floor = floor_of(jax.lax.stop_gradient(x))
            return jnp.where(x >= floor[:, None], x, probs.NEVER)

        return jax.lax.cond(jnp.any(on), keep, lambda: x)

    k = settings.top_k
    p = settings.top_p
    if settings.cutoffs is not None:
        logits = top_n_sigma(logits, settings.cutoffs.top_n_sigma)
    limited = cut(logits, k > 0, lambda x: kth_largest(x, k))
    nucleus = cut(limited, p < 1, lambda x: nucleus_floor(x, p))
    if settings.cutoffs is not None:
        return cut_off(nucleus, settings.cutoffs)
    return nucleus
