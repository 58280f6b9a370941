"""What runs in the process of every peer: jobs in, timed repeats out.

The first line of stdin is a :class:`PeerJob`. The process loads the models, warms up and answers
``{"ready": true}``. Each further line asks for one timed repeat, and is answered with one JSON
line. If anything fails, the answer is ``{"error": why}``.

A peer's own file gives a function that makes its modes from a job. A *mode* decodes one prompt:
``mode(prompt, budget, began)`` returns the new token ids, and calls ``began()`` once the first of
them is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

WARMUP_TOKENS = 8

Mode = Callable[[list[int], int, Callable[[], None]], Sequence[int]]


class PeerJob(NamedTuple):
    """What a peer decodes, greedily and one prompt at a time.

    Attributes:
      target, draft: paths of the weights.
      prompts: token ids.
      budget: new tokens of each prompt, at most.
      gamma: tokens that the draft model writes a round.
      eos_ids: tokens that end a text, as they end ours; none with ``--ignore-eos``.
      threads: of the peer, on a CPU.
      on_cpu: our model is on a CPU, so the peer's is as well.
      dtype: of our model, such as ``float32``.
    """

    target: str
    draft: str | None
    prompts: list[list[int]]
    budget: int
    gamma: int
    eos_ids: list[int]
    threads: int
    on_cpu: bool
    dtype: str


class Clock:
    """Seconds since it was made, and until the first token."""

    def __init__(self):
        self._start = time.perf_counter()
        self.first: float | None = None

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def began(self) -> None:
        """Notes the time of the first token; later calls do nothing."""
        if self.first is None:
            self.first = self.seconds()


def decode(mode: Mode, prompts: list[list[int]], budget: int) -> dict[str, Any]:
    """Greedy tokens, seconds, speed and seconds to the first token, one entry per prompt.

    ``first_token_s`` is None where the peer does not tell.
    """
    tokens = []
    seconds = []
    first_token_s = []
    for prompt in prompts:
        clock = Clock()
        output = mode(prompt, budget, clock.began)
        seconds.append(clock.seconds())
        first_token_s.append(clock.first)
        tokens.append(list(output))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "first_token_s": first_token_s,
        "tokens_per_second": [len(ids) / t for ids, t in zip(tokens, seconds, strict=True)],
    }


def answers(
    lines: Iterator[str], make_modes: Callable[[PeerJob], dict[str, Mode]]
) -> Iterator[dict[str, Any]]:
    """The answer to each line: ``ready`` to the first, a repeat of every mode to the others."""
    job = PeerJob(**json.loads(next(lines)))
    modes = make_modes(job)
    for mode in modes.values():
        decode(mode, job.prompts[:1], min(WARMUP_TOKENS, job.budget))
    yield {"ready": True}
    for _ in lines:
        yield {name: decode(mode, job.prompts, job.budget) for name, mode in modes.items()}


def main(make_modes: Callable[[PeerJob], dict[str, Mode]]) -> int:
    """Serves until stdin closes. Only answers go to stdout; all else goes to stderr.

    That holds for the descriptor, too, because libraries in C write to it.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for answer in answers(iter(sys.stdin), make_modes):
                print(json.dumps(answer), file=out, flush=True)
        except Exception as error:  # a library may raise anything: report it in one line
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(json.dumps({"error": why}), file=out, flush=True)
            return 1
    return 0
