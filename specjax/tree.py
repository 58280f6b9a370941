"""Draft trees as parent arrays: depth, ancestor bits, paths.

Axis legend: B rows, N nodes (node 0 is the root; parents come before children).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.types import NO_PARENT


def chain_parents(batch: int, nodes: int) -> Int[Array, "B N"]:
    """Parents of a chain: node i hangs from node i − 1."""
    parents = jnp.arange(-1, nodes - 1, dtype=jnp.int32).at[0].set(NO_PARENT)
    return jnp.broadcast_to(parents, (batch, nodes))


def ancestors(parents: Int[Array, "B N"], depth: int) -> Bool[Array, "B N N"]:
    """``bits[b, i, j]``: node j is node i or an ancestor of it.

    Each round of squaring doubles the reach, so ``log2(depth)`` products suffice. Parents
    known before tracing (a numpy array) give a numpy constant.
    """
    nodes = parents.shape[1]
    if isinstance(parents, np.ndarray):
        bits = np.eye(nodes, dtype=bool)
        for node, parent in enumerate(parents[0]):
            if parent != NO_PARENT:
                bits[node] |= bits[parent]
        return np.broadcast_to(bits, (parents.shape[0], nodes, nodes))
    one = jnp.eye(nodes, dtype=bool) | (parents[:, :, None] == jnp.arange(nodes))
    reach = 1
    while reach < depth:
        one = jnp.einsum("bij,bjk->bik", one, one, preferred_element_type=jnp.int32) > 0
        reach *= 2
    return one


def depths(bits: Bool[Array, "B N N"]) -> Int[Array, "B N"]:
    """Edges between each node and the root: its ancestors, itself not counted."""
    return bits.sum(-1, dtype=np.int32) - 1
