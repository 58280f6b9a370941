"""SpecTr's k-SEQ (Sun et al. 2023, Algorithms 2 and 3). Lossless."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.protocols import rule
from specjax.core.types import IID, ROOT
from specjax.verify.verdicts import tree_verdict

_HALVINGS = 30  # of [1, k]: below float32's resolution


class _KSeqWalk(NamedTuple):
    node: Int[Array, "B"]
    depth: Int[Array, "B"]
    survivors: Bool[Array, "B N"]  # drafts that agree with what was accepted so far
    weights: Float[Array, "B V"]  # what the last token is drawn from
    done: Bool[Array, "B"]
    refused: Bool[Array, "B"]


@rule(accepts=(IID,), lossless=True, chain_only=False)
def spectr(keys, draft, log_p):
    """k i.i.d. candidates per step; each is accepted with ``min(1, p/(ρ q))``, in order.

    ``ρ`` solves ``1 − (1 − β)^k = ρ β`` with ``β = Σ min(q, p/ρ)``. All candidates that equal
    the accepted token survive and offer the next candidates; k is their number. None
    accepted: a draw from ``norm(max(0, p − min(q, p/ρ) (1 − (1 − β)^k)/β))``.

    Arguments as :func:`specjax.verify.match`; siblings must be i.i.d.
    """
    nodes = draft.tokens.shape[1]
    u = probs.uniforms(
        keys, Purpose.ACCEPT, jnp.broadcast_to(jnp.arange(nodes), draft.tokens.shape)
    )
    q_row = jnp.asarray(draft.q_row)

    def step(w: _KSeqWalk, _):
        parent = jnp.clip(draft.parents, 0, nodes - 1)
        candidate = jnp.take_along_axis(w.survivors, parent, axis=1) & draft.valid
        candidate = candidate.at[:, ROOT].set(False)
        k = candidate.sum(-1)
        p = jnp.exp(probs.at_node(log_p, w.node))
        q = jnp.exp(probs.at_node(draft.log_q, q_row[jnp.argmax(candidate, axis=1)]))
        rho, beta = solve_rho(p, q, jnp.maximum(k, 1).astype(jnp.float32))
        px, qx = (jnp.take_along_axis(x, draft.tokens, axis=1) for x in (p, q))
        passed = candidate & (u * rho[:, None] * qx <= px) & (px > 0)
        some_passed, first = passed.any(1), jnp.argmax(passed, axis=1).astype(jnp.int32)
        token = probs.at_token(draft.tokens, first)[:, None]
        left = jnp.where((k > 0)[:, None], k_seq_residual(p, q, rho, beta, k), p)
        going = some_passed & ~w.done
        ended = ~some_passed & ~w.done
        return _KSeqWalk(
            node=jnp.where(going, first, w.node),
            depth=w.depth + going,
            survivors=jnp.where(going[:, None], candidate & (draft.tokens == token), w.survivors),
            weights=jnp.where(ended[:, None], left, w.weights),
            done=w.done | ended,
            refused=w.refused | (ended & (k > 0)),
        ), None

    rows, vocab = draft.tokens.shape[0], log_p.shape[-1]
    zero, no = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool)
    root = jnp.broadcast_to(jnp.arange(nodes) == ROOT, draft.tokens.shape)
    start = _KSeqWalk(zero, zero, root, jnp.zeros((rows, vocab), jnp.float32), no, no)
    w, _ = jax.lax.scan(step, start, length=draft.shape.depth + 1)
    return tree_verdict(keys, draft, w.node, w.depth, w.weights, w.depth + w.refused)


def solve_rho(
    p: Float[Array, "B V"], q: Float[Array, "B V"], k: Float[Array, "B"]
) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """``(ρ, β)`` of k candidates; the upper end of the bracket, so that no residual is negative."""

    def overlap(rho):
        return jnp.minimum(q, p / rho[:, None]).sum(-1)

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        beta = overlap(middle)
        enough = _some_of(beta, k) <= middle * beta
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, rho = jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.ones_like(k), k))
    return rho, overlap(rho)


def k_seq_residual(p, q, rho, beta, k) -> Float[Array, "B V"]:
    """Unnormalized law of the token that follows k refusals."""
    share = jnp.where(beta > 0, _some_of(beta, k) / jnp.where(beta > 0, beta, 1.0), 0.0)
    taken = jnp.minimum(q, p / rho[:, None]) * share[:, None]
    return probs.residual(p, taken)


def _some_of(beta, k):
    """``1 − (1 − β)^k`` without cancellation."""
    return -jnp.expm1(k * jnp.log1p(-jnp.minimum(beta, 1.0)))
