"""The protocol: the grid on the validation task, the best point, the comparison on the test."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infer.cli import make_directory
from infer.datasets.table import Source
from infer.loading import load_models, use_compilation_cache
from infer.prompts import Prompt, PromptEncoder, read_prompts, stops_of
from infer.timing import costs
from infer.tune.commands import GRID
from infer.tune.contenders import (
    Contender,
    TuneSetting,
    run_contender,
    with_measures,
    with_speedups,
)
from infer.tune.report import draw_thresholds, markdown
from specjax._util.errors import OptionError
from specjax._util.files import append_line, locked, parse_json, write_text
from specjax._util.program import say
from specjax.core.warp import Sampling
from specjax.lm import LM
from specjax.registry import method
from specjax.rewards import PRODUCT, Reward, combine

FASTEST = 10  # of these the best satisfaction wins


def tune(args: argparse.Namespace) -> int:
    """Tunes, compares where there is a test task, and writes the report.

    Raises:
      SpecjaxError: an option, a reward, a model, a line of a task or ``--out`` cannot be used.
    """
    home = make_directory(args.out)
    with locked(home, "--out"):
        return _tune(args, home)


def _tune(args: argparse.Namespace, home: Path) -> int:
    use_compilation_cache()
    options = dict(args.set)
    for point in grid_points(args):
        method("cdsl").resolve(options | point)  # what cannot run is said before models load
    validation, test = _settings(args)
    rows = MeasuredRows(home / "grid.jsonl", args)
    base = Contender("CDLH", "cdlh", _shared(options))
    base_row = rows.get("cdlh", {"options": options}, lambda: run_contender(validation, base))
    grid = []
    for point in grid_points(args):
        # Thresholds never recompile: the first point of each b pays for its program.
        first = (point["a_t"], point["r_t"]) == (args.a_t[0], args.r_t[0])
        one = Contender("CDSL", "cdsl", options | point)
        grid.append(rows.get("cdsl", point, lambda: run_contender(validation, one, warm=first)))
    base_row, *grid = with_speedups([base_row, *grid], base_row)
    best = choose(grid)
    report = {"job": vars(args), "c": validation.c, "grid": grid, "best": best, "cdlh": base_row}
    if test:
        tuned = options | {name: best["options"][name] for name in GRID}
        report["test"] = compare(args, rows, test, tuned)
    write_text(home / "report.json", json.dumps(report, indent=1))
    write_text(home / "report.md", markdown(report))
    draw_thresholds(report, home / "thresholds.png")
    print(markdown(report))
    return 0


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best satisfaction among the fastest, the share of all constraints before that of rows
    with all of theirs; the faster one on ties."""
    fastest = sorted(rows, key=lambda row: row["cost"])[:FASTEST]
    return max(fastest, key=lambda row: (row["soft_of_constraints"], row["hard"], -row["cost"]))


def compare(
    args: argparse.Namespace, rows: MeasuredRows, test: TuneSetting, tuned: dict[str, Any]
) -> list[dict[str, Any]]:
    """The test table: greedy, beam, nucleus and the three lookahead methods."""
    shared = _shared(tuned)
    contenders = [
        Contender("greedy", "autoregressive"),
        Contender("beam", "beam", {"beams": args.beams}),
        *(
            Contender(f"nucleus, {p:g}", "autoregressive", sampling=Sampling(1.0, top_p=p))
            for p in args.top_p
        ),
        Contender("CDLH", "cdlh", shared),
        Contender("CDLH-appx", "cdlh-appx", shared),
        Contender("CDSL", "cdsl", tuned),
    ]
    table = []
    for one in contenders:
        point = {"name": one.name, "options": dict(one.options)}
        table.append(rows.get("test", point, lambda: run_contender(test, one)))
    table = with_speedups(table, next(row for row in table if row["name"] == "CDLH"))
    if not args.measure:
        return table
    return with_measures(table, test.prompts, combine(args.measure), test.target.tokenizer)


