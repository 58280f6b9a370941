"""The contrastive target: what the target model says more than the draft model does.

Axis legend: B rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax._util.arguments import FLAG, ArgSpec, validate_fields
from specjax.core import probs
from specjax.core.protocols import TargetDist
from specjax.core.scoring import score
from specjax.core.warp import warp
from specjax.models.cache import commit_path

VARIANTS = ORIGINAL, IMPROVED = "original", "improved"


@dataclasses.dataclass(frozen=True)
class Contrastive(TargetDist):
    """The expert's distribution against an amateur's (Li et al. 2023; Yuan et al. 2024, SCD).

    The amateur is the draft model: its raw logits ride along with the draft, or it scores every
    node with a cache of its own (``own_passes``). Settings ``alpha`` and ``beta``; the run's
    temperature, top-k and top-p act on the result.
    """

    variant: str = IMPROVED
    own_passes: bool = False
    needs_draft = True
    settings = ("alpha", "beta")

    def __post_init__(self):
        validate_fields(self, variant=ArgSpec(str, choices=VARIANTS), own_passes=FLAG)

    @property
    def needs_draft_logits(self) -> bool:
        return not self.own_passes

    @property
    def draft_calls(self) -> int:
        return int(self.own_passes)

    def standalone(self) -> Contrastive:
        return dataclasses.replace(self, own_passes=True)

    def init(self, inputs, state):
        return inputs.draft.cache(*state.tokens.shape) if self.own_passes else ()

    def prefill_chunk(self, inputs, carried, tokens, start):
        if not self.own_passes:
            return ()
        return inputs.draft.prefill_chunk(carried, tokens, start)[0]

    def log_p(self, inputs, state, draft, logits):
        amateur, cache = draft.logits, state.target_state
        if self.own_passes:
            nodes = draft.replace(probes=None)  # the amateur knows no adaptive tokens
            amateur, cache, _ = score(inputs.draft, cache, state.length - 1, nodes)
        alpha, beta = inputs.settings["alpha"], inputs.settings["beta"]
        return warp(contrast(logits, amateur, alpha, beta, self.variant), inputs.warp), cache

    def commit(self, inputs, state, carried, draft, verdict):
        if not self.own_passes or draft.shape.is_chain:
            return carried
        return commit_path(carried, state.length - 1, verdict.path)


def contrast(
    expert: Float[Array, "... V"],
    amateur: Float[Array, "... V"],
    alpha: Float[Array, ""],
    beta: Float[Array, ""],
    variant: str,
) -> Float[Array, "... V"]:
    """Contrastive scores from raw logits; −inf off the plausible set (SCD §3, Li et al. §3.3).

    Plausible are tokens of ``Y_e ≥ log α + max Y_e``. ``original``: log p_e − log p_a;
    ``improved`` (O'Brien and Lewis 2023): ``(1 + β) Y_e − β Y_a``.
    """
    expert, amateur = expert.astype(jnp.float32), amateur.astype(jnp.float32)
    finite = amateur > probs.NEVER
    # An amateur that excludes a token would make its score +inf.
    least = jnp.min(jnp.where(finite, amateur, jnp.inf), axis=-1, keepdims=True)
    amateur = jnp.where(finite, amateur, least)
    plausible = expert >= jnp.log(alpha) + expert.max(-1, keepdims=True)
    if variant == ORIGINAL:
        scores = probs.log_softmax(expert) - probs.log_softmax(amateur)
    else:
        scores = (1 + beta) * expert - beta * amateur
    return jnp.where(plausible, scores, probs.NEVER)
