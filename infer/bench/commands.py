"""Measure methods side by side: tokens per second, acceptance, the cost curve, and a peer.

  python -m infer.bench                          the demo pair on held-out functions
  python -m infer.bench --peer transformers --out DIR
  python -m infer.bench --random-target 100m --peer transformers

Every figure has its ±: half of the 95 % interval over 1,000 bootstrap resamples of the prompts,
each with all its seeds. With several rows in flight times hold the prefill, too.

Exit codes: 0 done, 2 bad arguments or input, 3 done but some input lines were bad.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from infer.bench.metrics.settings import JUDGE_KEY
from infer.bench.metrics.table import METRICS
from infer.cli import (
    REPEATABLE,
    SEED_MAX,
    add_dataset,
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
from specjax._util.program import Parser, run

DEFAULT = ("speculative", "block", "lookup")
PEERS = ("transformers",)
# Random Llamas, by what SHAPE names.
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
    said = f"random weights instead of --target: {', '.join(SIZES)}"
    out.add_argument("--random-target", metavar="SIZE", help=said)
    out.add_argument("--prompts", metavar="FILE", help="default: held-out functions")
    add_dataset(out)
    add_stop(out)
    out.add_argument(
        "--run-tests",
        action="store_true",
        help="--metric pass@1, of --prompts in HumanEval's format: runs the code that the models "
        "write, where Landlock or bubblewrap lets it write to a fresh folder alone, "
        "under limits on time, memory and files, without processes, network and signals",
    )
    said = "run tests where neither works: that code can read and change your files"
    out.add_argument("--unsafe", action="store_true", help=said)
    said = f"what completions are worth: {', '.join(METRICS)} (docs/metrics.md); repeatable"
    out.add_argument("--metric", metavar="NAME[:ARG]", help=said, **REPEATABLE)
    said = f"an OpenAI-compatible endpoint for --metric judge; key in {JUDGE_KEY}"
    out.add_argument("--judge-url", metavar="URL", help=said)
    out.add_argument("--judge-model", metavar="NAME", help="as that endpoint calls it")
    out.add_argument("--num-prompts", type=whole(1), default=40, metavar="N")
    add_prompting(out)
    said = f"default: {','.join(DEFAULT)}; all: every method that fits"
    out.add_argument("--methods", metavar="A,B,…", help=said)
    said = "every chosen method that has the option, at each value; "
    said += "values that hold commas are parted by semicolons; repeatable, as a grid"
    shape = "OPTION=A..B|A,B,…"
    out.add_argument("--sweep", type=sweep, metavar=shape, help=said, **REPEATABLE)
    said = "for one method, or all that have the option; repeatable"
    shape = "[METHOD.]OPTION=VALUE"
    out.add_argument("--set", type=setting, metavar=shape, help=said, **REPEATABLE)
    add_new_tokens(out)
    out.add_argument("--batch-size", type=batch_sizes, default="1", metavar="B[,B…]")
    add_sampling(out)
    out.set_defaults(temperature=0.8, top_p=0.9)
    modes = out.add_mutually_exclusive_group()
    modes.add_argument("--greedy-only", action="store_true", help="leave the sampled rows out")
    modes.add_argument("--sampled-only", action="store_true", help="leave the greedy rows out")
    said = "passes over the prompts, with the seeds S, S + 1, …; greedy tokens are one pass's"
    out.add_argument("--repeats", type=whole(1), default=3, metavar="N", help=said)
    out.add_argument("--peer", metavar="NAME", help="transformers, in its own process")
    said = "draft step time over target step time, for which the speedup is foretold from the "
    said += "measured acceptance, beside the measured c (default: %(default)s)"
    out.add_argument("--cost", type=costs, default="0.05", metavar="C[,C…]", help=said)
    said = "of chains of drafts: the entropy of both models where a token was accepted or refused"
    out.add_argument("--entropy", action="store_true", help=said)
    out.add_argument("--json", action="store_true", help="the report as one object on stdout")
    out.add_argument("--out", metavar="DIR", help="write bench.json, bench.md, bench.png")
    return out


def check(args: argparse.Namespace, commands: Parser) -> None:
    """Refuses arguments that do not go together, and a peer that cannot run here."""
    set_new_tokens(args)
    if args.dataset and not args.prompts:
        commands.error("--dataset says what --prompts holds: give that, too")
    given = args.draft, args.prompts, args.chat, args.mesh, args.target != "demo"
    if args.random_target and any(given):
        commands.error(
            "--random-target has random weights, no tokenizer and one device: it takes no "
            "--target, --draft, --prompts, --chat or --mesh"
        )
    if args.seed + args.repeats - 1 > SEED_MAX:
        commands.error(f"--seed {args.seed}: the last of {args.repeats} is above {SEED_MAX}")
    if args.random_target and args.random_target not in SIZES:
        commands.error(f"--random-target {args.random_target}: choose {', '.join(SIZES)}")
    if args.run_tests and not args.prompts:
        commands.error("--run-tests needs --prompts FILE.jsonl in HumanEval's format")
    runs_tests = args.run_tests or any(name.startswith("pass") for name in args.metric)
    if args.unsafe and not runs_tests:
        commands.error("--unsafe is about --run-tests and pass@K, which are not asked for")
    if args.random_target and args.metric:
        commands.error("--metric reads texts, and --random-target has no tokenizer")
    if args.sampled_only and args.peer:
        commands.error(
            "--sampled-only leaves nothing that the peer is held against: it decodes greedily"
        )
    if args.sampled_only and args.temperature == 0:
        commands.error("--sampled-only --temperature 0: expected a temperature above 0")
    if args.peer and args.peer not in PEERS:
        commands.error(f"--peer {args.peer}: choose {', '.join(PEERS)}")
    if args.peer and importlib.util.find_spec("torch") is None:
        commands.error('--peer transformers needs torch: pip install "specjax[torch]"')
