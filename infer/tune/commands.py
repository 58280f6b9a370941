"""Tune a method's options on a validation file, then compare it on a test file.

  python -m infer.code_task code
  python -m infer.tune code/validation.jsonl --test code/test.jsonl --out runs/cdsl
  python -m infer.tune prompts.jsonl --method mtad --out runs/mtad

mtad, mtjd, bild, mentored, speculative, spectr and specinfer: of the grid, the fastest point whose
quality is within --bound of plain decoding's or of the best point's. Quality is perplexity under
the target, over all tokens or as the mean of the texts' perplexities, or ROUGE-L. Speed is the
modeled one, P. The last three methods are lossless: their quality differs only by chance.

cdsl (default): the protocol of Nakshatri et al. 2025, appendix C. Of a grid over a_t, r_t and b, it
takes the ten fastest points, and chooses the one that satisfies the constraints best. Speed is the
modeled one, which does not depend on the machine's noise; wall-clock speed is shown beside it. Soft
satisfaction has two figures: the mean over rows, and the share of all constraints. The paper counts
the latter, and the choice follows it; --select takes a figure of --measure instead. The report also
has speculative decoding without a reward (the paper's Tables 7 and 8).

Started again with the same arguments, files and models, it continues where it stopped. --out gets
grid.jsonl, report.json and report.md. For cdsl and with the plots extra it also gets
thresholds.png: speedup and satisfaction against r_t, a_t and b, with hard and ratio acceptance, as
in the paper's Figure 2. With --test it gets methods.png, too: speedup against satisfaction, by
method.

Exit codes: 0 done, 1 the system failed, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from infer.cli import (
    REPEATABLE,
    add_chat,
    add_dataset,
    add_devices,
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

NUCLEI = (0.9, 0.5)  # the top-p of the paper's Table 1
# CDSL's grid, from the paper's Table 2. A draft is kept if at least the share a_t of it is accepted
# and its reward is at least r_t. Below a_t, up to b tokens of the target are appended to it.
GRID = {"a_t": (0.3, 0.6, 0.9), "r_t": (0.3, 0.5, 0.6, 0.9), "b": (0, 1, 2)}
# Where the paper's figures hold the options that they do not vary (Figures 2, 7 and 8).
CENTER = {"a_t": 0.3, "r_t": 0.3, "b": 0}
# Grids of the other methods: the paper's choices (MTAD, Table 13) and values near them.
GRIDS = {
    "mtad": {"tau": ("0", "0.1", "0.3", "0.5", "0.7", "0.9")},
    "mtjd": {"block": ("2", "3", "4", "5")},
    "bild": {"tau1": ("0.3", "0.6", "0.9"), "tau2": ("1", "2", "3")},
    "mentored": {"max_kl": ("0.01", "0.03", "0.1", "0.3", "1")},
    "speculative": {"gamma": ("2", "4", "6", "8")},
    "spectr": {"gamma": ("2", "4"), "chains": ("2", "4")},
    # m children of the root, and a chain after each: MTAD's m sequences of γ = 4 tokens.
    "specinfer": {"branching": ("2,1,1,1", "4,1,1,1")},
}
MTJD_WIDTH = 8  # its default
QUALITIES = ("perplexity", "perplexity_of_rows", "rouge_l")

bound = checked(
    lambda text: (text.partition(":")[0], float(text.partition(":")[2])),
    "plain:SHARE or best:SHARE, such as plain:0.05",
    lambda pair: pair[0] in ("plain", "best") and 0 <= pair[1] < 1,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code. Wrong arguments exit at once, with 2."""
    args = parse(argv)
    work = "cdsl:tune" if args.method == "cdsl" else "lossy:tune"
    return run("infer.tune", f"infer.tune.{work}", args)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ends the program if they contradict each other."""
    commands = parser()
    args = parse_with_config(commands, argv)
    args.grid = dict(args.grid)
    if args.method == "cdsl" and args.grid:
        commands.error("--grid is for the other methods: cdsl has --a-t, --r-t and --b")
    if args.test_sample and not args.test:
        commands.error("--test-sample needs --test FILE")
    if (args.sample or args.test_sample) and not args.dataset:
        commands.error("--sample and --test-sample need --dataset NAME")
    _set_width(args)
    _set_center(args, commands)
    _check_cdsl(args, commands)
    if args.method != "cdsl" and len(args.top_p) > 1 and args.top_p != NUCLEI:
        commands.error(f"--top-p: expected one number for --method {args.method}")
    return args


def _set_width(args: argparse.Namespace) -> None:
    """Gives mtjd as many beams as --top-k: blocks are drawn from the likeliest that these find."""
    is_drawn = args.temperature > 0 and args.top_k > MTJD_WIDTH
    if args.method == "mtjd" and is_drawn and "width" not in dict(args.set):
        args.set = [*args.set, ("width", str(args.top_k))]


def _set_center(args: argparse.Namespace, commands: Parser) -> None:
    """Turns ``--at`` into numbers, with the paper's for options that it does not name."""
    given = dict(args.at)
    args.at = dict(CENTER)
    for option, text in given.items():
        if option not in CENTER:
            commands.error(f"--at {option}: choose {', '.join(CENTER)}")
        try:
            args.at[option] = type(CENTER[option])(text)
        except ValueError:
            commands.error(f"--at {option}={text}: expected a number such as {CENTER[option]}")


