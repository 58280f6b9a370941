"""From a target distribution's logits to its probabilities: what every one of them ends with."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core import probs, tree
from specjax.core.path_logits import path_logits
from specjax.core.types import DecodeState, Draft, Inputs
from specjax.core.warp import warp


def node_law(
    inputs: Inputs, state: DecodeState, draft: Draft, logits: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    """Log-probabilities of the token after each node, under all sampling settings of the rows.

    A grammar's mask comes first, so bans that would leave nothing of it are dropped.
    """
    logits = allowed_logits(draft, logits)
    return warp(_under_path_settings(inputs, state, draft, logits), inputs.warp)


def possible_logits(
    inputs: Inputs, state: DecodeState, draft: Draft, logits: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    """The logits of tokens that may follow; −inf for those that a grammar or a ban excludes."""
    logits = allowed_logits(draft, logits)
    changed = _under_path_settings(inputs, state, draft, logits)
    return jnp.where(changed > probs.NEVER, logits, probs.NEVER)


def _under_path_settings(
    inputs: Inputs, state: DecodeState, draft: Draft, logits: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    if inputs.warp.path is None:
        return logits
    paths = tree.paths(draft.tokens, draft.parents, draft.shape.depth)
    return path_logits(inputs, state, logits, paths)


def allowed_logits(draft: Draft, logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
    """The logits, without tokens that a grammar does not let follow."""
    if draft.allowed is None:
        return logits
    return jnp.where(_unpacked(draft.allowed, logits.shape[-1]), logits, probs.NEVER)


def _unpacked(bits: Int[Array, "B N W"], vocab: int) -> Bool[Array, "B N V"]:
    """One bool per token of 32 to a word, the lowest bit first."""
    ids = jnp.arange(32 * bits.shape[-1]).reshape(bits.shape[-1], 32)
    flags = (bits[..., None] >> (ids % 32)) & 1
    return (flags > 0).reshape(*bits.shape[:-1], -1)[..., :vocab]
