"""Measure methods side by side: tokens per second, acceptance, the cost curve, and peers.

  python -m infer.bench                          the demo pair on held-out functions
  python -m infer.bench --peer transformers --out DIR
  python -m infer.bench --random-target 100m --peer transformers,llama.cpp

Rates, speedups and qualities have a ±: half of the 95 % interval over 1,000 bootstrap resamples of
the prompts, each with all its seeds. At batch sizes above 1, times include the prefill.

Exit codes: 0 done, 1 the system failed, 2 bad arguments or input, 3 done but some lines were bad.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from infer.bench.metrics.settings import JUDGE_KEY
from infer.bench.metrics.table import METRICS
from infer.bench.peer_table import PEERS
from infer.cli import (
    REPEATABLE,
    add_dataset,
    add_devices,
    add_models,
    add_new_tokens,
    add_prompting,
    add_sampling,
    add_stop,
    checked,
    set_new_tokens,
    setting,
    sweep,
    whole,
)
from infer.config import add_config, parse_with_config
from infer.sampling_options import add_settings
from specjax._util.checks import SEED_MAX
from specjax._util.program import Parser, run

DEFAULT = ("speculative", "block", "lookup")
# Llamas with random weights: their sizes, in the order of SHAPE.
SHAPE = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size")
SIZES = {"13m": (384, 6, 6, 1024, 8192), "100m": (768, 10, 12, 2048, 32000)}

batch_sizes = checked(
    lambda text: [int(size) for size in text.split(",")],
    "numbers from 1, e.g. 1,8",
    lambda sizes: min(sizes) >= 1,
)
costs = checked(
    lambda text: [float(cost) for cost in text.split(",")],
    "numbers from 0, e.g. 0.01,0.05",
    lambda costs: all(0 <= cost < 1e6 for cost in costs),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code. Wrong arguments exit at once, with 2."""
    commands = parser()
    args = parse_with_config(commands, argv)
    check(args, commands)
    return run("infer.bench", "infer.bench.benchmark:run_benchmark", args)


def parser() -> Parser:
    """The command line of ``infer.bench``."""
    out = Parser("infer.bench", __doc__)
    add_config(out)
    add_models(out)
    out.add_argument(
        "--random-target",
        metavar="SIZE",
        help=f"a target with random weights instead of --target: {', '.join(SIZES)}",
    )
    _add_prompts(out)
    add_devices(out)
    _add_metrics(out)
    _add_methods(out)
    _add_repeats(out)
    _add_report(out)
    return out


def _add_prompts(out: Parser) -> None:
    """What is decoded: the prompts and how they are read."""
    text = "decode the prompts of this file (default: held-out functions of the standard library)"
    out.add_argument("--prompts", metavar="FILE", help=text)
    add_dataset(out)
    add_stop(out)
    text = "decode at most N prompts (default: %(default)s)"
    out.add_argument("--num-prompts", type=whole(1), default=40, metavar="N", help=text)
    add_prompting(out)


def _add_metrics(out: Parser) -> None:
    """How completions are scored."""
    out.add_argument(
        "--run-tests",
        action="store_true",
        help="same as --metric pass@1: run the tests of --prompts in HumanEval's format on the "
        "code that the models write. Landlock or bubblewrap confines it: it can write only to a "
        "fresh folder; time, memory and files are limited; it has no processes, no network and "
        "no signals",
    )
    out.add_argument(
        "--unsafe",
        action="store_true",
        help="run tests even if neither works here: that code can read and change your files",
    )
    out.add_argument(
        "--metric",
        metavar="NAME[:ARG]",
        help=f"a score of the completions: {', '.join(METRICS)} (docs/metrics.md); repeatable",
        **REPEATABLE,
    )
    out.add_argument(
        "--judge-url",
        metavar="URL",
        help=f"the OpenAI-compatible endpoint of --metric judge; its key is read from {JUDGE_KEY}",
    )
    out.add_argument("--judge-model", metavar="NAME", help="the model's name at that endpoint")


def _add_methods(out: Parser) -> None:
    """What is compared: methods, their options, samplings and batch sizes."""
    out.add_argument(
        "--methods",
        metavar="A,B,…",
        help="the methods to compare with plain decoding; all: every method that fits the models "
        f"(default: {','.join(DEFAULT)})",
    )
    out.add_argument(
        "--sweep",
        type=sweep,
        metavar="OPTION=A..B|A,B,…",
        help="run each chosen method that has OPTION at each of these values. Separate values that "
        "contain commas by semicolons. Repeatable: several sweeps make a grid",
        **REPEATABLE,
    )
    out.add_argument(
        "--set",
        type=setting,
        metavar="[METHOD.]OPTION=VALUE",
        help="set an option of one method, or of all that have it; repeatable",
        **REPEATABLE,
    )
    add_new_tokens(out)
    text = "decode B prompts at a time; several sizes are compared (default: %(default)s)"
    out.add_argument("--batch-size", type=batch_sizes, default="1", metavar="B[,B…]", help=text)
    add_sampling(out)
    add_settings(out)
    out.set_defaults(temperature=0.8, top_p=0.9)
    modes = out.add_mutually_exclusive_group()
    modes.add_argument("--greedy-only", action="store_true", help="leave out the sampled rows")
    modes.add_argument("--sampled-only", action="store_true", help="leave out the greedy rows")


