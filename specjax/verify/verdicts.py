"""What rules share: p and q of drafted tokens, and the form of a verdict, over chains and trees.

Axis legend: B rows, N nodes (γ + 1 of a chain), D depth, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.types import NO_NODE, ROOT, Draft, Verdict


def draft_length(draft: Draft) -> Int[Array, "B"]:
    """γ of each row: its number of valid draft tokens, the root not counted."""
    return draft.valid[:, 1:].sum(-1, dtype=jnp.int32)


def drafted_log_probs(
    draft: Draft, log_p: Float[Array, "B N V"]
) -> tuple[Float[Array, "B γ"], Float[Array, "B γ"]]:
    """log p(x_i) and log q(x_i) of the drafted tokens; q of a point mass is 1."""
    x = draft.tokens[:, 1:]
    # Of all nodes: a slice of p would be a copy of it.
    lp = probs.at_token(log_p, jnp.roll(draft.tokens, -1, axis=1))[:, :-1]
    lq = jnp.zeros_like(lp) if draft.log_q is None else probs.at_token(draft.log_q, x)
    return lp, lq


def draft_rows(draft: Draft, vocab: int) -> Float[Array, "B γ V"]:
    """log q of every draw; point masses are written out."""
    if draft.log_q is None:
        return probs.one_hot_log(draft.tokens[:, 1:], vocab)
    return draft.log_q


def draft_row(draft: Draft, index: Int[Array, "B"], vocab: int) -> Float[Array, "B V"]:
    """log q of the draw after node ``index``; only those V entries are touched."""
    if draft.log_q is None:
        refused = jnp.minimum(index + 1, draft.tokens.shape[1] - 1)
        return probs.one_hot_log(probs.at_token(draft.tokens, refused), vocab)
    return probs.at_node(draft.log_q, jnp.minimum(index, draft.log_q.shape[1] - 1))


def chain_verdict(
    keys: Key[Array, "B"],
    draft: Draft,
    accepted: Int[Array, "B"],
    refused: Bool[Array, "B"],
    weights: Float[Array, "B V"],
    tested: Int[Array, "B"] | None = None,
) -> Verdict:
    """The verdict that accepts the first ``accepted`` tokens and draws one from ``weights``.

    ``tested`` defaults to the accepted depth plus one where a token was refused.
    """
    tested = accepted + refused if tested is None else tested
    return tree_verdict(keys, draft, accepted, accepted, weights, tested)


def root_path(draft: Draft, node: Int[Array, "B"], depth: Int[Array, "B"]) -> Int[Array, "B D+1"]:
    """The nodes from the root down to ``node``, which lies at ``depth``, then NO_NODE."""
    at = jnp.arange(draft.shape.depth + 1, dtype=jnp.int32)
    if draft.shape.is_chain:
        return jnp.where(at <= depth[:, None], at, NO_NODE)

    def climb(node, _):
        parent = probs.at_token(draft.parents, node)
        return jnp.where(node == ROOT, ROOT, parent), node

    _, upward = jax.lax.scan(climb, node, length=draft.shape.depth + 1)
    steps = depth[:, None] - at
    downward = jnp.take_along_axis(upward.T, jnp.maximum(steps, 0), axis=1)
    return jnp.where(steps >= 0, downward, NO_NODE).astype(jnp.int32)


def drawn_verdict(
    draft: Draft,
    node: Int[Array, "B"],
    depth: Int[Array, "B"],
    y: Int[Array, "B"],
    tested: Int[Array, "B"] | int,
) -> Verdict:
    """The verdict that accepts the path to ``node`` and emits ``y`` after it."""
    path = root_path(draft, node, depth)
    at, here = jnp.arange(path.shape[1], dtype=jnp.int32), depth[:, None]
    below = jnp.where(at < here, jnp.roll(path, -1, axis=1), ROOT)
    accepted = jnp.take_along_axis(draft.tokens, below, axis=1)
    return Verdict(
        path=path,
        num_accepted=depth,
        num_tested=jnp.broadcast_to(jnp.asarray(tested, jnp.int32), depth.shape),
        tokens=jnp.where(at < here, accepted, jnp.where(at == here, y[:, None], 0)),
        num_tokens=depth + 1,
    )


def tree_verdict(
    keys: Key[Array, "B"],
    draft: Draft,
    node: Int[Array, "B"],
    depth: Int[Array, "B"],
    weights: Float[Array, "B V"],
    tested: Int[Array, "B"] | int,
) -> Verdict:
    """As :func:`drawn_verdict`, with the last token drawn from unnormalized ``weights``."""
    u = probs.uniforms(keys, Purpose.EMIT, node[:, None])[:, 0]
    return drawn_verdict(draft, node, depth, probs.sample(weights, u), tested)
