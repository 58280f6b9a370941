"""The protocol of a reward, and the sample that it scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from specjax.rewards.folding import Fold
from specjax.text.tokenizer import Tokenizer


class RewardWarning(UserWarning):
    """A reward raised or returned NaN, with the text it failed on; or it counts less than it could.

    Reported once per reward.
    """


@dataclasses.dataclass(frozen=True)
class Sample:
    """A completion so far, or with a candidate continuation appended.

    Attributes:
      text: the completion without its prompt.
      prompt: the text before it.
      tokens: the ids of the completion.
      constraints: what the task asks of this completion, by reward name, such as required words.
      ended: whether it ends with an end of sequence.
    """

    text: str
    prompt: str
    tokens: Sequence[int]
    constraints: dict[str, Sequence[str]]
    ended: bool = False


class DeviceReward(NamedTuple):
    """A reward that runs on the device: the function and its arrays."""

    fold: Fold
    shared: Any  # arrays that all rows share
    own: Any  # arrays with a leading axis over the rows of the job


class Reward(Protocol):
    """Scores a completion; higher is better.

    ``score`` is plain Python. If ``on_device`` gives a :class:`DeviceReward`, the device loop uses
    that. Otherwise the host calls ``score`` between passes, or ``score_many(samples)``, where there
    is such a method, for all samples at once.
    """

    @property
    def name(self) -> str:
        """As in ``--reward``; constraints go by it."""
        ...

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and highest score; None if unknown."""
        ...

    @property
    def full(self) -> float:
        """From this score on a constraint counts as satisfied."""
        ...

    def check(self, tokenizer: Tokenizer | None, constraints: Sequence[dict]) -> None:
        """Checks that it can score rows with these constraints, before anything compiles.

        Raises:
          OptionError: says what is missing or wrong.
        """

    def score(self, sample: Sample) -> float:
        """The score of one completion."""
        ...

    def on_device(
        self, tokenizer: Tokenizer | None, constraints: Sequence[dict]
    ) -> DeviceReward | None:
        """The same reward for the device, for the rows of a job; None if it needs text."""
