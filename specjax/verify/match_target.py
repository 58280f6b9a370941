"""Sample-and-match over any tree (SpecInfer's naive sampling, Miao et al. 2024 §4.3). Lossless."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.core import probs
from specjax.core.protocols import rule
from specjax.core.types import DETERMINISTIC, IID, POINT_MASS, ROOT, WITHOUT_REPLACEMENT
from specjax.verify.verdicts import path_verdict


class _MatchWalk(NamedTuple):
    """Where each row is on its way down the tree."""

    node: Int[Array, "B"]
    depth: Int[Array, "B"]
    y: Int[Array, "B"]  # the last token, which no child carries
    done: Bool[Array, "B"]
    rejected: Bool[Array, "B"]  # there were children, and none carried y


@rule(
    accepts=(IID, WITHOUT_REPLACEMENT, DETERMINISTIC, POINT_MASS),
    lossless=True,
    chain_only=False,
    extras=("written",),
    splits_vocabulary=True,
)
def match(keys, draft, log_p, *, written=0):
    """Draw y ~ p at the node; go on to the child that carries y, else stop and emit y.

    Every emitted token is a draw from p, so it does not matter how the draft was made. There is
    one draw per node, whatever the number of its children: a draw per child would be biased.

    The draw depends on the token's position in the output and not on the round. So the output does
    not depend on what is drafted: it is that of ``none`` × ``match``, token for token.

    Args:
      keys: the rows' keys ``[B]``, the same in every round (other rules get the round's keys).
      draft: any tree.
      log_p: float32 ``[B, N, V]``, log p of the token after each node.
      written: int32 ``[B]``, how many tokens each row has written before this round.
    """

    def step(walk: _MatchWalk, _):
        u = probs.position_uniforms(keys, written + walk.depth)
        y = probs.sample(jnp.exp(probs.at_node(log_p, walk.node)), u)
        is_child = (draft.parents == walk.node[:, None]) & draft.valid
        carries_y = is_child & (draft.tokens == y[:, None])
        matched = carries_y.any(1) & ~walk.done
        next_node = jnp.argmax(carries_y, axis=1).astype(jnp.int32)
        stopped = ~matched & ~walk.done
        return _MatchWalk(
            node=jnp.where(matched, next_node, walk.node),
            depth=walk.depth + matched,
            y=jnp.where(stopped, y, walk.y),
            done=walk.done | stopped,
            rejected=walk.rejected | (stopped & is_child.any(1)),
        ), None

    rows = draft.tokens.shape[0]
    zero = jnp.zeros((rows,), jnp.int32)
    no = jnp.zeros((rows,), bool)
    start = _MatchWalk(node=zero + ROOT, depth=zero, y=zero, done=no, rejected=no)
    # Depth + 1 steps: the last one draws the token after a deepest node.
    end, _ = jax.lax.scan(step, start, length=draft.shape.depth + 1)
    return path_verdict(draft, end.node, end.depth, end.y, end.depth + end.rejected)
