"""Decode with any method: one prompt, a file of prompts, or the embedded demo.

  python -m infer.run                                  the demo, and its speed over plain decoding
  python -m infer.run --prompt "def fib(n):" --temperature 0.8 --json
  python -m infer.run --target DIR --draft DIR --prompts in.jsonl --out out.jsonl
  python -m infer.run --target DIR --draft DIR --mesh data=2,model=4 --prompt "def fib(n):"
  python -m infer.run --method cdsl --reward lexical:yield,items --prompt "def walk(tree):"

Exit codes: 0 done, 1 the system failed, 2 bad arguments or input, 3 done but some lines were bad.
"""

from __future__ import annotations

import argparse
import sys
from argparse import _ArgumentGroup
from collections.abc import Sequence

from infer import cli
from infer.run import demo
from infer.sampling_options import add_settings
from specjax._util.program import BY_CLUSTER, Parser, run

# Memory of one device in GiB (vendors' data sheets).
DEVICE_GIB = {
    "a100-40": 40,
    "a100-80": 80,
    "b200": 180,
    "h100": 80,
    "h200": 141,
    "l40s": 48,
    "rtx4090": 24,
    "v5e": 16,
    "v5p": 95,
    "v6e": 32,
}
gibibytes = cli.checked(
    lambda text: DEVICE_GIB.get(text.lower()) or float(text),
    f"a number of GiB above 0 and below 2^40, or one of {', '.join(DEVICE_GIB)}",
    lambda g: 0 < g < 2**40,
)


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
    """Parses and checks the command line; an empty one runs the demo."""
    commands = parser()
    args = commands.parse_args(argv or demo.ARGUMENTS)
    check(args, commands)
    args.demo = not argv
    return args


def parser() -> Parser:
    """The command line of ``infer.run``."""
    out = Parser("infer.run", __doc__)
    cli.add_models(out)
    _add_method(out.add_argument_group("method"))
    _add_prompts(out.add_argument_group("prompts"))
    _add_decoding(out.add_argument_group("decoding"))
    sampling = out.add_argument_group("sampling")
    cli.add_sampling(sampling, of_model=True)
    add_settings(sampling)
    cli.add_distributed(
        cli.add_devices(out),
        "run as process INDEX of COUNT, with process 0 reachable at HOST:PORT. The processes "
        "share the prompts, or one model with --mesh model=N, and write one --out. "
        "cluster: take all three from the cluster manager; for one model only",
    )
    _add_plan(out.add_argument_group("plan"))
    _add_output(out.add_argument_group("output"))
    return out


def _add_method(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--method",
        metavar="NAME",
        help="decoding method, see --list-methods (default: speculative with a draft, else "
        "autoregressive)",
    )
    group.add_argument(
        "--set",
        type=cli.setting,
        metavar="OPTION=VALUE",
        help="set an option of the method, e.g. gamma=4; repeatable",
        **cli.REPEATABLE,
    )
    group.add_argument(
        "--drafter",
        metavar="NAME",
        help="instead of --method: the part that proposes draft tokens",
    )
    group.add_argument(
        "--rule", metavar="NAME", help="instead of --method: the rule that accepts draft tokens"
    )
    group.add_argument(
        "--target-dist",
        metavar="NAME",
        help="instead of --method: the distribution that completions follow (default: warped, the "
        "target's own)",
    )
    group.add_argument(
        "--list-methods",
        action="store_true",
        help="print all methods, their parts and options, and exit",
    )
    group.add_argument(
        "--reward",
        type=cli.some_text,
        metavar="NAME[:ARG]",
        help="score completions: lexical, forbidden, length, regex, json, python, classifier:DIR "
        "or module:function. Guides the methods that need a reward. Repeatable: scores are added "
        "(multiplied with --set combine=product)",
        **cli.REPEATABLE,
    )


def _add_prompts(group: _ArgumentGroup) -> None:
    group.add_argument("--prompt", type=cli.some_text, metavar="TEXT", help="complete this text")
    group.add_argument(
        "--prefix",
        type=cli.any_text,
        metavar="TEXT",
        help="infilling: generate the text between this and --suffix; the model must have been "
        "trained for it",
    )
    group.add_argument(
        "--suffix", type=cli.any_text, metavar="TEXT", help="infilling: the text that follows"
    )
    group.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='complete every line of a file: objects with "prompt", or "prefix" and "suffix", and '
        'optionally "id"',
    )
    cli.add_dataset(group)
    group.add_argument(
        "--task",
        metavar="FILE.jsonl",
        help='like --prompts, with "constraints" for --reward; reads CommonGen\'s format and '
        "conversations, too",
    )
    cli.add_prompting(group)


