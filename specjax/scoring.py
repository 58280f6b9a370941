"""One pass of a model over every node of a draft.

Axis legend: B rows, N draft nodes, P probes, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax import tree
from specjax.models import KVCache
from specjax.net import Net
from specjax.types import Draft, TreeShape

NARROW = 4  # tokens of a narrow pass: a CPU's kernels slow down beyond


def score(
    net: Net, cache: KVCache, start: Int[Array, "B"], draft: Draft
) -> tuple[Float[Array, "B N+P V"], KVCache]:
    """Logits at the draft's nodes, then at its probes; the cache holds them from ``start`` on.

    ``start`` is the number of committed tokens before the root. Positions are depths.
    """
    return tapped_score(net, cache, start, draft)[:2]


def tapped_score(
    net: Net, cache: KVCache, start: Int[Array, "B"], draft: Draft, taps: tuple[int, ...] = ()
) -> tuple[Float[Array, "B N+P V"], KVCache, Float[Array, "B N+P L D"] | None]:
    """:func:`score`, and the inputs of the L layers ``taps`` at every node; None where none is."""
    tokens, parents = draft.tokens, draft.parents
    if draft.probes is None and draft.shape.is_chain:
        return net.tapped_logits(cache, tokens, start, taps=taps)
    if draft.probes is not None:
        tokens = jnp.concatenate([tokens, draft.probes.tokens], axis=1)
        known = isinstance(parents, np.ndarray)  # then the mask is a constant
        join = np.concatenate if known else jnp.concatenate
        parents = join([parents, draft.probes.parents], axis=1)
    visible = tree.ancestors(parents, tokens.shape[1])
    positions = start[:, None] + tree.depths(visible)
    adaptive = draft.probes is not None
    return net.tapped_logits(cache, tokens, start, positions, visible, taps=taps, adaptive=adaptive)


def score_as_needed(
    net: Net,
    cache: KVCache,
    start: Int[Array, "B"],
    draft: Draft,
    live: Bool[Array, "B"],
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "B N V"], KVCache, Float[Array, "B N L D"] | None]:
    """:func:`tapped_score` for chains that mostly end long before their bound.

    A narrow pass where it holds the draft of every ``live`` row, else a pass over all nodes.
    What lies past a narrow pass is 0: no draft is there. Two loops of at most one turn, for
    ``lax.cond`` keeps a second copy of the cache.
    """
    nodes = draft.shape.nodes
    if nodes <= NARROW:
        return tapped_score(net, cache, start, draft, taps)
    longest = jnp.max(jnp.where(live, draft.valid.sum(-1), 0))

    def turn(width):
        part = dataclasses.replace(
            draft, tokens=draft.tokens[:, :width], shape=TreeShape.chain(width - 1)
        )

        def run(carry):
            _, wide, cache = carry
            logits, cache, states = tapped_score(net, cache, start, part, taps)
            new = logits, states
            wide = jax.tree.map(lambda x, y: x.at[:, :width].set(y), wide, new)
            return jnp.bool_(False), wide, cache

        return run

    logits, _, states = jax.eval_shape(
        lambda *arguments: tapped_score(*arguments, taps), net, cache, start, draft
    )
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (logits, states))
    short = longest <= NARROW
    _, wide, cache = jax.lax.while_loop(lambda c: c[0], turn(NARROW), (short, none, cache))
    (logits, states), cache = jax.lax.while_loop(
        lambda c: c[0], turn(nodes), (~short, wide, cache)
    )[1:]
    return logits, cache, states
