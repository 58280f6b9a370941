"""Classifier-free guidance: the target model's logits with the prompt against those without it.

Axis legend: B rows, N draft nodes, V vocabulary; ``...`` are leading axes.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax._util.arguments import as_integer_array, validate_fields
from specjax._util.checks import Check
from specjax._util.errors import OptionError
from specjax.core import probs
from specjax.core.protocols import TargetDist
from specjax.core.scoring import score
from specjax.core.types import ROOT, DecodeState
from specjax.models.cache import commit_path
from specjax.target.node_law import node_law

CHUNK = 128  # tokens of the negative prompt in a pass
TOKEN_IDS = Check(
    lambda value: tuple(as_integer_array(value).tolist()),
    fits=lambda ids: min(ids, default=0) >= 0,
    expected="token ids",
)


@dataclasses.dataclass(frozen=True)
class Guided(TargetDist):
    """The target model after the prompt, pushed away from what it says without the prompt.

    Sanchez et al. 2023 (arXiv 2306.17806); transformers' ``guidance_scale``. The new tokens
    are scored a second time, after ``negative`` in place of the prompt, with a KV cache of its own.
    So a round takes two target passes. The setting is ``guidance_scale``, see :func:`guide`. The
    run's sampling settings act on the result.

    Attributes:
      negative: token ids of the negative prompt. If empty, the last token of the row's own prompt
        takes its place, as in transformers.
    """

    negative: tuple[int, ...] = ()
    settings = ("guidance_scale",)
    follows_paths = True
    splits_vocabulary = True
    target_calls = 1

    def __post_init__(self):
        validate_fields(self, negative=TOKEN_IDS)

    @property
    def extra_positions(self) -> int:
        """Cache positions that the negative prompt needs more than the prompt."""
        return max(len(self.negative) - 1, 0)

    def init(self, inputs, state):
        largest = max(self.negative, default=0)
        if largest >= inputs.target.vocab_limit:
            raise OptionError(
                f"negative prompt: token {largest} is not among the target's "
                f"{inputs.target.vocab_limit}"
            )
        rows, capacity = state.tokens.shape
        cache = inputs.target.cache(rows, capacity)
        # The last token is the root of the first round, as a prompt's last token is.
        before = jnp.asarray(self.negative[:-1], jnp.int32)
        for begin in range(0, before.size, CHUNK):
            tokens = jnp.tile(before[begin : begin + CHUNK], (rows, 1))
            start = jnp.full((rows,), begin, jnp.int32)
            cache, _ = inputs.target.prefill_chunk(cache, tokens, start)
        return cache

    def log_p(self, inputs, state, draft, logits):
        nodes = draft.replace(probes=None)  # they only draft
        if self.negative:
            is_first = state.length == state.prompt_length
            root = jnp.where(is_first, self.negative[-1], draft.tokens[:, ROOT])
            nodes = nodes.replace(tokens=draft.tokens.at[:, ROOT].set(root))
        start = self._root_position(state)
        without_prompt = score(inputs.target, state.target_state, start, nodes)
        scale = inputs.settings["guidance_scale"]
        scores = guide(logits, without_prompt.logits, scale)
        return node_law(inputs, state, draft, scores), without_prompt.cache

    def commit(self, inputs, state, carried, draft, verdict):
        # A chain's nodes are already at their cache positions; those of a tree must be moved.
        if draft.shape.is_chain:
            return carried
        return commit_path(carried, self._root_position(state), verdict.path)

    def _root_position(self, state: DecodeState) -> Int[Array, "B"]:
        """Where the last committed token stands after the negative prompt."""
        return self.extra_positions + state.length - state.prompt_length


def guide(
    with_prompt: Float[Array, "... V"],
    without_prompt: Float[Array, "... V"],
    guidance_scale: Float[Array, ""],
) -> Float[Array, "... V"]:
    """Guided scores ``log u + s (log c − log u)`` of raw logits (Sanchez et al. 2023).

    c and u are the probabilities with and without the prompt, and s is the scale.

    Args:
      with_prompt, without_prompt: raw logits ``[..., V]``; the result is float32. A token whose
        logit is −inf in one of them keeps it.
      guidance_scale: 1 gives ``log c``; above 1, the prompt counts for more.
    """
    possible = (with_prompt > probs.NEVER) & (without_prompt > probs.NEVER)
    log_c = probs.log_softmax(with_prompt.astype(jnp.float32))
    log_u = probs.log_softmax(without_prompt.astype(jnp.float32))
    difference = jnp.where(possible, log_c - log_u, 0.0)
    return jnp.where(possible, log_u + guidance_scale * difference, probs.NEVER)
