"""Tune CDSL's thresholds on a validation task, then compare it on a test task.

  python -m infer.code_task code
  python -m infer.tune code/validation.jsonl --test code/test.jsonl --out runs/cdsl

The protocol of Nakshatri et al. 2025, appendix C: a grid over a_t, r_t and b; of the ten fastest
points the one that satisfies best. Speed is the modelled one, which no noise of the machine
moves; wall clock stands beside it. Started again with the same arguments it goes on where it
was. The output directory gets grid.jsonl, report.json, report.md and, with the plots extra,
thresholds.png: speedup and satisfaction against each threshold, as the paper's Figure 2.

Exit codes: 0 done, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infer.cli import (
    SEED_MAX,
    Parser,
    load_models,
    make_parser,
    setting,
    some_text,
    use_compilation_cache,
    whole,
)

FASTEST = 10  # of these the best satisfaction wins
GRID = {"a_t": (0.3, 0.6, 0.9), "r_t": (0.3, 0.5, 0.6, 0.9), "b": (0, 1, 2)}  # the paper's Table 2
COLUMNS = (
    ("method", "name", "{}"),
    ("soft", "soft", "{:.3f}"),
    ("hard", "hard", "{:.3f}"),
    ("target calls/token", "target_calls_per_token", "{:.2f}"),
    ("draft calls/token", "draft_calls_per_token", "{:.2f}"),
    ("P", "cost", "{:.2f}"),
    ("modelled speedup", "modelled_speedup", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("wall-clock speedup", "speedup", "{:.2f}"),
)


def parser() -> Parser:
    """The command line of ``infer.tune``."""
    out = make_parser("python -m infer.tune", __doc__)
    out.add_argument("validation", metavar="FILE.jsonl", help="a task, see infer.run --task")
    out.add_argument("--test", metavar="FILE.jsonl", help="compare the methods on this task")
    out.add_argument("--out", required=True, metavar="DIR")
    out.add_argument(
        "--reward",
        action="append",
        type=some_text,
        default=[],
        metavar="NAME[:ARG]",
        help="default: lexical; repeatable",
    )
    out.add_argument(
        "--measure",
        action="append",
        type=some_text,
        default=[],
        metavar="NAME[:ARG]",
        help="a reward on text that guides nothing and is "
        "measured on the test task, such as python; repeatable",
    )
    for name, values in GRID.items():
        out.add_argument(
            "--" + name.replace("_", "-"),
            type=numbers(int if name == "b" else float),
            default=values,
            metavar="A,B,…",
            help=f"default: {','.join(map(str, values))}",
        )
    out.add_argument(
        "--set",
        action="append",
        type=setting,
        default=[],
        metavar="OPTION=VALUE",
        help="k, d, accept, keep_verified or combine; repeatable",
    )
    out.add_argument("--beams", type=whole(1, 64), default=4, metavar="W")
    out.add_argument("--max-new-tokens", type=whole(1), default=64, metavar="N")
    out.add_argument("--batch-size", type=whole(1), default=8, metavar="B", help="of the grid")
    out.add_argument("--test-batch-size", type=whole(1), default=1, metavar="B")
    out.add_argument("--seed", type=whole(0, SEED_MAX), default=0, metavar="S")
    return out


def numbers(kind: type) -> Callable[[str], tuple]:
    """An argparse type: numbers with commas between them."""

    def parse(text: str) -> tuple:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            wanted = "whole numbers" if kind is int else "numbers"
            raise argparse.ArgumentTypeError(f"{text}: expected {wanted} such as 0,1") from None

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    args = parser().parse_args(argv)
    args.models, args.c = None, None
    from specjax.errors import SpecjaxError

    use_compilation_cache()
    try:
        return _run(args)
    except SpecjaxError as error:
        print(f"infer.tune: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    from infer.tune.contenders import Contender, add_speedups, run_contender
    from specjax.methods import method

    home = _directory(args.out)
    options = dict(args.set)
    for point in _points(args):
        method("cdsl").resolve(options | point)  # what cannot run is said before models load
    validation = _settings(args, args.validation, args.batch_size)
    base = _once(
        home,
        "cdlh",
        {"options": options},
        args,
        lambda: run_contender(validation, Contender("CDLH", "cdlh", _shared(options))),
    )
    rows = []
    for point in _points(args):
        # Thresholds never recompile: the first point of each b pays for its program.
        first = (point["a_t"], point["r_t"]) == (args.a_t[0], args.r_t[0])
        rows.append(
            _once(
                home,
                "cdsl",
                point,
                args,
                lambda: run_contender(
                    validation, Contender("CDSL", "cdsl", options | point), warm=first
                ),
            )
        )
    add_speedups([base, *rows], base)
    best = choose(rows)
    job = {name: value for name, value in vars(args).items() if name != "models"}
    report = {"job": job, "c": validation.c, "grid": rows, "best": best, "cdlh": base}
    if args.test:
        report["test"] = _compare(args, home, options | {n: best["options"][n] for n in GRID})
    (home / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (home / "report.md").write_text(markdown(report), encoding="utf-8")
    plot(report, home / "thresholds.png")
    print(markdown(report))
    return 0


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best satisfaction among the fastest, soft before hard; the faster one on ties."""
    fastest = sorted(rows, key=lambda row: row["cost"])[:FASTEST]
    return max(fastest, key=lambda row: (row["soft"], row["hard"], -row["cost"]))


