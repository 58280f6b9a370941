"""Mentored decoding (Tran-Thien 2023): as many acceptances as KL(p‖π) ≤ D allows. Lossy.

Among laws π within p's support, that is: a token that p excludes is never accepted.

The emitted law of each token is ``π = clip(q, b p, p/α)`` with ``b ≤ 1 ≤ 1/α``: draft tokens are
accepted with ``min(1, p/(α q))``, a refusal draws from ``norm(max(0, b p − q))``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.protocols import rule
from specjax.core.types import IID, POINT_MASS
from specjax.verify.verdicts import (
    chain_verdict,
    draft_length,
    draft_row,
    draft_rows,
    drafted_log_probs,
)

_OUTER, _INNER = 40, 64  # most steps of the two searches; a handful are taken


@rule(accepts=(IID, POINT_MASS), lossless=False, settings=("max_kl",))
def mentored(keys, draft, log_p, *, max_kl):
    """Accept x while ``u ≤ p(x)/(α q(x))``; else draw from ``norm(max(0, b p − q))``.

    ``max_kl = 0`` is :func:`specjax.verify.speculative` exactly. A token that p excludes is
    never accepted.

    Args:
      keys, draft, log_p: as :func:`specjax.verify.speculative`.
      max_kl: the bound D on KL(p‖π) of every token, nats, at least 0.
    """
    lp, lq = drafted_log_probs(draft, log_p)
    log_q = draft_rows(draft, log_p.shape[-1])
    bound = jnp.broadcast_to(jnp.asarray(max_kl, jnp.float32), lp.shape)
    log_alpha, b = mentor_levels(log_p[:, :-1], log_q, bound)
    nodes = jnp.broadcast_to(jnp.arange(1, lp.shape[1] + 1), lp.shape)
    u = probs.uniforms(keys, Purpose.ACCEPT, nodes)
    # −inf − −inf is NaN and compares false: a token without mass under p is refused.
    passed = (jnp.log(u) <= lp - lq - log_alpha) & draft.valid[:, 1:]
    accepted = jnp.cumprod(passed, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
    refused = accepted < draft_length(draft)
    p = jnp.exp(probs.at_node(log_p, accepted))
    q = jnp.exp(draft_row(draft, accepted, log_p.shape[-1]))
    share = probs.at_token(b, jnp.minimum(accepted, b.shape[1] - 1))[:, None]
    left = jnp.maximum(share * p - q, 0.0)
    left = jnp.where(left.sum(-1, keepdims=True) > 0, left, p)
    return chain_verdict(keys, draft, accepted, refused, jnp.where(refused[:, None], left, p))


class _Search(NamedTuple):
    """``low`` is the largest log(1/α) known to keep the bound, with its b and KL."""

    low: Float[Array, "..."]
    high: Float[Array, "..."]
    b: Float[Array, "..."]
    kl: Float[Array, "..."]
    guess: Float[Array, "..."]  # Newton's next point
    done: Bool[Array, "..."]
    step: Array


def mentor_levels(
    log_p: Float[Array, "... V"], log_q: Float[Array, "... V"], bound: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """``(log α, b)`` with the largest acceptance whose KL(p‖π) stays within ``bound``.

    ``0 ≤ bound − KL ≤ max(1e-3·bound, 1e-6)`` unless all is accepted that p allows. KL grows
    with ``A = 1/α``, and ``dKL/d log A = (A/b − 1)·p(q > A p)``, so a Newton step is tried and
    kept inside a shrinking bracket; no sort of the vocabulary.
    """
    pair = _Pair.of(log_p, log_q)
    slack = jnp.maximum(1e-3 * bound, 1e-6)
    aim = bound - 0.25 * slack
    zero = jnp.zeros_like(bound)
    # Accepts all of p's support, tokens whose probability is 0 in float32 included.
    top = jnp.max(jnp.where(log_p > probs.NEVER, pair.ratio, 0.0), axis=-1)
    top_b, top_kl, _ = pair.solve(top, jnp.ones_like(bound))
    whole = top_kl <= bound

    def more(s: _Search):
        return (s.step < _OUTER) & ~jnp.all(s.done)

    def improve(s: _Search) -> _Search:
        middle = 0.5 * (s.low + s.high)
        # Newton can stall against one end: every third step halves the bracket.
        inside = (s.guess > s.low) & (s.guess < s.high) & (s.step % 3 < 2)
        x = jnp.where(inside, s.guess, middle)
        b, kl, slope = pair.solve(x, s.b)
        good = (kl <= bound) & ~s.done
        bad = (kl > bound) & ~s.done
        low, kl_low = jnp.where(good, x, s.low), jnp.where(good, kl, s.kl)
        return _Search(
            low=low,
            high=jnp.where(bad, x, s.high),
            b=jnp.where(good, b, s.b),
            kl=kl_low,
            guess=x + (aim - kl) / jnp.where(slope > 0, slope, 1.0),
            done=s.done | (bound - kl_low <= 0.5 * slack),
            step=s.step + 1,
        )

    start = _Search(
        low=jnp.where(whole, top, zero),
        high=top,
        b=jnp.where(whole, top_b, 1.0),
        kl=jnp.where(whole, top_kl, zero),
        guess=zero,
        done=whole | (bound <= 0.5 * slack),
        step=jnp.int32(0),
    )
    end = jax.lax.while_loop(more, improve, start)
    # D = 0 asks for speculative sampling itself.
    exact = bound <= 0
    return jnp.where(exact, 0.0, -end.low), jnp.where(exact, 1.0, end.b)


def mentored_kl(
    log_p: Float[Array, "... V"],
    log_q: Float[Array, "... V"],
    log_alpha: Float[Array, "..."],
    b: Float[Array, "..."],
) -> Float[Array, "..."]:
    """KL(p‖π), nats, of the law π that the levels ``(log α, b)`` give; float32."""
    return _Pair.of(log_p, log_q).divergence(-log_alpha, b)


class _Pair(NamedTuple):
    """p, q and the log ratio log q − log p: +inf where p = 0, −inf where only p > 0."""

    p: Float[Array, "... V"]
    q: Float[Array, "... V"]
    ratio: Float[Array, "... V"]

    @classmethod
    def of(cls, log_p, log_q):
        ratio = jnp.where(log_p > probs.NEVER, log_q - log_p, jnp.inf)
        return cls(jnp.exp(log_p), jnp.exp(log_q), ratio)

    def solve(self, log_a, b):
        """``(b, KL, dKL/d log A)`` at A = exp(log_a); the ``b`` given is not below the answer.

        b solves ``Σ max(0, b p − q) = Σ max(0, q − A p)``: the left side is convex and piecewise
        linear in b, so Newton from above falls monotonically onto the root.
        """
        over = self.ratio > log_a[..., None]
        short = jnp.minimum(log_a[..., None] - self.ratio, 0.0)
        refused = -jnp.sum(jnp.where(over, self.q * jnp.expm1(short), 0.0), axis=-1)

        def more(carry):
            b, before, step = carry
            return (step < _INNER) & jnp.any(before - b > 1e-7 * before)

        def fall(carry):
            b, _, step = carry
            under = self.ratio < jnp.log(b)[..., None]
            mass_p = jnp.sum(jnp.where(under, self.p, 0.0), axis=-1)
            mass_q = jnp.sum(jnp.where(under, self.q, 0.0), axis=-1)
            lower = (refused + mass_q) / jnp.where(mass_p > 0, mass_p, 1.0)
            return jnp.where(mass_p > 0, jnp.minimum(lower, b), b), b, step + 1

        b = jax.lax.while_loop(more, fall, (b, jnp.full_like(b, 2.0), jnp.int32(0)))[0]
        kl = self.divergence(log_a, b)
        mass = jnp.sum(jnp.where(over, self.p, 0.0), axis=-1)
        slope = mass * (jnp.exp(log_a) / b - 1.0)
        return b, kl, jnp.where(jnp.isfinite(slope), slope, 0.0)

    def divergence(self, log_a, b):
        """KL(p‖π) of ``π = clip(q, b p, A p)``."""
        level = jnp.clip(self.ratio, jnp.log(b)[..., None], log_a[..., None])
        return -jnp.sum(jnp.where(self.p > 0, self.p * level, 0.0), axis=-1)
