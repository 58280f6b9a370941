"""Truncations beside top-k and top-p: min-p, typical, epsilon, eta and top-nσ.

They act on tempered logits in the order of transformers: top-nσ, top-k, top-p, min-p, typical,
epsilon, eta. Each sees what the ones before it have left, renormalized. The likeliest token always
stays, but for the typical cut, which may remove it.

Axis legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.core import probs, vocabulary
from specjax.core.floor import find_floor
from specjax.core.types import Cutoffs

Logits = Float[Array, "R V"]


def cut_off(logits: Logits, cutoffs: Cutoffs) -> Logits:
    """Min-p, typical, epsilon and eta cuts of rows whose largest logit is 0; −inf where cut."""
    x = _keep(logits, cutoffs.min_p, cutoffs.min_p > 0, _min_p)
    x = _keep(x, cutoffs.typical_p, cutoffs.typical_p < 1, _typical)
    x = _keep(x, cutoffs.epsilon_cutoff, cutoffs.epsilon_cutoff > 0, _epsilon)
    return _keep(x, cutoffs.eta_cutoff, cutoffs.eta_cutoff > 0, _eta)


def top_n_sigma(logits: Logits, sigmas: Float[Array, "R"]) -> Logits:
    """Logits at least ``max − n·σ`` (Tang et al. 2024, arXiv 2411.07641, §3); −inf where cut.

    σ is the standard deviation of the finite logits. 0 is off.
    """

    def keep(x, n):
        finite = x > probs.NEVER
        count = vocabulary.total(finite)
        mean = vocabulary.total(jnp.where(finite, x, 0.0)) / count
        squares = jnp.where(finite, (x - mean[:, None]) ** 2, 0.0)
        sigma = jnp.sqrt(vocabulary.total(squares) / count)
        return x >= (vocabulary.largest(x) - n * sigma)[:, None]

    return _keep(logits, sigmas, sigmas > 0, keep)


def _keep(
    x: Logits,
    value: Float[Array, "R"],
    on: Bool[Array, "R"],
    kept: Callable[[Logits, Float[Array, "R"]], Bool[Array, "R V"]],
) -> Logits:
    """``x`` with −inf where ``kept(x, value)`` is false, in the rows that are ``on``."""

    def cut():
        # The cut is a constant for gradients.
        keeps = kept(jax.lax.stop_gradient(x), value)
        return jnp.where(keeps | ~on[:, None], x, probs.NEVER)

    return jax.lax.cond(jnp.any(on), cut, lambda: x)


def _min_p(x: Logits, share: Float[Array, "R"]) -> Bool[Array, "R V"]:
    """Probabilities of at least ``share`` of the largest (Nguyen et al. 2024, arXiv 2407.01082)."""
    return x >= vocabulary.largest(x, keepdims=True) + jnp.log(share)[:, None]


def _typical(x: Logits, mass: Float[Array, "R"]) -> Bool[Array, "R V"]:
    """The tokens whose surprise is closest to the entropy, up to ``mass``.

    Locally typical sampling (Meister et al. 2023, arXiv 2202.00666, eq. 9–10).
    """
    log_p = probs.log_softmax(x)
    distance = jnp.abs(-log_p - _entropy(log_p)[:, None])
    near = jnp.where(x > probs.NEVER, -distance, probs.NEVER)
    lowest = vocabulary.least(jnp.where(x > probs.NEVER, near, jnp.inf))
    p = jnp.exp(log_p)
    everything = jnp.ones(mass.shape, bool)
    floor = find_floor(near, lambda _: p, mass, (lowest, vocabulary.largest(near)), everything)
    return near >= floor[:, None]


def _epsilon(x: Logits, epsilon: Float[Array, "R"]) -> Bool[Array, "R V"]:
    """Probabilities of at least ε (Hewitt et al. 2022, arXiv 2210.15191, §4.1)."""
    return _at_least(x, jnp.log(epsilon))


def _eta(x: Logits, epsilon: Float[Array, "R"]) -> Bool[Array, "R V"]:
    """Probabilities of at least ``min(ε, √ε · exp(−entropy))`` (Hewitt et al. 2022, §4.2)."""
    entropy = _entropy(probs.log_softmax(x))
    log_epsilon = jnp.log(epsilon)
    return _at_least(x, jnp.minimum(log_epsilon, log_epsilon / 2 - entropy))


def _at_least(x: Logits, log_floor: Float[Array, "R"]) -> Bool[Array, "R V"]:
    """Tokens of at least this log-probability, and the likeliest ones."""
    likeliest = x >= vocabulary.largest(x, keepdims=True)
    return likeliest | (probs.log_softmax(x) >= log_floor[:, None])


def _entropy(log_p: Logits) -> Float[Array, "R"]:
    """In nats; a token of probability 0 adds 0."""
    return -vocabulary.total(jnp.where(log_p > probs.NEVER, jnp.exp(log_p) * log_p, 0.0))
