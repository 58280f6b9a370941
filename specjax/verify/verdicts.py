"""What rules share: p and q of the draft tokens, acceptance draws, and making a verdict.

Axis legend: B rows, N nodes (γ + 1 of a chain), n nodes that a rule decides about, D depth,
V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.types import NO_NODE, ROOT, Draft, Verdict


def draft_length(draft: Draft) -> Int[Array, "B"]:
    """γ of each row: the number of its valid draft tokens, without the root."""
    return draft.valid[:, 1:].sum(-1, dtype=jnp.int32)


def drafted_log_probs(
    draft: Draft, log_p: Float[Array, "B N V"]
) -> tuple[Float[Array, "B γ"], Float[Array, "B γ"]]:
    """log p(x_i) and log q(x_i) of a chain's draft tokens; a point mass has q = 1."""
    x = draft.tokens[:, 1:]
    # Gather at all nodes and drop the last: slicing log_p[:, :-1] first would copy it.
    log_p_x = probs.at_token(log_p, jnp.roll(draft.tokens, -1, axis=1))[:, :-1]
    if draft.log_q is None:
        return log_p_x, jnp.zeros_like(log_p_x)
    return log_p_x, probs.at_token(draft.log_q, x)


def all_log_q(draft: Draft, vocab: int) -> Float[Array, "B γ V"]:
    """log q of every draft token of a chain; point masses are written out."""
    if draft.log_q is None:
        return probs.one_hot_log(draft.tokens[:, 1:], vocab)
    return draft.log_q


def log_q_after(draft: Draft, node: Int[Array, "B"], vocab: int) -> Float[Array, "B V"]:
    """log q of the draft token after ``node`` of a chain; only those V entries are read.

    After the last node there is no draft token: the result is finite but means nothing.
    """
    if draft.log_q is None:
        next_node = jnp.minimum(node + 1, draft.tokens.shape[1] - 1)
        return probs.one_hot_log(probs.at_index(draft.tokens, next_node), vocab)
    return probs.at_node(draft.log_q, jnp.minimum(node, draft.log_q.shape[1] - 1))


def acceptance_uniforms(
    keys: Key[Array, "B"], draft: Draft, first: int = ROOT
) -> Float[Array, "B n"]:
    """The uniform u in (0, 1] that decides about each node, from node ``first`` on."""
    rows, nodes = draft.tokens.shape
    index = jnp.broadcast_to(jnp.arange(first, nodes), (rows, nodes - first))
    return probs.uniforms(keys, Purpose.ACCEPT, index)


def count_leading(passed: Bool[Array, "B γ"]) -> Int[Array, "B"]:
    """How many tokens of a chain passed before the first that did not."""
    return jnp.cumprod(passed, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)


def chain_verdict(
    keys: Key[Array, "B"],
    draft: Draft,
    accepted: Int[Array, "B"],
    rejected: Bool[Array, "B"],
    weights: Float[Array, "B V"],
    tested: Int[Array, "B"] | None = None,
) -> Verdict:
    """The verdict that accepts the first ``accepted`` tokens and draws one from ``weights``.

    ``weights`` need not be normalized. ``tested`` is the number of draft tokens that were judged.
    By default these are the accepted ones, and the one that was ``rejected``, if any.
    """
    if tested is None:
        tested = accepted + rejected
    # In a chain the number of a node is its depth.
    return tree_verdict(keys, draft, accepted, accepted, weights, tested)


def tree_verdict(
    keys: Key[Array, "B"],
    draft: Draft,
    node: Int[Array, "B"],
    depth: Int[Array, "B"],
    weights: Float[Array, "B V"],
    tested: Int[Array, "B"] | int,
) -> Verdict:
    """As :func:`path_verdict`, with the last token drawn from unnormalized ``weights``."""
    u = probs.uniforms(keys, Purpose.EMIT, node[:, None])[:, 0]
    return path_verdict(draft, node, depth, probs.sample(weights, u), tested)


def path_verdict(
    draft: Draft,
    node: Int[Array, "B"],
    depth: Int[Array, "B"],
    y: Int[Array, "B"],
    tested: Int[Array, "B"] | int,
) -> Verdict:
    """The verdict that accepts the path to ``node``, which is at ``depth``, and emits ``y``."""
    path = root_path(draft, node, depth)
    position = jnp.arange(path.shape[1], dtype=jnp.int32)
    num_accepted = depth[:, None]
    # The root was emitted in an earlier round, so the new tokens begin one node below it.
    shifted = jnp.where(position < num_accepted, jnp.roll(path, -1, axis=1), ROOT)
    accepted = jnp.take_along_axis(draft.tokens, shifted, axis=1)
    last = jnp.where(position == num_accepted, y[:, None], 0)
    return Verdict(
        path=path,
        num_accepted=depth,
        num_tested=jnp.broadcast_to(jnp.asarray(tested, jnp.int32), depth.shape),
        tokens=jnp.where(position < num_accepted, accepted, last),
        num_tokens=depth + 1,
    )


def root_path(draft: Draft, node: Int[Array, "B"], depth: Int[Array, "B"]) -> Int[Array, "B D+1"]:
    """The nodes from the root to ``node``, which is at ``depth``; NO_NODE after them."""
    position = jnp.arange(draft.shape.depth + 1, dtype=jnp.int32)
    if draft.shape.is_chain:
        return jnp.where(position <= depth[:, None], position, NO_NODE)

    # The nodes from `node` up to the root, which then repeats. No loop on the device: its
    # iterations are few and tiny, and on a GPU each would wait for the one before.
    upward = [node]
    for _ in range(draft.shape.depth):
        parent = probs.at_index(jnp.asarray(draft.parents), upward[-1])
        upward.append(jnp.where(upward[-1] == ROOT, ROOT, parent))

    steps = depth[:, None] - position
    downward = jnp.take_along_axis(jnp.stack(upward, axis=1), jnp.maximum(steps, 0), axis=1)
    return jnp.where(steps >= 0, downward, NO_NODE).astype(jnp.int32)
