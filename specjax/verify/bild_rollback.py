"""BiLD's rollback (Kim et al. 2023, §3.3). Lossy: a refused token costs a plain target token."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.core import probs
from specjax.core.protocols import rule
from specjax.core.types import DETERMINISTIC, IID, POINT_MASS
from specjax.verify.verdicts import chain_verdict, draft_length


@rule(
    accepts=(IID, POINT_MASS, DETERMINISTIC),
    lossless=False,
    settings=("tau2",),
    extras=("raw_log_p",),
)
def bild(keys, draft, log_p, *, tau2, raw_log_p):
    """Keep draft tokens up to the first with ``−log p(x) > τ₂`` under the unwarped target.

    There, or after the whole draft, one token is drawn from warped p. The fallback (ending a
    draft where the draft model is unsure) is the chain drafter's ``stop`` and ``tau1``.

    Args:
      keys, draft, log_p: as :func:`specjax.verify.speculative`.
      tau2: nats, at least 0.
      raw_log_p: float32 ``[B, N, V]``, the target's own log-probabilities at temperature 1.
    """
    nll = -probs.at_token(raw_log_p[:, :-1], draft.tokens[:, 1:])
    kept = (nll <= tau2) & draft.valid[:, 1:]
    accepted = jnp.cumprod(kept, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
    refused = accepted < draft_length(draft)
    weights = jnp.exp(probs.at_node(log_p, accepted))
    return chain_verdict(keys, draft, accepted, refused, weights)
