"""Benchmark reports: rows, tables, Markdown, JSON and, with the ``plots`` extra, a picture."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infer.bench.quality import UNKNOWN, kl_to_target, mean_rouge
from infer.bench.sandbox import pass_at_1
from infer.timing import Case, Result, mismatches, output_logprobs
from specjax.errors import OptionError
from specjax.infill import exact_matches
from specjax.lm import LM
from specjax.methods import METHODS, Context
from specjax.metrics import (
    diversity,
    expected_scd_speedup,
    expected_scored_speedup,
    expected_self_draft_speedup,
    expected_speedup,
    perplexity,
    rates,
    ratio,
)

NEAR_TIE = 1e-4  # greedy rows may part where the target's two best logits are closer
COLUMNS = (
    ("method", "label", "{}"),
    ("mode", "mode", "{}"),
    ("batch", "batch_size", "{}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("first token, ms", "first_token_ms", "{:.0f}"),
    ("speedup", "speedup", "{:.2f}"),
    ("acceptance", "acceptance_rate", "{:.2f}"),
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

# What the cost model foretells, from the measured acceptance, c and v: three ways to count the
# amateur's pass over the bonus position (none, where it is needed, always), and whose is whose.
FORMULAS = {
    "speculative": expected_speedup,
    "scd_paper": expected_scd_speedup,
    "scd": expected_scored_speedup,
}
PREDICTED = {"speculative": "speculative", "scd": "scd"}
SELF_DRAFTING = "adaptive"  # this drafter's methods: foretold from tokens per round and v alone
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

# A table: column heads, and rows of cells.
Table = tuple[list[str], list[list[str]]]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import jax

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "cpu": model,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def pass_widths(case: Case, target: LM) -> tuple[int, ...]:
    """Tokens per row of each target pass of a round, where the cost model foretells the speed."""
    if case.method in PREDICTED:
        return (case.options["gamma"] + 1,)
    spec = METHODS[case.method]
    if spec.drafter != SELF_DRAFTING:
        return ()
    context = Context(target, None, greedy=case.mode == "greedy")
    return spec.build(context, case.options)[0].passes


def make_rows(
    target: LM,
    prompts: Sequence[Sequence[int]],
    results: Sequence[Result],
    v: Mapping[int, float],
    c: float | None,
) -> list[dict[str, Any]]:
    """The cases as rows of the report.

    ``mismatches`` (greedy rows of methods that are lossless for the warped target) lists the
    outputs that differ from plain decoding's at batch 1, or at the first size measured.
    """
    plain = next((r for r in results if r.case.mode == "greedy"), None)
    rows = []
    for result in results:
        widths = pass_widths(result.case, target)
        row, spec = _row(result, results, v, c, widths), METHODS[result.case.method]
        logprobs = output_logprobs(target, prompts, result.tokens)
        row["perplexity"] = perplexity(np.concatenate(logprobs))
        row["diversity"] = diversity(result.tokens)
        if result.case.mode == "greedy" and spec.lossless and spec.target_dist == "warped":
            row["mismatches"] = mismatches(target, prompts, plain.tokens, result.tokens)
        rows.append(row)
    return rows


def add_quality(
    rows: Sequence[dict[str, Any]],
    target: LM,
    draft: LM | None,
    questions: Sequence[Any],
    results: Sequence[Result],
    run_tests: bool,
) -> None:
    """Adds to each row KL to the target, energy, ROUGE-L and, where asked for, pass@1.

    Infilling tasks with a ``middle`` add the share of completions that equal it.

    ``questions`` are :class:`infer.bench.Question`. ``run_tests`` runs what the models wrote.
    """
    prompts = [question.tokens for question in questions]
    for row, result in zip(rows, results, strict=True):
        row["kl"] = kl_to_target(target, draft, prompts, result)
        tokens = sum(map(len, result.tokens))
        row["joules_per_token"] = (
            float(np.median(result.joules)) / tokens if result.joules else UNKNOWN
        )
        row["rouge_l"] = mean_rouge(result.text, [question.references for question in questions])
        row["exact_match"] = exact_match([question.task for question in questions], result.text)
        if run_tests:
            row["pass_at_1"] = pass_at_1([question.task for question in questions], result.text)


def exact_match(tasks: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> float | None:
    """The share of infilled texts that are the task's ``middle``; None without such tasks."""
    pairs = [
        (text, task["middle"])
        for task, text in zip(tasks, texts, strict=True)
        if "suffix" in task and isinstance(task.get("middle"), str)
    ]
    return exact_matches(*zip(*pairs, strict=True)) if pairs else None


