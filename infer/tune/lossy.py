"""mtad, mtjd, bild, mentored: the fastest point of a grid whose quality is within a bound."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.cli import make_directory
from infer.loading import load_models, use_compilation_cache
from infer.timing import costs
from infer.tune.commands import GRIDS
from infer.tune.contenders import Contender, TuneSetting, run_contender, with_speedups
from infer.tune.report import markdown_lossy
from infer.tune.tuning import MeasuredRows, read_task, sources, stops
from specjax._util.errors import OptionError
from specjax._util.files import locked, write_text
from specjax.core.warp import Sampling
from specjax.registry import METHODS, method

LOWER_IS_BETTER = ("perplexity",)


def tune(args: argparse.Namespace) -> int:
    """Tunes, compares where there is a test file, and writes the report.

    Raises:
      SpecjaxError: an option, a model, a file or ``--out`` cannot be used.
    """
    home = make_directory(args.out)
    with locked(home, "--out"):
        return _tune(args, home)


def _tune(args: argparse.Namespace, home: Path) -> int:
    use_compilation_cache()
    spec, own = method(args.method), dict(args.set)
    points = grid_points(args)
    for point in points:
        spec.resolve(own | point)  # what cannot run is said before models load
    sampling = Sampling(args.temperature, args.top_k, args.top_p[0])
    target, draft = load_models(args, want_draft=True)
    c = costs(target, draft, (1,))[1]

    def setting(path: str, source: Any, batch_size: int) -> TuneSetting:
        prompts = read_task(path, target, args.chat, None, source)
        ends, budget = stops(args, prompts), args.max_new_tokens
        return TuneSetting(target, draft, None, prompts, budget, batch_size, args.seed, ends, c)

    first, second = sources(args)
    validation = setting(args.validation, first, args.batch_size)
    rows = MeasuredRows(home / "grid.jsonl", args)

    def row(where: TuneSetting, kind: str, name: str, method: str, options: dict) -> dict[str, Any]:
        one = Contender(name, method, METHODS[method].resolve(options), sampling)
        point = {"name": name, "options": options}
        return rows.get(kind, point, lambda: run_contender(where, one))

    plain = row(validation, "plain", "plain", "autoregressive", {})
    grid = [row(validation, "grid", args.method, args.method, own | point) for point in points]
    plain, *grid = with_speedups([plain, *grid], plain)
    best, met = choose(grid, plain, args.quality, *args.bound)
    report = {
        "job": vars(args),
        "c": c,
        "options": list(points[0]),
        "plain": plain,
        "grid": grid,
        "best": best,
        "within_bound": met,
    }
    if args.test:
        test, tuned = setting(args.test, second, args.test_batch_size), best["options"]
        table = [
            row(test, "test", "plain", "autoregressive", {}),
            row(test, "test", f"{args.method}, defaults", args.method, own),
            row(test, "test", f"{args.method}, tuned", args.method, tuned),
        ]
        report["test"] = with_speedups(table, table[0])
    write_text(home / "report.json", json.dumps(report, indent=1))
    write_text(home / "report.md", markdown_lossy(report))
    print(markdown_lossy(report))
    return 0


def choose(
    rows: Sequence[dict[str, Any]], plain: dict[str, Any], quality: str, base: str, share: float
) -> tuple[dict[str, Any], bool]:
    """The fastest row whose ``quality`` is at most ``share`` worse than plain decoding's, or than
    the best row's; and whether there is one: where none is, the row of the best quality.

    Raises:
      OptionError: the prompts have no references that the quality needs.
    """
    if plain[quality] is None:
        raise OptionError(f"--quality {quality} needs prompts with references")
    sign = -1 if quality in LOWER_IS_BETTER else 1
    best = max(rows, key=lambda row: (sign * row[quality], -row["cost"]))
    against = plain if base == "plain" else best
    least = sign * against[quality] * (1 - sign * share)
    fitting = [row for row in rows if sign * row[quality] >= least]
    if not fitting:
        return best, False
    return min(fitting, key=lambda row: (row["cost"], -sign * row[quality])), True


def grid_points(args: argparse.Namespace) -> list[dict[str, str]]:
    """The grid, of ``--grid`` or the method's own."""
    grid = args.grid or GRIDS[args.method]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