def _check_cdsl(args: argparse.Namespace, commands: Parser) -> None:
    """Ends the program if arguments about the choice of cdsl's point contradict each other."""
    if args.method != "cdsl":
        only = {"--d": args.d, "--select": args.select, "--measure": args.measure}
        for option, value in only.items():
            if value:
                commands.error(f"{option} is for cdsl, not for --method {args.method}")
    if args.d and "d" in dict(args.set):
        given = dict(args.set)["d"]
        commands.error(f"--set d={given} beside --d: give --d alone, such as --d {given}")
    names = [measure.partition(":")[0] for measure in args.measure]
    if args.select and args.select not in names:
        commands.error(
            f"--select {args.select}: expected the name of a --measure, such as "
            "--measure llama-guard:DIR --select llama-guard"
        )


def parser() -> Parser:
    """The command line of ``infer.tune``."""
    out = Parser("infer.tune", __doc__)
    add_config(out)
    add_models(out)
    add_devices(out)
    _add_files(out)
    _add_method(out)
    _add_cdsl(out)
    _add_decoding(out)
    return out


def _add_files(out: Parser) -> None:
    """What is read and written."""
    text = "prompts to tune on; for cdsl a task with constraints, see infer.run --task"
    out.add_argument("validation", metavar="FILE", help=text)
    out.add_argument("--test", metavar="FILE", help="compare the methods on this file")
    add_dataset(out)
    text = "use only N prompts of the dataset, drawn by --seed"
    out.add_argument("--sample", type=whole(1), metavar="N", help=text)
    text = "use only N prompts of --test; from the same file, none of those of --sample"
    out.add_argument("--test-sample", type=whole(1), metavar="N", help=text)
    out.add_argument("--out", required=True, metavar="DIR", help="write the grid and the report")


def _add_method(out: Parser) -> None:
    """What is tuned, and the bound on the quality of methods other than cdsl."""
    names = ["cdsl", *GRIDS]
    out.add_argument(
        "--method", choices=names, default="cdsl", metavar="NAME", help=", ".join(names)
    )
    out.add_argument(
        "--grid",
        type=sweep,
        metavar="OPTION=A,B,…",
        help="values of an option to try, for methods other than cdsl; repeatable (default: the "
        "options that the method's paper tunes)",
        **REPEATABLE,
    )
    out.add_argument(
        "--quality",
        choices=QUALITIES,
        default="perplexity",
        metavar="NAME",
        help=f"the quality that --bound is about: {' or '.join(QUALITIES)}",
    )
    out.add_argument(
        "--bound",
        type=bound,
        default="plain:0.05",
        metavar="WHAT:SHARE",
        help="how much worse a point's quality may be than that of plain decoding, or of the best "
        "point (default: 5 %% worse than plain decoding)",
    )
    text = "sampling temperature of methods other than cdsl (default: %(default)g)"
    out.add_argument("--temperature", type=temperature, default=1.0, metavar="T", help=text)
    text = (
        "for methods other than cdsl: sample from the K most likely tokens; mtjd: from the K most "
        "likely blocks, with as many beams (default: %(default)s)"
    )
    out.add_argument("--top-k", type=whole(0), default=20, metavar="K", help=text)


