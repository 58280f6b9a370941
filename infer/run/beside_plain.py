"""The speed of a method beside plain decoding, of one prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import specjax as sj
from infer.timing import row_seconds

MOST, FEWEST = 9, 3  # timed pairs of runs
SECONDS = 15.0  # no further pair is begun after this time, if there are enough


class Comparison(NamedTuple):
    """Two ways to decode one prompt. Prefill does not count.

    Attributes:
      speed: tokens per second, the median over the timed runs.
      plain_speed: that of plain decoding.
      ratio: the median of the pairs' ratios.
      same: whether both gave the same tokens.
    """

    speed: float
    plain_speed: float
    ratio: float
    same: bool


def compare_with_plain(
    target: sj.LM, tokens: Sequence[int], arguments: Mapping[str, Any]
) -> Comparison:
    """Decodes a prompt by a method and plainly, in turns, after a pair that compiles.

    Args:
      tokens: the prompt.
      arguments: those of ``sj.generate`` for the method.
    """
    plain = {"method": "autoregressive", "draft": None, "options": {}}
    plain |= {"drafter": None, "rule": None, "target_dist": "warped"}
    plain_arguments = {**arguments, **plain}

    def decode(arguments: Mapping[str, Any]) -> tuple[float, sj.Generation]:
        run = sj.generate(target, [tokens], batch_size=1, **arguments)
        return run.lengths[0] / row_seconds(run, 1)[0], run

    decode(arguments)
    decode(plain_arguments)
    speeds = []
    start = time.perf_counter()
    while len(speeds) < FEWEST or (len(speeds) < MOST and time.perf_counter() - start < SECONDS):
        speed, run = decode(arguments)
        plain_speed, plain_run = decode(plain_arguments)
        speeds.append((speed, plain_speed))

    both = zip(*speeds, strict=True)
    speed, plain_speed = (statistics.median(one) for one in both)
    ratio = statistics.median(speed / plain for speed, plain in speeds)
    return Comparison(speed, plain_speed, ratio, np.array_equal(run.tokens[0], plain_run.tokens[0]))
