"""An exact test of whether a sampler has the right distribution: for our samplers and others.

Over a small vocabulary the distribution of the first L tokens can be written down. It has V^L
sequences, each with the product of its conditional probabilities. :func:`check` draws many
sequences and compares their counts with it, by Pearson's chi-square. It also says what the test is
worth:

- ``alpha``: the probability that a right sampler fails.
- ``caught``: for each usual mistake in speculative sampling, the probability that the test would
  find it. It is computed from the exact distribution that the mistake leads to.

A sampler's conditional distribution is a function from prefixes, int ``[N, n]``, to probabilities
``[N, V]``. It is called once for each n below L, with all V^n prefixes. A sampler that ends rows
repeats the end token, and its distribution must say so. Sums are in float64.

Axis legend: N prefixes or samples, L tokens, V vocabulary, γ draft length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy.special import chdtrc, chdtri, chndtr

from specjax._util.arguments import COUNT, validate_arguments
from specjax._util.checks import Check
from specjax._util.errors import OptionError
from specjax.core.mesh import replicated
from specjax.core.net import Net
from specjax.core.sampling import Sampling
from specjax.core.warp import warp
from specjax.lm import LM

NextLaw = Callable[[np.ndarray], np.ndarray]  # prefixes [N, n] → probabilities [N, V]
Draw = Callable[[int, int], np.ndarray]  # (samples, seed) → tokens [samples, L]
SAMPLES = 200_000
ALPHA = 1e-6
# Cells with a lower expected count are pooled: the statistic has the chi-square distribution only
# in the limit of many counts.
MIN_EXPECTED = 5


CHANCE = Check(float, above=0, below=1)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of :func:`check`.

    Attributes:
      p_value: of the counts under the exact distribution.
      alpha: the probability that a right sampler fails.
      samples: sequences drawn.
      outcomes: V^L, the possible sequences.
      caught: for each mistake, the probability that this test finds it; empty without ``next_q``.
    """

    p_value: float
    alpha: float
    samples: int
    outcomes: int
    caught: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether the sampler passed; a right one fails with probability ``alpha``."""
        return self.p_value >= self.alpha

    def __str__(self) -> str:
        verdict = "does NOT have the distribution"
        if self.passed:
            verdict = "has the distribution"
        lines = [
            f"{verdict}: p = {self.p_value:.2g} over {self.samples:,} samples of {self.outcomes:,} "
            f"sequences; a right sampler fails with probability {self.alpha:g}"
        ]
        lines += [f"  {chance:7.2%} would find: {slip}" for slip, chance in self.caught.items()]
        return "\n".join(lines)


@validate_arguments(vocab=COUNT, length=COUNT, gamma=COUNT, samples=COUNT, alpha=CHANCE)
def check(
    draw: Draw,
    next_p: NextLaw,
    *,
    vocab: int,
    length: int,
    next_q: NextLaw | None = None,
    gamma: int = 2,
    samples: int = SAMPLES,
    alpha: float = ALPHA,
    seed: int = 0,
) -> Report:
    """Tests whether ``draw`` samples from p.

    Args:
      draw: a function of ``(samples, seed)`` that gives int ``[samples, length]``, its rows
        independent.
      next_p: p of the next token, as the module describes it.
      vocab: V. The test needs a small one: V^L is at most 10⁶.
      length: L. If it is more than γ + 1, the test sees more than one round.
      next_q: q of the next token. Only ``caught`` uses it.
      gamma: the draft length of the mistakes in ``caught``.
      samples: sequences to draw.
      alpha: the probability that a right sampler fails.
      seed: passed to ``draw``.
    Raises:
      OptionError: an argument cannot be used, or ``draw`` gives another shape or other tokens.
    """
    law = joint(next_p, vocab, length)
    expected = law.reshape(-1) * samples
    _pool(expected, expected)  # raises before anything is drawn, if there is one outcome only
    tokens = np.asarray(draw(samples, seed))
    if tokens.shape != (samples, length):
        raise OptionError(f"draw gave shape {tokens.shape}, expected tokens [{samples}, {length}]")
    caught = {}
    if next_q is not None:
        for slip in SLIPS:
            other = speculative_joint(next_p, next_q, vocab, length, gamma, slip)
            caught[slip] = power(law, other, samples, alpha)
    return Report(
        p_value=p_value(histogram(tokens, vocab), law),
        alpha=alpha,
        samples=samples,
        outcomes=law.size,
        caught=caught,
    )


def joint(next_p: NextLaw, vocab: int, length: int) -> np.ndarray:
    """The distribution of the first L tokens: float64 ``[V] * L``, which sums to 1.

    Raises:
      OptionError: there are too many sequences, or ``next_p`` gives no probabilities.
    """
    law = np.ones(1)
    for prefixes in _prefixes(vocab, length):
        law = (law[:, None] * _probabilities(next_p, prefixes, vocab)).reshape(-1)
    return law.reshape((vocab,) * length)


def histogram(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Counts of the sequences ``[N, L]``: int64 ``[V] * L``.

    Raises:
      OptionError: a token is outside the vocabulary.
    """
    tokens = np.asarray(tokens)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise OptionError(f"tokens go from {tokens.min()} to {tokens.max()}; vocab={vocab}")
    shape = (vocab,) * tokens.shape[1]
    code = np.ravel_multi_index(tuple(tokens.T.astype(np.int64)), shape)
    return np.bincount(code, minlength=vocab ** len(shape)).reshape(shape)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """The p-value of counts under an exact distribution, by Pearson's chi-square test.

    Cells with an expected count below 5 are pooled. If an outcome of probability 0 was counted, the
    p-value is 0.

    Args:
      counts: of each outcome, any shape.
      law: the probability of each outcome, of the same shape.
    Raises:
      OptionError: the distribution has one outcome, which tests nothing.
    """
    counts = counts.reshape(-1)
    law = law.reshape(-1)
    if counts[law == 0].any():
        return 0.0
    all_expected = law * counts.sum()
    expected = _pool(all_expected, all_expected)
    observed = _pool(all_expected, counts)
    statistic = np.sum((observed - expected) ** 2 / expected)
    return float(chdtrc(len(expected) - 1, statistic))


