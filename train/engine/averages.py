"""Means of losses and of further figures, over training steps and over held-out batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from train.data.loader import ValidBatch

Extras = dict[str, tuple[Any, Any]]  # by name, pairs (sum, count) of equal shapes
# Steps, or held-out batches, that the device has been sent and has not finished. With two, it never
# waits for the host. With more, a signal would wait for all of them.
MOST_AHEAD = 2


class StepResult(NamedTuple):
    """What a training step reports, on the device or on the host.

    Attributes:
      loss: what the step minimizes, as a mean per token.
      norm: of the gradients. If it is not finite, the optimizer has skipped the step.
      extras: sums and counts whose ratios are logged.
    """

    loss: Any
    norm: Any
    extras: Extras

    @property
    def is_skipped(self) -> bool:
        """Whether the optimizer has skipped the step; waits until the step has ended."""
        jax.block_until_ready((self.loss, self.norm))
        return not math.isfinite(float(self.norm))


def to_json(results: Sequence[StepResult]) -> dict[str, list]:
    """Results as a checkpoint's note stores them. A skipped step is null."""
    losses: list[float | None] = []
    extras: list[dict | None] = []
    for result in jax.device_get(list(results)):
        if result.is_skipped:
            losses.append(None)
            extras.append(None)
        else:
            losses.append(float(result.loss))
            extras.append(jax.tree.map(lambda x: np.asarray(x).tolist(), result.extras))
    return {"pending": losses, "extras": extras}


def from_json(note: dict[str, Any]) -> list[StepResult]:
    """The results that :func:`to_json` has stored, without their norms."""
    results = []
    for loss, extras in zip(note["pending"], note["extras"], strict=True):
        if loss is None:
            results.append(StepResult(math.nan, math.nan, {}))
        else:
            results.append(StepResult(np.float32(loss), 0.0, extras))
    return results


def mean_of_steps(results: Sequence[StepResult]) -> tuple[float, dict[str, Any]] | None:
    """(mean loss, with equal weight of steps; means of the extras, with equal weight of tokens).

    Skipped steps do not count. None if all are skipped.
    """
    kept = [result for result in jax.device_get(list(results)) if not result.is_skipped]
    if not kept:
        return None
    mean = float(np.mean([result.loss for result in kept]))
    return mean, _ratios([result.extras for result in kept])


def weighted_mean(
    evaluate: Callable,
    params: dict,
    frozen: Any,
    batches: Sequence[ValidBatch],
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[float, dict[str, Any]] | None:
    """(held-out loss in nats per token, further figures by name).

    None if ``is_stopped``, which is asked before every batch, is true once.

    Each source counts by its weight, whatever number of its tokens was evaluated. With several
    sources, ``loss_by_source`` has the loss of each.
    """
    results = []
    for batch in batches:
        if is_stopped():
            return None
        results.append(evaluate(params, frozen, batch.rows))
        _wait_for_older(results)
    results = jax.device_get(results)
    tokens = _sum_by_source(batches, [count for _, count, *_ in results])
    nats = _sum_by_source(batches, [loss for loss, *_ in results])

    factors = [
        batch.weight / max(1.0, tokens[batch.source]) if len(tokens) > 1 else 1.0
        for batch in batches
    ]
    weighted = [
        jax.tree.map(lambda x, factor=factor: factor * np.asarray(x, np.float64), result)
        for factor, result in zip(factors, results, strict=True)
    ]
    total = sum(count for _, count, *_ in weighted)
    loss = sum(loss for loss, *_ in weighted) / (total if total else 1.0)
    figures = _ratios([extras for _, _, *rest in weighted for extras in rest])
    if len(tokens) > 1:
        figures["loss_by_source"] = {
            name: float(nats[name] / max(1.0, count)) for name, count in tokens.items()
        }
    return float(loss), figures


def _sum_by_source(batches: Sequence[ValidBatch], values: Sequence[Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for batch, value in zip(batches, values, strict=True):
        sums[batch.source] = sums.get(batch.source, 0.0) + float(value)
    return sums


def _ratios(extras: Sequence[Extras]) -> dict[str, Any]:
    """Sums over counts, by name, as JSON takes them; 0 / 0 is null."""
    ratios = {}
    for name in extras[0] if extras else ():
        sums = sum(np.asarray(pairs[name][0], np.float64) for pairs in extras)
        counts = sum(np.asarray(pairs[name][1], np.float64) for pairs in extras)
        ratio = np.where(counts > 0, sums / np.where(counts > 0, counts, 1), np.nan)
        ratios[name] = np.where(np.isnan(ratio), None, ratio).tolist()
    return ratios


def _wait_for_older(results: Sequence) -> None:
    """Waits until fewer than ``MOST_AHEAD`` results are still to be computed."""
    if len(results) >= MOST_AHEAD:
        jax.block_until_ready(results[-MOST_AHEAD])
