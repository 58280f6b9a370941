"""Tune CDSL's thresholds by the paper's protocol (Nakshatri et al. 2025, appendix C).

All points of a grid are measured on the validation task. Of the fastest ones, the point with the
best satisfaction is chosen, and compared with other methods on the test task. Two more parts of the
paper are measured on the validation task: speculative decoding without a reward (Tables 7 and 8),
and the curves of one option at a time (Figures 2 and 7 to 11).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.cli import check_grid, check_results, make_directory
from infer.llama_guard import NAME as LLAMA_GUARD
from infer.llama_guard import Guard, GuardReward
from infer.loading import load_models, saying_rewards, use_compilation_cache
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
from infer.tune.measured_rows import BEGIN, MeasuredRows
from infer.tune.ratio import ratio_speculative
from infer.tune.report import SOFT, draw_methods, draw_thresholds, markdown
from infer.tune.tasks import read_task, sources, stops
from specjax._util.errors import OptionError
from specjax._util.files import locked, write_text
from specjax.core.sampling import Sampling
from specjax.registry import method
from specjax.rewards import PRODUCT, Combined, combine
from specjax.runtime.generate import num_slots
from specjax.search.cdsl import HARD, RATIO

FASTEST = 10  # how many of the fastest points compete by satisfaction
CDLH_OPTIONS = ("k", "d", "combine")  # those of CDSL's options that CDLH has, too
OVERLAID = (HARD, RATIO)  # the values of accept that the curves compare
Row = dict[str, Any]
Point = dict[str, Any]  # options of CDSL, by name


def tune(args: argparse.Namespace) -> int:
    """Tunes, compares if there is a test task, and writes the report; returns the exit code.

    Raises:
      SpecjaxError: an option, a reward, a model, a line of a task or ``--out`` cannot be used.
    """
    directory = make_directory(args.out)
    with locked(directory, "--out"), saying_rewards("infer.tune"):
        check_results(directory / "grid.jsonl", BEGIN)
        return _tune(args, directory)


def _tune(args: argparse.Namespace, directory: Path) -> int:
    use_compilation_cache()
    options = dict(args.set)
    for point in [*grid_points(args), *curve_points(args, {})]:
        method("cdsl").resolve(options | point)  # wrong options are reported before models load
    measures = make_measures(args.measure)
    validation, test = _settings(args)
    rows = MeasuredRows(directory / "grid.jsonl", args, validation, test)
    job = TuneJob(args, rows, measures)

    # First what may refuse this pair of models.
    speculative = measure_speculative(job, validation)
    cdlh, grid = measure_grid(job, validation)
    best = choose(grid, args.select or SOFT)
    chosen = {name: best["options"][name] for name in grid_points(args)[0]}
    base = cdlh[chosen.get("d")]
    report = {
        "job": vars(args),
        "c": validation.c,
        "measures": [part.name for part in measures.parts] if measures else [],
        "speculative": speculative,
        "grid": grid,
        "best": best,
        "cdlh": base,
        "curves": measure_curves(job, validation, base, chosen),
    }
    if test:
        report["test"] = compare(job, test, options | chosen)

    write_text(directory / "report.json", json.dumps(report, indent=1))
    write_text(directory / "report.md", markdown(report))
    draw_thresholds(report, directory / "thresholds.png")
    if test:
        draw_methods(report, directory / "methods.png")
    print(markdown(report))
    return 0


@dataclasses.dataclass
class TuneJob:
    """The arguments, the rows measured so far, and the rewards of ``--measure``."""

    args: argparse.Namespace
    rows: MeasuredRows
    measures: Combined | None
    # Options of CDSL whose programs are compiled. Thresholds never recompile.
    compiled: set[str] = dataclasses.field(default_factory=set)

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``--set``."""
        return dict(self.args.set)

    def cdsl(self, setting: TuneSetting, point: Point) -> Row:
        """CDSL's row at a point of the validation task."""
        options = self.options | point
        program = json.dumps({k: v for k, v in options.items() if k not in ("a_t", "r_t")})

        def measure() -> Row:
            is_first = program not in self.compiled
            self.compiled.add(program)
            return measure_candidate(setting, Candidate("CDSL", "cdsl", options), warm=is_first)

        return self.rows.get("cdsl", point, measure)

    def measured(self, rows: Sequence[Row], setting: TuneSetting) -> list[Row]:
        """The rows with the figures of ``--measure``, if there are any."""
        if self.measures is None:
            return list(rows)
        return with_measures(rows, setting.prompts, self.measures, setting.target.tokenizer)


