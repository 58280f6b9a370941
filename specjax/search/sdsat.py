"""SDSAT's two-step decoding (Liu et al. 2024, §2.1). Lossless if its rule is lossless.

Axis legend: k adaptive tokens, n accepted draft tokens.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.core.protocols import Method, Rule, TargetDist
from specjax.core.round import DraftVerify, check_pair
from specjax.core.types import DecodeState, Inputs
from specjax.draft.adaptive import ProbePass, VerifyPass
from specjax.verify.match_target import match


@dataclasses.dataclass(frozen=True)
class TwoStep(Method):
    """One round is two passes of the target.

    The first pass has the root and k adaptive tokens. It emits m₀, a plain draw from p, and the
    logits at the adaptive tokens give the draft. The second pass verifies that draft after m₀. With
    n accepted tokens a round emits 2 + n. The adaptive tokens are never committed: their cache
    entries are above the committed length, and later tokens overwrite them.
    """

    probe: ProbePass
    verify: VerifyPass
    target: TargetDist
    rule: Rule

    def __post_init__(self):
        check_pair(self.verify, self.target, self.rule)

    @property
    def _first(self) -> DraftVerify:
        return DraftVerify(self.probe, self.target, match)

    @property
    def _second(self) -> DraftVerify:
        return DraftVerify(self.verify, self.target, self.rule)

    @property
    def name(self) -> str:
        return self._second.name

    @property
    def depth(self) -> int:
        return self._second.depth

    @property
    def follows_paths(self) -> bool:
        return self._second.follows_paths

    @property
    def passes(self) -> tuple[int, ...]:
        """Tokens per row of each target pass of a round."""
        return self._first.passes + self._second.passes

    @property
    def extra_positions(self) -> int:
        """Cache positions that the target's ``init`` may fill, beyond a row's own tokens."""
        return self.target.extra_positions

    @property
    def round_positions(self) -> int:
        # The second pass begins one position later, after m₀.
        return 1 + max(self._first.round_positions, self._second.round_positions)

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return self._first.init(inputs, state)

    def prefill_chunk(self, inputs, state, tokens, start) -> DecodeState:
        return self._first.prefill_chunk(inputs, state, tokens, start)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """Both passes, counted as one round."""
        live = (~state.done).astype(jnp.int32)
        rounds = state.stats.rounds
        # A pass derives its keys from the number of rounds. The first pass sees 2r and the second
        # 2r + 1, so no key serves two passes.
        state = state.replace(stats=state.stats.replace(rounds=2 * rounds))
        state = self._second.step(inputs, self._first.step(inputs, state))

        # The first pass accepts no draft token, so it has counted a round with 0 accepted, for
        # every row that was live. The second pass counts none for a row that ended with m₀.
        hist = state.stats.accepted_hist.at[:, 0].add(-live)
        return state.replace(stats=state.stats.replace(rounds=rounds + live, accepted_hist=hist))
