"""Measures and draws the pages' figures and the overview: python docs/tools/make_figures.py

Names (`gamma tau overview`) select some of the runs. `--draw` measures nothing and draws the
numbers in docs/figures. Every run is one of infer.bench on the embedded pair.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax

from infer.bench import commands as bench
from infer.reporting import fill
from infer.uncertainty import SPREAD_NOTE
from specjax._util.files import markdown_table, write_text
from specjax._util.platform import CPU_KERNELS_VARIABLE
from specjax.models.cpu_kernels import narrow_product
from specjax.registry import METHODS, MethodSpec

FIGURES, PAGES = (Path(__file__).parents[1] / name for name in ("figures", "pages"))
OVERVIEW = PAGES / "overview.md"
COMMON = ("--num-prompts", "40", "--repeats", "3", "--max-new-tokens", "32")
# Methods whose own draft lengths would follow the clock, and the length that they have here.
CLOCKED, LENGTH = ("lookup", "suffix"), 10
PLAIN, AT_ONCE = "autoregressive", 4  # methods of the overview in one run
KEPT = (
    "method",
    "mode",
    "options",
    "speedup",
    "predicted_speedup",
    "acceptance_rate",
    "block_efficiency",
    "tokens_per_target_call",
    "perplexity",
    "diversity",
    "kl",
    "accepted_hist",
    "pm",
)
QUALITIES = {"perplexity": "perplexity under the target", "kl": "measured KL(p‖π), nats per token"}
BLUE, RED, GREY = "#4c78a8", "#e45756", "#888888"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A run of infer.bench over the values of ``option``, and the figure's title.

    ``page`` gets the table of the numbers. ``quality`` is what a lossy rule may worsen: a key of
    the report's rows. Speed is drawn against it.
    """

    page: str
    option: str
    title: str
    argv: tuple[str, ...]
    quality: str = ""


def _sampled(methods: str, sweep: str, *more: str) -> tuple[str, ...]:
    return ("--sampled-only", "--methods", methods, "--sweep", sweep, *more)


SWEEPS = {
    "gamma": Sweep(
        "speculative", "gamma", "draft length γ", _sampled("speculative,block", "gamma=1,2,4,8")
    ),
    "chains": Sweep("spectr", "chains", "chains k", _sampled("spectr", "chains=1,2,4")),
    "branching": Sweep(
        "specinfer",
        "branching",
        "children per level",
        _sampled("specinfer", "branching=1,1,1;2,2,1;4,2,2"),
    ),
    "ngram": Sweep(
        "lookup",
        "ngram",
        "longest n-gram",
        ("--greedy-only", "--methods", "lookup", "--set", "gamma=10", "--sweep", "ngram=1,3"),
    ),
    "alpha": Sweep("contrastive", "alpha", "plausibility α", _sampled("scd", "alpha=0.1,0.5,0.8")),
    "max_kl": Sweep(
        "mentored",
        "max_kl",
        "bound D, nats",
        _sampled("speculative,mentored", "max_kl=0,0.1,0.3,1"),
        quality="kl",
    ),
    "tau1": Sweep(
        "bild",
        "tau1",
        "fallback threshold τ₁",
        _sampled("bild", "tau1=0.1,0.3,0.5,0.9"),
        quality="perplexity",
    ),
    "tau": Sweep(
        "mtad",
        "tau",
        "threshold τ",
        _sampled("speculative,mtad", "tau=0,0.1,0.3,0.9"),
        quality="perplexity",
    ),
    "width": Sweep(
        "mtad",
        "width",
        "beams W",
        _sampled("speculative,mtad", "width=1,2,4,8"),
        quality="perplexity",
    ),
    "beams": Sweep(
        "beam",
        "beams",
        "hypotheses W",
        ("--greedy-only", "--methods", "beam", "--sweep", "beams=1,2,4"),
        quality="perplexity",
    ),
    "k": Sweep(
        "sdsat",
        "k",
        "adaptive tokens k",
        (
            "--greedy-only",
            "--target",
            "demo-sdsat",
            "--methods",
            "sdsat,sdsat-single",
            "--sweep",
            "k=1,2,3,5,13",
        ),
    ),
}
POSITIONS = "sdsat_positions.svg"  # a second figure of the sweep over k


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and draws the named runs, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SWEEPS, "overview"], metavar="NAME")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args(argv)
    FIGURES.mkdir(exist_ok=True)
    for name in args.names or [*SWEEPS, "overview"]:
        if not args.draw:
            measure(name)
        if name == "overview":
            others = [read(sweep) for sweep in SWEEPS]
            write_text(OVERVIEW, overview_page(read("overview"), others))
        else:
            draw(SWEEPS[name], read(name), FIGURES / f"{name}.svg")
            write_table(name, read(name))
        if name == "k":
            draw_positions(read(name), FIGURES / POSITIONS)


