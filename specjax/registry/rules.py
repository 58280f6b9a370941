"""The acceptance rules by name."""

from __future__ import annotations

from collections.abc import Mapping

from specjax import verify
from specjax.core.protocols import Rule
from specjax.registry.options import Option
from specjax.registry.parts import PartSpec


def _rule(rule: Rule, summary: str, options: Mapping[str, Option] | None = None) -> PartSpec:
    return PartSpec(lambda: rule, summary, options or {})


RULES: dict[str, PartSpec] = {
    "speculative": _rule(
        verify.speculative,
        "accept each draft token with probability min(1, p/q), stop at the first rejection",
    ),
    "block": _rule(
        verify.block, "judge the draft as a block and accept its longest prefix that passes"
    ),
    "spectr": _rule(
        verify.spectr,
        "at each position, k candidates in turn, each accepted with probability min(1, p/(ρ q))",
    ),
    "specinfer": _rule(
        verify.specinfer,
        "try the children of a node in turn; each rejection leaves a residual of p",
    ),
    "match": _rule(
        verify.match, "sample a token from p and accept the child that carries the same token"
    ),
    "mentored": _rule(
        verify.mentored,
        "accept as often as a bound on the KL divergence from p allows",
        {
            "max_kl": Option(
                float,
                0.1,
                "largest KL divergence of p from the distribution of each output token, in nats",
                low=0,
            )
        },
    ),
    "joint": _rule(
        verify.joint,
        "accept the longest path whose joint probability ratio min(1, P/Q) is above tau",
        {
            "tau": Option(
                float,
                0.1,
                "accept a path if min(1, P/Q), target over draft probability, is above this",
                low=0,
                below=1,
            )
        },
    ),
    "bild": _rule(
        verify.bild,
        "cut the draft at the first token that is unlikely under the target",
        {"tau2": Option(float, 1.0, "accept a token if −log p(x) is at most this, in nats", low=0)},
    ),
}
