"""From a target distribution's logits to its probabilities: what every one of them ends with."""

from __future__ import annotations

from jaxtyping import Array, Float

from specjax.core import tree
from specjax.core.path_logits import path_logits
from specjax.core.types import DecodeState, Draft, Inputs
from specjax.core.warp import warp


def node_law(
    inputs: Inputs, state: DecodeState, draft: Draft, logits: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    """Log-probabilities of the token after each node, under all sampling settings of the rows."""
    if inputs.warp.path is not None:
        paths = tree.paths(draft.tokens, draft.parents, draft.shape.depth)
        logits = path_logits(inputs, state, logits, paths)
    return warp(logits, inputs.warp)