def measure(name: str) -> None:
    """Runs infer.bench and stores the numbers that are drawn, with the command."""
    if name == "overview":
        command, reports = _overview()
    else:
        command = " ".join(["python -m infer.bench", *COMMON, *SWEEPS[name].argv])
        reports = [_bench(*SWEEPS[name].argv)]
    rows = {(row["method"], row["mode"], row["label"]): row for r in reports for row in r["rows"]}
    kept = [{key: row[key] for key in KEPT if key in row} for row in rows.values()]
    about = "machine", "prompts", "repeats", "seed", "max_new_tokens", "c"
    whole = {"command": command, "rows": kept} | {key: reports[0][key] for key in about}
    whole["cpu_kernels"] = narrow_product.problem() is None
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    write_text(FIGURES / f"{name}.json", text + "\n")


def _bench(*argv: str) -> dict[str, Any]:
    """The report of one run."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = bench.main([*COMMON, *argv, "--json"])
    if code:
        sys.exit(code)
    return json.loads(out.getvalue())


def _overview() -> tuple[str, list[dict[str, Any]]]:
    """All methods, a few at a time, each time with plain decoding.

    One process cannot hold the programs of all methods: a system limits its memory maps.
    """
    names, reports = [name for name in _comparable() if name != PLAIN], []
    for first in range(0, len(names), AT_ONCE):
        methods = [PLAIN, *names[first : first + AT_ONCE]]
        reports.append(_bench("--methods", ",".join(methods), *fixed_lengths(methods)))
        jax.clear_caches()
    command = " ".join(["python -m infer.bench", *COMMON, f"--methods {PLAIN},METHOD,…"])
    return command, reports


def fixed_lengths(methods: Sequence[str]) -> list[str]:
    """Arguments that fix draft lengths: infer.bench refuses those of a method not in the run."""
    argv = []
    for name in CLOCKED:
        if name in methods:
            argv += ["--set", f"{name}.gamma={LENGTH}"]
    return argv


def read(name: str) -> dict[str, Any]:
    """The numbers of an earlier run."""
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def _comparable() -> list[str]:
    """Methods that run on the embedded pair without a reward or a tuned target."""
    return [name for name, spec in METHODS.items() if not _needs(spec)]


def _needs(spec: MethodSpec) -> str:
    """What keeps a method from running on the embedded pair; empty: nothing."""
    if spec.needs_reward:
        return "need a reward"
    return "need a tuned target" if spec.drafter == "adaptive" else ""


# --- tables ----------------------------------------------------------------------------------

V5E = "on_v5e"  # modeled speed of a row of the sdsat table on a v5e
# Largest number of tokens of a pass → its cycles, relative to a pass of up to eight tokens. The
# compiler of a v5e models them for CodeLlama-7B's shape (`python docs/tools/measure_tpu.py
# autoregressive --layers 4 --batch 1 --target codellama-7b --topology v5e:2x2 --pass-width N`).
V5E_PASSES = {8: 1.0, 16: 1.01, 24: 1.03, 32: 1.03, 48: 1.04, 64: 1.06, 96: 1.14}
COLUMNS = (
    ("tokens per round", "block_efficiency", "{:.2f}"),
    ("acceptance λ", "acceptance_rate", "{:.2f}"),
    ("speed", "speedup", "{:.2f}"),
    ("predicted", "predicted_speedup", "{:.2f}"),
    ("7B on v5e, modeled", V5E, "{:.2f}"),
    ("KL(p‖π)", "kl", "{:.3f}"),
    ("perplexity", "perplexity", "{:.2f}"),
)


def write_table(name: str, report: dict[str, Any]) -> None:
    """Writes a sweep's numbers between its marks on its page.

    Raises:
      SystemExit: the page has no marks.
    """
    sweep, about = SWEEPS[name], "{prompts} held-out functions × {repeats} seeds, {max_new_tokens} "
    page = PAGES / f"{sweep.page}.md"
    mode = report["rows"][0]["mode"]
    drawn = "greedy" if mode == "greedy" else "temperature 0.8, top-p 0.9"
    said = about.format(**report) + f"new tokens each, {drawn}, batch 1, {cores(report)}. "
    said += "± as in the [overview](overview.md)"
    said += f" ([numbers](../figures/{name}.json))."
    if name == "k":
        predict_v5e(report["rows"])
    keys = [key for _, key, _ in COLUMNS if key not in ("kl", "perplexity") or key == sweep.quality]
    columns = [column for column in COLUMNS if column[1] in keys]
    heads, cells = fill(columns, report["rows"])
    firsts = [_named(sweep, row) for row in report["rows"]]
    table = markdown_table(
        ("method", sweep.title, *heads), [(*a, *b) for a, b in zip(firsts, cells, strict=True)]
    )
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ending, after = rest.partition(end)
    if not (mark and ending):
        sys.exit(f"{page}: no {begin.strip()} … {end} to put the table between")
    write_text(page, f"{before}{begin}{textwrap.fill(said, 100)}\n\n{table}{end}{after}")


def cores(report: dict[str, Any]) -> str:
    """How many cores a run had."""
    count = report["machine"]["cores"]
    return "one core" if count == 1 else f"{count} cores"


def predict_v5e(rows: list[dict[str, Any]]) -> None:
    """Adds the speed that each row would have if passes cost :data:`V5E_PASSES`.

    A round has two passes over k + 1 tokens, or one pass over (k + 1)² tokens.
    """
    for row in rows:
        if "k" not in row["options"]:
            continue
        one = row["options"]["k"] + 1
        passes = [one**2] if row["options"]["single"] else [one, one]
        costs = [min((c for n, c in V5E_PASSES.items() if n >= t), default=None) for t in passes]
        if None in costs:
            continue
        row[V5E] = row["block_efficiency"] / sum(costs)
        row["pm"][V5E] = row["pm"]["block_efficiency"] / sum(costs)


def _named(sweep: Sweep, row: dict[str, Any]) -> tuple[str, str]:
    """A row's method, and its value of the option if it has one."""
    value = row["options"].get(sweep.option, "")
    return f"`{row['method']}`", str(_value(value))


