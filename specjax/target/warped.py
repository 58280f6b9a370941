"""The warped target: the target model's own distribution."""

from __future__ import annotations

import dataclasses

from specjax.core.protocols import TargetDist
from specjax.core.warp import warp


@dataclasses.dataclass(frozen=True)
class Warped(TargetDist):
    """The target model's distribution under the run's temperature, top-k and top-p."""

    def log_p(self, inputs, state, draft, logits):
        return warp(logits, inputs.warp), state.target_state
