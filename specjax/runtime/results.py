"""Results of a poll: reads them from the device, makes pieces and generations, and takes times.

It does not know which requests wait, and it changes nothing on the device.

Axis legend: B batch slots, S cache positions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Int8

from specjax.core.protocols import Sequences
from specjax.core.types import FINISH_REASONS, RUNNING, STOP_TEXT, DecodeState
from specjax.rewards import RewardScorer
from specjax.runtime.detokenizer import Detokenizer
from specjax.runtime.engine import Request
from specjax.runtime.output import Generation, Hypothesis, Piece


@dataclasses.dataclass
class Slot:
    """A batch slot in use: its running request, and what has been read of that so far."""

    request: Request
    detokenizer: Detokenizer
    began: float  # when its prefill began, by time.perf_counter
    length: int  # tokens at the last poll, prompt included
    passes_before: int  # passes of the batch before the request took the slot
    cached_tokens: int = 0  # of its prompt, that the prefix cache had
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0  # 0: no token yet
    share_seconds: float = 0.0


class Snapshot(NamedTuple):
    """The arrays of a state that a poll reads, on the host."""

    finish: Int[np.ndarray, "B"]
    length: Int[np.ndarray, "B"]
    tokens: Int[np.ndarray, "B S"]
    origin: Int8[np.ndarray, "B S"]
    logprobs: Float[np.ndarray, "B S"] | None
    rounds: Int[np.ndarray, "B"]
    passes: Int[np.ndarray, ""]


class PollResult(NamedTuple):
    """New pieces, and the batch slots whose requests have finished."""

    pieces: list[Piece]
    ended: Bool[np.ndarray, "B"]
    stopped: Bool[np.ndarray, "B"]  # by a stop string, which the device does not know of


class ResultReader:
    """Reads what is new of the running requests, and counts rounds, passes and seconds.

    Args:
      size: B, the number of batch slots.
      scorer: scores the completions; None without a reward.
      sequences: as :meth:`specjax.Method.sequences`.
    """

    def __init__(
        self,
        size: int,
        scorer: RewardScorer | None,
        sequences: Callable[[DecodeState], Sequences | None],
    ):
        self._size = size
        self._scorer = scorer
        self._sequences = sequences
        self.passes = 0  # batched forward passes of all requests so far
        self._rounds = 0  # of the batch
        self._slot_rounds = 0  # rounds of all batch slots that were running
        self._last_poll = 0.0  # when, by time.perf_counter
        # The state counts rounds and passes from its own beginning: these are read already.
        self._rounds_read = np.zeros(size, np.int64)
        self._passes_read = 0

    @property
    def occupancy(self) -> float:
        """The share of batch slots that were running, over all rounds."""
        return self._slot_rounds / max(1, self._rounds * self._size)

    def start_clock(self) -> None:
        """The first poll shares out the time from now on."""
        self._last_poll = time.perf_counter()

    def expect_new_state(self) -> None:
        """The next state's counters begin at 0."""
        self._rounds_read = np.zeros(self._size, np.int64)
        self._passes_read = 0

    def expect_new_request(self, number: int) -> None:
        """Batch slot ``number`` has a new request, whose counters begin at 0."""
        self._rounds_read[number] = 0

    def read(self, state: DecodeState, slots: Sequence[Slot | None]) -> PollResult:
        """What is new since the last poll; waits for the device. At least one slot is in use."""
        running = {number: slot for number, slot in enumerate(slots) if slot}
        snapshot = _fetch(state)
        self._count(snapshot, running)

        pieces: dict[int, Piece] = {}
        for number, slot in running.items():
            piece = _next_piece(snapshot, number, slot)
            if piece is not None:
                pieces[number] = piece

        ended = np.zeros(self._size, bool)
        stopped = np.zeros(self._size, bool)
        for number, piece in pieces.items():
            ended[number] = piece.finish_reason is not None
            stopped[number] = running[number].detokenizer.stopped

        if ended.any():
            finished = {number: running[number] for number in np.flatnonzero(ended).tolist()}
            for number, generation in self._generations(state, snapshot, finished).items():
                pieces[number] = dataclasses.replace(pieces[number], row=generation)
        return PollResult(list(pieces.values()), ended, stopped)

    def _count(self, snapshot: Snapshot, running: Mapping[int, Slot]) -> None:
        """Counts rounds, passes and seconds since the last poll; running requests share these."""
        now = time.perf_counter()
        new_rounds = [
            int(snapshot.rounds[number] - self._rounds_read[number]) for number in running
        ]
        self._rounds += max(new_rounds)
        self._slot_rounds += sum(new_rounds)
        self.passes += int(snapshot.passes) - self._passes_read
        # A copy: the slots' entries are set to 0, and what device_get returns is read-only.
        self._rounds_read = np.asarray(snapshot.rounds, np.int64).copy()
        self._passes_read = int(snapshot.passes)

        for slot in running.values():
            slot.share_seconds += (now - self._last_poll) / len(running)
            if not slot.first_token_seconds:
                slot.first_token_seconds = now - slot.began
        self._last_poll = now

    def _generations(
        self, state: DecodeState, snapshot: Snapshot, finished: Mapping[int, Slot]
    ) -> dict[int, Generation]:
        """The generations of finished requests by batch slot, with their rewards."""
        counters = dict(vars(jax.device_get(state.stats)))
        counters.pop("passes")  # of the batch, not of a row
        now = time.perf_counter()

        generations = {}
        for number, slot in finished.items():
            stats = {name: values[number : number + 1].copy() for name, values in counters.items()}
            # The device emitted what follows a stop string, too.
            stats["emitted"] = np.array([slot.detokenizer.count])
            generations[number] = self._generation(snapshot, number, slot, stats, now)

        rewards = self._rewards(generations, finished)
        hypotheses = self._hypotheses(state, finished)
        return {
            number: dataclasses.replace(
                generation, rewards=rewards.get(number), hypotheses=hypotheses.get(number)
            )
            for number, generation in generations.items()
        }

    def _hypotheses(
        self, state: DecodeState, finished: Mapping[int, Slot]
    ) -> dict[int, list[list[Hypothesis]]]:
        """What a search found for finished requests, by batch slot; empty if they are lone ones."""
        found = self._sequences(state)
        if found is None:
            return {}
        found = jax.device_get(found)
        hypotheses = {}
        for number, slot in finished.items():
            begin = len(slot.request.tokens)
            rows = []
            for tokens, length, score in zip(*(part[number] for part in found), strict=True):
                new = tokens[begin : begin + int(length)].copy()
                rows.append(Hypothesis(slot.detokenizer.whole_text(new), new, float(score)))
            hypotheses[number] = [rows]
        return hypotheses

    def _generation(
        self,
        snapshot: Snapshot,
        number: int,
        slot: Slot,
        stats: dict[str, np.ndarray],
        now: float,
    ) -> Generation:
        """The generation of one finished request."""
        prompt_length = len(slot.request.tokens)
        new = slice(prompt_length, prompt_length + slot.detokenizer.count)
        finish = snapshot.finish[number]
        if slot.detokenizer.stopped:
            # Also if the device ended the request in the same poll, behind the stop string.
            finish = STOP_TEXT
        logprobs = None
        if snapshot.logprobs is not None:
            logprobs = [snapshot.logprobs[number, new].copy()]
        return Generation(
            text=[slot.detokenizer.text],
            tokens=[snapshot.tokens[number, new].copy()],
            finish_reasons=[FINISH_REASONS[finish]],
            origins=[snapshot.origin[number, new].copy()],
            logprobs=logprobs,
            prompt_tokens=[prompt_length],
            stats=stats,
            prefill_seconds=np.array([slot.prefill_seconds]),
            first_token_seconds=np.array([slot.first_token_seconds]),
            decode_seconds=np.array([now - slot.began - slot.prefill_seconds]),
            share_seconds=np.array([slot.share_seconds]),
            cached_tokens=[slot.cached_tokens],
            passes=self.passes - slot.passes_before,
            occupancy=1.0,
        )

    def _rewards(
        self, generations: Mapping[int, Generation], finished: Mapping[int, Slot]
    ) -> dict[int, np.ndarray]:
        """The scores ``[1, rewards]`` of each completion, all scored in one call.

        The text is the detokenizer's: a stop string and what follows it are cut off.
        """
        if self._scorer is None:
            return {}
        samples = []
        for number, generation in generations.items():
            request = finished[number].request
            tokens = cast(Sequence[int], generation.tokens[0])  # an array of ids serves as well
            sample = self._scorer.sample(request, tokens)
            samples.append(dataclasses.replace(sample, text=generation.text[0]))
        scores = np.array(self._scorer.scores(samples), np.float64)
        return {number: scores[i : i + 1] for i, number in enumerate(generations)}