def power(
    law: np.ndarray, other: np.ndarray, samples: int = SAMPLES, alpha: float = ALPHA
) -> float:
    """The probability that the test rejects a sampler with the distribution ``other``.

    It follows from the noncentral chi-square distribution of the statistic.

    Args:
      law: the probability of each outcome under the right distribution.
      other: those of the sampler, of the same shape.
      samples: sequences that the test draws.
      alpha: the probability that a right sampler fails.
    Raises:
      OptionError: the right distribution has one outcome.
    """
    law = law.reshape(-1)
    other = other.reshape(-1)
    all_expected = law * samples
    expected = _pool(all_expected, all_expected)
    observed = _pool(all_expected, other * samples)
    noncentrality = np.sum((observed - expected) ** 2 / expected)
    threshold = chdtri(len(expected) - 1, alpha)
    # The sampler passes if the statistic is low and no impossible outcome was drawn.
    impossible = other[law == 0].sum()
    passes = chndtr(threshold, len(expected) - 1, noncentrality) * (1 - impossible) ** samples
    return float(1 - passes)


def _pool(all_expected: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values of the cells, float64; those with a low expected count are summed into one cell.

    If the expected count of that one is 0, it is left out.

    Raises:
      OptionError: only one cell is left.
    """
    small = all_expected < MIN_EXPECTED
    expected = np.append(all_expected[~small], all_expected[small].sum())
    if np.sum(expected > 0) < 2:
        raise OptionError(
            "a distribution with one outcome tests nothing; give longer or likelier sequences"
        )
    pooled = np.append(values[~small], values[small].sum())
    return pooled[expected > 0].astype(np.float64)


# --- the usual mistakes of speculative sampling ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Step:
    """The probabilities at one position of a round, ``[N, V]`` each.

    Attributes:
      accepted: that each token is drafted and accepted.
      rejected: of the token drawn after a rejection.
      bonus: of the bonus token, if the whole draft was accepted.
    """

    accepted: np.ndarray
    rejected: np.ndarray
    bonus: np.ndarray


def _correct_step(p: np.ndarray, q: np.ndarray) -> _Step:
    return _Step(np.minimum(p, q), _residual(p, q), p)


def _residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """``max(p − q, 0)``, normalized; p where p = q."""
    left = np.maximum(p - q, 0)
    total = left.sum(-1, keepdims=True)
    return np.where(total > 0, left / np.where(total > 0, total, 1), p)


def _accept_probability(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """``min(1, p / q)``; 1 where q = 0."""
    return np.minimum(1, np.divide(p, q, out=np.ones_like(p), where=q > 0))


def _wrong_temperature(p: np.ndarray, q: np.ndarray) -> _Step:
    """Drafts from q, but accepts by q at twice the temperature."""
    flatter = np.sqrt(q) / np.sqrt(q).sum(-1, keepdims=True)
    return _Step(q * _accept_probability(p, flatter), _residual(p, flatter), p)


def _point_mass(q: np.ndarray) -> np.ndarray:
    """Probability 1 for the most likely token."""
    return (np.arange(q.shape[-1]) == q.argmax(-1)[:, None]).astype(q.dtype)


# Each is a function of p and q at a position, and of both at the position before it.
_STEPS: dict[str, Callable[..., _Step]] = {
    "": lambda p, q, *before: _correct_step(p, q),
    "after a rejection a draw from p, not from the residual": lambda p, q, *before: _Step(
        np.minimum(p, q), p, p
    ),
    "the residual of the position before": lambda p, q, *before: _Step(
        np.minimum(p, q), _residual(*before), p
    ),
    "every drafted token accepted": lambda p, q, *before: _Step(q, p, p),
    "accepted by q/p instead of p/q": lambda p, q, *before: _Step(
        q * _accept_probability(q, p), _residual(p, q), p
    ),
    "the bonus token drawn from q": lambda p, q, *before: _Step(
        np.minimum(p, q), _residual(p, q), q
    ),
    "q handed over at another temperature than drawn at": lambda p, q, *before: _wrong_temperature(
        p, q
    ),
    "the likeliest token drafted, judged as a draw from q": lambda p, q, *before: _Step(
        _point_mass(q) * _accept_probability(p, q), _residual(p, q), p
    ),
}
SLIPS = tuple(name for name in _STEPS if name)


def speculative_joint(
    next_p: NextLaw, next_q: NextLaw, vocab: int, length: int, gamma: int, slip: str = ""
) -> np.ndarray:
    """The exact distribution of speculative sampling with one mistake, float64 ``[V] * L``.

    ``slip`` is one of :data:`SLIPS`. Without one the result is p's own distribution (Leviathan et
    al. 2023, Appendix A.1). The other arguments are those of :func:`check`.

    Raises:
      OptionError: there are too many sequences, or a distribution has rows that are no
        probabilities.
    """
    # states[n]: the probability of each sequence so far, where n tokens of the current draft have
    # been accepted.
    states = [np.ones(1)] + [np.zeros(1)] * gamma
    before = None
    for prefixes in _prefixes(vocab, length):
        p = _probabilities(next_p, prefixes, vocab)
        q = _probabilities(next_q, prefixes, vocab)
        after = [np.zeros(p.shape) for _ in states]
        for drafted, law in enumerate(states):
            # A round's first position has none before it in the round: its own p and q stand in.
            previous = before if drafted and before is not None else (p, q)
            step = _STEPS[slip](p, q, *previous)
            if drafted == gamma:
                after[0] += law[:, None] * step.bonus
                continue
            after[drafted + 1] += law[:, None] * step.accepted
            after[0] += (law * (1 - step.accepted.sum(-1)))[:, None] * step.rejected
        states = [law.reshape(-1) for law in after]
        # Each prefix has V continuations, which share its p and q.
        before = (np.repeat(p, vocab, axis=0), np.repeat(q, vocab, axis=0))
    total = np.zeros(vocab**length)
    for law in states:
        total = total + law
    return total.reshape((vocab,) * length)


_rescore = replicated(Net.rescore)


def model_law(model: LM, prompt: Sequence[int], sampling: Sampling) -> NextLaw:
    """The distribution of a model's next token after ``prompt`` and a prefix, warp included.

    Its columns are the ids below the model's ``vocab_limit``.

    Args:
      model: the model, possibly on a mesh.
      prompt: token ids.
      sampling: temperature, top-k and top-p of the warp.
    """
    prompt_ids = np.asarray(prompt, np.int32)

    def next_law(prefixes: np.ndarray) -> np.ndarray:
        prompts = np.tile(prompt_ids, (len(prefixes), 1))
        tokens = np.concatenate([prompts, prefixes], axis=1)
        last = np.full((len(tokens), 1), tokens.shape[1] - 1, np.int32)
        logits = _rescore(model.mesh, model.net, tokens.astype(np.int32), last)
        log_p = warp(logits, sampling.arrays(len(tokens)))[:, 0, : model.vocab_limit]
        return np.exp(np.asarray(log_p, np.float64))

    return next_law


def _prefixes(vocab: int, length: int) -> Iterator[np.ndarray]:
    """All prefixes of each length below L, int ``[V**n, n]``, first token slowest.

    Raises:
      OptionError: there are too many or too few sequences.
    """
    if vocab < 2 or length < 1 or vocab**length > 10**6:
        raise OptionError(
            f"vocab={vocab}, length={length}: give at least 2 and 1, and at most 10**6 sequences "
            "in all"
        )
    for n in range(length):
        yield np.indices((vocab,) * n).reshape(n, vocab**n).T


def _probabilities(next_law: NextLaw, prefixes: np.ndarray, vocab: int) -> np.ndarray:
    """``next_law`` of the prefixes, float64 ``[N, V]``, checked.

    Raises:
      OptionError: it gives another shape, or no probabilities.
    """
    rows = np.asarray(next_law(prefixes), np.float64)
    if rows.shape != (len(prefixes), vocab):
        raise OptionError(
            f"a distribution has shape {rows.shape}, expected [{len(prefixes)}, {vocab}]"
        )
    total = rows.sum(-1, keepdims=True)
    if not ((rows >= 0).all() and np.allclose(total, 1, atol=1e-4)):
        raise OptionError("a distribution has rows that are no probabilities; normalize them")
    return rows / total
