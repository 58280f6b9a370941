"""Put figures into a row of the report: the value, its ±, and the value of each run.

A row is a dict. ``row[key]`` is the figure over all runs, ``row["pm"][key]`` its ±, and
``row["runs"][key]`` a list with the figure of each run.

Axis legend: R runs, P prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from infer.bench.timed_cases import Result
from infer.uncertainty import ratio
from specjax.runtime.output import Generation

Row = dict[str, Any]
# (number of a prompt, run) -> the score of its completion; None if it has no score.
Score = Callable[[int, Generation], float | None]


def add_estimate(row: Row, key: str, value: Any, half_width: float | None) -> None:
    """Adds a figure, and its ± if it has one."""
    row[key] = value
    if half_width is not None:
        row["pm"][key] = half_width


def add_ratio(
    row: Row,
    key: str,
    numerators: np.ndarray,
    denominators: np.ndarray,
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    """Adds ``transform(Σ numerators / Σ denominators)``, both ``[R, P]``: over all, and per run."""
    value, half_width = ratio(numerators.sum(axis=0), denominators.sum(axis=0), transform)
    add_estimate(row, key, value, half_width)
    with np.errstate(divide="ignore", invalid="ignore"):
        runs = transform(numerators.sum(axis=1) / denominators.sum(axis=1))
    row["runs"][key] = runs[np.isfinite(runs)].tolist()


def add_median(row: Row, key: str, runs: np.ndarray) -> None:
    """Adds the median over the runs, ``[R]``, of what is measured once per run."""
    row[key] = float(np.median(runs))
    row["runs"][key] = runs.tolist()


def add_scores_mean(row: Row, key: str, scores: np.ndarray) -> None:
    """Adds the mean of the completions' scores, ``[R, P]``; NaN counts as no score."""
    add_ratio(row, key, np.nan_to_num(scores), np.isfinite(scores).astype(float))


def scores_of(result: Result, score: Score) -> np.ndarray:
    """The score of each completion, ``[R, P]`` float64; NaN for those without one."""
    count = len(result.tokens)
    scores = []
    for run in result.distinct_runs:
        scores.append([score(prompt, run) for prompt in range(count)])
    return np.array(scores, np.float64)
