"""The pictures of a report; they need the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.reporting import pyplot, save_figure
from specjax.registry import METHODS

BLUE = "#4c78a8"
RED = "#e45756"
GREY = "gray"
DASHES = ("-", "--", "-.", (0, (1, 1)))


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


def draw_entropies(path: Path, report: dict[str, Any]) -> Path:
    """Draws the mean entropy of both models where tokens were accepted and refused (SCD, Figure 2).

    A panel per row that has entropies. The error bars are the ± of the table.
    """
    rows = [row for row in report["rows"] if "target_accepted" in row]
    across = min(len(rows), 3)
    down = -(-len(rows) // across)
    figure, axes = pyplot().subplots(
        down, across, figsize=(4 * across, 3.6 * down), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    for axis, row in zip(axes.flat, rows, strict=False):
        for outcome, name, color, shift in (
            ("accepted", "accepted", BLUE, -0.2),
            ("refused", "rejected", RED, 0.2),
        ):
            keys = [f"{model}_{outcome}" for model in ("target", "draft")]
            heights = [row[key] or 0.0 for key in keys]
            errors = [row["pm"].get(key, 0.0) for key in keys]
            places = [place + shift for place in range(len(keys))]
            axis.bar(places, heights, 0.38, yerr=errors, capsize=4, color=color, label=name)
        axis.set_xticks([0, 1], ["target (expert)", "draft (amateur)"])
        axis.set(ylabel="mean entropy, nats", title=f"{row['label']}, {row['mode']}")
    axes.flat[0].legend(title="draft token", fontsize=8)
    return save_figure(figure, path)


def draw_costs(path: Path, report: dict[str, Any]) -> Path:
    """Draws the expected acceleration against c, a line per row whose acceptance was measured.

    As in SCD's Figures 1 and 4: a color for each value of the first swept option, a dash for each
    of the second, triangles for the options of a chosen preset, and dots for methods that have
    none of the swept options.
    """
    rows = [row for row in report["rows"] if _expected(row, report) is not None]
    sweep = report["sweep"]
    values = [sorted({row["options"][o] for row in rows if o in row["options"]}) for o in sweep[:2]]
    height = max(4.2, 0.19 * len(rows))
    figure, axis = pyplot().subplots(figsize=(9, height), layout="constrained")
    for number, row in enumerate(rows):
        style = {"color": f"C{number % 10}", "linestyle": "-", "marker": "."}
        if sweep and not any(option in row["options"] for option in sweep):
            style = {"color": "black", "linestyle": ":", "marker": ""}
        elif sweep:
            ranks = [v.index(row["options"][o]) for o, v in zip(sweep, values, strict=False)]
            style["color"] = pyplot().get_cmap("viridis")(0.9 * ranks[0] / max(len(values[0]), 1))
            if len(ranks) > 1:
                style["linestyle"] = DASHES[ranks[1] % len(DASHES)]
        if _is_preset(row):
            style["marker"] = "^"
        label = f"{row['label']}, {row['mode']}, λ = {row['acceptance_rate']:.2f}"
        axis.plot(report["cost"], _expected(row, report), label=label, **style)
    axis.axhline(1, color=GREY, linewidth=1)
    axis.set(xlabel="c, draft step time / target step time", ylabel="expected acceleration")
    figure.legend(loc="outside right upper", fontsize=7, handlelength=4)
    return save_figure(figure, path)


def _expected(row: dict[str, Any], report: dict[str, Any]) -> list[float] | None:
    """The expected acceleration at each c; None without a measured acceptance."""
    values = [row.get(f"expected_at_{cost:g}") for cost in report["cost"]]
    return None if None in values else values


def _is_preset(row: dict[str, Any]) -> bool:
    """Whether all of the row's options are those of its preset, though some may be swept."""
    option = METHODS[row["method"]].options.get("preset")
    if option is None:
        return False
    wanted = option.presets.get(row["options"]["preset"], {})
    # The variant is left out: the paper marks the best α and β of either.
    numbers = {name: value for name, value in wanted.items() if name in ("alpha", "beta")}
    return bool(numbers) and numbers.items() <= row["options"].items()
