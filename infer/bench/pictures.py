"""The pictures of a report; they need the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infer.reporting import pyplot, save_figure

BLUE, RED, GREY = "#4c78a8", "#e45756", "gray"


def draw_methods(path: Path, report: dict[str, Any]) -> Path:
    """Speedup per method, and the cost curve."""
    figure, (bars, curve) = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = [row for row in report["rows"] if row["speedup"] is not None]
    labels = [f"{r['label']}\n{r['mode']}, batch {r['batch_size']}" for r in rows]
    bars.barh(labels, [r["speedup"] for r in rows], color=BLUE, label="measured")
    at = [i for i, row in enumerate(rows) if row["predicted_speedup"]]
    predicted = [rows[i]["predicted_speedup"] for i in at]
    said = "predicted from c, v and acceptance"
    bars.plot(predicted, at, "|", color=RED, markersize=22, markeredgewidth=3, label=said)
    bars.axvline(1, color=GREY, linewidth=1)
    bars.set_xlabel("speedup over plain decoding")
    bars.invert_yaxis()
    bars.legend(loc="lower right", fontsize=8)
    widths = [int(width) for width in report["v"]]
    curve.plot(widths, list(report["v"].values()), "o-", color=BLUE, label="measured")
    curve.plot(widths, widths, ":", color=GREY, label="one pass per token")
    curve.set(xscale="log", yscale="log", xlabel="T, tokens per target pass")
    curve.set_ylabel("v(T), cost relative to one token")
    curve.set_xticks(widths, [str(w) for w in widths])
    curve.legend(fontsize=8)
    return save_figure(figure, path)


SWEPT = (
    ("speedup", "speedup over plain decoding"),
    ("block_efficiency", "tokens per round"),
    ("perplexity", "perplexity under the target"),
)


def draw_sweep(path: Path, report: dict[str, Any]) -> Path:
    """Speedup, tokens per round and perplexity against the options that were swept: lines of one,
    a surface of the first two per method."""
    options, lines = report["sweep"][:2], {}
    for row in report["rows"]:
        if all(option in row["options"] for option in options):
            name = f"{row['method']}, {row['mode']}, batch {row['batch_size']}"
            lines.setdefault(name, []).append(row)
    if len(options) == 2:
        return _draw_surfaces(path, options, lines)
    figure, axes = pyplot().subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, rows in lines.items():
        rows.sort(key=lambda row: row["options"][options[0]])
        values = [_shown(row["options"][options[0]]) for row in rows]
        for axis, (key, _) in zip(axes, SWEPT, strict=True):
            axis.plot(values, [row[key] for row in rows], "o-", label=name)
    for axis, (_, title) in zip(axes, SWEPT, strict=True):
        axis.set(xlabel=options[0], ylabel=title)
    axes[0].legend(fontsize=8)
    return save_figure(figure, path)


def _draw_surfaces(path: Path, options: Sequence[str], lines: dict[str, list]) -> Path:
    """A row of pictures per method, each cell with its value."""
    count = max(len(lines), 1)
    figure, axes = pyplot().subplots(
        count, 3, figsize=(13, 3.6 * count), layout="constrained", squeeze=False
    )
    for row_of_axes, (name, rows) in zip(axes, lines.items(), strict=False):
        ticks = [sorted({row["options"][option] for row in rows}) for option in options]
        for axis, (key, title) in zip(row_of_axes, SWEPT, strict=True):
            surface = np.full([len(values) for values in ticks], np.nan)
            for row in rows:
                at = [v.index(row["options"][o]) for v, o in zip(ticks, options, strict=True)]
                surface[tuple(at)] = np.nan if row[key] is None else row[key]
                axis.text(at[1], at[0], f"{surface[tuple(at)]:.2f}", ha="center", va="center")
            axis.imshow(surface, cmap="Blues", aspect="auto", alpha=0.7)
            axis.set_yticks(range(len(ticks[0])), list(map(_shown, ticks[0])))
            axis.set_xticks(range(len(ticks[1])), list(map(_shown, ticks[1])))
            axis.set(ylabel=options[0], xlabel=options[1], title=f"{name}: {title}")
            axis.title.set_fontsize(8)
    return save_figure(figure, path)


def draw_costs(path: Path, report: dict[str, Any]) -> Path:
    """The foretold speedup against c, a line per row whose acceptance was measured."""
    figure, axis = pyplot().subplots(figsize=(7, 4.2), layout="constrained")
    for row in report["rows"]:
        values = [row.get(f"expected_at_{cost:g}") for cost in report["cost"]]
        if None not in values:
            label = f"{row['label']}, {row['mode']}, λ = {row['acceptance_rate']:.2f}"
            axis.plot(report["cost"], values, "o-", label=label)
    axis.axhline(1, color=GREY, linewidth=1)
    axis.set(xlabel="c, draft step time / target step time", ylabel="expected acceleration")
    axis.legend(fontsize=7)
    return save_figure(figure, path)


def _shown(value: Any) -> Any:
    """A value as an axis takes it."""
    return str(value) if isinstance(value, tuple) else value
