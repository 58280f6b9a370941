"""Block verification (Sun et al. 2024, Algorithm 2). Lossless.

Accepts a whole block at a time: a token that speculative sampling would refuse may still stand
when what follows it makes the block likely enough. In expectation it accepts no fewer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.protocols import rule
from specjax.core.types import IID, POINT_MASS
from specjax.verify.speculative_sampling import speculative
from specjax.verify.verdicts import (
    chain_verdict,
    draft_length,
    draft_row,
    draft_rows,
    drafted_log_probs,
)


@rule(accepts=(IID, POINT_MASS), lossless=True)
def block(keys, draft, log_p):
    """Accept the longest prefix that passes, with the chain's running weight.

    ``w_0 = 1``, ``w_i = min(1, w_{i−1} p(x_i)/q(x_i))``. For i < γ the prefix of i tokens passes
    with ``h_i = Z_i / (Z_i + 1 − w_i)``, ``Z_i = Σ_x max(0, w_i p(x|x_≤i) − q(x|x_≤i))``; the
    whole draft with ``h_γ = w_γ``. The **largest** i that passes is accepted: a later one rescues
    earlier failures. Then a bonus from p, or a draw from ``norm(max(0, w_n p − q))``.

    Arguments as :func:`specjax.verify.speculative`.
    """
    if draft.shape.depth == 0:
        return speculative.verify(keys, draft, log_p)  # nothing to accept: a draw from p
    lp, lq = drafted_log_probs(draft, log_p)
    gamma = draft_length(draft)
    weight = _running_weights(jnp.where(lp > probs.NEVER, jnp.exp(lp - lq), 0.0))
    index = jnp.arange(1, lp.shape[1] + 1)
    chance = jnp.where(index == gamma[:, None], weight, _interior(draft, log_p, weight))
    u = probs.uniforms(keys, Purpose.ACCEPT, jnp.broadcast_to(index, lp.shape))
    passed = (u <= chance) & draft.valid[:, 1:]
    accepted = jnp.max(jnp.where(passed, index, 0), axis=1, initial=0).astype(jnp.int32)
    refused = accepted < gamma

    before = jnp.pad(weight, ((0, 0), (1, 0)), constant_values=1.0)  # w_0 … w_γ
    p = jnp.exp(probs.at_node(log_p, accepted))
    q = jnp.exp(draft_row(draft, accepted, log_p.shape[-1]))
    left = probs.residual(probs.at_token(before, accepted)[:, None] * p, q)
    weights = jnp.where(refused[:, None], left, p)
    return chain_verdict(keys, draft, accepted, refused, weights, tested=gamma)


def _running_weights(ratio):
    """``w_1 … w_γ`` of the ratios ``p(x_i)/q(x_i)``, float32 ``[B, γ]``."""

    def step(weight, ratio):
        weight = jnp.minimum(1.0, weight * ratio)
        return weight, weight

    return jax.lax.scan(step, jnp.ones_like(ratio[:, 0]), ratio.T)[1].T


def _interior(draft, log_p, weight):
    """``h_i`` for prefixes that the draft goes on from; the last column is never used."""
    p, q = jnp.exp(log_p[:, 1:-1]), jnp.exp(draft_rows(draft, log_p.shape[-1])[:, 1:])
    mass = jnp.maximum(weight[:, :-1, None] * p - q, 0.0).sum(-1)
    below = mass + 1.0 - weight[:, :-1]
    chance = jnp.where(below > 0, mass / jnp.where(below > 0, below, 1.0), 1.0)
    return jnp.concatenate([chance, weight[:, -1:]], axis=1)
