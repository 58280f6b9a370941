"""Attention of a token tree's nodes with their keys in the order of a chain.

A node's ancestors are not side by side in the cache, and sums over keys round by the places that
the keys are in. Here each node's scores are put where a chain's would be: the ancestor at depth d
at position ``start + d``. So its softmax has the bits of plain decoding's. Values are added up in
the order of the cache, in which a node's ancestors come before it with gaps between them. One by
one, gaps change no bit, so with a pass of the same width the logits have plain decoding's bits.

Axis legend: B rows, N nodes, R = G·N rows of grouped queries, K key heads, S cache positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class PathOrder(NamedTuple):
    """Where the keys of a tree's nodes would be in a chain.

    Attributes:
      start: int32, the cache position of the tree's root.
      path: int32, the nodes in each query's own order: its ancestors by depth and itself, then
        all others.
      place: int32, the inverse: where in its order a query has each node.
    """

    start: Int[Array, "B"]
    path: Int[Array | np.ndarray, "B Q N"]
    place: Int[Array | np.ndarray, "B Q N"]

    @classmethod
    def of(cls, start: Int[Array, "B"], visible: Bool[Array | np.ndarray, "B Q N"]) -> PathOrder:
        """The order of a tree whose nodes come after their ancestors.

        Args:
          visible: ``visible[b, i, j]``: query i sees node j, an ancestor or itself. In numpy it is
            known before tracing, and so is the order.
        """
        if isinstance(visible, np.ndarray):
            path = np.argsort(~visible, axis=-1, kind="stable").astype(np.int32)
            return cls(start, path, np.argsort(path, axis=-1).astype(np.int32))
        path = jnp.argsort(~visible, axis=-1, stable=True).astype(jnp.int32)
        return cls(start, path, jnp.argsort(path, axis=-1).astype(jnp.int32))

    def padded(self, queries: int) -> PathOrder:
        """With its last query repeated until there are ``queries``."""
        padding = ((0, 0), (0, queries - self.path.shape[1]), (0, 0))
        path, place = (jnp.pad(order, padding, mode="edge") for order in self[1:])
        return PathOrder(self.start, path, place)

    def chain(self, scores: Float[Array, "B K R S"]) -> Float[Array, "B K R S"]:
        """Scores by cache position, put where a chain's are."""
        return self._moved(scores, self.path)

    def tree(self, weights: Float[Array, "B K R S"]) -> Float[Array, "B K R S"]:
        """The inverse of :meth:`chain`."""
        return self._moved(weights, self.place)

    def _moved(
        self, x: Float[Array, "B K R S"], order: Int[Array | np.ndarray, "B Q N"]
    ) -> Float[Array, "B K R S"]:
        """``x`` whose entry d at the tree's places is the one of node ``order[…, d]``."""
        queries, nodes = order.shape[1:]
        order = jnp.tile(jnp.asarray(order), (1, x.shape[2] // queries, 1))
        is_source = order[..., None] == jnp.arange(nodes)
        # Passes are padded for few rows alone. Under vmap this would be a gather and a scatter.
        for row in range(x.shape[0]):
            first = (row, 0, 0, self.start[row])
            own = jax.lax.dynamic_slice(x, first, (1, *x.shape[1:3], nodes))
            moved = jnp.sum(jnp.where(is_source[row], own[..., None, :], 0.0), axis=-1)
            x = jax.lax.dynamic_update_slice(x, moved, first)
        return x
