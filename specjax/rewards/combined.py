"""Several rewards as one, and the scoring of completions on the host.

:class:`Combined` is the sum or product of rewards. :class:`RewardScorer` binds it to the requests
of one job. Where every part can run on the device, the scorer has a fold for the device loop;
otherwise the loop is host-driven and asks the scorer.

Axis legend: B rows, K candidate continuations of a row, M tokens of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax._util.errors import OptionError
from specjax.rewards.folding import Data, Together
from specjax.rewards.protocol import Reward, RewardWarning, Sample
from specjax.text.tokenizer import Tokenizer

SUM = "sum"
PRODUCT = "product"
COMBINATIONS = (SUM, PRODUCT)
SHOWN_CHARACTERS = 200  # of the text in the warning about a failing reward


@dataclasses.dataclass(frozen=True)
class Combined:
    """The sum of rewards, or their product."""

    parts: tuple[Reward, ...]
    product: bool = False
    # Indices of the parts whose failure has been reported. They are kept here and not in the
    # scorer, because a job may bind the same reward several times.
    reported: set[int] = dataclasses.field(default_factory=set, compare=False)

    def satisfied(self, scores: Sequence[float]) -> bool:
        """Whether every part's score is full."""
        pairs = zip(scores, self.parts, strict=True)
        return all(score >= part.full for score, part in pairs)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and highest combined score; None where a part does not know its own."""
        bounds = []
        for part in self.parts:
            if part.bounds is None:
                return None
            bounds.append(part.bounds)
        if not self.product:
            return sum(low for low, _ in bounds), sum(high for _, high in bounds)

        # Bounds may be negative, so either end of one factor can meet either end of the other.
        lowest = highest = 1.0
        for low, high in bounds:
            corners = [lowest * low, lowest * high, highest * low, highest * high]
            lowest = min(corners)
            highest = max(corners)
        return lowest, highest

    def check_threshold(self, r_t: float) -> None:
        """Refuses a threshold ``r_t`` outside the bounds: all completions would reach it, or none.

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
        """The combined score, in float32; −inf where a part failed."""
        if -math.inf in scores:
            return -math.inf
        combine = np.prod if self.product else np.sum
        return float(combine(np.asarray(scores, np.float32), dtype=np.float32))

    def fold(
        self, tokenizer: Tokenizer | None, constraints: Sequence[dict]
    ) -> tuple[Together, Data] | None:
        """The fold and its arrays for the rows of a job; None where a part needs text."""
        parts = []
        for part in self.parts:
            on_device = part.on_device(tokenizer, constraints)
            if on_device is None:
                return None
            parts.append(on_device)
        fold = Together(tuple(part.fold for part in parts), self.product)
        shared = jax.tree.map(jax.numpy.asarray, tuple(part.shared for part in parts))
        return fold, Data(shared, tuple(part.own for part in parts))


@dataclasses.dataclass
class RewardScorer:
    """A reward bound to the requests of one job.

    Scores completions with Python. A failing reward is reported once and scores −inf.

    Attributes:
      combined: the reward.
      tokenizer: the target's; None: rewards see no text.
      eos_ids: ids that end a sequence.
      fold, data: the same reward on the device; None where a part needs text.
    """

    combined: Combined
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    fold: Together | None = None
    data: Data | None = None

    @classmethod
    def bind(
        cls, combined: Combined, target: Any, constraints: Sequence[dict], guides: bool
    ) -> RewardScorer:
        """A scorer for rows with these constraints.

        Args:
          target: an :class:`specjax.LM`.
          constraints: one per row, by reward name.
          guides: whether a search asks for rewards. If so, they go to the device if they can.
        Raises:
          OptionError: a part cannot score these rows.
        """
        for part in combined.parts:
            part.check(target.tokenizer, constraints)
        scorer = cls(combined, target.tokenizer, frozenset(target.eos_ids))
        on_device = combined.fold(target.tokenizer, constraints) if guides else None
        if on_device is not None:
            scorer.fold, scorer.data = on_device
        return scorer

    def rows(self, cases: Sequence[int]) -> Data | tuple:
        """The device arrays of the job's rows with these numbers; () if there is no fold."""
        if self.data is None:
            return ()
        numbers = np.asarray(cases)
        own = jax.tree.map(lambda x: jax.numpy.asarray(x[numbers]), self.data.own)
        return self.data._replace(own=own)

    def scores(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """For each sample, the scores of all parts."""
        by_part = [
            self._scores_of_part(number, part, samples)
            for number, part in enumerate(self.combined.parts)
        ]
        return list(zip(*by_part, strict=True))

    def score_continuations(self, rows: Sequence, state: Any, continuations: Any) -> np.ndarray:
        """The combined reward of every continuation, float32 ``[B, K]``.

        Args:
          rows: the request in each batch slot, with its ``prompt`` and ``constraints``.
          state: the :class:`specjax.core.types.DecodeState`.
          continuations: the :class:`specjax.search.drivers.CandidateContinuations`. Rows that are
            not ``asked`` about get 0.
        """
        fetched = jax.device_get((state.tokens, state.prompt_length, state.length, continuations))
        tokens, prompt_length, length, continuations = fetched
        samples = []
        for i in map(int, np.flatnonzero(continuations.asked)):
            completion = tokens[i, prompt_length[i] : length[i]].tolist()
            each = zip(continuations.tokens[i], continuations.count[i], strict=True)
            for tokens_after, count in each:
                whole = completion + tokens_after[:count].tolist()
                samples.append(self.sample(rows[i], whole))

        rewards = [self.combined.value(scores) for scores in self.scores(samples)]
        values = np.zeros(continuations.count.shape, np.float32)
        values[continuations.asked] = np.reshape(rewards, (-1, continuations.count.shape[1]))
        return values

    def sample(self, row: Any, tokens: Sequence[int]) -> Sample:
        """The completion ``tokens`` of a request, as rewards see it."""
        text = ""
        if self.tokenizer:
            text = self.tokenizer.decode_after(row.tokens, tokens)
        ended = len(tokens) > 0 and int(tokens[-1]) in self.eos_ids
        return Sample(text, row.prompt, tokens, row.constraints, ended)

    def _scores_of_part(self, number: int, part: Reward, samples: Sequence[Sample]) -> list[float]:
        """One part's scores: from one ``score_many`` call if possible, else sample by sample."""
        score_many = getattr(part, "score_many", None)
        if len(samples) > 1 and score_many is not None:
            # One bad sample fails the whole call. Scored alone, the others get their score.
            with contextlib.suppress(Exception):
                values = [float(value) for value in score_many(samples)]
                if len(values) == len(samples) and not any(map(math.isnan, values)):
                    return values
        return [self._score(number, part, sample) for sample in samples]

    def _score(self, number: int, part: Reward, sample: Sample) -> float:
        """One part's score of one sample; −inf where it fails."""
        try:
            value = float(part.score(sample))
            problem = "returned NaN" if math.isnan(value) else ""
        except Exception as error:  # a reward may be a user's function, and raise anything
            value = math.nan
            first_line = (str(error) or "no message").splitlines()[0]
            problem = f"raised {type(error).__name__}: {first_line}"
        if not problem:
            return value

        if number not in self.combined.reported:
            self.combined.reported.add(number)
            text = sample.text[:SHOWN_CHARACTERS]
            if len(sample.text) > SHOWN_CHARACTERS:
                text += "…"
            warnings.warn(
                f"reward {part.name} {problem}; it counts as −∞ on {text!r}",
                RewardWarning,
                stacklevel=2,
            )
        return -math.inf
