"""Multi-step speculative sampling over a token tree (SpecInfer, Miao et al. 2024, Alg. 2).

Lossless.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.protocols import rule
from specjax.core.types import DETERMINISTIC, IID, POINT_MASS, ROOT, WITHOUT_REPLACEMENT, Draft
from specjax.verify.verdicts import tree_verdict


class _SiblingWalk(NamedTuple):
    """Where each row stands; ``p`` is what is left of the target's law at its node."""

    node: Int[Array, "B"]
    depth: Int[Array, "B"]
    refused: Bool[Array, "B"]
    p: Float[Array, "B V"]
    tried: Bool[Array, "B V"]  # tokens of the refused siblings


@rule(
    accepts=(IID, WITHOUT_REPLACEMENT, DETERMINISTIC, POINT_MASS), lossless=True, chain_only=False
)
def specinfer(keys, draft, log_p):
    """Try a node's children in the order they were drawn; each refusal leaves a residual.

    Child x is accepted while ``u ≤ p(x)/q(x)``; else ``p ← norm(max(0, p − q))``, and where
    siblings were drawn without replacement ``q(x) ← 0, q ← norm(q)``. No child left: y ~ p.
    A child without a law of its own (top-j, lookup) has a one-hot q. Sorting or shuffling
    the siblings would be biased.

    Arguments as :func:`specjax.verify.match`.
    """
    nodes, vocab = draft.tokens.shape[1], log_p.shape[-1]
    u = probs.uniforms(
        keys, Purpose.ACCEPT, jnp.broadcast_to(jnp.arange(nodes), draft.tokens.shape)
    )

    def visit(i, w: _SiblingWalk) -> _SiblingWalk:
        # Parents come before children, so one pass over the nodes walks down the tree.
        here = (draft.parents[:, i] == w.node) & draft.valid[:, i]
        return jax.lax.cond(jnp.any(here), lambda: attempt(i, w, here), lambda: w)

    def attempt(i, w: _SiblingWalk, here) -> _SiblingWalk:
        x = draft.tokens[:, i]
        q = _law(draft, i, x, w.tried, vocab)
        px, qx = probs.at_token(w.p, x), probs.at_token(q, x)
        passed = here & (u[:, i] * qx <= px) & (px > 0)
        failed = here & ~passed
        left = probs.residual(w.p, q)
        left = left / left.sum(-1, keepdims=True)
        p = jnp.where(failed[:, None], left, w.p)
        tried = w.tried | (failed[:, None] & (jnp.arange(vocab) == x[:, None]))
        return _SiblingWalk(
            node=jnp.where(passed, i, w.node).astype(jnp.int32),
            depth=w.depth + passed,
            refused=(w.refused | failed) & ~passed,
            p=jnp.where(passed[:, None], jnp.exp(log_p[:, i]), p),
            tried=tried & ~passed[:, None],
        )

    rows = draft.tokens.shape[0]
    zero, no = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool)
    start = _SiblingWalk(zero, zero, no, jnp.exp(log_p[:, ROOT]), jnp.zeros((rows, vocab), bool))
    w = jax.lax.fori_loop(1, nodes, visit, start)
    return tree_verdict(keys, draft, w.node, w.depth, w.p, w.depth + w.refused)


def _law(draft: Draft, i, x, tried, vocab) -> Float[Array, "B V"]:
    """The law that node i was drawn from, given that its earlier siblings were refused."""
    if draft.log_q is None:
        return jnp.exp(probs.one_hot_log(x, vocab))
    q = jnp.exp(draft.log_q[:, jnp.asarray(draft.q_row)[i]])
    if draft.sampling == WITHOUT_REPLACEMENT:
        q = jnp.where(tried, 0.0, q)
        q = q / jnp.maximum(q.sum(-1, keepdims=True), jnp.finfo(q.dtype).tiny)
    return q
