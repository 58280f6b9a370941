"""A draft head on a target's hidden states, as pure functions of its params (EAGLE-3).

EAGLE-3 is arXiv 2503.01840. The pair (features of token i, token i + 1) is at index i and predicts
token i + 2. Features come from the inputs of chosen layers of the target (:func:`fused_states`). A
further drafted step reads features that come from the hidden state of the step before
(:func:`fed_back`). The layer itself runs as every model's does:
:func:`specjax.models.forward_pass.forward` with ``features``, or :func:`head_states`.

Axis legend: B rows, T tokens, P auxiliary layers of the target, D hidden size, V vocabulary,
v draft vocabulary.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from specjax.models.attention import dense
from specjax.models.blocks import Remat
from specjax.models.families.head import EagleHead
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import hidden_states, module_of


def share_embedding(
    cfg: HeadConfig, params: dict, embed: Float[Array, "V D"]
) -> tuple[HeadConfig, dict]:
    """The head with its target's embedding, if it has none of its own; nothing is copied."""
    if cfg.own_embedding:
        return cfg, params
    return dataclasses.replace(cfg, own_embedding=True), params | {"embed": embed}


def fused_states(
    cfg: HeadConfig, params: dict, states: Float[Array, "B T P target"]
) -> Float[Array, "B T D"]:
    """The features of tokens: one product of the target's auxiliary hidden states.

    ``states`` are the ``aux`` of :func:`~specjax.models.forward_pass.hidden_states` for
    ``cfg.layer_ids``. Flags of the config say whether they are normed.
    """
    return _head_module(cfg, params).fused_states(states)


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
    """Hidden states, not normed, of whole sequences of pairs without a cache (training, tests).

    Args:
      tokens: int32; at index i the token after the one of ``features[:, i]``.
      positions, segments, and the others: as for
        :func:`specjax.models.forward_pass.hidden_states`. With a ``mask_fn`` that reads ``meta``,
        one sequence can hold several drafted steps.
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
    """The features of the next drafted step, from the hidden states of this one."""
    return _head_module(cfg, params).fed_back(hidden)


def draft_logits(
    cfg: HeadConfig, params: dict, hidden: Float[Array, "... D"]
) -> Float[Array, "... v"]:
    """Logits over the draft vocabulary of :func:`head_states`, in the model's dtype."""
    return _head_module(cfg, params).logits(hidden)


def _head_module(cfg: HeadConfig, params: dict) -> EagleHead:
    module = module_of(cfg, params)
    assert isinstance(module, EagleHead), "a HeadConfig's family makes an EagleHead"
    return module