def _add_decoding(group: _ArgumentGroup) -> None:
    cli.add_stop(group)
    cli.add_new_tokens(group)
    group.add_argument(
        "--num-samples",
        type=cli.whole(1, cli.MAX_ROWS),
        default=1,
        metavar="N",
        help="completions per prompt (default: %(default)s)",
    )
    group.add_argument(
        "--batch-size",
        type=cli.whole(1, cli.MAX_ROWS),
        default=8,
        metavar="B",
        help="completions decoded at the same time (default: %(default)s)",
    )
    cli.add_prefixes(group)


def _add_plan(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--plan",
        nargs="?",
        choices=("models", "batch"),
        const="models",
        help="print the memory that the models need and the largest batch that fits, and exit. "
        "With batch, also compile what --batch-size rows run, and say what it needs",
    )
    group.add_argument(
        "--memory",
        type=gibibytes,
        metavar="GIB",
        help="memory of each device for --plan, or a device's name, such as h100 "
        "(default: as the first device reports)",
    )


def _add_output(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--json", action="store_true", help="print one JSON object per completion to stdout"
    )
    group.add_argument(
        "--compare",
        action="store_true",
        help="after the completion of one prompt, show the speed of plain decoding beside the "
        "method's, both without prefill",
    )
    group.add_argument(
        "--logprobs",
        action="store_true",
        help="add the log-probability of every token, under the target at temperature 1",
    )
    group.add_argument(
        "--out",
        metavar="FILE.jsonl",
        help="append one JSON object per completion to this file; an interrupted job resumes when "
        "started again",
    )
    group.add_argument(
        "--profile",
        type=cli.some_text,
        metavar="DIR",
        help="decode the first --batch-size prompts twice, write a trace of the second run for a "
        "profiler's viewer to DIR, and exit",
    )


def check(args: argparse.Namespace, commands: Parser) -> None:
    """Refuses arguments that contradict each other, and sets defaults that depend on others."""
    cli.set_new_tokens(args)
    if args.dataset and not (args.prompts or args.task):
        commands.error("--dataset says what --prompts or --task holds: give one of them")
    sources = ("prompt", "prefix", "prompts", "task")
    given = [f"--{name}" for name in sources if vars(args)[name] is not None]
    if len(given) > 1:
        commands.error(f"{' and '.join(given)} exclude each other; give one")
    if (args.prefix is None) != (args.suffix is None):
        commands.error("--prefix and --suffix go together; either may be empty")
    if args.prefix is not None and args.chat:
        commands.error("--chat and --prefix exclude each other: infilling has no chat template")
    if args.method and (args.drafter or args.rule or args.target_dist):
        commands.error("--method and --drafter/--rule/--target-dist exclude each other")

    lists = ("prompts", "task", "json", "out", "profile", "plan")
    beside = next((name for name in lists if vars(args)[name]), None)
    if args.compare and beside:
        commands.error(
            f"--compare and --{beside} exclude each other: it shows one prompt; infer.bench "
            "compares methods on many"
        )
    for name in ("out", "json", "plan", "distributed"):
        if args.profile and vars(args)[name]:
            commands.error(f"--profile and --{name} exclude each other: it writes a trace alone")

    args.split = None
    args.span = None
    if args.distributed:
        _divide_work(args, commands)


def _divide_work(args: argparse.Namespace, commands: Parser) -> None:
    """Decides what ``--distributed`` processes share, and stores it in ``split`` or ``span``.

    With ``split`` each process decodes some of the prompts, on its own devices. With ``span`` one
    model spans the devices of all processes. ``--mesh`` counts the devices of all processes.
    """
    place = args.distributed
    if not args.out or not (args.prompts or args.task):
        commands.error("--distributed splits --prompts or --task, and needs --out: one file of all")
    if place == BY_CLUSTER:
        _span_cluster(args, commands)
        return
    mesh = args.mesh or {"data": place.count, "model": 1}

    if mesh["data"] % place.count == 0:
        args.split = place
        if args.mesh:
            args.mesh = mesh | {"data": mesh["data"] // place.count}
    elif mesh["data"] == 1 and mesh["model"] % place.count == 0:
        args.span = place
    else:
        commands.error(
            f"--mesh {cli.mesh_text(mesh)} counts the devices of all {place.count} processes: data "
            f"must be a multiple of {place.count}, so that each decodes its own prompts, or 1 with "
            "model a multiple of it, so that one model spans all"
        )


def _span_cluster(args: argparse.Namespace, commands: Parser) -> None:
    """``--distributed cluster``: how many processes there are is known when they have joined.

    Processes that split prompts do not join, so they have to be told.
    """
    mesh = args.mesh or {"data": 1, "model": 1}
    if mesh["data"] > 1 or mesh["model"] == 1:
        commands.error(
            f"--distributed {BY_CLUSTER} is for one model that spans all processes, with --mesh "
            "model=N: to split the prompts, give HOST:PORT,COUNT,INDEX with the manager's own "
            "variables, under SLURM HOST:1,$SLURM_NTASKS,$SLURM_PROCID"
        )
    args.span = BY_CLUSTER
