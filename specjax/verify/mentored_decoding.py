"""Mentored decoding (Tran-Thien 2023): accept as often as KL(p‖π) ≤ D allows. Lossy.

π is the distribution of each emitted token: ``π = clip(q, b p, p/α)`` with ``b ≤ 1 ≤ 1/α``. Draft
tokens are accepted with probability ``min(1, p/(α q))``. After a rejection, one token is drawn from
``norm(max(0, b p − q))``. π stays within p's support: a token that p excludes is never accepted.

Axis legend: B rows, V vocabulary; ``...`` are leading axes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.core import probs, vocabulary
from specjax.core.protocols import rule
from specjax.core.types import IID, POINT_MASS
from specjax.verify.verdicts import (
    acceptance_uniforms,
    all_log_q,
    chain_verdict,
    count_leading,
    draft_length,
    drafted_log_probs,
    log_q_after,
)

# Step limits of the two searches; a handful of steps is usually enough.
_MAX_ALPHA_STEPS = 40
_MAX_B_STEPS = 64


@rule(accepts=(IID, POINT_MASS), lossless=False, settings=("max_kl",), splits_vocabulary=True)
def mentored(keys, draft, log_p, *, max_kl):
    """Accept x while ``u ≤ p(x)/(α q(x))``; else draw from ``norm(max(0, b p − q))``.

    At each position, α and b give the highest acceptance within the bound. With ``max_kl = 0``
    they are 1, and the rule is exactly :func:`specjax.verify.speculative`.

    Args:
      keys, draft, log_p: as :func:`specjax.verify.speculative`.
      max_kl: the bound D on KL(p‖π) of every token, nats, at least 0.
    """
    log_p_x, log_q_x = drafted_log_probs(draft, log_p)
    log_q = all_log_q(draft, log_p.shape[-1])
    u = acceptance_uniforms(keys, draft, first=1)
    # −inf − −inf is NaN and compares false: a token without mass under p is rejected.
    accepted_plainly = jnp.log(u) <= log_p_x - log_q_x

    # α only raises acceptance. So where the token is accepted without it, the levels do not matter
    # (§6), and a bound that every level meets ends the search there before its first step.
    bound = jnp.where(accepted_plainly, jnp.inf, jnp.asarray(max_kl, jnp.float32))
    log_alpha, b = mentor_levels(log_p[:, :-1], log_q, bound)
    passed = (jnp.log(u) <= log_p_x - log_q_x - log_alpha) & draft.valid[:, 1:]
    accepted = count_leading(passed)
    rejected = accepted < draft_length(draft)

    # p, q and b of the token after the accepted ones.
    p = jnp.exp(probs.at_node(log_p, accepted))
    q = jnp.exp(log_q_after(draft, accepted, log_p.shape[-1]))
    b = probs.at_index(b, jnp.minimum(accepted, b.shape[1] - 1))[:, None]
    residual = jnp.maximum(b * p - q, 0.0)
    residual = jnp.where(vocabulary.total(residual, keepdims=True) > 0, residual, p)
    weights = jnp.where(rejected[:, None], residual, p)
    return chain_verdict(keys, draft, accepted, rejected, weights)


def mentor_levels(
    log_p: Float[Array, "... V"], log_q: Float[Array, "... V"], bound: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """``(log α, b)`` with the largest acceptance whose KL(p‖π) stays within ``bound``.

    ``0 ≤ bound − KL ≤ max(1e-3·bound, 1e-6)``, unless every token that p allows is accepted. KL
    grows with ``A = 1/α``, and ``dKL/d log A = (A/b − 1)·p(q > A p)``. So Newton steps are taken
    inside a shrinking interval. The vocabulary need not be sorted.

    Args:
      log_p, log_q: float32 ``[..., V]``, log p and log q of the same token.
      bound: float32 ``[...]``, D in nats, at least 0; inf: every token that p allows is accepted.
    """
    pair = _DraftAndTarget.of(log_p, log_q)
    slack = jnp.maximum(1e-3 * bound, 1e-6)
    aim = bound - 0.25 * slack  # a little below the bound: rounding must not exceed it

    def is_open(search: _AlphaSearch):
        return (search.step < _MAX_ALPHA_STEPS) & ~jnp.all(search.done)

    def improve(search: _AlphaSearch) -> _AlphaSearch:
        return search.improve(pair, bound, aim, slack)

    start = _AlphaSearch.start(pair, log_p, bound, slack)
    end = jax.lax.while_loop(is_open, improve, start)
    # D = 0 asks for speculative sampling itself.
    exact = bound <= 0
    return jnp.where(exact, 0.0, -end.low), jnp.where(exact, 1.0, end.b)


def mentored_kl(
    log_p: Float[Array, "... V"],
    log_q: Float[Array, "... V"],
    log_alpha: Float[Array, "..."],
    b: Float[Array, "..."],
) -> Float[Array, "..."]:
    """KL(p‖π), nats, of the distribution π with the levels ``(log α, b)``; float32."""
    return _DraftAndTarget.of(log_p, log_q).kl(-log_alpha, b)


class _DraftAndTarget(NamedTuple):
    """p, q and the log ratio log q − log p: +inf where p = 0, −inf where p > 0 and q = 0."""

    p: Float[Array, "... V"]
    q: Float[Array, "... V"]
    log_ratio: Float[Array, "... V"]

    @classmethod
    def of(cls, log_p, log_q):
        log_ratio = jnp.where(log_p > probs.NEVER, log_q - log_p, jnp.inf)
        return cls(jnp.exp(log_p), jnp.exp(log_q), log_ratio)

    def solve_b(self, log_a, b):
        """``(b, KL, dKL/d log A)`` at A = exp(log_a), by Newton from ``b``.

        b solves ``Σ max(0, b p − q) = Σ max(0, q − A p)``. The left side is convex and piecewise
        linear in b, so Newton steps from above fall monotonically to the root. The ``b`` given must
        therefore not be below it.
        """
        is_cut = self.log_ratio > log_a[..., None]  # q > A p
        log_share = jnp.minimum(log_a[..., None] - self.log_ratio, 0.0)
        rejected = -vocabulary.total(jnp.where(is_cut, self.q * jnp.expm1(log_share), 0.0))

        def is_falling(carry):
            b, previous, step = carry
            return (step < _MAX_B_STEPS) & jnp.any(previous - b > 1e-7 * previous)

        def newton_step(carry):
            b, _, step = carry
            is_raised = self.log_ratio < jnp.log(b)[..., None]  # q < b p
            mass_p = vocabulary.total(jnp.where(is_raised, self.p, 0.0))
            mass_q = vocabulary.total(jnp.where(is_raised, self.q, 0.0))
            lower = (rejected + mass_q) / jnp.where(mass_p > 0, mass_p, 1.0)
            return jnp.where(mass_p > 0, jnp.minimum(lower, b), b), b, step + 1

        # b is at most 1, so 2.0 as its previous value lets the first step run.
        b = jax.lax.while_loop(is_falling, newton_step, (b, jnp.full_like(b, 2.0), jnp.int32(0)))[0]
        kl = self.kl(log_a, b)
        mass = vocabulary.total(jnp.where(is_cut, self.p, 0.0))
        slope = mass * (jnp.exp(log_a) / b - 1.0)
        return b, kl, jnp.where(jnp.isfinite(slope), slope, 0.0)

    def kl(self, log_a, b):
        """KL(p‖π) of ``π = clip(q, b p, A p)``."""
        level = jnp.clip(self.log_ratio, jnp.log(b)[..., None], log_a[..., None])
        return -vocabulary.total(jnp.where(self.p > 0, self.p * level, 0.0))


class _AlphaSearch(NamedTuple):
    """The interval that holds log A = log(1/α)."""

    low: Float[Array, "..."]  # the largest value known to keep the bound
    high: Float[Array, "..."]
    b: Float[Array, "..."]  # at low
    kl: Float[Array, "..."]  # at low
    guess: Float[Array, "..."]  # Newton's next point
    done: Bool[Array, "..."]
    step: Array

    @classmethod
    def start(cls, pair: _DraftAndTarget, log_p, bound, slack) -> _AlphaSearch:
        """From 0 to the value that accepts all of p's support."""
        zero = jnp.zeros_like(bound)
        # By log p: exp(log p) may round to 0 in float32, and such tokens count, too.
        top = vocabulary.largest(jnp.where(log_p > probs.NEVER, pair.log_ratio, 0.0))
        top_b, top_kl, _ = pair.solve_b(top, jnp.ones_like(bound))
        top_fits = top_kl <= bound
        return cls(
            low=jnp.where(top_fits, top, zero),
            high=top,
            b=jnp.where(top_fits, top_b, 1.0),
            kl=jnp.where(top_fits, top_kl, zero),
            guess=zero,
            done=top_fits | (bound <= 0.5 * slack),
            step=jnp.int32(0),
        )

    def improve(self, pair: _DraftAndTarget, bound, aim, slack) -> _AlphaSearch:
        """The smaller interval after one more evaluation of the KL."""
        middle = 0.5 * (self.low + self.high)
        # Newton can stall against one end: every third step halves the interval.
        use_guess = (self.guess > self.low) & (self.guess < self.high) & (self.step % 3 < 2)
        x = jnp.where(use_guess, self.guess, middle)
        # b falls as A grows, so b at `low` is not below b at x.
        b, kl, slope = pair.solve_b(x, self.b)
        raises_low = (kl <= bound) & ~self.done
        lowers_high = (kl > bound) & ~self.done
        low_kl = jnp.where(raises_low, kl, self.kl)
        return _AlphaSearch(
            low=jnp.where(raises_low, x, self.low),
            high=jnp.where(lowers_high, x, self.high),
            b=jnp.where(raises_low, b, self.b),
            kl=low_kl,
            guess=x + (aim - kl) / jnp.where(slope > 0, slope, 1.0),
            done=self.done | (bound - low_kl <= 0.5 * slack),
            step=self.step + 1,
        )