def make_measures(names: Sequence[str]) -> Combined | None:
    """The rewards of ``--measure``; None if there are none.

    Raises:
      OptionError: an unknown name, or an argument or a model that it cannot use.
    """
    if not names:
        return None
    parts = []
    for text in names:
        name, _, directory = text.partition(":")
        if name != LLAMA_GUARD:
            parts.append(text)
            continue
        if not directory:
            raise OptionError("--measure llama-guard: expected a directory, as in llama-guard:DIR")
        parts.append(GuardReward(Guard(directory, "--measure llama-guard")))
    return combine(parts)


def measure_speculative(job: TuneJob, validation: TuneSetting) -> list[Row]:
    """Target and draft alone, and speculative decoding with both kinds of acceptance.

    The paper's hard rejection is greedy speculative decoding. Its ratio acceptance tests greedy
    draft tokens against unwarped p and q. The last row draws them, as that test asks for.
    """
    gamma = job.args.gamma
    options = {"gamma": gamma}
    ratio = ratio_speculative(gamma)
    unwarped = Sampling(1.0)
    candidates = [
        Candidate("target, greedy", "autoregressive"),
        Candidate("draft, greedy", "autoregressive", by_draft=True),
        Candidate("speculative, hard", "speculative", options),
        Candidate("speculative, ratio", "ratio", sampling=unwarped, composed=ratio),
        Candidate("speculative, ratio of sampled drafts", "speculative", options, unwarped),
    ]
    table = []
    for candidate in candidates:
        point = {"name": candidate.name, "gamma": gamma}
        # Its table has calls and no times.
        measure = _measuring(validation, candidate, warm=False)
        table.append(job.rows.get("speculative", point, measure))
    return job.measured(table, validation)


def measure_grid(job: TuneJob, validation: TuneSetting) -> tuple[dict[int | None, Row], list[Row]]:
    """CDLH's row by d, and the rows of the grid with their speedups over CDLH of the same d.

    Without ``--d`` there is one d, under the key None.
    """
    bases = {}
    grid = []
    for d in job.args.d or (None,):
        options = job.options if d is None else job.options | {"d": d}
        cdlh = Candidate("CDLH", "cdlh", _options_of_cdlh(options))
        base = job.rows.get("cdlh", {"options": options}, _measuring(validation, cdlh))
        points = [point for point in grid_points(job.args) if point.get("d") == d]
        rows = [job.cdsl(validation, point) for point in points]
        bases[d], *with_speed = with_speedups([base, *rows], base)
        grid += with_speed
    if job.args.select:
        grid = job.measured(grid, validation)
    return bases, grid


def measure_curves(
    job: TuneJob, validation: TuneSetting, base: Row, chosen: Point
) -> dict[str, list[Row]]:
    """The rows of the figures, by ``accept``: one option varies, the others stay at ``--at``."""
    curves = {}
    own = method("cdsl").resolve(job.options)["accept"]
    for accept in OVERLAID:
        also = {} if accept == own else {"accept": accept}
        rows = [job.cdsl(validation, point | also) for point in curve_points(job.args, chosen)]
        _, *rows = with_speedups([base, *rows], base)
        curves[accept] = job.measured(rows, validation) if job.args.select else rows
    return curves