# --- drawing ---------------------------------------------------------------------------------


def svg_pyplot() -> Any:
    """matplotlib.pyplot, set up to draw the same SVG every time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "specjax",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    from matplotlib import pyplot

    return pyplot


def draw_positions(report: dict[str, Any], path: Path) -> None:
    """The share of rounds that accept the answers up to each adaptive token, one line per k."""
    plt = svg_pyplot()
    rows = _lines(SWEEPS["k"], report["rows"])["sdsat"]
    figure, axis = plt.subplots(figsize=(4.6, 3.1), layout="constrained")
    for i, row in enumerate(rows):
        hist = row["accepted_hist"]
        at_least = [sum(hist[n:]) / sum(hist) for n in range(1, len(hist))]
        axis.plot(
            range(1, len(hist)),
            at_least,
            "o-",
            ms=3,
            color=plt.cm.viridis(i / len(rows)),
            label=f"k = {row['options']['k']}",
        )
    axis.set(xlabel="adaptive token", ylabel="rounds that accept up to it", ylim=(0, 1))
    axis.legend(fontsize=7, frameon=False, ncols=2)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw(sweep: Sweep, report: dict[str, Any], path: Path) -> None:
    """Draws tokens per round and speed over the option; for lossy rules, over quality.

    Bars show the ± of the report.
    """
    plt = svg_pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.1), layout="constrained")
    for color, (method, rows) in zip(
        (BLUE, RED), _lines(sweep, report["rows"]).items(), strict=False
    ):
        x = [_value(row["options"][sweep.option]) for row in rows]
        speed, faint = (left, "^--") if sweep.quality else (right, "o-")
        for axis, style, key, said in (
            (left, "o-", "block_efficiency", "tokens per round"),
            (speed, faint, "speedup", "speed, measured"),
        ):
            y = [row[key] for row in rows]
            _bars(axis, x, y, style, color, yerr=_pm(rows, key), label=f"{method}: {said}")
        if sweep.quality:
            _against_quality(right, sweep, rows, color)
        else:
            _predicted(right, x, rows, color)
    _references(left, right, sweep, report["rows"])
    left.set(xlabel=sweep.title, ylabel="plain decoding = 1")
    right.set_xlabel(QUALITIES.get(sweep.quality, sweep.title))
    right.set_ylabel("tokens per round" if sweep.quality else "plain decoding = 1")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _lines(sweep: Sweep, rows: list[dict]) -> dict[str, list[dict]]:
    """The rows with the option, by method, sorted by the option's values."""
    lines: dict[str, list[dict]] = {}
    for row in rows:
        if sweep.option in row["options"]:
            lines.setdefault(row["method"], []).append(row)
    return lines


