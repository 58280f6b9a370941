"""The report of a benchmark: tables, notes, and the files of ``--out``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from infer.bench.cases import PLAIN
from infer.bench.pictures import draw_costs, draw_entropies, draw_methods
from infer.bench.sweep_pictures import draw_sweep
from infer.cli import mesh_text
from infer.reporting import Column, Table, fill, pyplot
from infer.uncertainty import SPREAD_NOTE
from specjax._util.errors import OptionError
from specjax._util.files import markdown_table, write_text

# Rounding may decide a greedy token if the target's two best logits are closer than this.
NEAR_TIE = 1e-4
# Columns of the tables: head, key in a row, format.
COLUMNS = (
    ("method", "label", "{}"),
    ("mode", "mode", "{}"),
    ("batch", "batch_size", "{}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("first token, ms", "first_token_ms", "{:.0f}"),
    ("speedup", "speedup", "{:.2f}"),
    ("acceptance", "acceptance_rate", "{:.2f}"),
    ("accepted/drafted", "accept_rate_per_draft", "{:.2f}"),
    ("tokens/round", "block_efficiency", "{:.2f}"),
    ("perplexity", "perplexity", "{:.2f}"),
    ("perplexity, mean of rows", "perplexity_of_rows", "{:.2f}"),
    ("KL, nats/token", "kl", "{:.3g}"),
    ("diversity", "diversity", "{:.2f}"),
    ("ROUGE-L", "rouge_l", "{:.3f}"),
    ("pass@1", "pass_at_1", "{:.3f}"),
    ("exact match", "exact_match", "{:.3f}"),
    ("J/token", "joules_per_token", "{:.3g}"),
    ("target calls/token", "target_calls_per_token", "{:.2f}"),
    ("draft calls/token", "draft_calls_per_token", "{:.2f}"),
    ("predicted", "predicted_speedup", "{:.2f}"),
    ("measured/predicted", "measured_over_predicted", "{:.2f}"),
)
# Means over prompts, beside the ratios of sums above.
PROMPT_COLUMNS = (
    ("means over prompts", "label", "{}"),
    ("mode", "mode", "{}"),
    ("batch", "batch_size", "{}"),
    ("tokens/s, mean of prompts", "tokens_per_second_of_prompt", "{:.0f}"),
    ("acceptance, mean of prompts", "acceptance_rate_of_prompt", "{:.2f}"),
    ("accepted/drafted, mean of prompts", "accept_rate_per_draft_of_prompt", "{:.2f}"),
    ("tokens/round, mean of prompts", "block_efficiency_of_prompt", "{:.2f}"),
)
# SDSAT's Table 4: a line per model, temperature and file.
FASTEST_COLUMNS = (
    ("fastest of the sweep", "label", "{}"),
    ("target", "target", "{}"),
    ("temperature", "temperature", "{:g}"),
    ("data", "data", "{}"),
    ("batch", "batch_size", "{}"),
    ("plain, tokens/s", "plain_tokens_per_second", "{:.1f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}"),
)
PLOTTED = ("speedup", "tokens/round", "perplexity")  # the default of ``--plot``
PEER_COLUMNS = (
    ("peer", "name", "{}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("first token, ms", "first_token_ms", "{:.0f}"),
    ("ours", "ours", "{}"),
    ("tokens/s", "our_tokens_per_second", "{:.0f}"),
    ("ours / peer", "ratio", "{:.2f}"),
)
EXPECTED_COLUMNS = (
    ("expected from λ, γ, c and v", "label", "{}"),
    ("mode", "mode", "{}"),
    ("λ", "acceptance_rate", "{:.2f}"),
    ("γ", "gamma", "{}"),
    ("speculative", "expected_speculative", "{:.2f}"),
    ("SCD, Theorem 5.1", "expected_scd_paper", "{:.2f}"),
    ("SCD, scored every round", "expected_scd", "{:.2f}"),
    ("measured", "speedup", "{:.2f}"),
)
ENTROPY_COLUMNS = (
    ("entropy, nats", "label", "{}"),
    ("mode", "mode", "{}"),
    ("target, accepted", "target_accepted", "{:.3f}"),
    ("target, rejected", "target_rejected", "{:.3f}"),
    ("draft, accepted", "draft_accepted", "{:.3f}"),
    ("draft, rejected", "draft_rejected", "{:.3f}"),
)
BATCH_COLUMNS = (
    ("passes and prompts", "label", "{}"),
    ("mode", "mode", "{}"),
    ("batch", "batch_size", "{}"),
    ("s/pass", "seconds_per_pass", "{:.3g}"),
    ("s/prompt", "seconds_per_prompt", "{:.3g}"),
    ("J/pass", "joules_per_pass", "{:.3g}"),
    ("J/prompt", "joules_per_prompt", "{:.3g}"),
)


def headline(report: dict[str, Any]) -> str:
    """What was measured, and on what."""
    where = report["machine"]
    mesh = f" on a mesh of {mesh_text(report['mesh'])}" if report["mesh"] else ""
    return (
        f"{where['device']} ({where['cpu']}, {where['cores']} cores), jax {where['jax']}; target "
        f"{report['target']}, draft {report['draft']}{mesh}; {report['prompts']} prompts × "
        f"{report['repeats']} seeds from {report['seed']}, up to {report['max_new_tokens']} new "
        f"tokens each. {SPREAD_NOTE}"
    )


def tables(report: dict[str, Any]) -> list[Table]:
    """The tables of a report; one without rows is left out.

    They are: methods, means over prompts, the fastest of a sweep, predictions, entropies, batches,
    runs, peers and the cost curve.
    """
    rows = report["rows"]
    filled = [fill(_method_columns(report), rows)]
    if any("tokens_per_second_of_prompt" in row for row in rows):
        filled.append(fill(PROMPT_COLUMNS, rows))
    if report.get("sweep"):
        filled.append(fill(FASTEST_COLUMNS, fastest(report)))

    predicted = [row for row in rows if row.get("gamma")]
    if predicted:
        filled.append(fill(EXPECTED_COLUMNS, predicted))
    at_costs = [row for row in rows if any(key.startswith("expected_at_") for key in row)]
    if at_costs:
        columns = (COLUMNS[0], *EXPECTED_COLUMNS[1:4], *_cost_columns(report))
        filled.append(fill(columns, at_costs))
    with_entropy = [row for row in rows if "target_accepted" in row]
    if with_entropy:
        filled.append(fill(ENTROPY_COLUMNS, with_entropy))
    if len({row["batch_size"] for row in rows}) > 1:
        filled.append(fill(BATCH_COLUMNS, rows))
    over_runs = _over_runs(report)
    if over_runs:
        filled.append(over_runs)
    if report["peers"]:
        filled.append(fill(PEER_COLUMNS, report["peers"]))

    curve = report["v"]
    if curve:
        filled.append((["T", *curve], [["v(T)", *(f"{value:.2f}" for value in curve.values())]]))
    return filled


def _method_columns(report: dict[str, Any]) -> tuple[Column, ...]:
    """The columns of every report, and those of ``--metric``."""
    known = {key for _, key, _ in COLUMNS}
    of_metrics = [
        (head, key, "{:.3f}") for key, head in report["metrics"].items() if key not in known
    ]
    return (*COLUMNS, *of_metrics)


def plotted(heads: Sequence[str], metrics: Mapping[str, str]) -> dict[str, str]:
    """The columns of ``--plot``: heads by the key of a row.

    ``metrics`` are the columns of ``--metric``, in the same form. They are drawn by default, too.

    Raises:
      OptionError: there is no such column.
    """
    known = {key: head for head, key, _ in (*COLUMNS[3:], *PROMPT_COLUMNS[3:])} | dict(metrics)
    keys = {head: key for key, head in known.items()}
    chosen = {}
    for head in heads or (*PLOTTED, *metrics.values()):
        if head not in keys:
            raise OptionError(f"--plot {head}: no such column; choose some of {', '.join(keys)}")
        chosen[keys[head]] = head
    return chosen


def fastest(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each method, temperature and batch size, the row with the most tokens per second.

    The rows of the reports ``beside`` follow, with their own targets and files.
    """
    found = []
    for part in (report, *report["beside"]):
        groups: dict[tuple, list[dict[str, Any]]] = {}
        plain = {}
        for row in part["rows"]:
            setting = (row["temperature"], row["batch_size"])
            if row["method"] == PLAIN:
                plain[setting] = row["tokens_per_second"]
            if any(option in row["options"] for option in part["sweep"]):
                groups.setdefault((row["method"], *setting), []).append(row)
        for (_, *setting), rows in groups.items():
            best = max(rows, key=lambda row: row["tokens_per_second"])
            about = {"target": part["target"], "data": part["data"]}
            speed = {"plain_tokens_per_second": plain[tuple(setting)]}
            found.append(best | about | speed)
    return found


