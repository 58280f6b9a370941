"""Target distributions: what a draft is verified against."""

from __future__ import annotations

import dataclasses

from specjax.warp import warp


@dataclasses.dataclass(frozen=True)
class Warped:
    """The target model's own distribution, warped by the run's sampling settings."""

    vocab_limit: int  # ids from here on have probability 0
    needs_draft_logits = False

    def init(self, inputs, state, chunk):
        return ()

    def log_p(self, inputs, state, draft, logits):
        return warp(logits, inputs.warp, self.vocab_limit), state

    def commit(self, inputs, state, verdict, emitted):
        return state