def _fetch(state: DecodeState) -> Snapshot:
    """What a poll reads of the state; waits for the device."""
    # All in one call, which starts the copies of all arrays before it waits for the first.
    arrays = (
        state.finish,
        state.length,
        state.tokens,
        state.origin,
        state.logprobs,
        state.stats.rounds,
        state.stats.passes,
    )
    return Snapshot(*jax.device_get(arrays))


def _next_piece(snapshot: Snapshot, number: int, slot: Slot) -> Piece | None:
    """The new tokens of a batch slot; None if there are none and the request goes on."""
    begin = slot.length
    end = int(snapshot.length[number])
    finished = bool(snapshot.finish[number] != RUNNING)
    if begin == end and not finished:
        return None

    text, kept = slot.detokenizer.add(snapshot.tokens[number, begin:end], finished)
    slot.length = end
    reason = None
    if slot.detokenizer.stopped:
        reason = FINISH_REASONS[STOP_TEXT]
    elif finished:
        reason = FINISH_REASONS[snapshot.finish[number]]

    new = slice(begin, begin + kept)
    logprobs = None
    if snapshot.logprobs is not None:
        logprobs = snapshot.logprobs[number, new]
    return Piece(
        index=slot.request.request_id,
        text=text,
        tokens=snapshot.tokens[number, new],
        origins=snapshot.origin[number, new],
        finish_reason=reason,
        logprobs=logprobs,
    )