def grid_points(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The grid; b is static, so its values come outermost: thresholds never recompile."""
    grid = itertools.product(args.b, args.a_t, args.r_t)
    return [{"a_t": a_t, "r_t": r_t, "b": b} for b, a_t, r_t in grid]


def _shared(options: dict[str, Any]) -> dict[str, Any]:
    """The options that CDLH has, too."""
    return {name: value for name, value in options.items() if name in ("k", "d", "combine")}


def _settings(args: argparse.Namespace) -> tuple[TuneSetting, TuneSetting | None]:
    """What the contenders on the validation task share, and those on the test task."""
    reward = combine(args.reward or ["lexical"], dict(args.set).get("combine") == PRODUCT)
    target, draft = load_models(args, want_draft=True)
    first, second = sources(args)
    validation = read_task(args.validation, target, args.chat, reward.parts, first)
    test = read_task(args.test, target, args.chat, reward.parts, second) if args.test else None
    c = costs(target, draft, (1,))[1]

    def setting(prompts: Sequence[Prompt], batch_size: int) -> TuneSetting:
        budget = args.max_new_tokens
        stop = stops(args, prompts)
        return TuneSetting(target, draft, reward, prompts, budget, batch_size, args.seed, stop, c)

    on_test = setting(test, args.test_batch_size) if test else None
    return setting(validation, args.batch_size), on_test


def sources(args: argparse.Namespace) -> tuple[Source | None, Source | None]:
    """What to read of the dataset for validation and test; of one file disjoint samples."""
    if not args.dataset:
        return None, None
    shared = args.test and os.path.realpath(args.test) == os.path.realpath(args.validation)
    skip = args.sample or 0 if shared else 0
    first = Source(args.dataset, args.sample, args.seed)
    return first, Source(args.dataset, args.test_sample, args.seed, skip)


def stops(args: argparse.Namespace, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """What ends a completion: ``--stop``, or else the dataset's own."""
    own = stops_of(prompt.entry for prompt in prompts) if args.dataset else ()
    return tuple(args.stop) or own


def read_task(
    path: str,
    target: LM,
    chat: bool,
    rewards: Sequence[Reward] | None,
    source: Source | None = None,
) -> list[Prompt]:
    """The prompts of a task that these rewards can score.

    Raises:
      OptionError: it cannot be read, or a line of it is bad.
    """
    prompts, bad = read_prompts(path, PromptEncoder(target, chat=chat), rewards, source)
    if bad:
        raise OptionError(f"{path} line {bad[0].number}: {bad[0].reason}")
    return prompts


class MeasuredRows:
    """Rows in a file of JSON lines: each is measured once, and a job started again goes on."""

    def __init__(self, path: Path, args: argparse.Namespace):
        self._path, self._args, self._rows = path, args, {}
        # Bytes: text would also split at U+2028 and the like, which JSON allows in strings.
        data = path.read_bytes() if path.exists() else b""
        self._torn = bool(data) and not data.endswith(b"\n")
        for line in data.splitlines():
            try:
                entry = parse_json(line)
                if "each" in entry["row"]:  # else of a version that kept no spread
                    self._rows[json.dumps(entry["key"])] = entry["row"]
            except (ValueError, KeyError, TypeError):
                continue  # the torn last line of a run that was killed

    def get(
        self, kind: str, point: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """A row, from the file where it is there already; else measured and appended."""
        key = {"kind": kind, "point": point, "job": self._job(kind)}
        known = self._rows.get(json.dumps(key))
        if known is not None:
            return known
        row = measure()
        append_line(self._path, "\n" * self._torn + json.dumps({"key": key, "row": row}))
        self._torn = False
        worth = next(name for name in ("soft_of_constraints", "perplexity") if name in row)
        said = f"{worth} {row[worth]:.3f}, P {row['cost']:.2f}"
        say(
            "infer.tune",
            f"{kind} {json.dumps(point)}: {said}, {row['tokens_per_second']:.0f} tokens/s",
        )
        return row

    def _job(self, kind: str) -> dict[str, Any]:
        """What a row of this kind depends on beside its point."""
        of_kind = ("test", "test_batch_size") if kind == "test" else ("validation", "batch_size")
        shared = ("target", "draft", "dtype", "reward", "set", "chat", "stop", "max_new_tokens")
        drawn = (
            "seed",
            "method",
            "dataset",
            "sample",
            "test_sample",
            "temperature",
            "top_k",
            "top_p",
        )
        return {name: getattr(self._args, name) for name in (*shared, *drawn, *of_kind)}
