"""Target distributions: what a draft is verified against.

Axis legend: B rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import probs
from specjax.models import ModelConfig, init_cache
from specjax.models.cache import commit_path
from specjax.models.forward import prefill
from specjax.scoring import score
from specjax.warp import fit_vocabulary, limit_vocabulary, warp

ORIGINAL, IMPROVED = "original", "improved"


@dataclasses.dataclass(frozen=True)
class Warped:
    """The target model's own distribution, warped by the run's sampling settings."""

    vocab_limit: int  # ids from here on have probability 0
    needs_draft_logits = False
    draft_calls = 0

    def init(self, inputs, state, chunk):
        return ()

    def log_p(self, inputs, state, draft, logits):
        return warp(logits, inputs.warp, self.vocab_limit), state.target

    def commit(self, inputs, state, carried, draft, verdict):
        return carried


@dataclasses.dataclass(frozen=True)
class Contrastive:
    """The expert's distribution against an amateur's (Li et al. 2023; Yuan et al. 2024, SCD).

    The amateur is the drafter (its raw logits ride along with the draft), or, where
    ``amateur`` is set, the draft model scoring every node with a cache of its own. Settings
    ``alpha`` and ``beta``; the run's temperature, top-k and top-p act on the result.
    """

    vocab_limit: int
    variant: str = IMPROVED
    amateur: ModelConfig | None = None

    @property
    def needs_draft_logits(self) -> bool:
        return self.amateur is None

    @property
    def draft_calls(self) -> int:
        """Draft-model calls that one round adds."""
        return int(self.amateur is not None)

    def init(self, inputs, state, chunk):
        if self.amateur is None:
            return ()
        rows, slots = state.tokens.shape
        cache = init_cache(self.amateur, rows, slots, inputs.draft["embed"].dtype)
        return prefill(self.amateur, inputs.draft, cache, state.tokens, state.length, chunk)

    def log_p(self, inputs, state, draft, logits):
        amateur, carried = draft.logits, state.target
        if self.amateur is not None:
            nodes = draft.replace(probes=None)  # the amateur knows no adaptive tokens
            amateur, carried = score(self.amateur, inputs.draft, carried, state.length - 1, nodes)
            amateur = fit_vocabulary(amateur, logits.shape[-1])
        scores = contrast(
            limit_vocabulary(logits, self.vocab_limit),
            limit_vocabulary(amateur, self.vocab_limit),
            inputs.settings["alpha"],
            inputs.settings["beta"],
            self.variant,
        )
        return warp(scores, inputs.warp, self.vocab_limit), carried

    def commit(self, inputs, state, carried, draft, verdict):
        if self.amateur is None or draft.shape.is_chain:
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
