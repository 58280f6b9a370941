"""A head on a target's hidden states as pure functions of its params (EAGLE-3, arXiv 2503.01840).

The pair (features of token i, token i + 1) stands at place i and predicts token i + 2. Features
are of what chosen layers of the target read (:func:`fused_states`); a further drafted step reads
those that :func:`fed_back` makes of the step before. The layer itself runs as every model's does:
:func:`specjax.models.forward_pass.forward` with ``features``, or :func:`head_states`.

Axis legend: B rows, T tokens, P layers of the target, D hidden size, V vocabulary, v draft
vocabulary.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from specjax.models.attention import dense
from specjax.models.blocks import Remat
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import hidden_states, module_of


def share_embedding(
    cfg: HeadConfig, params: dict, embed: Float[Array, "V D"]
) -> tuple[HeadConfig, dict]:
    """The head with its target's embedding, where it has none of its own; nothing is copied."""
    if cfg.own_embedding:
        return cfg, params
    return dataclasses.replace(cfg, own_embedding=True), params | {"embed": embed}


def fused_states(
    cfg: HeadConfig, params: dict, states: Float[Array, "B T P target"]
) -> Float[Array, "B T D"]:
    """The features of tokens: one product of what the target's layers read there, normed by flag.

    ``states`` are what :func:`~specjax.models.forward_pass.hidden_states` gives for
    ``cfg.layer_ids``.
    """
    return module_of(cfg, params).fused_states(states)


def head_states(
    cfg: HeadConfig,
    params: dict,
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    mask_fn: dense.MaskFn | None = None,
    meta: dense.Meta | None = None,
    backend: str = "auto",
    remat: Remat = False,
    rows: NamedSharding | None = None,
) -> Float[Array, "B T D"]:
    """Hidden states, not normed, of whole sequences of pairs, without a cache (training, tests).

    Args:
      tokens: int32; at place i the token behind the one that ``features[:, i]`` are of.
      positions, segments, and what follows: as :func:`specjax.models.forward_pass.hidden_states`. A
        ``mask_fn`` and its ``meta`` may let tokens see what they like: several drafted steps in
        one sequence.
    """
    return hidden_states(
        cfg,
        params,
        tokens,
        positions,
        segments,
        mask_fn=mask_fn,
        meta=meta,
        backend=backend,
        remat=remat,
        rows=rows,
        features=features,
    ).hidden


def fed_back(cfg: HeadConfig, params: dict, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """What the next drafted step reads in place of features."""
    return module_of(cfg, params).fed_back(hidden)


def draft_logits(
    cfg: HeadConfig, params: dict, hidden: Float[Array, "... D"]
) -> Float[Array, "... v"]:
    """Logits over the draft vocabulary of :func:`head_states`, in the model's dtype."""
    return module_of(cfg, params).logits(hidden)
