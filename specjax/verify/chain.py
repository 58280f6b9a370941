"""What rules over a chain share: p and q of each drafted token, and the verdict's form.

Axis legend: B rows, N = γ + 1 nodes, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import probs
from specjax.probs import Purpose
from specjax.types import NO_NODE, Draft, Verdict


def draft_length(draft: Draft) -> Int[Array, "B"]:
    """γ of each row: its number of valid draft tokens, the root not counted."""
    return draft.valid[:, 1:].sum(-1, dtype=jnp.int32)


def drafted_log_probs(
    draft: Draft, log_p: Float[Array, "B N V"]
) -> tuple[Float[Array, "B γ"], Float[Array, "B γ"]]:
    """log p(x_i) and log q(x_i) of the drafted tokens; q of a point mass is 1."""
    x = draft.tokens[:, 1:]
    lp = probs.at_token(log_p[:, :-1], x)
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
    nodes = draft.tokens.shape[1]
    u = probs.uniforms(keys, Purpose.EMIT, accepted[:, None])[:, 0]
    y = probs.sample(weights, u)
    at = jnp.arange(nodes, dtype=jnp.int32)
    shifted = jnp.roll(draft.tokens, -1, axis=1)  # x_1 … x_γ, then a slot for y
    here = accepted[:, None]
    return Verdict(
        path=jnp.where(at <= here, at, NO_NODE),
        num_accepted=accepted,
        num_tested=accepted + refused if tested is None else tested,
        tokens=jnp.where(at < here, shifted, jnp.where(at == here, y[:, None], 0)),
        num_tokens=accepted + 1,
    )
