"""MTAD's acceptance by joint probability (Qin et al. 2024, §3.2 and Algorithm 1). Lossy.

With several beams the emitted text is likelier under the target than a plain sample.
Axis legend: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

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
    """Accept the longest path with ``min(1, P/Q) > τ``; then draw y ~ p.

    P and Q are the path's joint probabilities under target and draft: the products of the tokens'
    conditional probabilities. Shorter paths on the way may fail. Among paths of equal length, the
    one with the largest P is accepted; on a tie, the one that comes first.

    Args:
      keys, draft, log_p: as :func:`specjax.verify.specinfer`.
      tau: from 0 to below 1; 0 accepts every path that is possible under the target.
      raw_log_p: float32 ``[B, N, V]``, the target's unwarped log-probabilities.
      joint_raw: bool or ``[B]``, rows whose P is from ``raw_log_p``. Their Q must be unwarped, too.
    """
    log_p_x = _log_p_of_nodes(draft, log_p)
    if raw_log_p is not None:
        is_raw = jnp.broadcast_to(jnp.asarray(joint_raw, bool), draft.tokens.shape[:1])
        log_p_x = jnp.where(is_raw[:, None], _log_p_of_nodes(draft, raw_log_p), log_p_x)
    ancestors = tree.ancestors(draft.parents, draft.shape.depth)
    log_joint_p = _sum_over_path(ancestors, log_p_x)
    log_joint_q = _sum_over_path(ancestors, _log_q_of_nodes(draft))
    log_ratio = log_joint_p - log_joint_q

    depth = tree.depths(ancestors)
    # In logarithms: a possible path of many unlikely tokens has a ratio that float32 does not hold.
    log_tau = jnp.log(jnp.asarray(tau, jnp.float32))
    passed = draft.valid & (jnp.minimum(log_ratio, 0.0) > log_tau) & (log_joint_p > probs.NEVER)
    passed = passed | (depth == 0)  # the root always passes
    accepted = jnp.where(passed, depth, 0).max(-1)
    is_deepest = passed & (depth == accepted[:, None])
    node = jnp.argmax(jnp.where(is_deepest, log_joint_p, probs.NEVER), axis=1).astype(jnp.int32)

    tested = jnp.where(draft.valid, depth, 0).max(-1)
    p = jnp.exp(probs.at_node(log_p, node))
    return tree_verdict(keys, draft, node, accepted, p, tested)


def _log_p_of_nodes(draft: Draft, log_p: Float[Array, "B N V"]) -> Float[Array, "B N"]:
    """log p of each node's token given its path; 0 at the root."""
    # The root's parent is NO_PARENT: it is clipped, and the root's entry is set to 0.
    parent = jnp.clip(draft.parents, 0, draft.tokens.shape[1] - 1)
    rows = jnp.arange(draft.tokens.shape[0])[:, None]
    return log_p[rows, parent, draft.tokens].at[:, 0].set(0.0)


def _log_q_of_nodes(draft: Draft) -> Float[Array, "B N"]:
    """log q of each node's token given its path; 0 at the root and for point masses."""
    if draft.token_log_q is not None:
        return draft.token_log_q
    if draft.log_q is None:
        return jnp.zeros(draft.tokens.shape, jnp.float32)
    rows = jnp.arange(draft.tokens.shape[0])[:, None]
    return draft.log_q[rows, jnp.asarray(draft.q_row), draft.tokens].at[:, 0].set(0.0)


def _sum_over_path(
    ancestors: Bool[Array | np.ndarray, "B N N"], values: Float[Array, "B N"]
) -> Float[Array, "B N"]:
    """The sum of the values on each node's path. A matrix product would make −inf · 0 a NaN."""
    return jnp.where(ancestors, values[:, None, :], 0.0).sum(-1)