def _compare(args, home: Path, tuned: dict[str, Any]) -> list[dict[str, Any]]:
    """The test table: greedy, beam, nucleus and the three lookahead methods."""
    from infer.tune.contenders import (
        NUCLEUS,
        Contender,
        add_measures,
        add_speedups,
        run_contender,
    )
    from specjax.rewards import combine

    test = _settings(args, args.test, args.test_batch_size)
    shared = _shared(tuned)
    contenders = [
        Contender("greedy", "autoregressive"),
        Contender("beam", "beam", {"beams": args.beams}),
        Contender("nucleus", "autoregressive", {}, NUCLEUS),
        Contender("CDLH", "cdlh", shared),
        Contender("CDLH-appx", "cdlh-appx", shared),
        Contender("CDSL", "cdsl", tuned),
    ]
    rows = [
        _once(
            home,
            "test",
            {"name": one.name, "options": dict(one.options)},
            args,
            lambda: run_contender(test, one),
        )
        for one in contenders
    ]
    add_speedups(rows, next(row for row in rows if row["name"] == "CDLH"))
    if args.measure:
        add_measures(rows, test.prompts, combine(args.measure), test.target.tokenizer)
    return rows


def _points(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The grid; b is static, so its values come outermost: thresholds never recompile."""
    grid = itertools.product(args.b, args.a_t, args.r_t)
    return [{"a_t": a_t, "r_t": r_t, "b": b} for b, a_t, r_t in grid]


def _shared(options: dict[str, Any]) -> dict[str, Any]:
    """The options that CDLH has, too."""
    return {name: value for name, value in options.items() if name in ("k", "d", "combine")}


def _settings(args: argparse.Namespace, path: str, batch_size: int):
    """The models, the reward and a task's prompts.

    Raises:
      OptionError: a line of the task is bad.
    """
    from infer.prompts import read_prompts
    from infer.timing import costs
    from infer.tune.contenders import Setting
    from specjax.errors import OptionError
    from specjax.rewards import combine

    combined = combine(args.reward or ["lexical"], dict(args.set).get("combine") == "product")
    if not args.models:
        args.models = load_models(args, True)
    target, draft = args.models
    prompts, bad = read_prompts(path, target, False, combined.parts)
    if bad:
        raise OptionError(f"{path} line {bad[0].number}: {bad[0].reason}")
    if args.c is None:
        args.c = costs(target, draft, (1,))[1]
    return Setting(
        target, draft, combined, prompts, args.max_new_tokens, batch_size, args.seed, args.c
    )


def _once(home: Path, kind: str, point: dict, args, run: Callable[[], dict]) -> dict[str, Any]:
    """A row, from the results file where it is there already; else measured and appended."""
    key = json.loads(json.dumps({"kind": kind, "point": point, "job": _said(args, kind)}))
    file = home / "grid.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the torn last line of a run that was killed
        if entry["key"] == key:
            return entry["row"]
    row = run()
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" * _torn(file) + json.dumps({"key": key, "row": row}) + "\n")
        out.flush()
        os.fsync(out.fileno())
    print(
        f"infer.tune: {kind} {json.dumps(point)}: soft {row['soft']:.3f}, P {row['cost']:.2f}, "
        f"{row['tokens_per_second']:.0f} tokens/s",
        file=sys.stderr,
    )
    return row


def _torn(file: Path) -> bool:
    data = file.read_bytes()
    return bool(data) and not data.endswith(b"\n")


def _said(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """What a row of this kind depends on beside its point."""
    of_kind = ("test", "test_batch_size") if kind == "test" else ("validation", "batch_size")
    names = ("target", "draft", "dtype", "reward", "set", "max_new_tokens", "seed", *of_kind)
    return {name: getattr(args, name) for name in names}


def _directory(path: str) -> Path:
    from specjax.errors import OptionError

    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "grid.jsonl").open("a").close()
    except OSError as error:
        raise OptionError(f"--out {path}: cannot be written ({error.strerror})") from None
    return Path(path)


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown: the chosen point, the test table, the grid."""
    best = report["best"]
    chosen = ", ".join(f"{n} = {best['options'][n]:g}" for n in GRID)
    lines = [f"c = {report['c']:.3f}. Chosen on the validation task: {chosen}.", ""]
    if "test" in report:
        names = [*report["job"]["measure"], "all"] if report["job"]["measure"] else []
        extra = [(name.partition(":")[0], name.partition(":")[0], "{:.3f}") for name in names]
        columns = [*COLUMNS[:3], *extra, *COLUMNS[3:]]
        lines += ["## Test", "", *_table(columns, report["test"]), ""]
    points = [row | row["options"] for row in report["grid"]]
    columns = [(name, name, "{:g}") for name in GRID] + list(COLUMNS[1:])
    return "\n".join([*lines, "## Grid", "", *_table(columns, points), ""])


def _table(columns, rows) -> list[str]:
    lines = [[title for title, *_ in columns], ["---"] * len(columns)]
    lines += [[form.format(row[key]) for _, key, form in columns] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def plot(report: dict[str, Any], path: Path) -> None:
    """Modelled speedup over CDLH and soft satisfaction against a_t and r_t, means over the grid.

    Nothing is drawn without the plots extra.
    """
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), constrained_layout=True)
    for left, name in zip(axes, ("a_t", "r_t"), strict=True):
        right = left.twinx()
        values = sorted({row["options"][name] for row in report["grid"]})
        rows = {v: [r for r in report["grid"] if r["options"][name] == v] for v in values}
        for axis, key, label, style in (
            (left, "modelled_speedup", "speedup over CDLH", "C0o-"),
            (right, "soft", "satisfaction", "C1s--"),
        ):
            means = [statistics.mean(row[key] for row in rows[value]) for value in values]
            axis.plot(values, means, style)
            axis.set_ylabel(label, color=style[:2])
        left.set_xlabel(name)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
