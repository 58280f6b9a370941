"""What a reward must offer, and what it is asked about."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from specjax.rewards.folding import Fold
from specjax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Sample:
    """What was generated so far, or would be with a lookahead.

    ``text`` is the completion alone, ``tokens`` its ids, ``constraints`` what the prompt's line
    of a task asks for, by reward name; ``ended`` says that an end of sequence was reached.
    """

    text: str
    prompt: str
    tokens: Sequence[int]
    constraints: dict[str, Sequence[str]]
    ended: bool = False


class DeviceReward(NamedTuple):
    """A reward as arrays: ``own`` has one leading row per row of the job."""

    fold: Fold
    shared: Any
    own: Any


class Reward(Protocol):
    """Scores a completion; higher is better.

    ``score`` is plain Python on text. A reward that has ``on_device``, too, runs inside the
    device loop; one without is asked from the host between passes, about all samples at once
    where it has ``score_many(samples)``. ``bounds`` are the least and largest score where they
    are known; ``full`` is what counts as satisfied.
    """

    name: str
    bounds: tuple[float, float] | None
    full: float

    def check(self, tokenizer: Tokenizer | None, constraints: Sequence[dict]) -> None:
        """Refuses what it cannot score, before anything compiles.

        Raises:
          OptionError: says what is missing or wrong.
        """

    def score(self, sample: Sample) -> float: ...

    def on_device(
        self, tokenizer: Tokenizer | None, constraints: Sequence[dict]
    ) -> DeviceReward | None:
        """The reward for the rows of a job, or None where it needs text."""