def choose(rows: Sequence[Row], key: str = SOFT) -> Row:
    """The row with the best satisfaction among the fastest.

    The figure ``key`` decides, by default the share of all constraints. Then the share of rows that
    meet all of theirs decides, then speed.
    """
    fastest = sorted(rows, key=lambda row: row["cost"])[:FASTEST]
    return max(fastest, key=lambda row: (row[key], row["hard"], -row["cost"]))


def compare(job: TuneJob, test: TuneSetting, tuned: dict[str, Any]) -> list[Row]:
    """The test table: greedy, beam, nucleus and the three lookahead methods."""
    lookahead = _options_of_cdlh(tuned)
    candidates = [
        Candidate("greedy", "autoregressive"),
        Candidate("beam", "beam", {"beams": job.args.beams}),
        *(
            Candidate(f"nucleus, {p:g}", "autoregressive", sampling=Sampling(1.0, top_p=p))
            for p in job.args.top_p
        ),
        Candidate("CDLH", "cdlh", lookahead),
        Candidate("CDLH-appx", "cdlh-appx", lookahead),
        Candidate("CDSL", "cdsl", tuned),
    ]
    table = []
    for candidate in candidates:
        point = {"name": candidate.name, "options": dict(candidate.options)}
        table.append(job.rows.get("test", point, _measuring(test, candidate)))
    table = with_speedups(table, next(row for row in table if row["name"] == "CDLH"))
    return job.measured(table, test)


def grid_points(args: argparse.Namespace) -> list[Point]:
    """The grid, with d and b outermost: each of them is compiled anew, thresholds never are."""
    check_grid("--d, --b, --a-t and --r-t", [args.d or (None,), args.b, args.a_t, args.r_t])
    points = []
    for d, b, a_t, r_t in itertools.product(args.d or (None,), args.b, args.a_t, args.r_t):
        point = {"a_t": a_t, "r_t": r_t, "b": b}
        points.append(point if d is None else point | {"d": d})
    return points


def curve_points(args: argparse.Namespace, chosen: Point) -> list[Point]:
    """The points of the figures, each once: one option at its values, the others at ``--at``.

    ``chosen`` has the d of a grid with several; the figures are drawn at that d.
    """
    fixed = dict(args.at)
    if "d" in chosen:
        fixed["d"] = chosen["d"]
    points = []
    for option in GRID:
        for value in sorted({*getattr(args, option), args.at[option]}):
            point = fixed | {option: value}
            if point not in points:
                points.append(point)
    return points


def _measuring(setting: TuneSetting, candidate: Candidate, warm: bool = True):
    """A function that measures the candidate when it is called."""
    return lambda: measure_candidate(setting, candidate, warm)


def _options_of_cdlh(options: dict[str, Any]) -> dict[str, Any]:
    """Those of CDSL's options that CDLH has, too."""
    return {name: value for name, value in options.items() if name in CDLH_OPTIONS}


def _settings(args: argparse.Namespace) -> tuple[TuneSetting, TuneSetting | None]:
    """What the candidates share on the validation task, and on the test task if there is one."""
    reward = combine(args.reward or ["lexical"], dict(args.set).get("combine") == PRODUCT)
    target, draft = load_models(args, want_draft=True, mesh=args.mesh)
    validation_source, test_source = sources(args)
    # Both are read before anything is timed, so that bad lines are reported at once.
    validation = read_task(
        args.validation, "FILE", target, args.chat, reward.parts, validation_source
    )
    test = None
    if args.test:
        test = read_task(args.test, "--test", target, args.chat, reward.parts, test_source)
    _, c = costs(target, draft, (1,))

    def setting(prompts: Sequence[Prompt], batch_size: int) -> TuneSetting:
        slots = num_slots(target, batch_size, batch_size)
        budget = args.max_new_tokens
        stop = stops(args, prompts)
        return TuneSetting(target, draft, reward, prompts, budget, slots, args.seed, stop, c)

    on_test = setting(test, args.test_batch_size) if test else None
    return setting(validation, args.batch_size), on_test
