"""The pictures of a report; they need the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infer.reporting import pyplot, save_figure

BLUE = "#4c78a8"
RED = "#e45756"
GREY = "gray"
# What is drawn against swept options: the key of a row, and the axis's title.
SWEPT = (
    ("speedup", "speedup over plain decoding"),
    ("block_efficiency", "tokens per round"),
    ("perplexity", "perplexity under the target"),
)


def draw_methods(path: Path, report: dict[str, Any]) -> Path:
    """Draws each method's speedup, and the cost curve."""
    figure, (bars, curve) = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _draw_speedups(bars, [row for row in report["rows"] if row["speedup"] is not None])
    _draw_curve(curve, report["v"])
    return save_figure(figure, path)


def _draw_speedups(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    labels = [f"{r['label']}\n{r['mode']}, batch {r['batch_size']}" for r in rows]
    axis.barh(labels, [row["speedup"] for row in rows], color=BLUE, label="measured")
    places = [i for i, row in enumerate(rows) if row["predicted_speedup"]]
    axis.plot(
        [rows[i]["predicted_speedup"] for i in places],
        places,
        "|",
        color=RED,
        markersize=22,
        markeredgewidth=3,
        label="predicted from c, v and acceptance",
    )
    axis.axvline(1, color=GREY, linewidth=1)
    axis.set_xlabel("speedup over plain decoding")
    axis.invert_yaxis()
    axis.legend(loc="lower right", fontsize=8)


def _draw_curve(axis: Any, v: dict[str, float]) -> None:
    widths = [int(width) for width in v]
    axis.plot(widths, list(v.values()), "o-", color=BLUE, label="measured")
    axis.plot(widths, widths, ":", color=GREY, label="one pass per token")
    axis.set(xscale="log", yscale="log", xlabel="T, tokens per target pass")
    axis.set_ylabel("v(T), cost relative to one token")
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.legend(fontsize=8)


def draw_sweep(path: Path, report: dict[str, Any]) -> Path:
    """Draws speedup, tokens per round and perplexity against the swept options.

    One option gives lines; the first two of several give a surface per method.
    """
    options = report["sweep"][:2]
    groups: dict[str, list] = {}
    for row in report["rows"]:
        if all(option in row["options"] for option in options):
            name = f"{row['method']}, {row['mode']}, batch {row['batch_size']}"
            groups.setdefault(name, []).append(row)
    if len(options) == 2:
        return _draw_surfaces(path, options, groups)

    (option,) = options
    figure, axes = pyplot().subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, rows in groups.items():
        rows.sort(key=lambda row: row["options"][option])
        values = [_tick(row["options"][option]) for row in rows]
        for axis, (key, _) in zip(axes, SWEPT, strict=True):
            axis.plot(values, [row[key] for row in rows], "o-", label=name)
    for axis, (_, title) in zip(axes, SWEPT, strict=True):
        axis.set(xlabel=option, ylabel=title)
    axes[0].legend(fontsize=8)
    return save_figure(figure, path)


def _draw_surfaces(path: Path, options: Sequence[str], groups: dict[str, list]) -> Path:
    """Draws a row of pictures per method, with the number in each cell."""
    count = max(len(groups), 1)
    figure, axes = pyplot().subplots(
        count, 3, figsize=(13, 3.6 * count), layout="constrained", squeeze=False
    )
    for row_of_axes, (name, rows) in zip(axes, groups.items(), strict=False):
        for axis, (key, title) in zip(row_of_axes, SWEPT, strict=True):
            _draw_surface(axis, options, rows, key)
            axis.set_title(f"{name}: {title}", fontsize=8)
    return save_figure(figure, path)


def _draw_surface(axis: Any, options: Sequence[str], rows: Sequence[dict], key: str) -> None:
    """Draws one figure of the rows against two options: the first downwards, the second across."""
    down, across = options
    down_values = sorted({row["options"][down] for row in rows})
    across_values = sorted({row["options"][across] for row in rows})
    surface = np.full((len(down_values), len(across_values)), np.nan)
    for row in rows:
        y = down_values.index(row["options"][down])
        x = across_values.index(row["options"][across])
        surface[y, x] = np.nan if row[key] is None else row[key]
        axis.text(x, y, f"{surface[y, x]:.2f}", ha="center", va="center")
    axis.imshow(surface, cmap="Blues", aspect="auto", alpha=0.7)
    axis.set_yticks(range(len(down_values)), list(map(_tick, down_values)))
    axis.set_xticks(range(len(across_values)), list(map(_tick, across_values)))
    axis.set(ylabel=down, xlabel=across)


def draw_costs(path: Path, report: dict[str, Any]) -> Path:
    """Draws the expected speedup against c, a line per row whose acceptance was measured."""
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


def _tick(value: Any) -> Any:
    """A value as a label of an axis: matplotlib takes no tuples."""
    return str(value) if isinstance(value, tuple) else value
