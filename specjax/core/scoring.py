"""One pass of a model over every node of a draft.

Axis legend: B rows, N draft nodes, P probes, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core import tree
from specjax.core.net import Net
from specjax.core.types import Draft
from specjax.models import KVCache


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
