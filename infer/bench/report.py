"""The report of a benchmark: tables, notes, and the files of ``--out``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from infer.bench.pictures import draw_costs, draw_methods, draw_sweep
from infer.cli import mesh_text
from infer.reporting import Column, Table, fill, pyplot
from infer.uncertainty import SAID
from specjax._util.errors import OptionError
from specjax._util.files import markdown_table, write_text

NEAR_TIE = 1e-4  # greedy rows may part where the target's two best logits are closer
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
    ("target, refused", "target_refused", "{:.3f}"),
    ("draft, accepted", "draft_accepted", "{:.3f}"),
    ("draft, refused", "draft_refused", "{:.3f}"),
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
    """What was measured, and where."""
    where = report["machine"]
    mesh = f" on a mesh of {mesh_text(report['mesh'])}" if report["mesh"] else ""
    return (
        f"{where['device']} ({where['cpu']}, {where['cores']} cores), jax {where['jax']}; target "
        f"{report['target']}, draft {report['draft']}{mesh}; {report['prompts']} prompts × "
        f"{report['repeats']} seeds from {report['seed']}, up to {report['max_new_tokens']} new "
        f"tokens each. {SAID}"
    )


def tables(report: dict[str, Any]) -> list[Table]:
    """The methods, what the cost model expects of them, the peers, the cost curve."""
    filled = [fill(_method_columns(report), report["rows"])]
    if expected := [row for row in report["rows"] if row.get("gamma")]:
        filled.append(fill(EXPECTED_COLUMNS, expected))
    if at := [row for row in report["rows"] if any(k.startswith("expected_at_") for k in row)]:
        filled.append(fill((COLUMNS[0], *EXPECTED_COLUMNS[1:4], *_cost_columns(report)), at))
    if parted := [row for row in report["rows"] if "target_accepted" in row]:
        filled.append(fill(ENTROPY_COLUMNS, parted))
    if len({row["batch_size"] for row in report["rows"]}) > 1:
        filled.append(fill(BATCH_COLUMNS, report["rows"]))
    if spread := _over_runs(report):
        filled.append(spread)
    if report["peers"]:
        filled.append(fill(PEER_COLUMNS, report["peers"]))
    curve = report["v"]
    filled.append((["T", *curve], [["v(T)", *(f"{x:.2f}" for x in curve.values())]]))
    return filled


def _method_columns(report: dict[str, Any]) -> tuple[Column, ...]:
    """Those of every report, and of the metrics asked for."""
    known = {key for _, key, _ in COLUMNS}
    asked = [(head, key, "{:.3f}") for key, head in report["metrics"].items() if key not in known]
    return (*COLUMNS, *asked)


def _cost_columns(report: dict[str, Any]) -> list[Column]:
    return [(f"expected, c = {c:g}", f"expected_at_{c:g}", "{:.2f}") for c in report["cost"]]


def _over_runs(report: dict[str, Any]) -> Table | None:
    """Mean and standard error of what differs from run to run; None of a single run."""
    rows = []
    for row in report["rows"]:
        runs = {key: np.array(v) for key, v in row.get("runs", {}).items() if len(v) > 1}
        if runs:
            spread = {key: v.std(ddof=1) / len(v) ** 0.5 for key, v in runs.items()}
            means = {key: v.mean() for key, v in runs.items()}
            rows.append({name: row[name] for name in ("label", "mode", "batch_size")} | means)
            rows[-1]["pm"] = spread
    head = ("mean ± standard error of the runs", "label", "{}")
    columns = (head, *_method_columns(report)[1:], *_cost_columns(report), *ENTROPY_COLUMNS[2:])
    return fill(columns, rows) if rows else None


def notes(report: dict[str, Any]) -> list[str]:
    """The draft's cost, and whether greedy outputs are those of plain decoding."""
    lines = []
    if report["c"] is not None:
        lines.append(f"c = {report['c']:.3f} (draft step time / target step time).")
    if report["energy"]:
        lines.append(f"Energy: {report['energy']}, prefill and idling included.")
    for row in [*report["rows"], *report["peers"]]:
        if "mismatches" not in row:
            continue
        name = row.get("name") or f"{row['method']} at batch {row['batch_size']}"
        parted = row["mismatches"]
        if parted or "name" in row or row["method"] != "autoregressive":
            far = sum(where["gap"] >= NEAR_TIE for where in parted)
            lines.append(
                f"{name}: {len(parted)} of {report['prompts']} greedy outputs differ "
                f"from {row.get('ours', 'plain decoding')}, {far} of them not at a "
                f"near-tie (gap < {NEAR_TIE:g})."
            )
    return lines


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    parts = [markdown_table(head, rows) for head, rows in tables(report)]
    lines = [headline(report), "", *parts, *(f"- {note}" for note in notes(report))]
    return "\n".join(lines).rstrip() + "\n"


def show(report: dict[str, Any], console: Console) -> None:
    """The report on a terminal."""
    console.print(headline(report), markup=False)
    for head, rows in tables(report):
        grid = Grid(box=box.SIMPLE_HEAD)
        for i, name in enumerate(head):
            # A narrow terminal folds headings; names and numbers are never cut short.
            grid.add_column(name, justify="right" if i else "left", no_wrap=not i, overflow="fold")
        for row in rows:
            grid.add_row(*row)
        console.print(grid)
    for note in notes(report):
        console.print(note, markup=False)


def write(home: Path, report: dict[str, Any]) -> list[Path]:
    """Writes bench.json and bench.md, and bench.png where matplotlib is there.

    Raises:
      OptionError: the directory cannot be written.
    """
    try:
        write_text(home / "bench.json", json.dumps(report, indent=1) + "\n")
        write_text(home / "bench.md", markdown(report))
        files = [home / "bench.json", home / "bench.md"]
        if pyplot():
            files.append(draw_methods(home / "bench.png", report))
            if report["sweep"]:
                files.append(draw_sweep(home / "sweep.png", report))
            if any(
                f"expected_at_{cost:g}" in row
                for row in report["rows"]
                for cost in report["cost"][1:]
            ):
                files.append(draw_costs(home / "costs.png", report))
    except OSError as error:
        raise OptionError(f"--out {home}: cannot be written ({error.strerror})") from None
    return files