def _add_repeats(out: Parser) -> None:
    """How often it is measured, and against what."""
    out.add_argument(
        "--repeats",
        type=whole(1),
        default=3,
        metavar="N",
        help="decode all prompts N times, with the seeds S, S + 1, …. All repeats are timed; the "
        "tokens of greedy rows are counted once (default: %(default)s)",
    )
    out.add_argument(
        "--peer",
        type=lambda text: list(dict.fromkeys(text.split(","))),
        default=[],
        metavar="A,B,…",
        help="also time other libraries, each in its own process, with the same weights and "
        f"prompts, greedily: {', '.join(PEERS)}",
    )


def _add_report(out: Parser) -> None:
    """What the report has, and where it is written."""
    out.add_argument(
        "--cost",
        type=costs,
        default="0.05",
        metavar="C[,C…]",
        help="also predict the speedup at these draft costs c (draft step time / target step "
        "time), from the measured acceptance (default: %(default)s)",
    )
    curve = out.add_mutually_exclusive_group()
    curve.add_argument(
        "--curve-seconds",
        type=checked(float, "a number of seconds above 0", lambda seconds: 0 < seconds < 1e6),
        default=20.0,
        metavar="N",
        help="measure v(T) and c for about N seconds, compilations aside (default: %(default)g)",
    )
    text = "measure neither v(T) nor c, and predict no speedup"
    curve.add_argument("--no-curve", action="store_true", help=text)
    out.add_argument(
        "--entropy",
        action="store_true",
        help="report the entropy of target and draft where a token was accepted or rejected, for "
        "methods that draft chains",
    )
    out.add_argument("--json", action="store_true", help="print the report as one JSON object")
    out.add_argument(
        "--out",
        metavar="DIR",
        help="write bench.json, bench.md and bench.png to DIR, and runs.jsonl while it measures",
    )
    out.add_argument(
        "--plot",
        metavar="COLUMN",
        help="what sweep.png shows against the swept options: the title of a column, e.g. "
        '"tokens/s"; repeatable (default: speedup, tokens/round, perplexity and each --metric)',
        **REPEATABLE,
    )
    out.add_argument(
        "--beside",
        metavar="DIR",
        help="the --out of an earlier run with the same sweep: sweep.png and the table of the "
        "fastest values show its rows, too; repeatable",
        **REPEATABLE,
    )


def check(args: argparse.Namespace, commands: Parser) -> None:
    """Ends the program if arguments contradict each other, or a peer is not installed."""
    set_new_tokens(args)
    if args.dataset and not args.prompts:
        commands.error("--dataset names the format of --prompts: give --prompts FILE, too")
    if args.seed + args.repeats - 1 > SEED_MAX:
        commands.error(f"--seed {args.seed}: the last of {args.repeats} seeds is above {SEED_MAX}")
    if args.sampled_only and args.temperature == 0:
        commands.error("--sampled-only --temperature 0: expected a temperature above 0")
    if (args.plot or args.beside) and not args.sweep:
        commands.error("--plot and --beside are about sweep.png: give --sweep, too")
    _check_random_target(args, commands)
    _check_tests(args, commands)
    _check_peer(args, commands)


def _check_random_target(args: argparse.Namespace, commands: Parser) -> None:
    if not args.random_target:
        return
    given = (
        *(args.draft, args.base, args.prompts, args.chat, args.mesh),
        args.target != "demo",
    )
    if any(given):
        commands.error(
            "--random-target has random weights, no tokenizer and one device: it takes no "
            "--target, --draft, --base, --prompts, --chat or --mesh"
        )
    if args.random_target not in SIZES:
        commands.error(f"--random-target {args.random_target}: choose {', '.join(SIZES)}")
    if args.metric:
        commands.error("--metric reads texts, and --random-target has no tokenizer")


def _check_tests(args: argparse.Namespace, commands: Parser) -> None:
    if args.run_tests and not args.prompts:
        commands.error("--run-tests needs --prompts FILE.jsonl in HumanEval's format")
    runs_tests = args.run_tests or any(name.startswith("pass") for name in args.metric)
    if args.unsafe and not runs_tests:
        commands.error("--unsafe needs --run-tests or --metric pass@K: nothing else runs code")


def _check_peer(args: argparse.Namespace, commands: Parser) -> None:
    if not args.peer:
        return
    if args.sampled_only:
        commands.error("--peer decodes greedily, and --sampled-only leaves no row to compare with")
    if 1 not in args.batch_size or (args.mesh or {}).get("data", 1) > 1:
        commands.error("--peer is compared at batch size 1: give that, and no --mesh data=N")
    for name in args.peer:
        if name not in PEERS:
            commands.error(f"--peer {name}: choose {', '.join(PEERS)}")
        spec = PEERS[name]
        if importlib.util.find_spec(spec.package) is None:
            commands.error(f"--peer {name} needs {spec.package}: pip install {spec.install}")
