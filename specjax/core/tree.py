"""Draft trees as parent arrays: depth, ancestor bits, a chain cut shorter.

Axis legend: B rows, D depth, N nodes (node 0 is the root; parents come before children).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.core.types import NO_PARENT, NO_TOKEN, Draft, TreeShape


def cut_chain(draft: Draft, nodes: int) -> Draft:
    """The first ``nodes`` of a chain; no node after them may be valid.

    ``log_q`` has no row for the root, so it has one row fewer than there are nodes.
    """

    def first(x, count=nodes):
        return None if x is None else x[:, :count]

    return draft.replace(
        tokens=first(draft.tokens),
        parents=first(draft.parents),
        valid=first(draft.valid),
        log_q=first(draft.log_q, nodes - 1) if nodes > 1 else None,
        logits=first(draft.logits),
        token_log_q=first(draft.token_log_q),
        allowed=first(draft.allowed),
        shape=TreeShape.chain(nodes - 1),
        q_row=draft.q_row[:nodes],
    )


def ancestors(
    parents: Int[Array | np.ndarray, "B N"], depth: int
) -> Bool[Array | np.ndarray, "B N N"]:
    """``bits[b, i, j]``: node j is node i or an ancestor of it.

    Squaring the matrix doubles how far it reaches, so ``log2(depth)`` products suffice. Parents in
    numpy are known before tracing and give a numpy constant.
    """
    nodes = parents.shape[1]
    if isinstance(parents, np.ndarray):
        # Static parents are the same in every row.
        bits = np.eye(nodes, dtype=bool)
        for node, parent in enumerate(parents[0]):
            if parent != NO_PARENT:
                bits[node] |= bits[parent]
        return np.broadcast_to(bits, (parents.shape[0], nodes, nodes))
    bits = jnp.eye(nodes, dtype=bool) | (parents[:, :, None] == jnp.arange(nodes))
    reach = 1
    while reach < depth:
        bits = jnp.einsum("bij,bjk->bik", bits, bits, preferred_element_type=jnp.int32) > 0
        reach *= 2
    return bits


def paths(
    tokens: Int[Array, "B N"], parents: Int[Array | np.ndarray, "B N"], depth: int
) -> Int[Array, "B N D"]:
    """The tokens below the root on the way to each node, its own included, then NO_TOKEN."""
    bits = ancestors(parents, depth)
    at_depth = depths(bits)[:, None, None, :] == np.arange(1, depth + 1)[:, None]
    on_way = bits[:, :, None, :] & at_depth
    return jnp.max(jnp.where(on_way, tokens[:, None, None, :], NO_TOKEN), axis=-1)


def depths(bits: Bool[Array | np.ndarray, "B N N"]) -> Int[Array | np.ndarray, "B N"]:
    """Edges between each node and the root: its ancestors, itself not counted."""
    return bits.sum(-1, dtype=np.int32) - 1
