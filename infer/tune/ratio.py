"""Speculative decoding with the ratio acceptance of CDSL's paper (Nakshatri et al. 2025, §3.2.2).

Its draft tokens are the draft model's argmaxes, and it accepts them with u ≤ min(1, p/q). It is
lossy: that test keeps the target's distribution only for tokens that were sampled from q.
"""

from __future__ import annotations

from specjax.core.protocols import rule
from specjax.core.round import DraftVerify
from specjax.core.types import DETERMINISTIC, IID
from specjax.draft import Chain
from specjax.target import Warped
from specjax.verify import speculative


@rule(accepts=(DETERMINISTIC,), lossless=False)
def ratio(keys, draft, log_p):
    """As ``speculative``, for a chain of argmaxes of ``draft.log_q``. Lossy."""
    return speculative(keys, draft.replace(sampling=IID), log_p)


def ratio_speculative(gamma: int) -> DraftVerify:
    """The method with ``gamma`` draft tokens a round; at temperature 1, p and q are unwarped."""
    return DraftVerify(Chain(gamma, greedy=True), Warped(), ratio)
