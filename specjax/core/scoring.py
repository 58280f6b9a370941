"""One pass of a model over every node of a draft.

Axis legend: B rows, N draft nodes, P probes, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.core import tree
from specjax.core.net import Net, NetOutput
from specjax.core.types import Draft
from specjax.models import KVCache


def score(
    net: Net,
    cache: KVCache,
    start: Int[Array, "B"],
    draft: Draft,
    aux_layers: tuple[int, ...] = (),
) -> NetOutput:
    """Logits ``[B, N+P, V]`` at the draft's nodes, then at its probes.

    ``start`` is the number of committed tokens before the root. After the pass the cache holds
    nodes and probes from there on. A node's position is ``start`` plus its depth. ``aux_layers``:
    as in :meth:`specjax.core.net.Net.logits`.
    """
    tokens = draft.tokens
    parents = draft.parents
    if draft.probes is None and draft.shape.is_chain:
        return net.logits(cache, tokens, start, aux_layers=aux_layers)
    if draft.probes is not None:
        tokens = jnp.concatenate([tokens, draft.probes.tokens], axis=1)
        # Parents in numpy are static: the mask is then a constant of the program.
        join = np.concatenate if isinstance(parents, np.ndarray) else jnp.concatenate
        parents = join([parents, draft.probes.parents], axis=1)
    visible = tree.ancestors(parents, tokens.shape[1])
    positions = start[:, None] + tree.depths(visible)
    return net.logits(
        cache,
        tokens,
        start,
        positions,
        visible,
        aux_layers=aux_layers,
        adaptive=draft.probes is not None,
    )
