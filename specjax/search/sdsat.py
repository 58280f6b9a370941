"""SDSAT's two-step decoding (Liu et al. 2024, §3.3). Lossless where its rule is."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from specjax.compat import check_pair
from specjax.decode import DraftVerify
from specjax.draft.adaptive import Answering, Asking
from specjax.models import ModelConfig
from specjax.protocols import Rule, TargetDist
from specjax.types import DecodeState, Inputs
from specjax.verify.speculative import speculative


class TwoPasses(NamedTuple):
    """The drafters of the two passes."""

    asking: Asking
    answering: Answering


@dataclasses.dataclass(frozen=True)
class TwoStep:
    """One round is two passes of the target.

    The first carries the pending token and k adaptive tokens: it emits m₀, a plain draw from
    p, and their answers are the draft. The second verifies that draft behind m₀. With n
    accepted a round emits 2 + n tokens. The adaptive tokens never enter the cache: what they
    wrote stands above the committed length.
    """

    model: ModelConfig
    asking: Asking
    answering: Answering
    target: TargetDist
    rule: Rule
    reserves = False

    def __post_init__(self):
        check_pair(self.answering, self.target, self.rule)

    @property
    def _first(self) -> DraftVerify:
        return DraftVerify(self.model, self.asking, self.target, speculative)

    @property
    def _second(self) -> DraftVerify:
        return DraftVerify(self.model, self.answering, self.target, self.rule)

    @property
    def depth(self) -> int:
        return self.answering.shape.depth

    @property
    def passes(self) -> tuple[int, ...]:
        """Tokens per row of each target pass of a round."""
        return self._first.passes + self._second.passes

    @property
    def width(self) -> int:
        return 1 + max(self._first.width, self._second.width)

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> DecodeState:
        return self._first.init(inputs, state, chunk)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return self._second.step(inputs, self._first.step(inputs, state))

    def finalize(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """Counts a pair of passes as one round; each pass had keys, so a round, of its own."""
        stats = state.stats
        rounds = (stats.rounds + 1) // 2  # a row may have ended with m₀
        hist = stats.accepted_hist.at[:, 0].add(-rounds)
        return state.replace(stats=stats.replace(rounds=rounds, accepted_hist=hist))
