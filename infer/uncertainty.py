"""How far a figure may be off: the bootstrap over prompts (Efron 1979), percentile intervals.

A resample draws as many prompts as there are, a prompt with all of its seeds: completions of one
prompt are alike and no sample of their own. Figures are ratios of sums over prompts, so a resample
is a matrix product.

Axis legend: P prompts, R repeats, N resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

RESAMPLES, LEVEL = 1000, 0.95
SAID = (
    f"± is half of the {LEVEL:.0%} interval over {RESAMPLES:,} bootstrap resamples of the prompts, "
    "each with all its seeds."
)

# A figure and its ±: None where nothing was counted, or where one prompt shows no spread.
Estimate = tuple[float | None, float | None]
# Tokens and seconds of each repeat and prompt, ``[R, P]`` both.
Speed = tuple[np.ndarray, np.ndarray]


def ratio(
    above: np.ndarray, below: np.ndarray, of: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> Estimate:
    """``of(Σ above / Σ below)``, both ``[P]``."""
    return bootstrap(len(above), lambda draws: of((draws @ above) / (draws @ below)))


def mean(values: np.ndarray) -> Estimate:
    """Of one value a prompt, ``[P]``."""
    return ratio(values, np.ones(len(values)))


def with_spread(row: dict[str, Any], **figures: Estimate) -> dict[str, Any]:
    """``row`` with each figure under its name, and its ± in ``pm``."""
    values = {name: value for name, (value, _) in figures.items()}
    return (
        row | values | {"pm": row.get("pm", {}) | {name: pm for name, (_, pm) in figures.items()}}
    )


def speed_ratio(ours: Speed, theirs: Speed) -> Estimate:
    """Tokens per second over tokens per second: the median of the repeats' ratios."""

    def figure(draws: np.ndarray) -> np.ndarray:
        one, other = (draws @ tokens.T / (draws @ seconds.T) for tokens, seconds in (ours, theirs))
        return np.median(one / other, axis=1)

    return bootstrap(ours[0].shape[1], figure)


def bootstrap(units: int, figure: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """Of any figure of ``units`` prompts: it takes how often each counts, ``[N, units]``, and gives
    ``[N]``."""
    drawing = np.random.Generator(np.random.Philox(0))
    draws = drawing.multinomial(units, np.full(units, 1 / units), RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(np.ones((1, units)))[0])
        spread = figure(draws)
    if not np.isfinite(value):
        return None, None
    low, high = np.quantile(spread[np.isfinite(spread)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return value, float(high - low) / 2 if units > 1 else None
