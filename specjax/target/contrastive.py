"""The contrastive target: the target model's logits against those of the draft model.

Axis legend: B rows, N draft nodes, V vocabulary; ``...`` are leading axes.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax._util.arguments import FLAG, validate_fields
from specjax._util.checks import Check
from specjax.core import probs, vocabulary
from specjax.core.protocols import TargetDist
from specjax.core.scoring import score
from specjax.models.cache import commit_path
from specjax.target.node_law import node_law, possible_logits

ORIGINAL = "original"
IMPROVED = "improved"
VARIANTS = (ORIGINAL, IMPROVED)


@dataclasses.dataclass(frozen=True)
class Contrastive(TargetDist):
    """The target model (expert) against the draft model (amateur).

    Li et al. 2023; with speculative drafts, Yuan et al. 2024 (SCD). The amateur's raw logits come
    with the draft. With ``own_passes`` the amateur scores every node itself and has its own KV
    cache. Settings are ``alpha`` and ``beta``, see :func:`contrast`. The run's sampling settings
    act on the result.
    """

    variant: str = IMPROVED
    own_passes: bool = False
    needs_draft = True
    follows_paths = True
    splits_vocabulary = True
    settings = ("alpha", "beta")

    def __post_init__(self):
        validate_fields(self, variant=Check(str, choices=VARIANTS), own_passes=FLAG)

    @property
    def needs_draft_logits(self) -> bool:
        """Whether the amateur's logits are the drafter's."""
        return not self.own_passes

    @property
    def draft_calls(self) -> int:
        """One pass of the amateur, if the drafter does not give its logits."""
        return int(self.own_passes)

    def standalone(self) -> Contrastive:
        return dataclasses.replace(self, own_passes=True)

    def init(self, inputs, state):
        if not self.own_passes:
            return ()
        return _amateur_of(inputs).cache(*state.tokens.shape)

    def prefill_chunk(self, inputs, carried, tokens, start):
        if not self.own_passes:
            return ()
        cache, _ = _amateur_of(inputs).prefill_chunk(carried, tokens, start)
        return cache

    def log_p(self, inputs, state, draft, logits):
        amateur_logits = draft.logits
        cache = state.target_state
        if self.own_passes:
            nodes = draft.replace(probes=None)  # the amateur has no adaptive tokens
            root = state.length - 1
            amateur_logits, cache, _ = score(_amateur_of(inputs), cache, root, nodes)
        assert amateur_logits is not None, "MethodSpec.build pairs it with a drafter of logits"
        alpha = inputs.settings["alpha"]
        beta = inputs.settings["beta"]
        # A token is plausible beside those that may follow. Others may all be more likely.
        logits = possible_logits(inputs, state, draft, logits)
        scores = contrast(logits, amateur_logits, alpha, beta, self.variant)
        return node_law(inputs, state, draft, scores), cache

    def commit(self, inputs, state, carried, draft, verdict):
        # A chain's nodes are already at their cache positions; those of a tree must be moved.
        if not self.own_passes or draft.shape.is_chain:
            return carried
        return commit_path(carried, state.length - 1, verdict.path)


def _amateur_of(inputs):
    """The draft model."""
    assert inputs.draft is not None, "needs_draft: a run without a draft model is refused"
    return inputs.draft


def contrast(
    expert: Float[Array, "... V"],
    amateur: Float[Array, "... V"],
    alpha: Float[Array, ""],
    beta: Float[Array, ""],
    variant: str,
) -> Float[Array, "... V"]:
    """Contrastive scores of raw logits (SCD §3.1; Li et al. 2023, §3.3).

    A token keeps its score if it has at least ``α`` times the expert's top probability, that is,
    if ``Y_e ≥ log α + max Y_e``. All others get −inf. The score is ``log p_e − log p_a`` with the
    variant ``original``, and ``(1 + β) Y_e − β Y_a`` with ``improved`` (O'Brien and Lewis 2023).

    Args:
      expert, amateur: raw logits Y_e and Y_a ``[..., V]``; the result is float32.
      alpha: from above 0 to 1.
      beta: the amateur's weight in the variant ``improved``, at least 0.
      variant: one of :data:`VARIANTS`.
    """
    expert = expert.astype(jnp.float32)
    amateur = amateur.astype(jnp.float32)
    # A token that the amateur excludes would score +inf: use the smallest finite logit instead.
    is_finite = amateur > probs.NEVER
    smallest = vocabulary.least(jnp.where(is_finite, amateur, jnp.inf), keepdims=True)
    amateur = jnp.where(is_finite, amateur, smallest)

    plausible = expert >= jnp.log(alpha) + vocabulary.largest(expert, keepdims=True)
    if variant == ORIGINAL:
        scores = probs.log_softmax(expert) - probs.log_softmax(amateur)
    else:
        scores = (1 + beta) * expert - beta * amateur
    return jnp.where(plausible, scores, probs.NEVER)
