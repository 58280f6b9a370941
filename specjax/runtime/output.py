"""What comes out of decoding: pieces of text as they stream, and whole generations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.core.types import FROM_DRAFT


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One of several completions that a search found.

    ``tokens`` are int32 ids ``[n]``. ``score`` is what the search ranks by: of beams, the total
    log-probability in nats over ``n ** length_penalty``.
    """

    text: str
    tokens: np.ndarray
    score: float


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated, one entry per prompt and sample, prompts outermost.

    ``tokens`` (int32 ids), ``origins`` and ``logprobs`` have an array ``[n]`` for each row, where n
    is the number of its generated tokens. ``stats`` are counters per row (int), see
    :class:`specjax.core.types.Stats`. ``origins`` say whether the draft or the target wrote a
    token. ``logprobs``, where asked for, are nats under the unwarped target. ``cached_tokens`` of a
    prompt came from the prefix cache and were not prefilled. ``rewards``, where there is a reward,
    score the whole completions: float64 with one row per completion and one column per reward.
    ``hypotheses`` of a row are the best that its search found, if it was asked for several.

    Times are seconds, compilation included. A row's time begins with its prefill.
    ``prefill_seconds`` end at its first round. If other rows run meanwhile, the last pass of its
    prefill counts as decoding, because the host does not wait for it. ``first_token_seconds`` end
    at the row's first poll, and include the prefill. ``decode_seconds`` are from the end of the
    prefill to the end of the row. ``share_seconds`` are the row's share of the whole time, prefill
    included: running rows share the time between two polls evenly.

    ``passes`` are batched forward passes of all rows together. ``occupancy`` is the share of batch
    slots that were running, over all rounds.
    """

    text: list[str]
    tokens: list[np.ndarray]
    finish_reasons: list[str]
    origins: list[np.ndarray]
    logprobs: list[np.ndarray] | None
    prompt_tokens: list[int]
    stats: dict[str, np.ndarray]
    prefill_seconds: np.ndarray
    first_token_seconds: np.ndarray
    decode_seconds: np.ndarray
    share_seconds: np.ndarray
    cached_tokens: list[int]
    passes: int
    occupancy: float
    rewards: np.ndarray | None = None
    hypotheses: list[list[Hypothesis]] | None = None

    @property
    def accepted_emitted(self) -> np.ndarray:
        """Draft tokens of each row that were accepted and are part of its output.

        ``stats["accepted"]`` counts those, too, that the budget, EOS or a stop string cut off.
        """
        return np.array([int((origins == FROM_DRAFT).sum()) for origins in self.origins])

    @property
    def lengths(self) -> np.ndarray:
        """Number of generated tokens per row."""
        return np.array([len(tokens) for tokens in self.tokens])


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of one row, and their log-probabilities where asked for.

    A row's last piece has its ``finish_reason`` and, as ``row``, a generation of that row alone.
    ``index`` is the number of that row in the job. The last piece of a stream carries the whole
    generation.
    """

    index: int
    text: str
    tokens: np.ndarray
    origins: np.ndarray
    finish_reason: str | None = None
    logprobs: np.ndarray | None = None
    row: Generation | None = None
    generation: Generation | None = None

    @property
    def accepted(self) -> np.ndarray:
        """Which of the tokens are accepted draft tokens."""
        return self.origins == FROM_DRAFT


def concatenate(rows: Sequence[Generation], passes: int, occupancy: float) -> Generation:
    """Generations of one row each as one generation."""
    counters = rows[0].stats
    stats = {name: np.concatenate([row.stats[name] for row in rows]) for name in counters}

    joined = {}
    for field in dataclasses.fields(Generation):
        if field.name not in ("stats", "passes", "occupancy"):
            joined[field.name] = _join([getattr(row, field.name) for row in rows])
    return Generation(stats=stats, passes=passes, occupancy=occupancy, **joined)


def _join(values: list[Any]) -> Any:
    """One field of all rows: lists or arrays end to end, None if the rows have None."""
    if values[0] is None:
        return None
    if isinstance(values[0], list):
        return list(itertools.chain.from_iterable(values))
    return np.concatenate(values)
