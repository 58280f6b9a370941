"""The report of a tuning: the chosen point, the test table, the grid, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.reporting import Column, fill, pyplot, save_figure
from infer.tune.commands import GRID
from infer.uncertainty import SPREAD_NOTE
from specjax._util.files import markdown_table

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
LOSSY_COLUMNS = (
    COLUMNS[0],
    ("perplexity", "perplexity", "{:.3f}"),
    ("ROUGE-L", "rouge_l", "{:.3f}"),
    ("acceptance", "acceptance_rate", "{:.2f}"),
    *COLUMNS[4:],
)


def markdown(report: dict[str, Any]) -> str:
    """The report of cdsl as Markdown: the chosen point, the test table, the grid."""
    options = report["best"]["options"]
    chosen = ", ".join(f"{name} = {options[name]:g}" for name in GRID)
    first = f"c = {report['c']:.3f}. Chosen on the validation task: {chosen}. {SPREAD_NOTE}"

    parts = [first, ""]
    if "test" in report:
        columns = [*COLUMNS[:4], *_measure_columns(report["job"]["measure"]), *COLUMNS[4:]]
        parts += ["## Test", "", markdown_table(*fill(columns, report["test"]))]
    columns = [*((name, name, "{:g}") for name in GRID), *COLUMNS[1:]]
    points = [row | row["options"] for row in report["grid"]]
    parts += ["## Grid", "", markdown_table(*fill(columns, points))]
    return "\n".join(parts)


def _measure_columns(measures: list[str]) -> list[Column]:
    """The columns of ``--measure``, each under its reward's name."""
    if not measures:
        return []
    names = [measure.partition(":")[0] for measure in measures]
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


def draw_thresholds(report: dict[str, Any], path: Path) -> None:
    """Draws modeled speedup over CDLH and satisfaction against a_t and r_t, means over the grid.

    Nothing is drawn without the plots extra.
    """
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for left, name in zip(axes, ("a_t", "r_t"), strict=True):
        left.set_xlabel(name)
        _draw_means(left, report["grid"], name, "modelled_speedup", "C0o-")
        left.set_ylabel("speedup over CDLH", color="C0")
        right = left.twinx()
        _draw_means(right, report["grid"], name, "soft_of_constraints", "C1s--")
        right.set_ylabel("constraints satisfied", color="C1")
    save_figure(figure, path)


def _draw_means(
    axis: Any, rows: Sequence[dict[str, Any]], option: str, key: str, style: str
) -> None:
    """Draws the mean of a figure over all rows with the same value of an option."""
    values = sorted({row["options"][option] for row in rows})
    means = []
    for value in values:
        means.append(statistics.mean(r[key] for r in rows if r["options"][option] == value))
    axis.plot(values, means, style)