def _row(
    result: Result,
    results: Sequence[Result],
    v: Mapping[int, float],
    c: float | None,
    widths: Sequence[int],
) -> dict[str, Any]:
    """One case, with the speedup and, where c and v are known, its prediction."""
    case = result.case
    base = next(
        r
        for r in results
        if r.case.method == "autoregressive"
        and (r.case.mode, r.case.batch_size) == (case.mode, case.batch_size)
    )
    pairs = zip(result.tokens_per_second, base.tokens_per_second, strict=True)
    speedup = None if result is base else float(np.median([a / b for a, b in pairs]))
    found, predicted = rates(result.counters), None
    known = c is not None and found["acceptance_rate"] is not None and case.batch_size == 1
    if case.method in PREDICTED and known:
        gamma, rate = case.options["gamma"], found["acceptance_rate"]
        of = {name: formula(rate, gamma, c, v[gamma + 1]) for name, formula in FORMULAS.items()}
        predicted = of[PREDICTED[case.method]]
        found |= {"gamma": gamma, **{f"expected_{name}": value for name, value in of.items()}}
    elif METHODS[case.method].drafter == SELF_DRAFTING and case.batch_size == 1:
        passes = [v[width] for width in widths]
        predicted = expected_self_draft_speedup(found["block_efficiency"], passes)
    tokens = result.counters["emitted"]
    return {
        "method": case.method,
        "label": case.label,
        "mode": case.mode,
        "batch_size": case.batch_size,
        "options": dict(case.options),
        "tokens_per_second": result.speed,
        "first_token_ms": 1e3 * float(np.median(result.first_token_s)),
        "speedup": speedup,
        "predicted_speedup": predicted,
        "measured_over_predicted": speedup / predicted if predicted and speedup else None,
        "draft_calls": result.counters["draft_calls"],
        "target_calls_per_token": ratio(result.counters["target_calls"], tokens),
        "draft_calls_per_token": ratio(result.counters["draft_calls"], tokens),
        "counters": result.counters,
        "accepted_hist": result.accepted_hist,
        "repeats": result.tokens_per_second,
    } | found


def headline(report: dict[str, Any]) -> str:
    """What was measured, and where."""
    where = report["machine"]
    return (
        f"{where['device']} ({where['cpu']}, {where['cores']} cores), jax {where['jax']}; target "
        f"{report['target']}, draft {report['draft']}; {report['prompts']} prompts, up to "
        f"{report['max_new_tokens']} new tokens each."
    )


def tables(report: dict[str, Any]) -> list[Table]:
    """The methods, what the cost model expects of them, the peers, the cost curve."""
    found = [_columns(COLUMNS, report["rows"])]
    if expected := [row for row in report["rows"] if row.get("gamma")]:
        found.append(_columns(EXPECTED_COLUMNS, expected))
    if report["peers"]:
        found.append(_columns(PEER_COLUMNS, report["peers"]))
    curve = report["v"]
    found.append((["T", *curve], [["v(T)", *(f"{x:.2f}" for x in curve.values())]]))
    return found


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
            far = sum(found["gap"] >= NEAR_TIE for found in parted)
            lines.append(
                f"{name}: {len(parted)} of {report['prompts']} greedy outputs differ "
                f"from {row.get('ours', 'plain decoding')}, {far} of them not at a "
                f"near-tie (gap < {NEAR_TIE:g})."
            )
    return lines


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [headline(report), ""]
    for head, rows in tables(report):
        lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines.append("")
    return "\n".join([*lines, *(f"- {note}" for note in notes(report))]).rstrip() + "\n"


def show(report: dict[str, Any], console: Any) -> None:
    """The report on a terminal, a rich console."""
    from rich import box
    from rich.table import Table as Grid

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


