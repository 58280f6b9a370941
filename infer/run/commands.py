"""Decode with any method: a prompt, a file of prompts, or the embedded demo.

  python -m infer.run                                  the demo: colored, beside plain decoding
  python -m infer.run --prompt "def fib(n):" --temperature 0.8 --json
  python -m infer.run --target DIR --draft DIR --prompts in.jsonl --out out.jsonl
  python -m infer.run --target DIR --draft DIR --mesh data=2,model=4 --prompt "def fib(n):"
  python -m infer.run --method cdsl --reward lexical:yield,items --prompt "def walk(tree):"

Exit codes: 0 done, 2 bad arguments or input, 3 done but some input lines were bad.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from infer import cli
from infer.run import demo
from specjax._util.program import Parser, run

gibibytes = cli.checked(float, "a number of GiB above 0 and below 2^40", lambda g: 0 < g < 2**40)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code. Wrong arguments exit at once, with 2."""
    args = arguments(sys.argv[1:] if argv is None else argv)
    work = "infer.run.job:run_job"
    if args.list_methods:
        work = "infer.run.listing:list_methods"
    elif args.plan:
        work = "infer.run.plan:print_plan"
    return run("infer.run", work, args)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Those given, checked; the demo's where there are none."""
    commands = parser()
    args = commands.parse_args(argv or demo.ARGUMENTS)
    check(args, commands)
    args.demo = not argv
    return args


def parser() -> Parser:
    """The command line of ``infer.run``."""
    out = Parser("infer.run", __doc__)
    cli.add_models(out)
    how = out.add_argument_group("method")
    how.add_argument("--method", metavar="NAME", help="default: speculative where there is a draft")
    said = "an option of the method; repeatable"
    how.add_argument("--set", type=cli.setting, metavar="OPTION=VALUE", help=said, **cli.REPEATABLE)
    how.add_argument("--drafter", metavar="NAME", help="compose a method of parts")
    how.add_argument("--rule", metavar="NAME")
    how.add_argument("--target-dist", metavar="NAME")
    how.add_argument("--list-methods", action="store_true", help="print the table and stop")
    how.add_argument(
        "--reward",
        type=cli.some_text,
        metavar="NAME[:ARG]",
        help="what completions are worth: lexical, forbidden, length, regex, json, python, "
        "classifier:DIR, module:function; repeatable, summed (--set combine=product)",
        **cli.REPEATABLE,
    )
    what = out.add_argument_group("prompts")
    what.add_argument("--prompt", type=cli.some_text, metavar="TEXT")
    said = "fill in what stands between this and --suffix, with the model's own sentinels"
    what.add_argument("--prefix", type=cli.any_text, metavar="TEXT", help=said)
    what.add_argument("--suffix", type=cli.any_text, metavar="TEXT")
    said = 'objects with "prompt", or "prefix" and "suffix", maybe "id"'
    what.add_argument("--prompts", metavar="FILE.jsonl", help=said)
    cli.add_dataset(what)
    said = "prompts with constraints; CommonGen's and conversation formats, too"
    what.add_argument("--task", metavar="FILE.jsonl", help=said)
    cli.add_prompting(what)
    cli.add_stop(what)
    cli.add_new_tokens(what)
    what.add_argument("--num-samples", type=cli.whole(1, cli.MOST_ROWS), default=1, metavar="N")
    what.add_argument("--batch-size", type=cli.whole(1, cli.MOST_ROWS), default=8, metavar="B")
    said = "prompts whose caches are kept for others that begin alike, a row of memory each"
    what.add_argument(
        "--prefixes", type=cli.whole(0, cli.MOST_ROWS), default=4, metavar="N", help=said
    )
    sampling = out.add_argument_group("sampling")
    cli.add_sampling(sampling)
    plan = out.add_argument_group("plan")
    plan.add_argument("--plan", action="store_true", help="print what the models need and stop")
    plan.add_argument("--memory", type=gibibytes, metavar="GIB", help="default: the device's")
    results = out.add_argument_group("output")
    results.add_argument("--json", action="store_true", help="one object per row on stdout")
    results.add_argument("--logprobs", action="store_true")
    results.add_argument("--out", metavar="FILE.jsonl", help="append rows here; resumable")
    said = "one of COUNT processes that split the prompts, or a --mesh, and write one --out"
    results.add_argument("--distributed", type=cli.place, metavar=cli.Place.FORM, help=said)
    return out


def check(args: argparse.Namespace, commands: Parser) -> None:
    """Refuses arguments that do not go together."""
    cli.settle_new_tokens(args)
    if args.dataset and not (args.prompts or args.task):
        commands.error("--dataset says what --prompts or --task holds: give one of them")
    sources = ("prompt", "prefix", "prompts", "task")
    given = [f"--{name}" for name in sources if vars(args)[name] is not None]
    if len(given) > 1:
        commands.error(f"{' and '.join(given)} exclude each other; give one")
    if (args.prefix is None) != (args.suffix is None):
        commands.error("--prefix and --suffix go together; either may be empty")
    if args.prefix is not None and args.chat:
        commands.error("--chat and --prefix exclude each other: a middle is no message")
    if args.method and (args.drafter or args.rule or args.target_dist):
        commands.error("--method and --drafter/--rule/--target-dist exclude each other")
    args.split = args.span = None
    if args.distributed:
        _settle_processes(args, commands)


def _settle_processes(args: argparse.Namespace, commands: Parser) -> None:
    """Says which place among processes it has: of those that ``split`` the prompts, each on its
    devices of ``--mesh``, or of those whose devices one model is to ``span``."""
    place, mesh = args.distributed, args.mesh or {"data": args.distributed.count, "model": 1}
    if not args.out or not (args.prompts or args.task):
        commands.error("--distributed splits --prompts or --task, and needs --out: one file of all")
    if mesh["data"] % place.count == 0:
        args.split = place
        args.mesh = args.mesh and mesh | {"data": mesh["data"] // place.count}
    elif mesh["data"] == 1 and mesh["model"] % place.count == 0:
        args.span = place
    else:
        commands.error(
            f"--mesh {cli.mesh_text(mesh)} counts the devices of all {place.count} processes: data "
            f"must be a multiple of {place.count}, for each has rows of its own, or else 1 and "
            "model a multiple, for one model over all"
        )
