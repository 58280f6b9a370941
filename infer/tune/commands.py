"""Tune CDSL's thresholds on a validation task, then compare it on a test task.

  python -m infer.code_task code
  python -m infer.tune code/validation.jsonl --test code/test.jsonl --out runs/cdsl

The protocol of Nakshatri et al. 2025, appendix C: a grid over a_t, r_t and b; of the ten fastest
points the one that satisfies best. Speed is the modelled one, which no noise of the machine
moves; wall clock stands beside it. Soft satisfaction is said twice: the mean over rows, and the
share of all constraints, which the paper counts and the choice follows. Started again with the
same arguments it goes on where it was. The output directory gets grid.jsonl, report.json,
report.md and, with the plots extra, thresholds.png: speedup and satisfaction against each
threshold, as the paper's Figure 2.

Exit codes: 0 done, 2 bad arguments or input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infer.cli import (
    REPEATABLE,
    add_chat,
    add_models,
    add_stop,
    checked,
    seed,
    setting,
    some_text,
    top_p,
    whole,
)
from specjax.program import Parser, run

NUCLEI = (0.9, 0.5)  # top-p of the paper's Table 1
GRID = {"a_t": (0.3, 0.6, 0.9), "r_t": (0.3, 0.5, 0.6, 0.9), "b": (0, 1, 2)}  # the paper's Table 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code. Wrong arguments exit at once, with 2."""
    return run("infer.tune", "infer.tune.tuning:tune", parser().parse_args(argv))


def parser() -> Parser:
    """The command line of ``infer.tune``."""
    out = Parser("infer.tune", __doc__)
    add_models(out)
    out.add_argument("validation", metavar="FILE.jsonl", help="a task, see infer.run --task")
    out.add_argument("--test", metavar="FILE.jsonl", help="compare the methods on this task")
    out.add_argument("--out", required=True, metavar="DIR")
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
