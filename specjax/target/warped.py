"""The warped target: the target model's own distribution."""

from __future__ import annotations

import dataclasses

from specjax.core.protocols import TargetDist
from specjax.target.node_law import node_law


@dataclasses.dataclass(frozen=True)
class Warped(TargetDist):
    """The target model's distribution under the run's sampling settings."""

    follows_paths = True
    splits_vocabulary = True

    def log_p(self, inputs, state, draft, logits):
        return node_law(inputs, state, draft, logits), state.target_state
