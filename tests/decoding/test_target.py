"""Contrastive scores against rows worked out by hand (Li et al. 2023, §3.3; SCD, §3)."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import probs
from specjax.target import contrastive
from specjax.target.contrastive import IMPROVED, ORIGINAL

NEVER = -np.inf
EXPERT = [2.0, 1.0, 0.0]  # raw logits; log p = logits − 2.407606
AMATEUR = [1.0, 1.5, 0.5]  # raw logits; log q = logits − 2.180270
# (variant, α, β, amateur) → scores. α = 0.3 needs expert logits of at least 2 + log 0.3 = 0.796.
ROWS = {
    "log ratio": (ORIGINAL, 0.1, 0.5, AMATEUR, [0.772664, -0.727336, -0.727336]),
    "log ratio of the plausible": (ORIGINAL, 0.3, 0.5, AMATEUR, [0.772664, -0.727336, NEVER]),
    "weighted difference": (IMPROVED, 0.1, 0.5, AMATEUR, [2.5, 0.75, -0.25]),
    "twice the weight": (IMPROVED, 0.3, 1.0, AMATEUR, [3.0, 0.5, NEVER]),
    "no weight: the expert": (IMPROVED, 0.1, 0.0, AMATEUR, EXPERT),
    "a token that the amateur excludes": (
        IMPROVED,
        0.1,
        0.5,
        [1.0, NEVER, 0.5],
        [2.5, 1.25, -0.25],
    ),
}


def check(name):
    variant, alpha, beta, amateur, want = ROWS[name]
    rows = (jnp.array([[x]]) for x in (EXPERT, amateur))
    scores = contrastive.contrast(*rows, jnp.float32(alpha), jnp.float32(beta), variant)
    np.testing.assert_allclose(scores[0, 0], want, atol=1e-5)


@pytest.mark.parametrize("name", ROWS)
def test_scores_by_hand(name):
    check(name)


def mutated(original, improved):
    """``contrast`` with other formulas."""

    def contrast(expert, amateur, alpha, beta, variant):
        finite = amateur > NEVER
        amateur = jnp.where(finite, amateur, jnp.min(jnp.where(finite, amateur, jnp.inf)))
        scores = (original if variant == ORIGINAL else improved)(expert, amateur, beta)
        plausible = expert >= jnp.log(alpha) + expert.max(-1, keepdims=True)
        return jnp.where(plausible, scores, NEVER)

    return contrast


def log_ratio(e, a, beta):
    return probs.log_softmax(e) - probs.log_softmax(a)


def difference(e, a, beta):
    return (1 + beta) * e - beta * a


MUTANTS = {
    "improved rewards the amateur": (log_ratio, lambda e, a, beta: e + 3 * beta * a),
    "improved forgets 1 + β": (log_ratio, lambda e, a, beta: e - beta * a),
    "original adds": (lambda e, a, beta: probs.log_softmax(e) + probs.log_softmax(a), difference),
    "original subtracts logits": (lambda e, a, beta: e - a, difference),
}


def test_the_frame_of_the_mutants_is_right(monkeypatch):
    monkeypatch.setattr(contrastive, "contrast", mutated(log_ratio, difference))
    for name in ROWS:
        check(name)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(mutant, monkeypatch):
    monkeypatch.setattr(contrastive, "contrast", mutated(*MUTANTS[mutant]))
    with pytest.raises(AssertionError):
        for name in ROWS:
            check(name)
