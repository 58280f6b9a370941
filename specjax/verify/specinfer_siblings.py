"""Multi-step speculative sampling over a token tree (SpecInfer, Miao et al. 2024, Algorithm 2).

Lossless. Axis legend: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core import probs, vocabulary
from specjax.core.protocols import rule
from specjax.core.types import DETERMINISTIC, IID, POINT_MASS, ROOT, WITHOUT_REPLACEMENT, Draft
from specjax.verify.verdicts import acceptance_uniforms, tree_verdict


class _SiblingWalk(NamedTuple):
    """Where each row is on its way down the tree."""

    node: Int[Array, "B"]
    depth: Int[Array, "B"]
    rejected: Bool[Array, "B"]  # whether a child of the node was rejected
    p: Float[Array, "B V"]  # of the next token: the target's, then the residual of rejections
    tried: Bool[Array, "B V"]  # tokens of the node's rejected children


@rule(
    accepts=(IID, WITHOUT_REPLACEMENT, DETERMINISTIC, POINT_MASS),
    lossless=True,
    chain_only=False,
    splits_vocabulary=True,
)
def specinfer(keys, draft, log_p):
    """Try a node's children in the order in which they were drawn.

    A child x is accepted if ``u ≤ p(x)/q(x)``. Otherwise ``p ← norm(max(0, p − q))`` for the next
    child. If siblings were drawn without replacement, ``q(x) ← 0`` and ``q ← norm(q)``, too. If no
    child is left, y ~ p ends the walk. A child that was not drawn (top-j, lookup) has a one-hot q.

    The order matters: sorted or shuffled siblings would be biased. Arguments as
    :func:`specjax.verify.speculative`; the draft may be any tree.
    """
    nodes = draft.tokens.shape[1]
    vocab = log_p.shape[-1]
    u = acceptance_uniforms(keys, draft)

    def visit(i, walk: _SiblingWalk) -> _SiblingWalk:
        # Parents come before children, so one pass over the nodes walks down the tree.
        is_child = (jnp.asarray(draft.parents)[:, i] == walk.node) & draft.valid[:, i]
        return jax.lax.cond(jnp.any(is_child), lambda: attempt(i, walk, is_child), lambda: walk)

    def attempt(i, walk: _SiblingWalk, is_child) -> _SiblingWalk:
        x = draft.tokens[:, i]
        q = _draft_distribution(draft, i, x, walk.tried, vocab)
        p_x = probs.at_token(walk.p, x)
        q_x = probs.at_token(q, x)
        passed = is_child & (u[:, i] * q_x <= p_x) & (p_x > 0)  # u q ≤ p also holds for p = q = 0
        failed = is_child & ~passed

        residual = probs.residual(walk.p, q)
        residual = residual / vocabulary.total(residual, keepdims=True)
        p = jnp.where(failed[:, None], residual, walk.p)
        tried = walk.tried | (failed[:, None] & (vocabulary.ids(vocab) == x[:, None]))
        return _SiblingWalk(
            node=jnp.where(passed, i, walk.node).astype(jnp.int32),
            depth=walk.depth + passed,
            rejected=(walk.rejected | failed) & ~passed,
            p=jnp.where(passed[:, None], jnp.exp(log_p[:, i]), p),
            tried=tried & ~passed[:, None],
        )

    rows = draft.tokens.shape[0]
    zero = jnp.zeros((rows,), jnp.int32)
    start = _SiblingWalk(
        node=zero,
        depth=zero,
        rejected=jnp.zeros((rows,), bool),
        p=jnp.exp(log_p[:, ROOT]),
        tried=jnp.zeros((rows, vocab), bool),
    )
    end = jax.lax.fori_loop(1, nodes, visit, start)
    return tree_verdict(keys, draft, end.node, end.depth, end.p, end.depth + end.rejected)


def _draft_distribution(draft: Draft, i, x, tried, vocab) -> Float[Array, "B V"]:
    """q that node i was drawn from, given that its earlier siblings were rejected.

    A token that was chosen by its rank was not drawn: its q is one-hot.
    """
    if draft.log_q is None or draft.sampling == DETERMINISTIC:
        return jnp.exp(probs.one_hot_log(x, vocab))
    q = jnp.exp(draft.log_q[:, jnp.asarray(draft.q_row)[i]])
    if draft.sampling == WITHOUT_REPLACEMENT:
        q = jnp.where(tried, 0.0, q)
        # If all of q's mass was tried, the sum is 0: dividing by `tiny` gives 0 and no NaN.
        q = q / jnp.maximum(vocabulary.total(q, keepdims=True), jnp.finfo(q.dtype).tiny)
    return q
