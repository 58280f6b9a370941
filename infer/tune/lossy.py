"""Tune a method but cdsl: the fastest point of a grid whose quality is within a bound.

Quality is perplexity under the target or ROUGE-L, on the validation file. The chosen point is
compared with plain decoding and with the method's defaults on the test file.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.cli import check_grid, check_results, make_directory
from infer.loading import load_models, use_compilation_cache
from infer.prompts import Prompt
from infer.timing import costs
from infer.tune.candidates import Candidate, TuneSetting, measure_candidate, with_speedups
from infer.tune.commands import GRIDS
from infer.tune.measured_rows import BEGIN, MeasuredRows
from infer.tune.report import markdown_lossy
from infer.tune.tasks import read_task, sources, stops
from specjax._util.errors import OptionError
from specjax._util.files import locked, write_text
from specjax.core.sampling import Sampling
from specjax.registry import METHODS, Context, method
from specjax.runtime.generate import num_slots

LOWER_IS_BETTER = ("perplexity", "perplexity_of_rows")


def tune(args: argparse.Namespace) -> int:
    """Tunes, compares if there is a test file, and writes the report; returns the exit code.

    Raises:
      SpecjaxError: an option, a model, a file or ``--out`` cannot be used.
    """
    directory = make_directory(args.out)
    with locked(directory, "--out"):
        check_results(directory / "grid.jsonl", BEGIN)
        return _tune(args, directory)


def _tune(args: argparse.Namespace, directory: Path) -> int:
    use_compilation_cache()
    options = dict(args.set)
    points = grid_points(args)
    for point in points:
        # Wrong options are reported before models load.
        method(args.method).resolve(options | point)
    target, draft = load_models(args, want_draft=True, mesh=args.mesh)
    check_points(args, Context(target, draft), points)
    validation_source, test_source = sources(args)
    # Both are read before anything is timed, so that a wrong file is reported at once.
    validation_prompts = read_task(
        args.validation, "FILE", target, args.chat, None, validation_source
    )
    test_prompts = []
    if args.test:
        test_prompts = read_task(args.test, "--test", target, args.chat, None, test_source)
    _, c = costs(target, draft, (1,))

    def setting(prompts: list[Prompt], batch_size: int) -> TuneSetting:
        slots = num_slots(target, batch_size, batch_size)
        stop = stops(args, prompts)
        budget = args.max_new_tokens
        return TuneSetting(target, draft, None, prompts, budget, slots, args.seed, stop, c)

    validation = setting(validation_prompts, args.batch_size)
    test = setting(test_prompts, args.test_batch_size) if test_prompts else None
    rows = MeasuredRows(directory / "grid.jsonl", args, validation, test)
    plain, grid = _measure_grid(args, rows, validation, points)
    best, is_within_bound = choose(grid, plain, args.quality, *args.bound)
    report = {
        "job": vars(args),
        "c": c,
        "options": list(points[0]),
        "plain": plain,
        "grid": grid,
        "best": best,
        "within_bound": is_within_bound,
    }
    if test:
        report["test"] = compare(args, rows, test, best["options"])

    write_text(directory / "report.json", json.dumps(report, indent=1))
    write_text(directory / "report.md", markdown_lossy(report))
    print(markdown_lossy(report))
    return 0


def check_points(
    args: argparse.Namespace, context: Context, points: Sequence[dict[str, str]]
) -> None:
    """Checks that the method can draw at every point and with its defaults, before any is measured.

    Raises:
      OptionError, PairError: it cannot, or models and method do not fit.
    """
    options = dict(args.set)
    compared = [options] if args.test else []
    for point in [*compared, *(options | point for point in points)]:
        built, _ = method(args.method).build(context, point)
        built.check_sampling(_sampling(args))


def _sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(args.temperature, args.top_k, args.top_p[0])


def _row(
    args: argparse.Namespace,
    rows: MeasuredRows,
    setting: TuneSetting,
    kind: str,
    name: str,
    options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A row of the tuned method with ``options``, or of plain decoding if they are None."""
    method_name = "autoregressive" if options is None else args.method
    options = dict(options or {})
    resolved = METHODS[method_name].resolve(options)
    candidate = Candidate(name, method_name, resolved, _sampling(args))
    point = {"name": name, "options": options}
    return rows.get(kind, point, lambda: measure_candidate(setting, candidate))


def _measure_grid(
    args: argparse.Namespace,
    rows: MeasuredRows,
    validation: TuneSetting,
    points: Sequence[dict[str, str]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Plain decoding's row and those of the grid, with their speedups over it."""
    options = dict(args.set)
    plain = _row(args, rows, validation, "plain", "plain", None)
    grid = [_row(args, rows, validation, "grid", args.method, options | point) for point in points]
    plain, *grid = with_speedups([plain, *grid], plain)
    return plain, grid


def compare(
    args: argparse.Namespace, rows: MeasuredRows, test: TuneSetting, tuned: dict[str, Any]
) -> list[dict[str, Any]]:
    """The test table: plain decoding, the method with its defaults, and the chosen point."""
    table = [
        _row(args, rows, test, "test", "plain", None),
        _row(args, rows, test, "test", f"{args.method}, defaults", dict(args.set)),
        _row(args, rows, test, "test", f"{args.method}, tuned", tuned),
    ]
    return with_speedups(table, table[0])


def choose(
    rows: Sequence[dict[str, Any]], plain: dict[str, Any], quality: str, base: str, share: float
) -> tuple[dict[str, Any], bool]:
    """The fastest row whose quality is within the bound, and whether there is one.

    If there is none, the row with the best quality is returned.

    Args:
      rows: the grid.
      plain: plain decoding's row.
      quality: the key of the quality, ``perplexity``, ``perplexity_of_rows`` or ``rouge_l``.
      base: what the bound is relative to: ``plain`` decoding or the ``best`` row.
      share: how much worse than that the quality may be, e.g. 0.05 for 5 %.

    Raises:
      OptionError: the quality needs references that the prompts do not have.
    """
    if plain[quality] is None:
        raise OptionError(f"--quality {quality} needs prompts with references")
    sign = -1 if quality in LOWER_IS_BETTER else 1  # sign · quality: higher is better

    # Ties go to the cheaper row.
    best = max(rows, key=lambda row: (sign * row[quality], -row["cost"]))
    against = plain if base == "plain" else best
    threshold = sign * against[quality] * (1 - sign * share)
    within = [row for row in rows if sign * row[quality] >= threshold]
    if not within:
        return best, False
    return min(within, key=lambda row: (row["cost"], -sign * row[quality])), True


def grid_points(args: argparse.Namespace) -> list[dict[str, str]]:
    """The points of ``--grid``, or of the method's default grid."""
    grid = args.grid or GRIDS[args.method]
    check_grid("--grid", list(grid.values()))
    points = itertools.product(*grid.values())
    return [dict(zip(grid, values, strict=True)) for values in points]
