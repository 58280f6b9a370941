"""What rules over trees share: the verdict of a walk from the root to a node.

Axis legend: B rows, N nodes, D depth, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax import probs
from specjax.probs import Purpose
from specjax.types import NO_NODE, ROOT, Draft, Verdict


def root_path(draft: Draft, node: Int[Array, "B"], depth: Int[Array, "B"]) -> Int[Array, "B D+1"]:
    """The nodes from the root down to ``node``, which lies at ``depth``, then NO_NODE."""

    def climb(node, _):
        parent = probs.at_token(draft.parents, node)
        return jnp.where(node == ROOT, ROOT, parent), node

    _, upward = jax.lax.scan(climb, node, length=draft.shape.depth + 1)
    steps = depth[:, None] - jnp.arange(draft.shape.depth + 1)
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
    """As :func:`drawn_verdict`, with the last token drawn from unnormalised ``weights``."""
    u = probs.uniforms(keys, Purpose.EMIT, node[:, None])[:, 0]
    return drawn_verdict(draft, node, depth, probs.sample(weights, u), tested)
