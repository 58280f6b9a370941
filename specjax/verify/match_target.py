"""Sample-and-match over any tree (SpecInfer's naive sampling, Miao et al. 2024 §4.3). Lossless."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.core import probs
from specjax.core.protocols import rule
from specjax.core.types import DETERMINISTIC, IID, POINT_MASS, ROOT, WITHOUT_REPLACEMENT
from specjax.verify.verdicts import drawn_verdict


class _MatchWalk(NamedTuple):
    node: Int[Array, "B"]
    depth: Int[Array, "B"]
    y: Int[Array, "B"]
    done: Bool[Array, "B"]
    refused: Bool[Array, "B"]


@rule(
    accepts=(IID, WITHOUT_REPLACEMENT, DETERMINISTIC, POINT_MASS),
    lossless=True,
    chain_only=False,
    extras=("written",),
)
def match(keys, draft, log_p, *, written=0):
    """Draw one y ~ p at the node; descend into the child that carries it, else emit it.

    Every emitted token is a draw from p, so the draft's law does not matter. One draw per
    node, whatever the number of its children: a draw per path would be biased. The draw is of the
    token's place in the row, not of the round: what was drafted never changes what is written,
    and ``none`` × ``match`` writes the same tokens.

    Args:
      keys: the rows' keys ``[B]``, the same in every round.
      draft: any tree.
      log_p: float32 ``[B, N, V]``, log p of the token after each node.
      written: int32 ``[B]``, how many tokens each row has written before this round.
    """

    def step(w: _MatchWalk, _):
        u = probs.place_uniforms(keys, written + w.depth)
        y = probs.sample(jnp.exp(probs.at_node(log_p, w.node)), u)
        child = (draft.parents == w.node[:, None]) & draft.valid
        hit = child & (draft.tokens == y[:, None])
        matched = hit.any(1) & ~w.done
        next_node = jnp.argmax(hit, axis=1).astype(jnp.int32)
        ended = ~matched & ~w.done
        return _MatchWalk(
            node=jnp.where(matched, next_node, w.node),
            depth=w.depth + matched,
            y=jnp.where(ended, y, w.y),
            done=w.done | ended,
            refused=w.refused | (ended & child.any(1)),
        ), None

    rows = draft.tokens.shape[0]
    zero, no = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool)
    start = _MatchWalk(zero + ROOT, zero, zero, no, no)
    w, _ = jax.lax.scan(step, start, length=draft.shape.depth + 1)
    return drawn_verdict(draft, w.node, w.depth, w.y, w.depth + w.refused)
