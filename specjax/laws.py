"""Does a sampler have the law that it should? An exact test, for our samplers and anybody's.

Over a small vocabulary the law of the first L tokens can be written down: V^L sequences, each with
the product of its conditionals. :func:`check` draws many sequences, holds their counts against
that law by Pearson's chi-square, and says what the test is worth: the chance that a right sampler
fails it (``alpha``), and the chance that each of the usual slips in speculative sampling would be
found (``caught``), from the slip's own exact law.

A conditional law is a function of prefixes: int ``[N, n]`` to probabilities ``[N, V]``, called once
for each n below L, with all V^n prefixes. A sampler that ends rows gives the end again and again,
and its law says so. Sums are in float64.

Axis legend: N prefixes or samples, L tokens, V vocabulary, γ draft length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy.special import chdtrc, chdtri, chndtr

from specjax._util.arguments import COUNT, ArgSpec, validate_arguments
from specjax._util.errors import OptionError
from specjax.core.mesh import replicated
from specjax.core.net import Net
from specjax.core.warp import Sampling, warp
from specjax.lm import LM

NextLaw = Callable[[np.ndarray], np.ndarray]
Draw = Callable[[int, int], np.ndarray]
SAMPLES, ALPHA = 200_000, 1e-6
FEWEST = (
    5  # cells that expect fewer are pooled: chi-square's law is the statistic's only in the limit
)


CHANCE = ArgSpec(float, above=0, below=1)


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`check` found.

    ``p_value``: of the counts under the exact law. ``caught``: by slip, the chance that this test
    finds it; empty without a draft's law.
    """

    p_value: float
    alpha: float
    samples: int
    outcomes: int
    caught: dict[str, float]

    @property
    def passed(self) -> bool:
        """A right sampler passes but for a chance of ``alpha``."""
        return self.p_value >= self.alpha

    def __str__(self) -> str:
        verdict = "has the law" if self.passed else "does NOT have the law"
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
      draw: ``(samples, seed)`` to int ``[samples, length]``, independent rows.
      next_p: p of the next token, see the module.
      vocab: V; the test needs few tokens: V^L is at most 10⁶.
      length: L; longer than γ + 1 it sees more than one round.
      next_q: q of the next token, for ``caught`` alone.
      gamma: draft length of the slips in ``caught``.
      samples: sequences drawn.
      alpha: the chance that a right sampler fails.
      seed: handed to ``draw``.
    Raises:
      OptionError: an argument cannot be used, or ``draw`` gives something else.
    """
    law = joint(next_p, vocab, length)
    _pooled(law.reshape(-1) * samples)  # said before anything is drawn
    tokens = np.asarray(draw(samples, seed))
    if tokens.shape != (samples, length):
        raise OptionError(
            f"draw gave shape {tokens.shape}; [{samples}, {length}] tokens are wanted"
        )
    caught = {}
    if next_q is not None:
        for slip in SLIPS:
            other = speculative_joint(next_p, next_q, vocab, length, gamma, slip)
            caught[slip] = power(law, other, samples, alpha)
    found = p_value(histogram(tokens, vocab), law)
    return Report(found, alpha, samples, law.size, caught)


def joint(next_p: NextLaw, vocab: int, length: int) -> np.ndarray:
    """The law of the first L tokens: float64 ``[V] * L``, its sum 1.

    Raises:
      OptionError: there are too many sequences, or ``next_p`` gives no probabilities.
    """
    law = np.ones(1)
    for prefixes in _prefixes(vocab, length):
        law = (law[:, None] * _rows(next_p, prefixes, vocab)).reshape(-1)
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
    """Pearson's chi-square of counts against an exact law; cells that expect under 5 are pooled.

    A count where the law is zero gives 0: it cannot happen.

    Raises:
      OptionError: the law has one outcome, which tests nothing.
    """
    counts, law = counts.reshape(-1), law.reshape(-1)
    if counts[law == 0].any():
        return 0.0
    want, seen = _pooled(law * counts.sum(), law * counts.sum(), counts)
    return float(chdtrc(len(want) - 1, np.sum((seen - want) ** 2 / want)))


def power(
    law: np.ndarray, other: np.ndarray, samples: int = SAMPLES, alpha: float = ALPHA
) -> float:
    """The chance that the test refuses a sampler whose law is ``other`` (noncentral chi-square)."""
    law, other = law.reshape(-1), other.reshape(-1)
    impossible = other[law == 0].sum()
    want, seen = _pooled(law * samples, law * samples, other * samples)
    bound = chdtri(len(want) - 1, alpha)
    distance = np.sum((seen - want) ** 2 / want)
    passes = chndtr(bound, len(want) - 1, distance) * (1 - impossible) ** samples
    return float(1 - passes)


def _pooled(expected: np.ndarray, *what: np.ndarray) -> list[np.ndarray]:
    """Each of ``what``, its cells that expect too little pooled, but for what expects nothing."""
    small = expected < FEWEST
    total = np.append(expected[~small], expected[small].sum())
    if np.sum(total > 0) < 2:
        raise OptionError("a law with one outcome tests nothing; give longer or likelier sequences")
    return [np.append(x[~small], x[small].sum())[total > 0].astype(np.float64) for x in what]


# --- the usual slips -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Step:
    """One position of a round, ``[N, V]`` each.

    Probability that each token is drafted and accepted, the law after a refusal, and the law
    of the bonus token where the draft has ended.
    """

    accepted: np.ndarray
    refused: np.ndarray
    bonus: np.ndarray


def _right(p: np.ndarray, q: np.ndarray) -> _Step:
    return _Step(np.minimum(p, q), _residual(p, q), p)


def _residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    left = np.maximum(p - q, 0)
    total = left.sum(-1, keepdims=True)
    return np.where(total > 0, left / np.where(total > 0, total, 1), p)


def _chance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.minimum(1, np.divide(p, q, out=np.ones_like(p), where=q > 0))


def _flat_claim(p: np.ndarray, q: np.ndarray) -> _Step:
    flat = np.sqrt(q) / np.sqrt(q).sum(-1, keepdims=True)
    return _Step(q * _chance(p, flat), _residual(p, flat), p)


def _point_mass(q: np.ndarray) -> np.ndarray:
    return (np.arange(q.shape[-1]) == q.argmax(-1)[:, None]).astype(q.dtype)


# Of p and q at a position, and at the one before it.
_STEPS: dict[str, Callable[..., _Step]] = {
    "": lambda p, q, *before: _right(p, q),
    "after a refusal a draw from p, not from the residual": lambda p, q, *before: _Step(
        np.minimum(p, q), p, p
    ),
    "the residual of the position before": lambda p, q, *before: _Step(
        np.minimum(p, q), _residual(*before), p
    ),
    "every drafted token accepted": lambda p, q, *before: _Step(q, p, p),
    "accepted by q/p instead of p/q": lambda p, q, *before: _Step(
        q * _chance(q, p), _residual(p, q), p
    ),
    "the bonus token drawn from q": lambda p, q, *before: _Step(
        np.minimum(p, q), _residual(p, q), q
    ),
    "q handed over at another temperature than drawn at": lambda p, q, *before: _flat_claim(p, q),
    "the likeliest token drafted, judged as a draw from q": lambda p, q, *before: _Step(
        _point_mass(q) * _chance(p, q), _residual(p, q), p
    ),
}
SLIPS = tuple(name for name in _STEPS if name)


def speculative_joint(
    next_p: NextLaw, next_q: NextLaw, vocab: int, length: int, gamma: int, slip: str = ""
) -> np.ndarray:
    """The exact law of speculative sampling with one slip of :data:`SLIPS`, ``[V] * L``.

    Without one it is p's own (Leviathan et al. 2023, Appendix A.1).
    """
    # The law of what was emitted, by how many tokens of the running draft were accepted.
    states = [np.ones(1)] + [np.zeros(1)] * gamma
    before = None
    for prefixes in _prefixes(vocab, length):
        here = tuple(_rows(law, prefixes, vocab) for law in (next_p, next_q))
        after = [np.zeros(here[0].shape) for _ in states]
        for drafted, law in enumerate(states):
            # A round's first position has none before it.
            step = _STEPS[slip](*here, *(before if drafted and before else here))
            if drafted == gamma:
                after[0] += law[:, None] * step.bonus
                continue
            after[drafted + 1] += law[:, None] * step.accepted
            after[0] += (law * (1 - step.accepted.sum(-1)))[:, None] * step.refused
        states = [law.reshape(-1) for law in after]
        before = tuple(np.repeat(rows, vocab, axis=0) for rows in here)
    return sum(states).reshape((vocab,) * length)


_rescore = replicated(Net.rescore)


def model_law(model: LM, prompt: Sequence[int], sampling: Sampling) -> NextLaw:
    """The warped law of a model's next token after ``prompt`` and a prefix."""
    head = np.asarray(prompt, np.int32)

    def next_law(prefixes: np.ndarray) -> np.ndarray:
        tokens = np.concatenate([np.tile(head, (len(prefixes), 1)), prefixes], axis=1)
        last = np.full((len(tokens), 1), tokens.shape[1] - 1, np.int32)
        logits = _rescore(model.mesh, model.net, tokens.astype(np.int32), last)
        log_p = warp(logits, sampling.arrays(len(tokens)))[:, 0, : model.vocab_limit]
        return np.exp(np.asarray(log_p, np.float64))

    return next_law


def _prefixes(vocab: int, length: int) -> Iterator[np.ndarray]:
    """All prefixes of each length below L, int ``[V**n, n]``, first token slowest."""
    if vocab < 2 or length < 1 or vocab**length > 10**6:
        said = f"vocab={vocab}, length={length}: give at least 2 and 1"
        raise OptionError(f"{said}, and at most 10**6 sequences in all")
    for n in range(length):
        yield np.indices((vocab,) * n).reshape(n, vocab**n).T


def _rows(next_law: NextLaw, prefixes: np.ndarray, vocab: int) -> np.ndarray:
    rows = np.asarray(next_law(prefixes), np.float64)
    if rows.shape != (len(prefixes), vocab):
        raise OptionError(f"a law gave shape {rows.shape}; [{len(prefixes)}, {vocab}] is wanted")
    total = rows.sum(-1, keepdims=True)
    if not ((rows >= 0).all() and np.allclose(total, 1, atol=1e-4)):
        raise OptionError("a law gave rows that are no probabilities; normalize them")
    return rows / total
