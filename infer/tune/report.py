"""The report of a tuning: the chosen point, the test table, the grid, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.reporting import Column, fill, pyplot, save_figure
from infer.tune.commands import GRID
from infer.uncertainty import SPREAD_NOTE
from specjax._util.files import markdown_table

SOFT = "soft_of_constraints"  # the satisfaction that the paper counts
# The options of the picture's columns, and their titles: the paper's order.
PANELS = {"r_t": "reward threshold, r_t", "a_t": "approval threshold, a_t", "b": "b"}
# Columns of the tables: head, key in a row, format.
COLUMNS = (
    ("method", "name", "{}"),
    ("soft, mean of rows", "soft_of_rows", "{:.3f}"),
    ("soft, of all constraints", "soft_of_constraints", "{:.3f}"),
    ("hard", "hard", "{:.3f}"),
    ("target calls/token", "target_calls_per_token", "{:.2f}"),
    ("draft calls/token", "draft_calls_per_token", "{:.2f}"),
    ("P", "cost", "{:.2f}"),
    ("modeled speedup", "modelled_speedup", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("wall-clock speedup", "speedup", "{:.2f}"),
)
SPECULATIVE_COLUMNS = (
    COLUMNS[0],
    ("acceptance rate", "acceptance_rate", "{:.3f}"),
    ("draft calls/token", "draft_calls_per_token", "{:.3f}"),
    ("target calls/token", "target_calls_per_token", "{:.3f}"),
    ("hard", "hard", "{:.3f}"),
    ("soft, of all constraints", SOFT, "{:.3f}"),
)
LOSSY_COLUMNS = (
    COLUMNS[0],
    ("perplexity", "perplexity", "{:.3f}"),
    ("perplexity, mean of rows", "perplexity_of_rows", "{:.3f}"),
    ("ROUGE-L", "rouge_l", "{:.3f}"),
    ("acceptance", "acceptance_rate", "{:.2f}"),
    *COLUMNS[4:],
)


def markdown(report: dict[str, Any]) -> str:
    """The report of cdsl as Markdown: the chosen point, the test table, the others."""
    options = report["best"]["options"]
    names = [*GRID, "d"] if report["job"]["d"] else list(GRID)
    chosen = ", ".join(f"{name} = {options[name]:g}" for name in names)
    first = f"c = {report['c']:.3f}. Chosen on the validation task: {chosen}. {SPREAD_NOTE}"
    measured = _measure_columns(report["measures"])

    parts = [first, ""]
    if "test" in report:
        columns = [*COLUMNS[:4], *measured, *COLUMNS[4:]]
        parts += ["## Test", "", markdown_table(*fill(columns, report["test"]))]
    parts += [f"## Speculative decoding, γ = {report['job']['gamma']}", ""]
    parts += [markdown_table(*fill([*SPECULATIVE_COLUMNS, *measured], report["speculative"]))]
    columns = [*((name, name, "{:g}") for name in names), *COLUMNS[1:4], *measured, *COLUMNS[4:]]
    points = [row | row["options"] for row in report["grid"]]
    parts += ["## Grid", "", markdown_table(*fill(columns, points))]
    return "\n".join(parts)


def _measure_columns(names: list[str]) -> list[Column]:
    """The columns of ``--measure``, each under its reward's name."""
    if not names:
        return []
    return [(name, name, "{:.3f}") for name in [*names, "all"]]


def markdown_lossy(report: dict[str, Any]) -> str:
    """The report of the other methods: the chosen point and why, the test table, the grid."""
    options = report["best"]["options"]
    chosen = ", ".join(f"{name} = {options[name]}" for name in report["options"])
    cost = f"c = {report['c']:.3f}. " if report["c"] is not None else ""
    why = _why_chosen(report)
    first = f"{cost}Chosen on the validation file: {chosen}: {why}. {SPREAD_NOTE}"

    parts = [first, ""]
    if "test" in report:
        parts += ["## Test", "", markdown_table(*fill(LOSSY_COLUMNS, report["test"]))]
    option_columns = [(name, name, "{}") for name in report["options"]]
    columns = [LOSSY_COLUMNS[0], *option_columns, *LOSSY_COLUMNS[1:]]
    points = [report["plain"], *(row | row["options"] for row in report["grid"])]
    parts += ["## Grid", "", markdown_table(*fill(columns, points))]
    return "\n".join(parts)


def _why_chosen(report: dict[str, Any]) -> str:
    quality = report["job"]["quality"]
    base, share = report["job"]["bound"]
    against = "plain decoding" if base == "plain" else "the best point"
    if report["within_bound"]:
        return (
            f"the fastest (least P) whose {quality} is at most {share:.1%} worse than {against}'s"
        )
    return f"the best {quality}, because no point is within {share:.1%} of {against}'s"


def draw_methods(report: dict[str, Any], path: Path) -> None:
    """Draws the paper's Figure 1: each method of the test table, by its satisfaction and its speed.

    Nothing is drawn without the plots extra.
    """
    plt = pyplot()
    if plt is None:
        return
    selected = report["job"]["select"]
    figure, axis = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for row in report["test"]:
        place = (100 * row[selected or SOFT], row["modelled_speedup"])
        axis.plot(*place, "o", label=row["name"])
        axis.annotate(row["name"], place, (5, 5), textcoords="offset points", fontsize=8)
    axis.set(xlabel=_title_of(selected), ylabel="speedup over CDLH")
    axis.grid(linewidth=0.4, alpha=0.6)
    save_figure(figure, path)


def _title_of(selected: str | None) -> str:
    """The title of the axis of the satisfaction, or of the measure that chooses the point."""
    return f"{selected or 'constraints satisfied'}, %"


def draw_thresholds(report: dict[str, Any], path: Path) -> None:
    """Draws the paper's six panels: speedup over CDLH, and satisfaction, against each option.

    The other two options stay at ``--at``. Nothing is drawn without the plots extra.
    """
    plt = pyplot()
    if plt is None:
        return
    selected = report["job"]["select"]
    figures = (
        ("modelled_speedup", "speedup over CDLH", 1),
        (selected or SOFT, _title_of(selected), 100),
    )
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    for row_of_axes, (key, title, scale) in zip(axes, figures, strict=True):
        for axis, option in zip(row_of_axes, PANELS, strict=True):
            for accept, rows in report["curves"].items():
                values, heights = curve(rows, option, report["job"]["at"], key)
                axis.plot(values, [scale * height for height in heights], "o-", label=accept)
            axis.set(xlabel=PANELS[option], ylabel=title)
    axes[0][0].legend(title="acceptance", fontsize=8)
    save_figure(figure, path)


def curve(
    rows: Sequence[dict[str, Any]], option: str, center: dict[str, float], key: str
) -> tuple[list[float], list[float]]:
    """A figure of the rows that differ from the center only in ``option``, by its value."""
    others = [name for name in PANELS if name != option]
    points = {}
    for row in rows:
        if all(row["options"][name] == center[name] for name in others):
            points[row["options"][option]] = row[key]
    values = sorted(points)
    return values, [points[value] for value in values]
