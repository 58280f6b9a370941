"""Measures SmolLM2 with its drafters: python docs/tools/make_smollm2.py TARGET PROMPTS

TARGET is what `python -m infer.convert smollm2 --out TARGET` writes, and PROMPTS what
`python docs/tools/write_prompts.py PROMPTS` writes. Each kind of prompts is two runs of
infer.bench: a greedy one, beside transformers and llama.cpp, and a sampled one. It measures the
runs that docs/figures/smollm2.json lacks; with --again all of them, and after a break those that
are not finished yet (in runs/smollm2.json).

It writes docs/figures/smollm2.json, the tables of docs/benchmarks.md and docs/figures/smollm2.svg.
With --draw it draws the numbers in docs/figures again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from make_figures import BLUE, FIGURES, GREY, KEPT, RED, svg_pyplot

from infer.reporting import fill
from specjax._util.files import markdown_table, write_text

BENCHMARKS = Path(__file__).parents[1] / "benchmarks.md"
UNFINISHED = Path(__file__).parents[2] / "runs" / "smollm2.json"  # what --again has measured so far
KINDS = ("chat", "code", "rewriting")
SAMPLED = ", sampled"  # after the kind, in the name of a run
RUNS = (*KINDS, *(kind + SAMPLED for kind in KINDS))
HEAD = "smollm2-head"
COMMON = ("--chat", "--num-prompts", "40", "--max-new-tokens", "48", "--repeats", "1", "--json")
DRAFTERS = ("--draft", HEAD, "--methods", "speculative,lookup,suffix")
DRAFTERS += ("--set", "speculative.gamma=2")
BESIDE_PEERS = ("--greedy-only", "--peer", "transformers,llama.cpp")
COLUMNS = (
    ("tokens per pass", "tokens_per_target_call", "{:.2f}"),
    ("λ", "acceptance_rate", "{:.2f}"),
    ("over plain decoding", "speedup", "{:.2f}"),
    ("predicted", "predicted_speedup", "{:.2f}"),
    ("over plain, sampled", "sampled_speedup", "{:.2f}"),
)
KEPT_OF_PEERS = ("name", "ratio", "pm", "mismatches")
COLORS = {HEAD: BLUE, "lookup": "#f2a13b", "suffix": RED}
PLAIN = "autoregressive"


def main() -> None:
    """Measures what is missing, and writes tables and picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("prompts", nargs="?", type=Path)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--again", action="store_true", help="measure all runs anew")
    measured.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.draw and args.prompts is None:
        parser.error("TARGET and PROMPTS are needed, or --draw")
    path = FIGURES / "smollm2.json"
    runs = read(path)
    done = read(UNFINISHED) if args.again else dict(runs)
    for name in () if args.draw else RUNS:
        if name not in done:
            done[name] = runs[name] = measure(args, name)
            write(path, runs)
            if args.again:
                write(UNFINISHED, done)
    if args.again:
        UNFINISHED.unlink(missing_ok=True)  # the next --again measures all runs
    write_tables(runs)
    draw(runs, FIGURES / "smollm2.svg")


def read(path: Path) -> dict[str, Any]:
    """The runs in a file; none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, runs: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(runs, indent=1, ensure_ascii=False) + "\n")


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The rows of a run, and the peers' rows of a greedy one."""
    kind, is_sampled, _ = name.partition(SAMPLED)
    prompts = ("--prompts", str(args.prompts / f"{kind}.jsonl"))
    mode = ("--sampled-only",) if is_sampled else BESIDE_PEERS
    report = bench(args, *prompts, *DRAFTERS, *mode)
    about = {key: report[key] for key in ("machine", "prompts", "max_new_tokens")}
    peers = [{key: row[key] for key in KEPT_OF_PEERS} for row in report["peers"]]
    return about | {"rows": [kept(row) for row in report["rows"]], "peers": peers}


