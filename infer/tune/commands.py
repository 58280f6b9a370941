"""Tune a lossy method's options on a validation file, then compare it on a test file.

  python -m infer.code_task code
  python -m infer.tune code/validation.jsonl --test code/test.jsonl --out runs/cdsl
  python -m infer.tune prompts.jsonl --method mtad --out runs/mtad

mtad, mtjd, bild and mentored: of the grid, the fastest point whose quality, perplexity under the
target or ROUGE-L, is within --bound of plain decoding's, or of the best point's. Speed is the
modeled one, P.

cdsl (default): the protocol of Nakshatri et al. 2025, appendix C: a grid over a_t, r_t and b; of
the ten fastest points the one that satisfies best. Speed is the modeled one, which no noise of the
machine moves; wall clock stands beside it. Soft satisfaction is said twice: the mean over rows, and
the share of all constraints, which the paper counts and the choice follows. Started again with the
same arguments it goes on where it was. The output directory gets grid.jsonl, report.json, report.md
and, with the plots extra, thresholds.png: speedup and satisfaction against each threshold, as the
paper's Figure 2.

Exit codes: 0 done, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from infer.cli import (
    REPEATABLE,
    add_chat,
    add_dataset,
    add_models,
    add_stop,
    checked,
    seed,
    setting,
    some_text,
    sweep,
    temperature,
    top_p,
    whole,
)
from infer.config import add_config, parse_with_config
from specjax._util.program import Parser, run

NUCLEI = (0.9, 0.5)  # top-p of the paper's Table 1
GRID = {"a_t": (0.3, 0.6, 0.9), "r_t": (0.3, 0.5, 0.6, 0.9), "b": (0, 1, 2)}  # the paper's Table 2
# Of the other lossy methods: the paper's choices (MTAD, Table 13) and their neighbors.
GRIDS = {
    "mtad": {"tau": ("0", "0.1", "0.3", "0.5", "0.7", "0.9")},
    "mtjd": {"block": ("2", "3", "4", "5")},
    "bild": {"tau1": ("0.3", "0.6", "0.9"), "tau2": ("1", "2", "3")},
    "mentored": {"max_kl": ("0.01", "0.03", "0.1", "0.3", "1")},
}
QUALITIES = ("perplexity", "rouge_l")

bound = checked(
    lambda text: (text.partition(":")[0], float(text.partition(":")[2])),
    "plain:SHARE or best:SHARE, such as plain:0.05",
    lambda pair: pair[0] in ("plain", "best") and 0 <= pair[1] < 1,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code. Wrong arguments exit at once, with 2."""
    args = parse(argv)
    work = "tuning:tune" if args.method == "cdsl" else "lossy:tune"
    return run("infer.tune", f"infer.tune.{work}", args)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; such as do not go together end the program."""
    commands = parser()
    args = parse_with_config(commands, argv)
    args.grid = dict(args.grid)
    if args.method == "cdsl" and args.grid:
        commands.error("--grid is of the other methods: cdsl has --a-t, --r-t and --b")
    if args.test_sample and not args.test:
        commands.error("--test-sample is of --test, which is not given")
    if (args.sample or args.test_sample) and not args.dataset:
        commands.error("--sample and --test-sample are of a --dataset")
    if args.method != "cdsl" and len(args.top_p) > 1 and args.top_p != NUCLEI:
        commands.error(f"--top-p: one number for --method {args.method}")
    return args


def parser() -> Parser:
    """The command line of ``infer.tune``."""
    out = Parser("infer.tune", __doc__)
    add_config(out)
    add_models(out)
    said = "prompts; of cdsl a task, see infer.run --task"
    out.add_argument("validation", metavar="FILE", help=said)
    out.add_argument("--test", metavar="FILE", help="compare the methods on this file")
    add_dataset(out)
    said = "of the dataset's prompts that many, drawn by --seed"
    out.add_argument("--sample", type=whole(1), metavar="N", help=said)
    said = "of --test; from the same file others than those of --sample"
    out.add_argument("--test-sample", type=whole(1), metavar="N", help=said)
    out.add_argument("--out", required=True, metavar="DIR")
    names = ["cdsl", *GRIDS]
    out.add_argument(
        "--method", choices=names, default="cdsl", metavar="NAME", help=", ".join(names)
    )
    said = "of a method but cdsl; repeatable (default: the options that its paper tunes)"
    shape = {"metavar": "OPTION=A,B,…"} | REPEATABLE
    out.add_argument("--grid", type=sweep, help=said, **shape)
    said = f"what the bound is on: {' or '.join(QUALITIES)}"
    out.add_argument(
        "--quality", choices=QUALITIES, default="perplexity", metavar="NAME", help=said
    )
    said = "how much worse than plain decoding, or the best point, a point may be (default: 5 %% "
    said += "of plain decoding)"
    out.add_argument("--bound", type=bound, default="plain:0.05", metavar="WHAT:SHARE", help=said)
    said = "of the methods but cdsl, whose --top-p is one number (default: %(default)g)"
    out.add_argument("--temperature", type=temperature, default=1.0, metavar="T", help=said)
    out.add_argument("--top-k", type=whole(0), default=20, metavar="K", help=said)
    rewards = {"type": some_text, "metavar": "NAME[:ARG]"} | REPEATABLE
    out.add_argument("--reward", help="default: lexical; repeatable", **rewards)
    said = "a reward on text that guides nothing and is measured on the test task, such as python; "
    out.add_argument("--measure", help=said + "repeatable", **rewards)
    for name, values in GRID.items():
        kind, said = numbers(type(values[0])), f"default: {','.join(map(str, values))}"
        flag = "--" + name.replace("_", "-")
        out.add_argument(flag, type=kind, default=values, metavar="A,B,…", help=said)
    said = "k, d, accept, keep_verified or combine; repeatable"
    out.add_argument("--set", type=setting, metavar="OPTION=VALUE", help=said, **REPEATABLE)
    said = "of nucleus sampling on the test task, default: 0.9,0.5"
    out.add_argument("--top-p", type=numbers(top_p), default=NUCLEI, metavar="P,P,…", help=said)
    out.add_argument("--beams", type=whole(1, 64), default=4, metavar="W")
    add_chat(out)
    add_stop(out)
    out.add_argument("--max-new-tokens", type=whole(1), default=64, metavar="N")
    out.add_argument("--batch-size", type=whole(1), default=8, metavar="B", help="of the grid")
    out.add_argument("--test-batch-size", type=whole(1), default=1, metavar="B")
    out.add_argument("--seed", type=seed, default=0, metavar="S")
    return out


def numbers(kind: type) -> Callable[[str], tuple]:
    """An argparse type: numbers with commas between them."""
    wanted = "whole numbers" if kind is int else "numbers"
    return checked(lambda text: tuple(map(kind, text.split(","))), f"{wanted} such as 0,1")
