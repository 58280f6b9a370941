"""Speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023). Lossless."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.core import probs
from specjax.core.protocols import rule
from specjax.core.types import IID, POINT_MASS
from specjax.verify.verdicts import (
    acceptance_uniforms,
    chain_verdict,
    count_leading,
    draft_length,
    drafted_log_probs,
    log_q_after,
)


@rule(accepts=(IID, POINT_MASS), lossless=True, splits_vocabulary=True)
def speculative(keys, draft, log_p):
    """Accept x_i while ``u_i ≤ p(x_i)/q(x_i)``.

    After a rejection, one token is drawn from ``norm(max(0, p − q))``. If the whole draft is
    accepted, a bonus token is drawn from p. A position is accepted with probability
    ``Σ min(p, q)``. Greedy decoding is a special case: p and q are then point masses.

    Args:
      keys: the round's keys, one per row ``[B]``.
      draft: a chain of γ tokens, drawn from ``draft.log_q``, or point masses.
      log_p: float32 ``[B, N, V]``, log p of the token after each of the N = γ + 1 nodes.
    """
    log_p_x, log_q_x = drafted_log_probs(draft, log_p)
    u = acceptance_uniforms(keys, draft, first=1)
    # −inf − −inf is NaN and compares false: a token without mass under p is rejected.
    passed = (jnp.log(u) <= log_p_x - log_q_x) & draft.valid[:, 1:]
    accepted = count_leading(passed)
    rejected = accepted < draft_length(draft)

    # p and q of the token after the accepted ones.
    p = jnp.exp(probs.at_node(log_p, accepted))
    q = jnp.exp(log_q_after(draft, accepted, log_p.shape[-1]))
    weights = jnp.where(rejected[:, None], probs.residual(p, q), p)
    return chain_verdict(keys, draft, accepted, rejected, weights)
