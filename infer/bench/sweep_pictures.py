"""The picture of a sweep: the columns of ``--plot`` against the swept options.

One option with several values gives curves, two give surfaces. They need the ``plots`` extra.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infer.reporting import pyplot, save_figure, sort_key

# Titles of the axes, by option; the others have the option's name.
AXES = {
    "alpha": "α",
    "beta": "β",
    "block": "K, tokens of a block",
    "gamma": "γ, draft length",
    "k": "number of adaptive tokens, k",
    "max_kl": "D, bound on the KL divergence, nats",
    "tau": "acceptance threshold τ",
    "width": "width of the beam",
}
PANEL = (4.6, 3.9)  # inches
LEGEND_ROWS = 0.2  # inches of a line of the legend
LEVELS = ((5, 2), (1, 2), (5, 2, 1, 2), (8, 3), (3, 1, 1, 1, 1, 1))  # dashes

Row = dict[str, Any]


def draw_sweep(path: Path, report: dict[str, Any]) -> Path:
    """Draws each column of ``report["plot"]`` against the swept options.

    One option with several values gives curves, with a dashed line for what has no such option.
    The first two of several options give a surface per method and per value of the others.
    """
    axes = _axes_of(report)
    if len(axes) > 1:
        return _draw_surfaces(path, axes[:2], report)
    return _draw_curves(path, axes[0], report)


def _axes_of(report: dict[str, Any]) -> list[str]:
    """The swept options that have several values, or else the first."""
    several = []
    for option in report["sweep"]:
        rows = [row for row in report["rows"] if option in row["options"]]
        if len({_value(row, option) for row in rows}) > 1:
            several.append(option)
    return several or report["sweep"][:1]


def _groups(report: dict[str, Any], axes: Sequence[str]) -> dict[str, list[Row]]:
    """Rows by the name of their curve: all that have the options ``axes``."""
    others = [option for option in report["sweep"] if option not in axes]
    groups: dict[str, list[Row]] = {}
    for row, setting in _rows_with_settings(report):
        if all(option in row["options"] for option in axes):
            words = [row["method"], *(f"{name}={row['options'].get(name)}" for name in others)]
            groups.setdefault(", ".join([" ".join(words), *setting]), []).append(row)
    return groups


def _rows_with_settings(report: dict[str, Any]) -> list[tuple[Row, list[str]]]:
    """All rows, each with its target, file, sampling and batch size, as far as they differ."""
    parts = [report, *report["beside"]]
    pairs = []
    for part in parts:
        for row in part["rows"]:
            temperature = row["temperature"]
            words = (
                Path(part["target"]).name,
                part["data"],
                "greedy" if temperature == 0 else f"T = {temperature:g}",
                f"batch {row['batch_size']}",
            )
            pairs.append((row, words))
    differing = [len(set(values)) > 1 for values in zip(*(w for _, w in pairs), strict=True)]
    return [(row, list(itertools.compress(words, differing))) for row, words in pairs]


def _draw_curves(path: Path, option: str, report: dict[str, Any]) -> Path:
    groups = _groups(report, [option])
    plot = report["plot"]
    places, ticks = _scale(option, itertools.chain.from_iterable(groups.values()))
    across = min(len(plot), 3)
    down = -(-len(plot) // across)
    size = (PANEL[0] * across, PANEL[1] * down + LEGEND_ROWS * len(groups))
    plt = pyplot()
    figure, axes = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(plot) :]:
        axis.set_visible(False)
    for axis, (key, head) in zip(axes.flat, plot.items(), strict=False):
        for number, (name, rows) in enumerate(groups.items()):
            at = [places[_value(row, option)] for row in rows]
            _draw_curve(axis, at, rows, key, f"C{number % 10}", name)
        _draw_levels(axis, option, report, key)
        axis.set(xlabel=AXES.get(option, option), ylabel=head)
        if ticks:
            axis.set_xticks(list(ticks), list(ticks.values()))
        axis.grid(linewidth=0.4, alpha=0.6)
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8, handlelength=3)
    return save_figure(figure, path)


def _scale(option: str, rows: Iterable[Row]) -> tuple[dict[Any, float], dict[float, str]]:
    """The place of each value on the axis of an option, and the labels of places.

    Numbers are their own places, and only whole ones are labeled. Values such as words or lists,
    and numbers among them, stand side by side.
    """
    values = sorted({_value(row, option) for row in rows}, key=sort_key)
    kinds = set(map(type, values))
    if kinds <= {int, float}:
        places = {value: value for value in values}
        labeled = values if kinds == {int} else []
        return places, {value: str(value) for value in labeled}
    places = {value: float(place) for place, value in enumerate(values)}
    return places, {place: _label(value) for value, place in places.items()}


def _draw_curve(
    axis: Any, at: Sequence[float], rows: Sequence[Row], key: str, color: str, name: str
) -> None:
    """One curve, of rows at these places, with the ± of its figures as a band."""
    order = np.argsort(at, kind="stable")
    places = np.array(at)[order]
    figures = np.array([_number(row.get(key)) for row in rows])[order]
    spread = np.array([row["pm"].get(key) or 0.0 for row in rows])[order]
    axis.plot(places, figures, "o-", color=color, markersize=4, label=name)
    if spread.any():
        axis.fill_between(
            places, figures - spread, figures + spread, color=color, alpha=0.15, linewidth=0
        )


def _draw_levels(axis: Any, option: str, report: dict[str, Any], key: str) -> None:
    """A dashed line per row without the option: plain decoding, and methods compared with it."""
    pairs = _rows_with_settings(report)
    without = [(row, setting) for row, setting in pairs if option not in row["options"]]
    for number, (row, setting) in enumerate(without):
        # A panel whose column the row lacks has a line without a place, for the legend.
        axis.axhline(
            _number(row.get(key)),
            label=", ".join([row["label"], *setting]),
            linestyle=(0, LEVELS[number % len(LEVELS)]),
            color="black",
            linewidth=1,
        )


def _draw_surfaces(path: Path, options: Sequence[str], report: dict[str, Any]) -> Path:
    """Draws a row of pictures per method, with the number in each cell."""
    groups = _groups(report, options)
    plot = report["plot"]
    down = max(len(groups), 1)
    size = (PANEL[0] * len(plot), PANEL[1] * down)
    figure, axes = pyplot().subplots(
        down, len(plot), figsize=size, layout="constrained", squeeze=False
    )
    for row_of_axes, (name, rows) in zip(axes, groups.items(), strict=False):
        for axis, (key, head) in zip(row_of_axes, plot.items(), strict=True):
            image = _draw_surface(axis, options, rows, key)
            axis.set_title(name, fontsize=9)
            figure.colorbar(image, ax=axis, label=head)
    return save_figure(figure, path)


def _draw_surface(axis: Any, options: Sequence[str], rows: Sequence[Row], key: str) -> Any:
    """Draws one figure of the rows against two options: the first across, the second upwards."""
    across, up = options
    across_values = sorted({_value(row, across) for row in rows}, key=sort_key)
    up_values = sorted({_value(row, up) for row in rows}, key=sort_key)
    surface = np.full((len(up_values), len(across_values)), np.nan)
    for row in rows:
        x = across_values.index(_value(row, across))
        y = up_values.index(_value(row, up))
        surface[y, x] = _number(row.get(key))
        if np.isfinite(surface[y, x]):
            axis.text(x, y, f"{surface[y, x]:.3g}", ha="center", va="center", fontsize=8)
    image = axis.imshow(surface, cmap="Blues", aspect="auto", alpha=0.7, origin="lower")
    axis.set_xticks(range(len(across_values)), list(map(_label, across_values)))
    axis.set_yticks(range(len(up_values)), list(map(_label, up_values)))
    axis.set(xlabel=AXES.get(across, across), ylabel=AXES.get(up, up))
    return image


def _number(value: Any) -> float:
    """A figure of a row; NaN, which is not drawn, for None and for texts such as "n/a"."""
    return float(value) if isinstance(value, int | float) else np.nan


def _value(row: Row, option: str) -> Any:
    """The row's value of an option. What was a tuple is a list in the report of ``--beside``."""
    value = row["options"][option]
    return tuple(value) if isinstance(value, list) else value


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
