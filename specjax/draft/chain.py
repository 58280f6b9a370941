"""Chain drafting: a draft model draws γ tokens one after another (Leviathan et al. 2023 §2).

Axis legend: B rows, N = γ + 1 nodes, P draft passes (γ, or γ + 1 with the bonus token's logits),
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import COUNT, FLAG, validate_fields
from specjax._util.checks import Check
from specjax._util.errors import PairError
from specjax.core import probs, vocabulary
from specjax.core.probs import Purpose
from specjax.core.protocols import Proposal
from specjax.core.types import (
    DETERMINISTIC,
    IID,
    NO_TOKEN,
    DecodeState,
    Draft,
    Inputs,
    TreeShape,
)
from specjax.core.warp import warp
from specjax.draft.model_drafter import ModelDrafter, draw_chain, last_two

# The memory layout of the draft's probabilities: axes in their order, the steps outermost.
STEP_BY_STEP = Layout((0, 1, 2))
# When a row's draft ends early: never, before a token that the draft is unsure of, or after it.
NEVER_STOPS = "never"
STOPS_BEFORE = "before"
STOPS_AFTER = "after"
STOPS = (NEVER_STOPS, STOPS_BEFORE, STOPS_AFTER)


class ChainRecord(NamedTuple):
    """What is kept of each draft pass besides its token."""

    valid: Bool[Array, "B γ"]
    log_q: Float[Array, "P B V"]
    logits: Float[Array, "P B V"] | None  # raw, where a target distribution asks for them
    # The tokens so far, then NO_TOKEN, where the rows have settings that read them.
    path: Int[Array, "B γ"] | None


@dataclasses.dataclass(frozen=True)
class Chain(ModelDrafter):
    """γ tokens drawn from a draft model with the target's warp, or unwarped (``draft_warp=False``).

    With ``greedy`` they are its most probable tokens instead, beside the same ``log_q``. The rules
    of sampled drafts refuse them, because they are no draws from it.

    A row's chain ends at its first end-of-sequence token. With ``stop`` it also ends where the
    draft's largest probability, unwarped, is below the setting ``tau1`` (BiLD's fallback, Kim et
    al. 2023, §3.3). That reads only the prefix, so it is lossless under a lossless rule. The loop
    of draft passes ends when every row's chain has ended. A setting ``gamma``, if there is one, is
    a smaller γ for this round.
    """

    gamma: int = 4
    stop: str = NEVER_STOPS
    draft_warp: bool = True
    keep_logits: bool = False
    greedy: bool = False
    name = "chain"
    splits_vocabulary = True

    def __post_init__(self):
        stop = Check(str, choices=STOPS)
        flags = {"draft_warp": FLAG, "keep_logits": FLAG, "greedy": FLAG}
        validate_fields(self, gamma=COUNT, stop=stop, **flags)
        if self.keep_logits and self.stop == STOPS_AFTER:
            raise PairError(
                "a chain that stops after an unsure token has no logits after that token, "
                "which this target distribution needs: use stop=before"
            )

    @property
    def sampling(self) -> str:
        """I.i.d. draws from q, or its likeliest tokens."""
        return DETERMINISTIC if self.greedy else IID

    @property
    def shape(self) -> TreeShape:
        """A chain of γ nodes."""
        return TreeShape.chain(self.gamma)

    @property
    def ends_early(self) -> bool:
        """Whether it stops where the draft model is unsure, before γ."""
        return self.stop != NEVER_STOPS

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the thresholds that its stop reads."""
        return ("tau1",) if self.ends_early else ()

    def with_logits(self) -> Chain:
        return dataclasses.replace(self, keep_logits=True)

    def propose(self, inputs, state, keys) -> Proposal:
        first = self.first_logits(inputs, state)
        rows, vocab = first[0].shape
        passes = self.gamma + self.keep_logits  # the logits after the last token cost one pass more
        # One row of the record per step, the steps outermost. If they were a short axis next to the
        # vocabulary, a TPU would transpose every row that is written.
        record = ChainRecord(
            valid=jnp.zeros((rows, self.gamma), bool),
            log_q=jnp.full((passes, rows, vocab), probs.NEVER, jnp.float32),
            logits=jnp.zeros((passes, rows, vocab)) if self.keep_logits else None,
            path=None if inputs.warp.path is None else jnp.full((rows, self.gamma), NO_TOKEN),
        )
        chain = draw_chain(
            first,
            functools.partial(self.next_logits, inputs, state),
            last_two(state),
            self.can_draft(state),
            self.gamma,
            functools.partial(self._draw, inputs, state, keys),
            record,
            passes,
        )

        record = chain.extra
        log_q = self.to_target_vocab(inputs, record.log_q[: self.gamma].swapaxes(0, 1))
        logits = record.logits
        if logits is not None:
            logits = self.to_target_vocab(inputs, logits.swapaxes(0, 1))
        draft = Draft.chain(
            chain.window[:, 2:],
            log_q,
            root=chain.window[:, 1],
            valid=record.valid,
            sampling=self.sampling,
            logits=logits,
        )
        return Proposal(draft, chain.carry, chain.calls, chain.step)

    def _draw(
        self,
        inputs: Inputs,
        state: DecodeState,
        keys: Key[Array, "B"],
        step: Int[Array, ""],
        logits: Float[Array, "B V"],
        active: Bool[Array, "B"],
        record: ChainRecord,
    ) -> tuple[Int[Array, "B"], Bool[Array, "B"], ChainRecord]:
        """Node ``step + 1``, drawn from the logits of one draft pass; see :func:`draw_chain`.

        The extra pass, which only gives the logits after the last token, comes here, too. What it
        writes to ``valid`` is dropped, and its ``log_q`` is not used.
        """
        if self.draft_warp:
            paths = None if record.path is None else record.path[:, None]
            followed = self.with_path_settings(inputs, state, logits[:, None], paths)
            log_q = warp(followed, inputs.warp)[:, 0]
        else:
            log_q = probs.log_softmax(logits)
        gamma = inputs.settings.get("gamma", self.gamma)
        drawn = active & (step < gamma)
        if self.stop == STOPS_BEFORE:
            drawn = drawn & self._is_sure(inputs, logits)

        node = jnp.broadcast_to(step + 1, (log_q.shape[0], 1))
        if self.greedy:
            token = vocabulary.argmax(log_q).astype(jnp.int32)
        else:
            u = probs.uniforms(keys, Purpose.DRAFT, node)[:, 0]
            token = probs.sample(jnp.exp(log_q), u)
        token = jnp.where(drawn, self.to_target_ids(inputs, token), 0)
        # If raw logits are kept, a row also takes part in the extra pass, hence + keep_logits.
        active = drawn & ~inputs.is_eos(token) & (step + 1 < gamma + self.keep_logits)
        if self.stop == STOPS_AFTER:
            active = active & self._is_sure(inputs, logits)

        valid = record.valid.at[:, step].set(drawn, mode="drop")
        # The constraint keeps the steps outermost in the loop's carry, too: see `propose`.
        written = jax.lax.dynamic_update_index_in_dim(record.log_q, log_q, step, 0)
        all_log_q = with_layout_constraint(written, STEP_BY_STEP)
        all_logits = record.logits
        if all_logits is not None:
            all_logits = jax.lax.dynamic_update_index_in_dim(all_logits, logits, step, 0)
        path = record.path
        if path is not None:
            path = path.at[:, step].set(token, mode="drop")
        return token, active, ChainRecord(valid, all_log_q, all_logits, path)

    def _is_sure(self, inputs: Inputs, logits: Float[Array, "B V"]) -> Bool[Array, "B"]:
        """Whether the draft's largest probability, at temperature 1, reaches ``tau1``."""
        return jnp.exp(vocabulary.largest(probs.log_softmax(logits))) >= inputs.settings["tau1"]
