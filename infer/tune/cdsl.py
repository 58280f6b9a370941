"""Tune CDSL's thresholds by the paper's protocol (Nakshatri et al. 2025, appendix C).

All points of a grid are measured on the validation task. Of the fastest ones, the point with the
best satisfaction is chosen, and compared with other methods on the test task.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.cli import check_grid, make_directory
from infer.loading import load_models, use_compilation_cache
from infer.prompts import Prompt
from infer.timing import costs
from infer.tune.candidates import (
    Candidate,
    TuneSetting,
    measure_candidate,
    with_measures,
    with_speedups,
)
from infer.tune.commands import GRID
from infer.tune.measured_rows import MeasuredRows
from infer.tune.report import draw_thresholds, markdown
from infer.tune.tasks import read_task, sources, stops
from specjax._util.files import locked, write_text
from specjax.core.warp import Sampling
from specjax.registry import method
from specjax.rewards import PRODUCT, combine

FASTEST = 10  # how many of the fastest points compete by satisfaction
CDLH_OPTIONS = ("k", "d", "combine")  # those of CDSL's options that CDLH has, too


def tune(args: argparse.Namespace) -> int:
    """Tunes, compares if there is a test task, and writes the report; returns the exit code.

    Raises:
      SpecjaxError: an option, a reward, a model, a line of a task or ``--out`` cannot be used.
    """
    directory = make_directory(args.out)
    with locked(directory, "--out"):
        return _tune(args, directory)


def _tune(args: argparse.Namespace, directory: Path) -> int:
    use_compilation_cache()
    options = dict(args.set)
    for point in grid_points(args):
        method("cdsl").resolve(options | point)  # wrong options are reported before models load
    validation, test = _settings(args)
    rows = MeasuredRows(directory / "grid.jsonl", args)

    base, grid = _measure_grid(args, rows, validation, options)
    best = choose(grid)
    report = {"job": vars(args), "c": validation.c, "grid": grid, "best": best, "cdlh": base}
    if test:
        tuned = options | {name: best["options"][name] for name in GRID}
        report["test"] = compare(args, rows, test, tuned)

    write_text(directory / "report.json", json.dumps(report, indent=1))
    write_text(directory / "report.md", markdown(report))
    draw_thresholds(report, directory / "thresholds.png")
    print(markdown(report))
    return 0


def _measure_grid(
    args: argparse.Namespace,
    rows: MeasuredRows,
    validation: TuneSetting,
    options: dict[str, Any],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """CDLH's row and those of the grid, with their speedups over it."""
    cdlh = Candidate("CDLH", "cdlh", _options_of_cdlh(options))
    base = rows.get("cdlh", {"options": options}, lambda: measure_candidate(validation, cdlh))
    grid = []
    for point in grid_points(args):
        # Thresholds never recompile, so only the first point of each b needs a warmup.
        is_first = point["a_t"] == args.a_t[0] and point["r_t"] == args.r_t[0]
        cdsl = Candidate("CDSL", "cdsl", options | point)
        row = rows.get("cdsl", point, lambda: measure_candidate(validation, cdsl, warm=is_first))
        grid.append(row)
    base, *grid = with_speedups([base, *grid], base)
    return base, grid


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the best satisfaction among the fastest.

    The share of all constraints decides, then the share of rows that meet all of theirs, then
    speed.
    """
    fastest = sorted(rows, key=lambda row: row["cost"])[:FASTEST]
    return max(fastest, key=lambda row: (row["soft_of_constraints"], row["hard"], -row["cost"]))


def compare(
    args: argparse.Namespace, rows: MeasuredRows, test: TuneSetting, tuned: dict[str, Any]
) -> list[dict[str, Any]]:
    """The test table: greedy, beam, nucleus and the three lookahead methods."""
    lookahead = _options_of_cdlh(tuned)
    candidates = [
        Candidate("greedy", "autoregressive"),
        Candidate("beam", "beam", {"beams": args.beams}),
        *(
            Candidate(f"nucleus, {p:g}", "autoregressive", sampling=Sampling(1.0, top_p=p))
            for p in args.top_p
        ),
        Candidate("CDLH", "cdlh", lookahead),
        Candidate("CDLH-appx", "cdlh-appx", lookahead),
        Candidate("CDSL", "cdsl", tuned),
    ]
    table = []
    for candidate in candidates:
        point = {"name": candidate.name, "options": dict(candidate.options)}
        table.append(rows.get("test", point, lambda: measure_candidate(test, candidate)))
    table = with_speedups(table, next(row for row in table if row["name"] == "CDLH"))
    if not args.measure:
        return table
    return with_measures(table, test.prompts, combine(args.measure), test.target.tokenizer)


def grid_points(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The grid, with b outermost: each b is compiled anew, thresholds never are."""
    check_grid("--b, --a-t and --r-t", [args.b, args.a_t, args.r_t])
    points = itertools.product(args.b, args.a_t, args.r_t)
    return [{"a_t": a_t, "r_t": r_t, "b": b} for b, a_t, r_t in points]


def _options_of_cdlh(options: dict[str, Any]) -> dict[str, Any]:
    """Those of CDSL's options that CDLH has, too."""
    return {name: value for name, value in options.items() if name in CDLH_OPTIONS}


def _settings(args: argparse.Namespace) -> tuple[TuneSetting, TuneSetting | None]:
    """What the candidates share on the validation task, and on the test task if there is one."""
    reward = combine(args.reward or ["lexical"], dict(args.set).get("combine") == PRODUCT)
    target, draft = load_models(args, want_draft=True)
    validation_source, test_source = sources(args)
    # Both are read before anything is timed, so that bad lines are reported at once.
    validation = read_task(args.validation, target, args.chat, reward.parts, validation_source)
    test = None
    if args.test:
        test = read_task(args.test, target, args.chat, reward.parts, test_source)
    _, c = costs(target, draft, (1,))

    def setting(prompts: Sequence[Prompt], batch_size: int) -> TuneSetting:
        budget = args.max_new_tokens
        stop = stops(args, prompts)
        return TuneSetting(target, draft, reward, prompts, budget, batch_size, args.seed, stop, c)

    on_test = setting(test, args.test_batch_size) if test else None
    return setting(validation, args.batch_size), on_test