def bench(args: argparse.Namespace, *argv: str) -> dict[str, Any]:
    """The report of one run, in a process of its own."""
    command = [sys.executable, "-m", "infer.bench", "--target", args.target, *COMMON, *argv]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row."""
    return {key: row[key] for key in KEPT if key in row}


def name_of(row: dict[str, Any]) -> str:
    """What drafts in a row."""
    return HEAD if row["method"] == "speculative" else row["method"]


# --- tables ----------------------------------------------------------------------------------


def write_tables(runs: dict[str, Any]) -> None:
    """Writes a table for each kind between the marks of docs/benchmarks.md."""
    parts = []
    for kind in KINDS:
        rows = rows_of_drafters(runs, kind)
        heads, cells = fill(COLUMNS, rows)
        names = [f"`{name_of(row)}`" for row in rows]
        body = [(name, *cell) for name, cell in zip(names, cells, strict=True)]
        parts.append(markdown_table((f"{kind}: drafts by", *heads), body))
    parts.append(table_of_peers({kind: runs[kind] for kind in KINDS}))
    begin, end = "<!-- smollm2 -->\n", "<!-- /smollm2 -->"
    before, mark, rest = BENCHMARKS.read_text(encoding="utf-8").partition(begin)
    _, ending, after = rest.partition(end)
    if not (mark and ending):
        sys.exit(f"{BENCHMARKS}: no {begin.strip()} … {end} to put the tables between")
    write_text(BENCHMARKS, before + begin + "\n".join(parts) + end + after)


def rows_of_drafters(runs: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The greedy rows of a kind, with the speed of the sampled ones."""
    sampled = runs.get(kind + SAMPLED, {"rows": []})
    speeds = {row["method"]: (row["speedup"], row["pm"]) for row in sampled["rows"]}
    rows = []
    for row in runs[kind]["rows"]:
        if row["method"] == PLAIN:
            continue
        speed, pm = speeds.get(row["method"], (None, {}))
        pm = row["pm"] | {"sampled_speedup": pm.get("speedup")}
        rows.append(row | {"sampled_speedup": speed, "pm": pm})
    return rows


def table_of_peers(kinds: dict[str, Any]) -> str:
    """Our plain decoding over other libraries' plain decoding."""
    said = {
        (row["name"], kind): f"{row['ratio']:.2f} ± {row['pm']['ratio']:.2f}"
        for kind, report in kinds.items()
        for row in report["peers"]
    }
    names = dict.fromkeys(name for name, _ in said)
    rows = [(f"{name}", *(said[name, kind] for kind in kinds)) for name in names]
    return markdown_table(("our plain decoding over", *kinds), rows)


# --- drawing ---------------------------------------------------------------------------------


def draw(runs: dict[str, Any], path: Path) -> None:
    """Greedy speed over plain decoding: a group of bars for each kind of prompts."""
    plt = svg_pyplot()
    figure, axis = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
    width = 0.8 / len(COLORS)
    for place, (name, color) in enumerate(COLORS.items()):
        at = [group - 0.4 + (place + 0.5) * width for group in range(len(KINDS))]
        rows = [row_of(runs[kind], name) for kind in KINDS]
        speeds = [row["speedup"] for row in rows]
        spread = [row["pm"]["speedup"] for row in rows]
        axis.bar(at, speeds, width * 0.9, yerr=spread, color=color, label=name, capsize=2)
        for x, row in zip(at, rows, strict=True):
            text = f"{row['speedup']:.2f}"
            axis.annotate(text, (x, 0.03), ha="center", fontsize=7, color="white")
    axis.axhline(1.0, color=GREY, linewidth=0.9)
    axis.set_xticks(range(len(KINDS)), KINDS)
    axis.set_ylabel("speed, plain decoding = 1")
    figure.legend(loc="outside lower center", ncols=len(COLORS), fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def row_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The row of a drafter."""
    (row,) = [row for row in report["rows"] if name_of(row) == name]
    return row


if __name__ == "__main__":
    main()