def _value(value: Any) -> Any:
    """An option's value as a point on its axis; trees become categories."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _predicted(axis: Any, x: list, rows: list[dict], color: str) -> None:
    known = [
        (at, row["predicted_speedup"])
        for at, row in zip(x, rows, strict=True)
        if row["predicted_speedup"]
    ]
    if known:
        axis.plot(*zip(*known, strict=True), ":", color=color, label="predicted")


def _against_quality(axis: Any, sweep: Sweep, rows: list[dict], color: str) -> None:
    """Tokens per round over the quality, each point with the option's value."""
    _points(axis, rows, sweep.quality, "o", color)
    for row in rows:
        point = row[sweep.quality], row["block_efficiency"]
        _name(axis, f"{row['options'][sweep.option]:g}", point, color)


def _points(axis: Any, rows: list[dict], quality: str, style: str, color: str) -> None:
    """Tokens per round over quality, with the ± of both."""
    x, y = ([row[key] for row in rows] for key in (quality, "block_efficiency"))
    errors = {"xerr": _pm(rows, quality), "yerr": _pm(rows, "block_efficiency")}
    _bars(axis, x, y, style, color, **errors)


def _bars(axis: Any, x: list, y: list, style: str, color: str, **more: Any) -> None:
    """A line or points with error bars."""
    axis.errorbar(x, y, fmt=style, color=color, ms=4, elinewidth=0.9, capsize=2, **more)


def _pm(rows: list[dict], key: str) -> list[float]:
    """Half of each row's 95 % interval of a figure, the ± of the report."""
    return [row["pm"].get(key, 0.0) for row in rows]


def _references(left: Any, right: Any, sweep: Sweep, rows: list[dict]) -> None:
    """Methods without the option: plain decoding, and speculative beside lossy rules."""
    (left if sweep.quality else right).axhline(1.0, color=GREY, linewidth=0.7)
    for row in rows:
        if sweep.option in row["options"]:
            continue
        rounds = row["block_efficiency"]
        if row["method"] != "autoregressive":
            said, half_width = f"{row['method']}: tokens per round", *_pm([row], "block_efficiency")
            left.axhline(rounds, color=GREY, ls=":", label=said)
            left.axhspan(rounds - half_width, rounds + half_width, color=GREY, alpha=0.2, lw=0)
        if sweep.quality == "perplexity":
            _points(right, [row], "perplexity", "x", GREY)
            _name(right, row["method"], (row["perplexity"], rounds), GREY)


def _name(axis: Any, text: str, point: tuple[float, float], color: str) -> None:
    axis.annotate(text, point, fontsize=7, color=color, textcoords="offset points", xytext=(4, 4))


# --- the overview ----------------------------------------------------------------------------

HEAD = """# All methods side by side

<!-- Written by docs/tools/make_figures.py from docs/figures/overview.json. -->

{measured}

Speed is the ratio to plain decoding of the same mode. Perplexity is that of the output under the
unwarped target. Sampled is temperature 0.8, top-p 0.9.

{pm}

{how}

```bash
{command}
```

{absent}
"""
MEASURED = (
    "The embedded pair decodes {prompts} held-out functions × {repeats} seeds, with "
    "{max_new_tokens} new tokens each. All runs have batch 1, float32 and default options{fixed}, "
    "on {cores} of {cpu}, with {products}."
)
HOW = (
    "`python docs/tools/make_figures.py overview` measures and writes this page. For four methods "
    "at a time it runs the following{settings}:"
)


