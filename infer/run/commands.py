"""Decode with any method: a prompt, a file of prompts, or the embedded demo.

  python -m infer.run                                  the demo: real Python code, coloured
  python -m infer.run --prompt "def fib(n):" --temperature 0.8 --json
  python -m infer.run --target DIR --draft DIR --prompts in.jsonl --out out.jsonl
  python -m infer.run --target DIR --draft DIR --mesh data=2,model=4 --prompt "def fib(n):"
  python -m infer.run --method cdsl --reward lexical:yield,items --prompt "def walk(tree):"

Exit codes: 0 done, 2 bad arguments or input, 3 done but some input lines were bad.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infer.cli import (
    Parser,
    add_sampling,
    any_text,
    gibibytes,
    load_models,
    make_parser,
    mesh_axes,
    setting,
    some_text,
    use_compilation_cache,
    whole,
)

if TYPE_CHECKING:
    from specjax.lm import LM

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how JAX's errors begin where an allocation failed


def parser() -> Parser:
    """The command line of ``infer.run``."""
    out = make_parser("python -m infer.run", __doc__)
    how = out.add_argument_group("method")
    how.add_argument("--method", metavar="NAME", help="default: speculative where there is a draft")
    how.add_argument(
        "--set",
        action="append",
        type=setting,
        default=[],
        metavar="OPTION=VALUE",
        help="an option of the method; repeatable",
    )
    how.add_argument("--drafter", metavar="NAME", help="compose a method of parts")
    how.add_argument("--rule", metavar="NAME")
    how.add_argument("--target-dist", metavar="NAME")
    how.add_argument("--list-methods", action="store_true", help="print the table and stop")
    how.add_argument(
        "--reward",
        action="append",
        type=some_text,
        default=[],
        metavar="NAME[:ARG]",
        help="what completions are worth: lexical, forbidden, length, regex, json, python, "
        "classifier:DIR, module:function; repeatable, summed (--set combine=product)",
    )
    what = out.add_argument_group("prompts")
    what.add_argument("--prompt", type=some_text, metavar="TEXT")
    what.add_argument(
        "--prefix",
        type=any_text,
        metavar="TEXT",
        help="fill in what stands between this and --suffix, with the model's own sentinels",
    )
    what.add_argument("--suffix", type=any_text, metavar="TEXT")
    what.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='objects with "prompt", or "prefix" and "suffix", maybe "id"',
    )
    what.add_argument(
        "--task",
        metavar="FILE.jsonl",
        help="prompts with constraints; CommonGen's and conversation formats, too",
    )
    what.add_argument("--chat", action="store_true", help="use the model's chat template")
    what.add_argument("--max-new-tokens", type=whole(1), default=128, metavar="N")
    what.add_argument("--num-samples", type=whole(1), default=1, metavar="N")
    what.add_argument(
        "--stop", action="append", type=some_text, default=[], metavar="TEXT", help="repeatable"
    )
    what.add_argument("--batch-size", type=whole(1), default=8, metavar="B")
    add_sampling(out)
    what.add_argument(
        "--mesh",
        type=mesh_axes,
        metavar="AXIS=N,...",
        help="several devices: data=N splits the rows, model=N the models",
    )
    plan = out.add_argument_group("plan")
    plan.add_argument("--plan", action="store_true", help="print what the models need and stop")
    plan.add_argument("--memory", type=gibibytes, metavar="GIB", help="default: the device's")
    results = out.add_argument_group("output")
    results.add_argument("--json", action="store_true", help="one object per row on stdout")
    results.add_argument("--logprobs", action="store_true")
    results.add_argument("--out", metavar="FILE.jsonl", help="append rows here; resumable")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code.

    Raises:
      SystemExit: after ``--help`` and ``--version``, and with 2 on an argument that is wrong
        by itself; such errors come before the seconds that importing the library takes.
    """
    commands = parser()
    args = commands.parse_args(argv)
    _check(args, commands)
    try:
        return _reported(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader is gone, e.g. `| head`: nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _reported(args: argparse.Namespace) -> int:
    """Runs; what the user asked wrongly becomes one line and exit code 2."""
    from specjax.errors import SpecjaxError
    from specjax.rewards import RewardWarning

    def say(message, category, filename, lineno, file=None, line=None):
        print(f"infer.run: {' '.join(str(message).split())}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", RewardWarning)
            warnings.showwarning = say
            return _run(args)
    except SpecjaxError as error:
        print(f"infer.run: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and OUT_OF_MEMORY not in str(error):
            raise
        print(
            "infer.run: out of memory; lower --batch-size or --max-new-tokens, or see --plan "
            "for what fits",
            file=sys.stderr,
        )
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.list_methods:
        from infer.run.screen import Terminal, method_table

        method_table(Terminal())
        return 0
    if args.plan:
        from infer.run.plan import run_plan

        return run_plan(args)
    compiles = use_compilation_cache()
    from infer.run.job import Job, check_method
    from specjax.infill import ending_middles

    want_draft = check_method(args)
    target, draft = load_models(args, want_draft, args.mesh)
    if args.prefix is not None:
        target = ending_middles(target)
    job = Job.create(args, target, draft)
    if args.prompts or args.task:
        return job.batch(args.prompts or args.task, args.out, bool(args.task))
    text, tokens = _asked(args, target)
    if args.json or args.out:
        return job.objects(text, tokens, args.out)
    return job.show(text, tokens, compiles)


def _asked(args: argparse.Namespace, target: LM) -> tuple[str, list[int]]:
    """(what is shown as the prompt, its token ids)."""
    from infer.prompts import encode, encode_infilling

    if args.prefix is not None:
        return args.prefix, encode_infilling(target, args.prefix, args.suffix)
    text = args.prompt if args.prompt is not None else demo_prompt()
    return text, encode(target, text, args.chat)


def _check(args: argparse.Namespace, commands: Parser) -> None:
    """Arguments that do not go together are refused before anything heavy is imported."""
    args.options = dict(args.set)
    given = {
        "--prompt": args.prompt,
        "--prefix": args.prefix,
        "--prompts": args.prompts,
        "--task": args.task,
    }
    sources = [name for name, value in given.items() if value is not None]
    if len(sources) > 1:
        commands.error(f"{' and '.join(sources)} exclude each other; give one")
    if (args.prefix is None) != (args.suffix is None):
        commands.error("--prefix and --suffix go together; either may be empty")
    if args.prefix is not None and args.chat:
        commands.error("--chat and --prefix exclude each other: a middle is no message")
    if args.method and (args.drafter or args.rule or args.target_dist):
        commands.error("--method and --drafter/--rule/--target-dist exclude each other")


def demo_prompt() -> str:
    """A held-out function of the standard library, up to its body."""
    from specjax.demo.heldout import held_out_functions

    functions, warnings = held_out_functions(1)
    for warning in warnings:
        print(warning, file=sys.stderr)
    return functions[0].prompt


if __name__ == "__main__":
    sys.exit(main())