def _add_cdsl(out: Parser) -> None:
    """Rewards and grid of cdsl."""
    rewards = {"type": some_text, "metavar": "NAME[:ARG]"} | REPEATABLE
    text = "a reward that guides decoding; repeatable (default: lexical)"
    out.add_argument("--reward", help=text, **rewards)
    text = "a further reward on text, such as python, or llama-guard:DIR: it does not guide "
    text += "decoding, and is only measured; repeatable"
    out.add_argument("--measure", help=text, **rewards)
    text = "choose the point with the most of this --measure among the fastest, instead of the "
    text += "most constraints met; it is then measured on all points"
    out.add_argument("--select", type=some_text, metavar="NAME", help=text)
    for name, values in GRID.items():
        out.add_argument(
            "--" + name.replace("_", "-"),
            type=numbers(type(values[0])),
            default=values,
            metavar="A,B,…",
            help=f"values of {name} in cdsl's grid (default: {','.join(map(str, values))})",
        )
    text = "values of d in cdsl's grid, such as 3,5 (default: that of --set)"
    out.add_argument("--d", type=numbers(int), default=(), metavar="A,B,…", help=text)
    center = ", ".join(f"{name}={value:g}" for name, value in CENTER.items())
    text = "where the picture holds the options that a panel does not vary; repeatable (default: "
    text += f"{center})"
    out.add_argument("--at", type=setting, metavar="OPTION=VALUE", help=text, **REPEATABLE)
    text = "draft length of speculative decoding without a reward (default: %(default)s)"
    out.add_argument("--gamma", type=whole(1, 64), default=3, metavar="N", help=text)


def _add_decoding(out: Parser) -> None:
    """How texts are decoded."""
    text = "an option of the method (cdsl: k, d, accept, keep_verified or combine); repeatable"
    out.add_argument("--set", type=setting, metavar="OPTION=VALUE", help=text, **REPEATABLE)
    text = (
        "cdsl: the top-p of nucleus sampling on the test task (default: 0.9,0.5); other methods: "
    )
    text += "one number, for all their sampling (default: 0.9)"
    out.add_argument("--top-p", type=numbers(top_p), default=NUCLEI, metavar="P,P,…", help=text)
    text = "beams of beam search on the test task (default: %(default)s)"
    out.add_argument("--beams", type=whole(1, 64), default=4, metavar="W", help=text)
    add_chat(out)
    add_stop(out)
    text = "longest completion in tokens (default: %(default)s)"
    out.add_argument("--max-new-tokens", type=whole(1), default=64, metavar="N", help=text)
    text = "batch size on the validation file (default: %(default)s)"
    out.add_argument("--batch-size", type=whole(1), default=8, metavar="B", help=text)
    text = "batch size on the test file (default: %(default)s)"
    out.add_argument("--test-batch-size", type=whole(1), default=1, metavar="B", help=text)
    text = "seed of sampling and of --sample (default: %(default)s)"
    out.add_argument("--seed", type=seed, default=0, metavar="S", help=text)


def numbers(kind: type) -> Callable[[str], tuple]:
    """An argparse type: numbers with commas between them."""
    wanted = "whole numbers" if kind is int else "numbers"
    return checked(lambda text: tuple(map(kind, text.split(","))), f"{wanted} such as 0,1")