def read_beside(directory: str, sweep: Sequence[str]) -> dict[str, Any]:
    """What is shown of an earlier report: its target, its prompts' file, its sweep and its rows.

    Raises:
      OptionError: there is no such report, or it swept other options.
    """
    path = Path(directory) / "bench.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        part = {key: report[key] for key in ("target", "data", "sweep", "rows")}
        part["rows"] = [row for row in part["rows"] if row["temperature"] is not None]
    except OSError as error:
        raise OptionError(f"--beside {directory}: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise OptionError(f"--beside {directory}: {path} is not a report of infer.bench") from None
    if part["sweep"] != list(sweep):
        swept = ", ".join(part["sweep"]) or "nothing"
        raise OptionError(
            f"--beside {directory}: it swept {swept}, and this run sweeps {', '.join(sweep)}"
        )
    return part


def _cost_columns(report: dict[str, Any]) -> list[Column]:
    """The columns of ``--cost``."""
    return [(f"expected, c = {c:g}", f"expected_at_{c:g}", "{:.2f}") for c in report["cost"]]


def _over_runs(report: dict[str, Any]) -> Table | None:
    """Mean and standard error of the figures that differ between runs; None for a single run."""
    rows = []
    for row in report["rows"]:
        means = {}
        errors = {}
        for key, values in row.get("runs", {}).items():
            if len(values) > 1:
                means[key] = np.mean(values)
                errors[key] = np.std(values, ddof=1) / len(values) ** 0.5
        if means:
            case = {name: row[name] for name in ("label", "mode", "batch_size")}
            rows.append(case | means | {"pm": errors})
    if not rows:
        return None
    label = ("mean ± standard error of the runs", "label", "{}")
    columns = (label, *_method_columns(report)[1:], *_cost_columns(report), *ENTROPY_COLUMNS[2:])
    return fill(columns, rows)


def notes(report: dict[str, Any]) -> list[str]:
    """The draft's cost, the source of energy figures, and how greedy outputs differ."""
    lines = []
    if report["c"] is not None:
        lines.append(f"c = {report['c']:.3f} (draft step time / target step time).")
    if report["energy"]:
        lines.append(f"Energy: {report['energy']}, prefill and idling included.")
    for row in [*report["rows"], *report["peers"]]:
        is_peer = "name" in row
        is_plain = not is_peer and row["method"] == "autoregressive"
        # Plain decoding at batch 1 is what the others are compared with, and differs from none.
        if row.get("mismatches") or ("mismatches" in row and not is_plain):
            lines.append(_mismatch_note(row, report["prompts"]))
    return lines


def _mismatch_note(row: dict[str, Any], prompts: int) -> str:
    """How many greedy outputs differ, and how many of them for a reason other than rounding."""
    name = row.get("name") or f"{row['method']} at batch {row['batch_size']}"
    differing = row["mismatches"]
    not_ties = sum(where["gap"] >= NEAR_TIE for where in differing)
    return (
        f"{name}: {len(differing)} of {prompts} greedy outputs differ "
        f"from {row.get('ours', 'plain decoding')}, {not_ties} of them not at a "
        f"near-tie (gap < {NEAR_TIE:g})."
    )


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    parts = [markdown_table(head, rows) for head, rows in tables(report)]
    lines = [headline(report), "", *parts, *(f"- {note}" for note in notes(report))]
    return "\n".join(lines).rstrip() + "\n"


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the report on a terminal."""
    console.print(headline(report), markup=False)
    for head, rows in tables(report):
        grid = Grid(box=box.SIMPLE_HEAD)
        for i, name in enumerate(head):
            # A narrow terminal folds headings; names and numbers are never cut short.
            justify = "right" if i else "left"
            grid.add_column(name, justify=justify, no_wrap=i == 0, overflow="fold")
        for row in rows:
            grid.add_row(*row)
        console.print(grid)
    for note in notes(report):
        console.print(note, markup=False)


def write(directory: Path, report: dict[str, Any]) -> list[Path]:
    """Writes bench.json and bench.md, and the pictures if matplotlib is there.

    Raises:
      OptionError: the directory cannot be written.
    """
    try:
        write_text(directory / "bench.json", json.dumps(report, indent=1) + "\n")
        write_text(directory / "bench.md", markdown(report))
        pictures = _draw(directory, report) if pyplot() else []
    except OSError as error:
        raise OptionError(f"--out {directory}: cannot be written ({error.strerror})") from None
    return [directory / "bench.json", directory / "bench.md", *pictures]


def _draw(directory: Path, report: dict[str, Any]) -> list[Path]:
    """Draws the pictures that the report has data for."""
    files = [draw_methods(directory / "bench.png", report)]
    if any("target_accepted" in row for row in report["rows"]):
        files.append(draw_entropies(directory / "entropies.png", report))
    if report["sweep"]:
        files.append(draw_sweep(directory / "sweep.png", report))
    # A line against c needs a second point.
    costs = [f"expected_at_{cost:g}" for cost in report["cost"][1:]]
    if any(key in row for row in report["rows"] for key in costs):
        files.append(draw_costs(directory / "costs.png", report))
    return files
