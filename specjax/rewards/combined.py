"""Several rewards as one: on the device where all can, else scored from the host.

Axis legend: B rows, K lanes, M tokens of a lane.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Sequence

import jax
import numpy as np

from specjax._util.errors import OptionError
from specjax.rewards.folding import Data, Together
from specjax.rewards.protocol import Reward, Sample
from specjax.text.tokenizer import Tokenizer

SUM, PRODUCT = "sum", "product"
COMBINATIONS = (SUM, PRODUCT)
SHOWN = 200  # characters of the text that a failing reward is reported with


class RewardWarning(UserWarning):
    """A reward raised or returned NaN; said once per reward, with the text it failed on."""


@dataclasses.dataclass(frozen=True)
class Combined:
    """Rewards added up, or multiplied."""

    parts: tuple[Reward, ...]
    product: bool = False
    # Numbers of the parts that failed once: a job is several runs of the same reward.
    reported: set[int] = dataclasses.field(default_factory=set, compare=False)

    def satisfied(self, scores: Sequence[float]) -> bool:
        """Whether every part's score is full."""
        return all(s >= part.full for s, part in zip(scores, self.parts, strict=True))

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and largest combined score, where every part knows its own."""
        each = [part.bounds for part in self.parts]
        if None in each:
            return None
        if not self.product:
            return sum(low for low, _ in each), sum(high for _, high in each)
        corners = (1.0, 1.0)
        for bound in each:
            products = [a * b for a in corners for b in bound]
            corners = min(products), max(products)
        return corners

    def check_threshold(self, r_t: float) -> None:
        """Refuses an ``r_t`` that no completion, or every one, reaches.

        Raises:
          OptionError: the threshold lies outside the reward's bounds.
        """
        if self.bounds is None:
            return
        low, high = self.bounds
        if not low <= r_t <= high:
            raise OptionError(
                f"r_t={r_t:g}: this reward lies between {low:g} and {high:g}; "
                "choose a threshold in between"
            )

    def value(self, scores: Sequence[float]) -> float:
        """The combined float32 score; −inf where a part failed."""
        if -math.inf in scores:
            return -math.inf
        combine = np.prod if self.product else np.sum
        return float(combine(np.asarray(scores, np.float32), dtype=np.float32))

    def fold(
        self, tokenizer: Tokenizer | None, constraints: Sequence[dict]
    ) -> tuple[Together, Data] | None:
        """The fold and its arrays for the rows of a job; None where a part needs text."""
        each = [part.on_device(tokenizer, constraints) for part in self.parts]
        if None in each:
            return None
        fold = Together(tuple(one.fold for one in each), self.product)
        shared = jax.tree.map(jax.numpy.asarray, tuple(one.shared for one in each))
        return fold, Data(shared, tuple(one.own for one in each))


@dataclasses.dataclass
class Judge:
    """A reward bound to the rows of a job.

    Scores texts with Python; a failing reward is reported once and scores −inf.
    """

    combined: Combined
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    fold: Together | None = None  # the same on the device, where no part needs text
    data: Data | None = None

    @classmethod
    def bind(cls, combined: Combined, target, constraints: Sequence[dict], guides: bool) -> Judge:
        """For rows with these ``constraints``; ``guides`` asks for the fold.

        Raises:
          OptionError: a part cannot score what it is to score.
        """
        for part in combined.parts:
            part.check(target.tokenizer, constraints)
        on_device = combined.fold(target.tokenizer, constraints) if guides else None
        eos_ids = frozenset(target.eos_ids)
        return cls(combined, target.tokenizer, eos_ids, *(on_device or (None, None)))

    def rows(self, cases: Sequence[int]) -> Data | tuple:
        """The arrays of some of the rows."""
        if self.data is None:
            return ()
        own = jax.tree.map(lambda x: jax.numpy.asarray(x[np.asarray(cases)]), self.data.own)
        return self.data._replace(own=own)

    def scores(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Each part's score of each sample."""
        parts = enumerate(self.combined.parts)
        return list(zip(*(self._scores(i, part, samples) for i, part in parts), strict=True))

    def lanes(self, rows: Sequence, state, lanes) -> np.ndarray:
        """The combined reward of every lane, float32 ``[B, K]``; rows that do not ask get 0."""
        fetched = jax.device_get((state.tokens, state.prompt_length, state.length, lanes))
        tokens, begin, end, lanes = fetched
        samples = []
        for i in np.flatnonzero(lanes.asked):
            before = tokens[i, begin[i] : end[i]].tolist()
            for ahead, count in zip(lanes.tokens[i], lanes.count[i], strict=True):
                samples.append(self.sample(rows[i], before + ahead[:count].tolist()))
        values = np.zeros(lanes.count.shape, np.float32)
        found = [self.combined.value(scores) for scores in self.scores(samples)]
        values[lanes.asked] = np.reshape(found, (-1, values.shape[1]))
        return values

    def sample(self, row, tokens: Sequence[int]) -> Sample:
        """What the rewards see of a row with ``prompt`` and ``constraints``."""
        text = self.tokenizer.decode(tokens) if self.tokenizer else ""
        ended = len(tokens) > 0 and int(tokens[-1]) in self.eos_ids
        return Sample(text, row.prompt, tokens, row.constraints, ended)

    def _scores(self, number: int, part: Reward, samples: Sequence[Sample]) -> list[float]:
        """One part's scores; where they fail together, each sample is asked alone."""
        if len(samples) > 1 and hasattr(part, "score_many"):
            with contextlib.suppress(Exception):
                values = [float(value) for value in part.score_many(samples)]
                if len(values) == len(samples) and not any(map(math.isnan, values)):
                    return values
        return [self._score(number, part, sample) for sample in samples]

    def _score(self, number: int, part: Reward, sample: Sample) -> float:
        try:
            value = float(part.score(sample))
            problem = "returned NaN" if math.isnan(value) else ""
        except Exception as error:  # a reward is anybody's program
            value, first = math.nan, (str(error) or "no message").splitlines()[0]
            problem = f"raised {type(error).__name__}: {first}"
        if not problem:
            return value
        if number not in self.combined.reported:
            self.combined.reported.add(number)
            text = sample.text[:SHOWN] + ("…" if len(sample.text) > SHOWN else "")
            warnings.warn(
                f"reward {part.name} {problem}; it counts as −∞ on {text!r}",
                RewardWarning,
                stacklevel=2,
            )
        return -math.inf
