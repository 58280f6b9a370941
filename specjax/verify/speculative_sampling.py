"""Speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023). Lossless."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.protocols import rule
from specjax.core.types import IID, POINT_MASS
from specjax.verify.verdicts import chain_verdict, draft_length, draft_row, drafted_log_probs


@rule(accepts=(IID, POINT_MASS), lossless=True)
def speculative(keys, draft, log_p):
    """Accept x_i while u_i ≤ p(x_i)/q(x_i); then draw norm(max(0, p − q)), or a bonus from p.

    The per-position acceptance is Σ min(p, q). Greedy decoding is the same code: p and q
    are point masses.

    Args:
      keys: the round's keys, one per row ``[B]``.
      draft: a chain, drawn from ``draft.log_q`` or certain.
      log_p: float32 ``[B, N, V]``, log p of the token after each node.
    """
    lp, lq = drafted_log_probs(draft, log_p)
    nodes = jnp.broadcast_to(jnp.arange(1, lp.shape[1] + 1), lp.shape)
    u = probs.uniforms(keys, Purpose.ACCEPT, nodes)
    # −inf − −inf is NaN and compares false: a token without mass under p is refused.
    passed = (jnp.log(u) <= lp - lq) & draft.valid[:, 1:]
    accepted = jnp.cumprod(passed, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
    refused = accepted < draft_length(draft)
    p = jnp.exp(probs.at_node(log_p, accepted))
    q = jnp.exp(draft_row(draft, accepted, log_p.shape[-1]))
    weights = jnp.where(refused[:, None], probs.residual(p, q), p)
    return chain_verdict(keys, draft, accepted, refused, weights)
