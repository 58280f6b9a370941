"""SpecTr's k-SEQ (Sun et al. 2023, Algorithms 2 and 3). Lossless.

Axis legend: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core import probs
from specjax.core.protocols import rule
from specjax.core.types import IID, ROOT, Draft
from specjax.verify.verdicts import acceptance_uniforms, tree_verdict

_HALVINGS = 30  # bisection steps on [1, k]; the last interval is below float32's resolution


class _KSeqWalk(NamedTuple):
    """Where each row is on its way down the tree."""

    node: Int[Array, "B"]
    depth: Int[Array, "B"]
    survivors: Bool[Array, "B N"]  # nodes at this depth that agree with the accepted tokens
    weights: Float[Array, "B V"]  # what the last token is drawn from
    done: Bool[Array, "B"]
    rejected: Bool[Array, "B"]

    @classmethod
    def at_root(cls, draft: Draft, vocab: int) -> _KSeqWalk:
        rows, nodes = draft.tokens.shape
        zero = jnp.zeros((rows,), jnp.int32)
        no = jnp.zeros((rows,), bool)
        return cls(
            node=zero,
            depth=zero,
            survivors=jnp.broadcast_to(jnp.arange(nodes) == ROOT, draft.tokens.shape),
            weights=jnp.zeros((rows, vocab), jnp.float32),
            done=no,
            rejected=no,
        )


@rule(accepts=(IID,), lossless=True, chain_only=False)
def spectr(keys, draft, log_p):
    """Try k i.i.d. candidates per position, each accepted with probability ``min(1, p/(ρ q))``.

    ``ρ`` solves ``1 − (1 − β)^k = ρ β``, where ``β = Σ min(q, p/ρ)``. All candidates that equal
    the accepted token survive: their children are the next k candidates. If none is accepted, one
    token is drawn from ``norm(max(0, p − min(q, p/ρ) (1 − (1 − β)^k)/β))``.

    Arguments as :func:`specjax.verify.specinfer`; siblings must be i.i.d.
    """
    nodes = draft.tokens.shape[1]
    u = acceptance_uniforms(keys, draft)
    q_row = jnp.asarray(draft.q_row)

    def step(walk: _KSeqWalk, _):
        parent = jnp.clip(draft.parents, 0, nodes - 1)
        candidates = jnp.take_along_axis(walk.survivors, parent, axis=1) & draft.valid
        candidates = candidates.at[:, ROOT].set(False)
        k = candidates.sum(-1)

        p = jnp.exp(probs.at_node(log_p, walk.node))
        # The candidates are i.i.d.: all have the q of the first.
        q = jnp.exp(probs.at_node(draft.log_q, q_row[jnp.argmax(candidates, axis=1)]))
        rho, beta = solve_rho(p, q, jnp.maximum(k, 1).astype(jnp.float32))
        p_x = jnp.take_along_axis(p, draft.tokens, axis=1)
        q_x = jnp.take_along_axis(q, draft.tokens, axis=1)
        passed = candidates & (u * rho[:, None] * q_x <= p_x) & (p_x > 0)

        any_passed = passed.any(1)
        first = jnp.argmax(passed, axis=1).astype(jnp.int32)
        accepted = any_passed & ~walk.done
        stopped = ~any_passed & ~walk.done
        token = probs.at_token(draft.tokens, first)[:, None]
        equal = candidates & (draft.tokens == token)
        residual = jnp.where((k > 0)[:, None], k_seq_residual(p, q, rho, beta, k), p)
        return _KSeqWalk(
            node=jnp.where(accepted, first, walk.node),
            depth=walk.depth + accepted,
            survivors=jnp.where(accepted[:, None], equal, walk.survivors),
            weights=jnp.where(stopped[:, None], residual, walk.weights),
            done=walk.done | stopped,
            rejected=walk.rejected | (stopped & (k > 0)),
        ), None

    start = _KSeqWalk.at_root(draft, vocab=log_p.shape[-1])
    # Depth + 1 steps: the last one gives the weights after a deepest node.
    end, _ = jax.lax.scan(step, start, length=draft.shape.depth + 1)
    return tree_verdict(keys, draft, end.node, end.depth, end.weights, end.depth + end.rejected)


def solve_rho(
    p: Float[Array, "B V"], q: Float[Array, "B V"], k: Float[Array, "B"]
) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """``(ρ, β)`` of k ≥ 1 candidates, by bisection.

    ρ is the upper end of the last interval. With a smaller ρ, more than p could be accepted of a
    token, and its residual would be negative.
    """

    def overlap(rho):
        return jnp.minimum(q, p / rho[:, None]).sum(-1)

    def halve(_, interval):
        low, high = interval
        middle = 0.5 * (low + high)
        beta = overlap(middle)
        is_above = _chance_of_any(beta, k) <= middle * beta
        return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

    _, rho = jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.ones_like(k), k))
    return rho, overlap(rho)


def k_seq_residual(p, q, rho, beta, k) -> Float[Array, "B V"]:
    """Unnormalized distribution of the token that follows k rejections.

    Args:
      p, q: float32 ``[B, V]``.
      rho, beta: float32 ``[B]``, as :func:`solve_rho` returns them.
      k: ``[B]``, the number of candidates.
    """
    share = jnp.where(beta > 0, _chance_of_any(beta, k) / jnp.where(beta > 0, beta, 1.0), 0.0)
    accepted_mass = jnp.minimum(q, p / rho[:, None]) * share[:, None]
    return probs.residual(p, accepted_mass)


def _chance_of_any(beta, k):
    """``1 − (1 − β)^k``, the chance that one of k is accepted, without cancellation."""
    return -jnp.expm1(k * jnp.log1p(-jnp.minimum(beta, 1.0)))
