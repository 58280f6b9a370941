"""The report of a tuning: the chosen point, the test table, the grid, and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from infer.reporting import fill, pyplot, save_figure
from infer.tune.commands import GRID
from infer.uncertainty import SAID
from specjax._util.files import markdown_table

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
    """The report as Markdown: the chosen point, the test table, the grid."""
    best = report["best"]
    chosen = ", ".join(f"{name} = {best['options'][name]:g}" for name in GRID)
    lines = [f"c = {report['c']:.3f}. Chosen on the validation task: {chosen}. {SAID}", ""]
    if "test" in report:
        names = [*report["job"]["measure"], "all"] if report["job"]["measure"] else []
        extra = [(name.partition(":")[0], name.partition(":")[0], "{:.3f}") for name in names]
        columns = [*COLUMNS[:4], *extra, *COLUMNS[4:]]
        lines += ["## Test", "", markdown_table(*fill(columns, report["test"]))]
    columns = [*((name, name, "{:g}") for name in GRID), *COLUMNS[1:]]
    points = [row | row["options"] for row in report["grid"]]
    return "\n".join([*lines, "## Grid", "", markdown_table(*fill(columns, points))])


def markdown_lossy(report: dict[str, Any]) -> str:
    """The report of a method but cdsl: the chosen point and why, the test table, the grid."""
    best, job, plain = report["best"], report["job"], report["plain"]
    quality, (base, share) = job["quality"], job["bound"]
    chosen = ", ".join(f"{name} = {best['options'][name]}" for name in report["options"])
    against = "plain decoding" if base == "plain" else "the best point"
    why = f"the fastest (least P) whose {quality} is at most {share:.1%} worse than {against}'s"
    if not report["within_bound"]:
        why = f"the best {quality}, for no point is within {share:.1%} of {against}'s"
    first = f"c = {report['c']:.3f}. " if report["c"] is not None else ""
    lines = [f"{first}Chosen on the validation file: {chosen}: {why}. {SAID}", ""]
    if "test" in report:
        lines += ["## Test", "", markdown_table(*fill(LOSSY_COLUMNS, report["test"]))]
    columns = [LOSSY_COLUMNS[0], *((name, name, "{}") for name in report["options"])]
    points = [plain, *(row | row["options"] for row in report["grid"])]
    table = markdown_table(*fill([*columns, *LOSSY_COLUMNS[1:]], points))
    return "\n".join([*lines, "## Grid", "", table])


def draw_thresholds(report: dict[str, Any], path: Path) -> None:
    """Modeled speedup over CDLH and soft satisfaction against a_t and r_t, means over the grid.

    Nothing is drawn without the plots extra.
    """
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for left, name in zip(axes, ("a_t", "r_t"), strict=True):
        right = left.twinx()
        values = sorted({row["options"][name] for row in report["grid"]})
        rows = {v: [r for r in report["grid"] if r["options"][name] == v] for v in values}
        for axis, key, label, style in (
            (left, "modelled_speedup", "speedup over CDLH", "C0o-"),
            (right, "soft_of_constraints", "constraints satisfied", "C1s--"),
        ):
            means = [statistics.mean(row[key] for row in rows[value]) for value in values]
            axis.plot(values, means, style)
            axis.set_ylabel(label, color=style[:2])
        left.set_xlabel(name)
    save_figure(figure, path)
