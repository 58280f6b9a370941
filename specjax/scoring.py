"""One pass of a model over every node of a draft.

Axis legend: B rows, N draft nodes, P probes, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.models import KVCache, ModelConfig, forward, logits_of
from specjax.types import Draft


def score(
    cfg: ModelConfig, params: dict, cache: KVCache, start: Int[Array, "B"], draft: Draft
) -> tuple[Float[Array, "B N+P V"], KVCache]:
    """Logits at the draft's nodes, then at its probes; the cache holds them from ``start`` on.

    ``start`` is the number of committed tokens before the root. Positions are depths.
    """
    tokens, parents = draft.tokens, draft.parents
    if draft.probes is None and draft.shape.is_chain:
        visible, depth = None, jnp.arange(draft.shape.nodes, dtype=jnp.int32)
    else:
        if draft.probes is not None:
            tokens = jnp.concatenate([tokens, draft.probes.tokens], axis=1)
            known = isinstance(parents, np.ndarray)  # then the mask is a constant
            join = np.concatenate if known else jnp.concatenate
            parents = join([parents, draft.probes.parents], axis=1)
        visible = tree.ancestors(parents, tokens.shape[1])
        depth = tree.depths(visible)
    hidden, cache = forward(cfg, params, cache, tokens, start[:, None] + depth, start, visible)
    return logits_of(cfg, params, hidden), cache
