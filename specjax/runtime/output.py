"""What comes out of decoding: text as it streams, and whole generations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from specjax.core.types import FROM_DRAFT
from specjax.text.tokenizer import IncrementalDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated, one entry per prompt and sample, prompts outermost.

    ``stats`` are counters per row (int), see :class:`specjax.core.types.Stats`; ``origins`` say for
    each token whether the draft or the target wrote it; ``logprobs`` (where asked) are nats
    under the unwarped target. ``cached_tokens`` of a prompt were not prefilled, for a row before
    began with them, too. ``rewards`` (where there is a reward) are the scores of the whole
    completions, one column per reward.

    Times are seconds, compilation included, each row's from when its turn came. ``prefill_seconds``
    are its prompt's up to its first round; where other rows were decoded meanwhile, a last pass
    counts as decoding, for nobody waits for it. ``share_seconds`` are the row's share of the whole
    time, prefill included: running requests share it evenly. ``passes`` are batched forwards of all
    rows together, and ``occupancy`` is the share of rows that were live, over all rounds.
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

    @property
    def lengths(self) -> np.ndarray:
        """Number of generated tokens per row."""
        return np.array([len(tokens) for tokens in self.tokens])


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of one row, and their log-probabilities where asked.

    A row's last piece has its ``finish_reason`` and, as ``row``, a generation of it alone; the last
    piece of a stream carries the whole generation.
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


class Reader:
    """Turns one row's tokens into text and finds stop strings in it."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = IncrementalDecoder(tokenizer) if tokenizer else None
        self.text, self.count = "", 0
        self.stopped = self.closed = False
        self.stops = bool(stop)
        self._held = max((len(s) - 1 for s in stop), default=0)
        self._shown = 0

    def read(self, tokens: np.ndarray, ended: bool) -> tuple[str, int]:
        """New text that can be shown, and how many of ``tokens`` the row keeps."""
        kept = len(tokens)
        if self._decoder is None:
            pass
        elif not self._stop:
            self.text += self._decoder.push(tokens)
        else:
            kept = self._search(tokens)
        self.count += kept
        self.closed = ended or self.stopped
        if self.closed and self._decoder and not self.stopped:
            self.text += self._decoder.flush()
            self._cut_at_stop()
        # What may be the beginning of a stop string is held back.
        end = len(self.text) if self.closed else max(self._shown, len(self.text) - self._held)
        text, self._shown = self.text[self._shown : end], max(end, self._shown)
        return text, kept

    def _search(self, tokens: np.ndarray) -> int:
        for n, token in enumerate(tokens, 1):
            self.text += self._decoder.push([token])
            if self._cut_at_stop():
                return n
        return len(tokens)

    def _cut_at_stop(self) -> bool:
        places = [at for at in (self.text.find(s) for s in self._stop) if at >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True
        return bool(places)


def concatenate(rows: list[Generation], passes: int, occupancy: float) -> Generation:
    """Generations of a row each as one."""

    def join(values):
        if values[0] is None:
            return None
        flat = itertools.chain.from_iterable
        return list(flat(values)) if isinstance(values[0], list) else np.concatenate(values)

    stats = {name: join([row.stats[name] for row in rows]) for name in rows[0].stats}
    names = {field.name for field in dataclasses.fields(Generation)}
    names -= {"stats", "passes", "occupancy"}
    rest = {name: join([getattr(row, name) for row in rows]) for name in names}
    return Generation(stats=stats, passes=passes, occupancy=occupancy, **rest)
