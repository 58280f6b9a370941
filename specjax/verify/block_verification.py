"""Block verification (Sun et al. 2024, Algorithm 2). Lossless.

It judges a draft as a block. A token that speculative sampling would reject may be accepted, if
what follows makes the block likely enough. The expected number of accepted tokens is never lower.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.core import probs, vocabulary
from specjax.core.protocols import rule
from specjax.core.types import IID, POINT_MASS
from specjax.verify.speculative_sampling import speculative
from specjax.verify.verdicts import (
    acceptance_uniforms,
    all_log_q,
    chain_verdict,
    draft_length,
    drafted_log_probs,
    log_q_after,
)


@rule(accepts=(IID, POINT_MASS), lossless=True, splits_vocabulary=True)
def block(keys, draft, log_p):
    """Accept the **longest** prefix that passes, even if shorter ones fail.

    Running weights: ``w_0 = 1``, ``w_i = min(1, w_{i−1} p(x_i)/q(x_i))``. A prefix of i < γ tokens
    passes with probability ``h_i = Z_i / (Z_i + 1 − w_i)``, where
    ``Z_i = Σ_x max(0, w_i p(x|x_≤i) − q(x|x_≤i))``. The whole draft passes with ``h_γ = w_γ``.

    After n accepted tokens, one is drawn from ``norm(max(0, w_n p − q))``, or a bonus token from p
    if n = γ. Arguments as :func:`specjax.verify.speculative`.
    """
    if draft.shape.depth == 0:
        return speculative.verify(keys, draft, log_p)  # no draft: one token from p
    log_p_x, log_q_x = drafted_log_probs(draft, log_p)
    gamma = draft_length(draft)

    # A token that p excludes has ratio 0: −inf − −inf would be NaN.
    weight = _running_weights(jnp.where(log_p_x > probs.NEVER, jnp.exp(log_p_x - log_q_x), 0.0))
    length = jnp.arange(1, log_p_x.shape[1] + 1)
    h = jnp.where(length == gamma[:, None], weight, _prefix_chances(draft, log_p, weight))
    u = acceptance_uniforms(keys, draft, first=1)
    passed = (u <= h) & draft.valid[:, 1:]
    accepted = jnp.max(jnp.where(passed, length, 0), axis=1, initial=0).astype(jnp.int32)
    rejected = accepted < gamma

    p = jnp.exp(probs.at_node(log_p, accepted))
    q = jnp.exp(log_q_after(draft, accepted, log_p.shape[-1]))
    weight_from_0 = jnp.pad(weight, ((0, 0), (1, 0)), constant_values=1.0)  # w_0 … w_γ
    w = probs.at_index(weight_from_0, accepted)
    weights = jnp.where(rejected[:, None], probs.residual(w[:, None] * p, q), p)
    # Every draft token was tested, including those after the accepted ones.
    return chain_verdict(keys, draft, accepted, rejected, weights, tested=gamma)


def _running_weights(ratio):
    """``w_1 … w_γ`` from the ratios ``p(x_i)/q(x_i)``, float32 ``[B, γ]``."""

    def step(weight, ratio):
        weight = jnp.minimum(1.0, weight * ratio)
        return weight, weight

    # Unrolled, or a GPU's round would not be one CUDA graph: no graph holds the scan's writes.
    return jax.lax.scan(step, jnp.ones_like(ratio[:, 0]), ratio.T, unroll=True)[1].T


def _prefix_chances(draft, log_p, weight):
    """``h_1 … h_{γ−1}``, float32 ``[B, γ]``; the last column only fills the shape."""
    # p and q of the token after each prefix of 1 … γ − 1 tokens.
    p = jnp.exp(log_p[:, 1:-1])
    q = jnp.exp(all_log_q(draft, log_p.shape[-1])[:, 1:])
    z = vocabulary.total(jnp.maximum(weight[:, :-1, None] * p - q, 0.0))
    # 0/0 only if w_i = 1 and p = q after the prefix: the prefix then passes surely.
    denominator = z + 1.0 - weight[:, :-1]
    chance = jnp.where(denominator > 0, z / jnp.where(denominator > 0, denominator, 1.0), 1.0)
    return jnp.concatenate([chance, weight[:, -1:]], axis=1)
