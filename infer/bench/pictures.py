"""The pictures of a report; they need the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.reporting import pyplot, save_figure, sort_key
from specjax.registry import METHODS

BLUE = "#4c78a8"
RED = "#e45756"
GREY = "gray"
DASHES = ("-", "--", "-.", (0, (1, 1)))


def draw_methods(path: Path, report: dict[str, Any]) -> Path:
    """Draws each method's speedup, and the cost curve."""
    rows = [row for row in report["rows"] if row["speedup"] is not None]
    height = max(4.2, 0.45 * len(rows))  # of two lines of text per row
    if not report["v"]:
        figure, bars = pyplot().subplots(figsize=(6, height), layout="constrained")
        _draw_speedups(bars, rows)
        return save_figure(figure, path)
    figure, (bars, curve) = pyplot().subplots(1, 2, figsize=(11, height), layout="constrained")
    _draw_speedups(bars, rows)
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
    axis.figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", fontsize=8)


def _draw_curve(axis: Any, v: dict[str, float]) -> None:
    widths = [int(width) for width in v]
    axis.plot(widths, list(v.values()), "o-", color=BLUE, label="measured")
    axis.plot(widths, widths, ":", color=GREY, label="one pass per token")
    axis.set(xscale="log", yscale="log", xlabel="T, tokens per target pass")
    axis.set_ylabel("v(T), cost relative to one token")
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.legend(fontsize=8)


def draw_entropies(path: Path, report: dict[str, Any]) -> Path:
    """Draws both models' mean entropy where tokens were accepted and rejected (SCD, Figure 2).

    A panel per row that has entropies. The error bars are the ± of the table.
    """
    rows = [row for row in report["rows"] if "target_accepted" in row]
    across = min(len(rows), 3)
    down = -(-len(rows) // across)
    figure, axes = pyplot().subplots(
        down,
        across,
        figsize=(4 * across, 3.6 * down + 0.3),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    for axis, row in zip(axes.flat, rows, strict=False):
        for outcome, color, shift in (
            ("accepted", BLUE, -0.2),
            ("rejected", RED, 0.2),
        ):
            keys = [f"{model}_{outcome}" for model in ("target", "draft")]
            heights = [row[key] or 0.0 for key in keys]
            errors = [row["pm"].get(key, 0.0) for key in keys]
            places = [place + shift for place in range(len(keys))]
            axis.bar(places, heights, 0.38, yerr=errors, capsize=4, color=color, label=outcome)
        axis.tick_params(labelleft=True)
        axis.set_xticks([0, 1], ["target (expert)", "draft (amateur)"])
        axis.set(ylabel="mean entropy, nats", title=f"{row['label']}, {row['mode']}")
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(
        handles, [f"{name} tokens" for name in names], loc="outside lower center", ncols=2
    )
    return save_figure(figure, path)


def draw_costs(path: Path, report: dict[str, Any]) -> Path:
    """Draws the expected acceleration against c, a line per row whose acceptance was measured.

    As in SCD's Figures 1 and 4, methods without the swept options are dotted.
    """
    rows = [row for row in report["rows"] if _expected(row, report) is not None]
    height = max(4.2, 0.19 * len(rows))  # of the legend
    figure, axis = pyplot().subplots(figsize=(9, height), layout="constrained")
    styles = _cost_styles(rows, report["sweep"])
    for row, style in zip(rows, styles, strict=True):
        label = f"{row['label']}, {row['mode']}, λ = {row['acceptance_rate']:.2f}"
        axis.plot(report["cost"], _expected(row, report), label=label, **style)
    axis.axhline(1, color=GREY, linewidth=1)
    axis.set(xlabel="c, draft step time / target step time", ylabel="expected acceleration")
    figure.legend(loc="outside right upper", fontsize=7, handlelength=4)
    return save_figure(figure, path)


def _cost_styles(rows: Sequence[dict[str, Any]], sweep: Sequence[str]) -> list[dict[str, Any]]:
    """A color per value of the first swept option, and a dash per value of the second.

    Triangles mark the options of a row's preset.
    """
    axes = []  # of each of these options the values, sorted
    for option in sweep[:2]:
        values = {row["options"][option] for row in rows if option in row["options"]}
        axes.append(sorted(values, key=sort_key))
    styles = []
    for number, row in enumerate(rows):
        options = row["options"]
        marker = "^" if _is_preset(row) else "."
        style = {"color": f"C{number % 10}", "linestyle": "-", "marker": marker}
        if sweep and not any(option in options for option in sweep):
            style = {"color": "black", "linestyle": ":", "marker": ""}
        if sweep and sweep[0] in options:
            rank = axes[0].index(options[sweep[0]])
            style["color"] = pyplot().get_cmap("viridis")(0.9 * rank / len(axes[0]))
        if len(sweep) > 1 and sweep[1] in options:
            style["linestyle"] = DASHES[axes[1].index(options[sweep[1]]) % len(DASHES)]
        styles.append(style)
    return styles


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
