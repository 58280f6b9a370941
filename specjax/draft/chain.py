"""Chain drafting: a draft model draws γ tokens one after another (Leviathan et al. 2023 §2).

Axis legend: B rows, N = γ + 1 nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float

from specjax._util.arguments import COUNT, FLAG, validate_fields
from specjax._util.checks import Check
from specjax._util.errors import PairError
from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.protocols import Proposal
from specjax.core.types import IID, Draft, TreeShape
from specjax.core.warp import warp
from specjax.draft.model_drafter import ModelDrafter, draw_chain, last_two

# When a row's draft ends early: never, before or after a token that the draft is unsure of.
STEP_BY_STEP = Layout((0, 1, 2))
STOPS = NEVER_STOPS, STOPS_BEFORE, STOPS_AFTER = "never", "before", "after"


@dataclasses.dataclass(frozen=True)
class Chain(ModelDrafter):
    """γ tokens drawn from a draft model with the target's warp, or none (``draft_warp=False``).

    A row's chain ends at its first end-of-sequence token; with ``stop``, also where the draft's
    largest probability, unwarped, is below the setting ``tau1`` (BiLD's fallback, Kim et al. 2023
    §3.2; lossless under a lossless rule, for it reads the prefix alone). The loop ends when every
    row's chain has. A setting ``gamma``, where there is one, is a smaller γ of this round.
    """

    gamma: int = 4
    stop: str = NEVER_STOPS
    draft_warp: bool = True
    keep_logits: bool = False
    name = "chain"
    sampling = IID

    def __post_init__(self):
        validate_fields(
            self, gamma=COUNT, stop=Check(str, choices=STOPS), draft_warp=FLAG, keep_logits=FLAG
        )
        if self.keep_logits and self.stop == STOPS_AFTER:
            raise PairError(
                "a chain that stops after an unsure token has no logits behind it, "
                "which this target distribution needs: use stop=before"
            )

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chain(self.gamma)

    @property
    def ends_early(self) -> bool:
        return self.stop != NEVER_STOPS

    @property
    def settings(self) -> tuple[str, ...]:
        return ("tau1",) if self.ends_early else ()

    def with_logits(self) -> Chain:
        return dataclasses.replace(self, keep_logits=True)

    def propose(self, inputs, state, keys):
        begun = self.begin(inputs, state)
        rows, vocab = begun[0].shape
        passes = self.gamma + self.keep_logits  # the bonus leaf's logits cost one pass more
        valid = jnp.zeros((rows, self.gamma), bool)
        # Step by step: beside a short axis of steps a TPU would turn every one around.
        log_q = jnp.full((passes, rows, vocab), probs.NEVER, jnp.float32)
        raw = jnp.zeros((passes, rows, vocab)) if self.keep_logits else None
        chain = draw_chain(
            begun,
            functools.partial(self.follow, inputs, state),
            last_two(state),
            self.ready(state),
            self.gamma,
            lambda *drawn: self._draw(inputs, keys, *drawn),
            (valid, log_q, raw),
            passes,
        )
        root, below, (valid, log_q, raw) = chain.window[:, 1], chain.window[:, 2:], chain.more
        log_q = self.over_target(inputs, log_q[: self.gamma].swapaxes(0, 1))
        raw = None if raw is None else self.over_target(inputs, raw.swapaxes(0, 1))
        draft = Draft.chain(
            below, log_q, root=root, valid=valid, sampling=self.sampling, logits=raw
        )
        return Proposal(draft, chain.cache, chain.calls, chain.step)

    def _draw(self, inputs, keys, step, logits: Float[Array, "B V"], alive, laws):
        """The token drawn after one draft pass: node ``step + 1``.

        Of the pass that only scores the bonus leaf what is not ``raw`` is dropped.
        """
        valid, log_q, raw = laws
        q = probs.log_softmax(logits)
        if self.draft_warp:
            q = warp(logits[:, None], inputs.warp)[:, 0]
        most = inputs.settings.get("gamma", self.gamma)
        drawn = alive & (step < most)
        if self.stop == STOPS_BEFORE:
            drawn = drawn & self._sure(inputs, logits)
        node = jnp.broadcast_to(step + 1, (q.shape[0], 1))
        x = probs.sample(jnp.exp(q), probs.uniforms(keys, Purpose.DRAFT, node)[:, 0])
        x = jnp.where(drawn, self.named(inputs, x), 0)
        going = drawn & ~inputs.is_eos(x) & (step + 1 < most + self.keep_logits)
        if self.stop == STOPS_AFTER:
            going = going & self._sure(inputs, logits)
        valid = valid.at[:, step].set(drawn, mode="drop")
        log_q = with_layout_constraint(
            jax.lax.dynamic_update_index_in_dim(log_q, q, step, 0), STEP_BY_STEP
        )
        if raw is not None:
            raw = jax.lax.dynamic_update_index_in_dim(raw, logits, step, 0)
        return x, going, (valid, log_q, raw)

    def _sure(self, inputs, logits: Float[Array, "B V"]) -> Bool[Array, "B"]:
        """Whether the draft's largest probability, at temperature 1, reaches ``tau1``."""
        return jnp.exp(probs.log_softmax(logits).max(-1)) >= inputs.settings["tau1"]
