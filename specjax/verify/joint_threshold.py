"""MTAD's acceptance by joint probability (Qin et al. 2024, Algorithm 1). Lossy.

With several beams the emitted text is likelier under the target than a plain sample.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax.core import probs, tree
from specjax.core.protocols import rule
from specjax.core.types import DETERMINISTIC, IID, POINT_MASS, Draft
from specjax.verify.verdicts import tree_verdict


@rule(
    accepts=(IID, POINT_MASS, DETERMINISTIC),
    lossless=False,
    chain_only=False,
    settings=("tau",),
    extras=("raw_log_p", "joint_raw"),
)
def joint(keys, draft, log_p, *, tau, raw_log_p=None, joint_raw=False):
    """Accept the longest path with ``min(1, P/Q) > τ``; then y ~ p.

    P and Q are the joint probabilities of the path under target and draft: products of
    conditionals. A failure on the way does not matter (no stop at the first). Among paths of
    one length the one with the larger P is taken, then the earlier beam.

    Args:
      keys, draft, log_p: as :func:`specjax.verify.match`.
      tau: from 0 to below 1; 0 accepts whatever the target can say at all.
      raw_log_p: float32 ``[B, N, V]``, the target at temperature 1, unwarped.
      joint_raw: bool or ``[B]``: P from ``raw_log_p`` (the draft's Q must match).
    """
    if raw_log_p is not None:
        raw = jnp.broadcast_to(jnp.asarray(joint_raw, bool), draft.tokens.shape[:1])
        conditional = jnp.where(raw[:, None], _of_nodes(draft, raw_log_p), _of_nodes(draft, log_p))
    else:
        conditional = _of_nodes(draft, log_p)
    bits = tree.ancestors(draft.parents, draft.shape.depth)
    log_joint_p = _over_path(bits, conditional)
    gap = log_joint_p - _over_path(bits, _draft_conditionals(draft))
    depth = tree.depths(bits)
    passed = draft.valid & (jnp.exp(jnp.minimum(gap, 0.0)) > tau) & (log_joint_p > probs.NEVER)
    passed = passed | (depth == 0)
    accepted = jnp.where(passed, depth, 0).max(-1)
    deepest = passed & (depth == accepted[:, None])
    node = jnp.argmax(jnp.where(deepest, log_joint_p, probs.NEVER), axis=1).astype(jnp.int32)
    tested = jnp.where(draft.valid, depth, 0).max(-1)
    weights = jnp.exp(probs.at_node(log_p, node))
    return tree_verdict(keys, draft, node, accepted, weights, tested)


def _of_nodes(draft: Draft, log_p):
    """log p of each node's token given its path, ``[B, N]``; 0 at the root."""
    parent = jnp.clip(draft.parents, 0, draft.tokens.shape[1] - 1)
    rows = jnp.arange(draft.tokens.shape[0])[:, None]
    return log_p[rows, parent, draft.tokens].at[:, 0].set(0.0)


def _draft_conditionals(draft: Draft):
    """log q of each node's token given its path, ``[B, N]``; 0 at the root."""
    if draft.token_log_q is not None:
        return draft.token_log_q
    if draft.log_q is None:
        return jnp.zeros(draft.tokens.shape, jnp.float32)
    rows = jnp.arange(draft.tokens.shape[0])[:, None]
    return draft.log_q[rows, jnp.asarray(draft.q_row), draft.tokens].at[:, 0].set(0.0)


def _over_path(bits, conditional):
    """Sums over each node's path; a product would turn −inf · 0 into NaN."""
    return jnp.where(bits, conditional[:, None, :], 0.0).sum(-1)
