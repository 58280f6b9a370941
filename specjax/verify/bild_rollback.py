"""BiLD's rollback policy (Kim et al. 2023, §3.4). Lossy: it accepts tokens by a fixed threshold."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.core import probs
from specjax.core.protocols import rule
from specjax.core.types import DETERMINISTIC, IID, POINT_MASS
from specjax.verify.verdicts import chain_verdict, count_leading, draft_length


@rule(
    accepts=(IID, POINT_MASS, DETERMINISTIC),
    lossless=False,
    settings=("tau2",),
    extras=("raw_log_p",),
    splits_vocabulary=True,
)
def bild(keys, draft, log_p, *, tau2, raw_log_p):
    """Accept draft tokens before the first with ``−log p(x) > τ₂``, where p is unwarped.

    Then one token is drawn from the warped p. The other half of BiLD ends a draft where the
    draft model is unsure. It is in the chain drafter: options ``stop`` and ``tau1``.

    Args:
      keys, draft, log_p: as :func:`specjax.verify.speculative`.
      tau2: the threshold τ₂ in nats, at least 0.
      raw_log_p: float32 ``[B, N, V]``, the target's unwarped log-probabilities.
    """
    surprise = -probs.at_token(raw_log_p[:, :-1], draft.tokens[:, 1:])
    passed = (surprise <= tau2) & draft.valid[:, 1:]
    accepted = count_leading(passed)
    rejected = accepted < draft_length(draft)

    p = jnp.exp(probs.at_node(log_p, accepted))
    return chain_verdict(keys, draft, accepted, rejected, p)