def _columns(columns: Sequence[tuple[str, str, str]], rows: Sequence[dict]) -> Table:
    """The columns of which any row has a value; words such as "n/a" stand as they are."""

    def cell(value, shape):
        return "" if value is None else value if isinstance(value, str) else shape.format(value)

    columns = [c for c in columns if any(row.get(c[1]) is not None for row in rows)]
    cells = [[cell(row.get(key), shape) for _, key, shape in columns] for row in rows]
    return [name for name, *_ in columns], cells


def make_directory(directory: str) -> Path:
    """The directory of ``--out``; made first, so that no measurement is lost to a typing error.

    Raises:
      OptionError: it cannot be made or written.
    """
    home = Path(directory)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError as error:
        raise OptionError(f"--out {directory}: cannot be written ({error.strerror})") from None


def write(home: Path, report: dict[str, Any]) -> list[Path]:
    """Writes bench.json and bench.md, and bench.png where matplotlib is there.

    Raises:
      OptionError: the directory cannot be written.
    """
    from specjax.files import write_text

    try:
        write_text(home / "bench.json", json.dumps(report, indent=1) + "\n")
        write_text(home / "bench.md", markdown(report))
        files = [home / "bench.json", home / "bench.md"]
        if importlib.util.find_spec("matplotlib"):
            files.append(_picture(home / "bench.png", report))
            if report["sweep"]:
                files.append(_sweep_picture(home / "sweep.png", report))
    except OSError as error:
        raise OptionError(f"--out {home}: cannot be written ({error.strerror})") from None
    return files


def _picture(path: Path, report: dict[str, Any]) -> Path:
    """Speedup per method, and the cost curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (bars, curve) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = [row for row in report["rows"] if row["speedup"] is not None]
    labels = [f"{r['label']}\n{r['mode']}, batch {r['batch_size']}" for r in rows]
    bars.barh(labels, [r["speedup"] for r in rows], color="#4c78a8", label="measured")
    ticks = [(i, r["predicted_speedup"]) for i, r in enumerate(rows) if r["predicted_speedup"]]
    bars.plot(
        [x for _, x in ticks],
        [i for i, _ in ticks],
        "|",
        color="#e45756",
        markersize=22,
        markeredgewidth=3,
        label="predicted from c, v and acceptance",
    )
    bars.axvline(1, color="grey", linewidth=1)
    bars.set_xlabel("speedup over plain decoding")
    bars.invert_yaxis()
    bars.legend(loc="lower right", fontsize=8)
    widths = [int(width) for width in report["v"]]
    curve.plot(widths, list(report["v"].values()), "o-", color="#4c78a8", label="measured")
    curve.plot(widths, widths, ":", color="grey", label="one pass per token")
    curve.set(
        xscale="log",
        yscale="log",
        xlabel="T, tokens per target pass",
        ylabel="v(T), cost relative to one token",
    )
    curve.set_xticks(widths, [str(w) for w in widths])
    curve.legend(fontsize=8)
    return _save(figure, path)


def _sweep_picture(path: Path, report: dict[str, Any]) -> Path:
    """Speedup, tokens per round and perplexity against the option that was swept."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    option = report["sweep"]
    shown = (
        ("speedup", "speedup over plain decoding"),
        ("block_efficiency", "tokens per round"),
        ("perplexity", "perplexity under the target"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    swept = [row for row in report["rows"] if option in row["options"]]
    lines = dict.fromkeys((row["method"], row["mode"], row["batch_size"]) for row in swept)
    for method, mode, size in lines:
        rows = [
            r for r in swept if (r["method"], r["mode"], r["batch_size"]) == (method, mode, size)
        ]
        rows.sort(key=lambda row: row["options"][option])
        for axis, (key, _) in zip(axes, shown, strict=True):
            values = [r["options"][option] for r in rows]
            values = [str(v) if isinstance(v, tuple) else v for v in values]
            axis.plot(values, [r[key] for r in rows], "o-", label=f"{method}, {mode}, batch {size}")
    for axis, (_, title) in zip(axes, shown, strict=True):
        axis.set(xlabel=option, ylabel=title)
    axes[0].legend(fontsize=8)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    """Writes the picture aside and renames it."""
    from matplotlib import pyplot as plt

    scratch = path.with_name(f".{path.name}")
    figure.savefig(scratch, dpi=130, format="png")
    os.replace(scratch, path)
    plt.close(figure)
    return path