SHOWN = tuple((key, key, "{:.2f}") for key in ("speedup", "block_efficiency", "perplexity"))


def overview_page(report: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """The table of methods: speed, tokens per round and perplexity, greedy and sampled.

    ``others`` are reports of other runs, which may have some of the same rows.
    """
    names = dict.fromkeys(row["method"] for row in report["rows"])
    head = overview_head(report, names, spread_of_runs([report, *others]))
    measured = {(row["method"], row["mode"]): row for row in report["rows"]}
    figures = "tokens/round", "perplexity"
    columns = "method", "lossless", "greedy: speed", *figures, "sampled: speed", *figures
    rows = []
    for name in names:
        cells = [f"`{name}`", "yes" if METHODS[name].lossless else "no"]
        for mode in ("greedy", "sampled"):
            row = measured[name, mode]
            row["speedup"] = row["speedup"] or 1.0  # plain decoding itself
            cells += fill(SHOWN, [row])[1][0]
        rows.append(cells)
    return head + "\n" + markdown_table(columns, rows)


def overview_head(report: dict[str, Any], names: Collection[str], spread: str) -> str:
    """What was measured and how, and which methods were not."""
    rows = [row for row in report["rows"] if row["method"] in CLOCKED]
    lengths = {row["method"]: row["options"]["gamma"] for row in rows}
    fixed = " and ".join(f"γ = {gamma} for `{name}`" for name, gamma in lengths.items())
    settings = " and ".join(
        f"`--set {name}.gamma={gamma}` beside `{name}`" for name, gamma in lengths.items()
    )
    measured = MEASURED.format(
        **report,
        cores=cores(report),
        cpu=report["machine"]["cpu"],
        fixed=fixed and f", but {fixed}",
        products=products(report),
    )
    how = HOW.format(settings=settings and f", with {settings}")
    return HEAD.format(
        measured=textwrap.fill(measured, 100),
        pm=textwrap.fill(f"{SPREAD_NOTE} {spread}", 100),
        how=textwrap.fill(how, 100),
        command=report["command"],
        absent=absent(names),
    )


def spread_of_runs(reports: Sequence[dict[str, Any]]) -> str:
    """How far apart sampled speculative's speeds are in runs under the first one's conditions.

    Empty if that is the only such run.
    """
    rows = [row | _conditions(report) for report in reports for row in report["rows"]]
    ours = next(row for row in rows if (row["method"], row["mode"]) == ("speculative", "sampled"))
    same = ("method", "mode", "options", *_conditions(reports[0]))
    speeds = [row["speedup"] for row in rows if all(row[key] == ours[key] for key in same)]
    if len(speeds) == 1:
        return ""
    return (
        f"Sampled `speculative` with γ = {ours['options']['gamma']} came to speeds from "
        f"{min(speeds):.2f} to {max(speeds):.2f} in {len(speeds)} runs for these pages."
    )


def _conditions(report: dict[str, Any]) -> dict[str, Any]:
    """What runs must have in common for their speeds to be compared."""
    about = "machine", "cpu_kernels", "prompts", "repeats", "seed", "max_new_tokens"
    return {key: report[key] for key in about}


def products(report: dict[str, Any]) -> str:
    """Whose products the run computed with."""
    if report["cpu_kernels"]:
        return "our CPU kernels"
    return f"XLA's products (`{CPU_KERNELS_VARIABLE}=0`)"


def absent(names: Collection[str]) -> str:
    """The methods that are not among ``names``, and why."""
    reasons: dict[str, list[str]] = {}
    for name, spec in METHODS.items():
        if name not in names:
            why = _needs(spec) or "not measured in this run"
            reasons.setdefault(why, []).append(f"`{name}`")
    said = "; ".join(f"{', '.join(found)} ({why})" for why, found in reasons.items())
    return textwrap.fill(f"Not in this table: {said}.", 100)


if __name__ == "__main__":
    main()
