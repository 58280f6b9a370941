"""The pictures of a report; they need the ``plots`` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infer.reporting import pyplot, save_figure

BLUE, RED, GREY = "#4c78a8", "#e45756", "grey"


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


def draw_sweep(path: Path, report: dict[str, Any]) -> Path:
    """Speedup, tokens per round and perplexity against the option that was swept."""
    option, lines = report["sweep"], {}
    for row in report["rows"]:
        if option in row["options"]:
            name = f"{row['method']}, {row['mode']}, batch {row['batch_size']}"
            lines.setdefault(name, []).append(row)
    shown = (
        ("speedup", "speedup over plain decoding"),
        ("block_efficiency", "tokens per round"),
        ("perplexity", "perplexity under the target"),
    )
    figure, axes = pyplot().subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, rows in lines.items():
        rows.sort(key=lambda row: row["options"][option])
        values = [row["options"][option] for row in rows]
        values = [str(value) if isinstance(value, tuple) else value for value in values]
        for axis, (key, _) in zip(axes, shown, strict=True):
            axis.plot(values, [row[key] for row in rows], "o-", label=name)
    for axis, (_, title) in zip(axes, shown, strict=True):
        axis.set(xlabel=option, ylabel=title)
    axes[0].legend(fontsize=8)
    return save_figure(figure, path)
