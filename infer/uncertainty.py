"""Confidence intervals by the bootstrap over prompts (Efron 1979), percentile method.

A resample draws P of the P prompts with replacement. A drawn prompt brings all of its seeds,
because completions of one prompt are not independent. Figures are ratios of sums over prompts.
So a resample is one row of counts, and its sums are a matrix product.

Axis legend: P prompts, R repeats, N resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# `scipy.stats.bootstrap` fits less: it refuses one prompt, and one 0/0 resample makes it all NaN.
RESAMPLES = 1000
LEVEL = 0.95
SPREAD_NOTE = (
    f"± is half of the {LEVEL:.0%} interval over {RESAMPLES:,} bootstrap resamples of the prompts, "
    "each with all its seeds. Speeds of separate runs may differ by more."
)

# A figure and its ±. The figure is None if nothing was counted, the ± if there is one prompt.
Estimate = tuple[float | None, float | None]
# Tokens and seconds of each repeat and prompt, ``[R, P]`` both.
Speed = tuple[np.ndarray, np.ndarray]


def ratio(
    numerators: np.ndarray,
    denominators: np.ndarray,
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Estimate:
    """``transform(Σ numerators / Σ denominators)``, both ``[P]``."""

    def figure(draws: np.ndarray) -> np.ndarray:
        return transform((draws @ numerators) / (draws @ denominators))

    return bootstrap(len(numerators), figure)


def mean(values: np.ndarray) -> Estimate:
    """The mean of one value per prompt, ``[P]``."""
    return ratio(values, np.ones(len(values)))


def with_spread(row: dict[str, Any], **figures: Estimate) -> dict[str, Any]:
    """A copy of ``row`` with each figure under its name, and its ± under that name in ``pm``."""
    values = {}
    half_widths = dict(row.get("pm", {}))
    for name, (value, half_width) in figures.items():
        values[name] = value
        half_widths[name] = half_width
    return row | values | {"pm": half_widths}


def speed_ratio(ours: Speed, theirs: Speed) -> Estimate:
    """Tokens per second over tokens per second: the median of the repeats' ratios."""

    def tokens_per_second(speed: Speed, draws: np.ndarray) -> np.ndarray:
        tokens, seconds = speed
        return draws @ tokens.T / (draws @ seconds.T)  # [N, R]

    def figure(draws: np.ndarray) -> np.ndarray:
        ratios = tokens_per_second(ours, draws) / tokens_per_second(theirs, draws)
        return np.median(ratios, axis=1)

    return bootstrap(ours[0].shape[1], figure)


def bootstrap(prompts: int, figure: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """The estimate of any figure of ``prompts`` prompts; always the same for the same input.

    ``figure`` gets how often each prompt counts, ``[N, P]``, and returns ``[N]``.
    """
    generator = np.random.Generator(np.random.Philox(0))
    draws = generator.multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(np.ones((1, prompts)))[0])
        resampled = figure(draws)
    if not np.isfinite(value):
        return None, None
    if prompts == 1:
        return value, None

    # A resample may draw only prompts without a score: it has no figure and is left out.
    finite = resampled[np.isfinite(resampled)]
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return value, float(high - low) / 2
