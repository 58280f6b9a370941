"""Measure methods side by side: tokens per second, acceptance, the cost curve, and a peer.

  python -m infer.bench                          the demo pair on held-out functions
  python -m infer.bench --peer transformers --out DIR
  python -m infer.bench --random-target 100m --peer transformers

Exit codes: 0 done, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.cli import (
    Parser,
    load_models,
    make_parser,
    parse_settings,
    use_compilation_cache,
)

SIZES = {"13m": (384, 6, 6, 1024, 8192), "100m": (768, 10, 12, 2048, 32000)}
DEFAULT = ("speculative", "block", "lookup")
SAMPLED = {"temperature": 0.8, "top_k": 0, "top_p": 0.9}


def parser() -> Parser:
    """The command line of ``infer.bench``."""
    out = make_parser("python -m infer.bench", __doc__)
    out.add_argument(
        "--random-target",
        metavar="SIZE",
        help=f"random weights instead of --target: {', '.join(SIZES)}",
    )
    out.add_argument("--prompts", metavar="FILE.jsonl", help="default: held-out functions")
    out.add_argument(
        "--run-tests",
        action="store_true",
        help="pass@1 of --prompts in HumanEval's format. WARNING: runs the code that "
        "the models write, in a subprocess with limits on time, memory, files "
        "and processes, and without network where the kernel allows; that "
        "stops accidents, not attacks: use a machine you can lose",
    )
    out.add_argument("--num-prompts", type=int, default=40, metavar="N")
    out.add_argument(
        "--methods",
        metavar="A,B,…",
        help=f"default: {','.join(DEFAULT)}; all: every method that fits",
    )
    out.add_argument(
        "--sweep",
        metavar="OPTION=A..B|A,B,…",
        help="every chosen method that has the option, at each value; "
        "values that hold commas are parted by semicolons",
    )
    out.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[METHOD.]OPTION=VALUE",
        help="for one method, or all that have the option; repeatable",
    )
    out.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    out.add_argument("--batch-size", default="1", metavar="B[,B…]")
    out.add_argument("--temperature", type=float, default=SAMPLED["temperature"], metavar="T")
    out.add_argument("--top-k", type=int, default=SAMPLED["top_k"], metavar="K")
    out.add_argument("--top-p", type=float, default=SAMPLED["top_p"], metavar="P")
    modes = out.add_mutually_exclusive_group()
    modes.add_argument("--greedy-only", action="store_true", help="leave the sampled rows out")
    modes.add_argument("--sampled-only", action="store_true", help="leave the greedy rows out")
    out.add_argument("--repeats", type=int, default=3, metavar="N")
    out.add_argument("--peer", metavar="NAME", help="transformers, in its own process")
    out.add_argument("--json", action="store_true", help="the report as one object on stdout")
    out.add_argument("--out", metavar="DIR", help="write bench.json, bench.md, bench.png")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    args = parser().parse_args(argv)
    from specjax.errors import SpecjaxError

    try:
        return _run(args)
    except SpecjaxError as error:
        _say(" ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    from infer.bench.peers import check_peer
    from infer.bench.report import make_directory, markdown, write

    check_arguments(args)
    if args.peer:
        check_peer(args.peer)
    home = make_directory(args.out) if args.out else None
    report = make_report(args)
    # Shown before it is written: a full disk costs the files, not the measurement.
    if args.json:
        print(json.dumps(report), flush=True)
    elif sys.stdout.isatty():
        _show(report)
    else:
        print(markdown(report), end="", flush=True)
    if home:
        files = write(home, report)
        _say("wrote " + ", ".join(map(str, files)))
        if len(files) < 3:
            _say('no bench.png: it needs matplotlib, pip install "specjax[plots]"')
    return 0


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console

    from infer.bench.report import show

    show(report, Console(highlight=False))


def check_arguments(args: argparse.Namespace) -> None:
    """What needs no model to be refused.

    Raises:
      OptionError: names the argument and the way out.
    """
    from specjax.errors import OptionError

    if args.random_target and (args.draft or args.prompts or args.target != "demo"):
        raise OptionError(
            "--random-target has random weights and no tokenizer: it takes no "
            "--target, --draft or --prompts"
        )
    if args.random_target and args.random_target not in SIZES:
        raise OptionError(f"--random-target {args.random_target}: choose {', '.join(SIZES)}")
    if args.num_prompts < 1 or args.repeats < 1 or args.max_new_tokens < 1:
        raise OptionError("--num-prompts, --repeats and --max-new-tokens must be at least 1")
    if args.run_tests and not args.prompts:
        raise OptionError("--run-tests needs --prompts FILE.jsonl in HumanEval's format")
    if args.sampled_only and args.peer:
        raise OptionError(
            "--sampled-only leaves nothing that the peer is held against: it decodes greedily"
        )
    if args.sampled_only and args.temperature == 0:
        raise OptionError("--sampled-only --temperature 0: expected a temperature above 0")


def make_report(args: argparse.Namespace) -> dict[str, Any]:
    """Measures everything, methods first, then the cost curve."""
    import jax

    from infer.bench.energy import find_meter
    from infer.bench.peers import peer_rows
    from infer.bench.report import add_quality, machine, make_rows, pass_widths
    from infer.timing import CURVE, costs, measure
    from specjax.infill import ending_middles

    use_compilation_cache()
    settings = parse_settings(args.set)
    meter = find_meter(jax.default_backend())
    with models(args) as (target, draft, directories):
        cases = make_cases(args, draft is not None, settings)
        questions = read_questions(args, target)
        prompts = [question.tokens for question in questions]
        if any("suffix" in question.task for question in questions):
            target = ending_middles(target)
        _say(f"{len(cases)} cases × {len(prompts)} prompts; warming up")
        with make_peer(args, directories, prompts, cases) as peer:
            results = measure(
                target,
                draft,
                prompts,
                cases,
                args.max_new_tokens,
                args.repeats,
                peer.repeat if peer else lambda repeat: None,
                meter,
            )
        _say("cost curve")
        passes = {width for case in cases for width in pass_widths(case, target)}
        v, c = costs(target, draft, sorted(passes.union(CURVE)))
        rows = make_rows(target, prompts, results, v, c)
        add_quality(rows, target, draft, questions, results, args.run_tests)
        return {
            "machine": machine(),
            "target": args.random_target or args.target,
            "draft": draft.source if draft else None,
            "prompts": len(prompts),
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "rows": rows,
            "energy": meter.source if meter else None,
            "peers": peer_rows(target, prompts, peer.answers, results) if peer else [],
            "v": {str(width): value for width, value in v.items()},
            "c": c,
            "sweep": parse_sweep(args.sweep)[0] if args.sweep else None,
        }


@contextlib.contextmanager
def models(args: argparse.Namespace) -> Iterator[tuple]:
    """Target, draft or None, and the directories a peer loads the same weights from."""
    from specjax.lm import from_params, locate
    from specjax.models import load_pretrained
    from specjax.models.hf.checkpoint import DTYPES

    if not args.random_target:
        target, draft = load_models(args, want_draft=True)
        names = args.target, draft.source if draft else None
        yield target, draft, [str(locate(n)) if n else None for n in names]
        return
    with tempfile.TemporaryDirectory() as scratch:
        save_random(args.random_target, scratch)
        loaded = load_pretrained(scratch, DTYPES[args.dtype or "float32"])
        yield from_params(*loaded), None, [scratch, None]


def save_random(size: str, directory: str) -> None:
    """A random Llama of about the given size, saved for us and for a peer."""
    import jax

    from specjax.models import ModelConfig, init_params, save_pretrained

    hidden, layers, heads, inner, vocab = SIZES[size]
    cfg = ModelConfig.llama(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=inner,
    )
    save_pretrained(directory, cfg, init_params(cfg, jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and what its completion is judged by."""

    tokens: list[int]
    references: tuple[str, ...] = ()
    task: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the file's object


def read_questions(args: argparse.Namespace, target: Any) -> list[Question]:
    """From the file, the held-out functions, or random tokens for random weights."""
    import numpy as np

    from infer.bench.sandbox import check_tasks
    from infer.prompts import read_prompts
    from specjax.demo.heldout import held_out_functions
    from specjax.errors import OptionError

    if target.tokenizer is None:
        generator = np.random.Generator(np.random.Philox(0))
        vocab = target.config.vocab_size
        return [Question(t) for t in generator.integers(5, vocab, (args.num_prompts, 96)).tolist()]
    if args.prompts:
        prompts, bad = read_prompts(args.prompts, target, chat=False)
        if bad:
            raise OptionError(f"--prompts {args.prompts} line {bad[0].number}: {bad[0].reason}")
        prompts = prompts[: args.num_prompts]
        if args.run_tests:
            check_tasks([p.entry for p in prompts])
        return [Question(p.tokens, references_of(p.entry), p.entry) for p in prompts]
    functions, warnings = held_out_functions(args.num_prompts)
    for warning in warnings:
        _say(warning)
    return [Question(target.tokenizer.encode(f.prompt), (f.reference,)) for f in functions]


def references_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts under ``references`` or ``reference``; of Spec-Bench's list the first turn's."""
    known = entry.get("references", entry.get("reference"))
    if isinstance(known, list) and "turns" in entry:
        known = known[:1]
    known = known if isinstance(known, list) else [known]
    return tuple(text for text in known if isinstance(text, str))


def make_cases(args: argparse.Namespace, has_draft: bool, settings: dict[str, str]) -> list:
    """Every method × sampling × batch size; plain decoding always comes first."""
    import specjax as sj
    from infer.timing import Case
    from specjax.errors import OptionError
    from specjax.methods import METHODS, method

    names = args.methods.split(",") if args.methods else list(DEFAULT)
    if args.methods in (None, "all"):
        names = [
            n
            for n in (METHODS if args.methods else names)
            if not METHODS[n].needs_reward and (has_draft or not METHODS[n].needs_draft)
        ]
    specs = [method("autoregressive"), *(method(n) for n in names if n != "autoregressive")]
    used = {
        name
        for spec in specs
        for name in settings
        if name in spec.options or name.startswith(_prefix(spec))
    }
    if unused := set(settings) - used:
        raise OptionError(f"--set {min(unused)}: no chosen method has that option")
    try:
        sizes = [int(size) for size in args.batch_size.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise OptionError(f"--batch-size {args.batch_size}: expected numbers from 1, e.g. 1,8")
    sampled = sj.Sampling(args.temperature, args.top_k, args.top_p)
    samplings = [sj.Sampling()] * (not args.sampled_only) + [sampled] * (not args.greedy_only)
    option, values = parse_sweep(args.sweep) if args.sweep else ("", [])
    if option and not any(option in spec.options for spec in specs):
        raise OptionError(f"--sweep {args.sweep}: no chosen method has the option {option!r}")
    runs = []
    for spec in specs:
        own, swept = options_of(spec, settings), option if option in spec.options else ""
        each = [own | {option: value} for value in values] if swept else [own]
        runs += [(spec.name, spec.resolve(options), swept) for options in each]
    return [
        Case(name, options, sampling, size, swept)
        for size in sizes
        for sampling in samplings
        for name, options, swept in runs
    ]


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """``gamma=1..8``, ``tau=0,0.1,0.3`` or ``branching=4,2,2;2,2`` as option and values.

    Raises:
      OptionError: another form.
    """
    from specjax.errors import OptionError

    name, found, values = text.partition("=")
    first, dots, last = values.partition("..")
    comma = ";" if ";" in values else ","
    try:
        listed = range(int(first), int(last) + 1) if dots else values.split(comma)
    except ValueError:
        listed = []
    if not found or not all(str(value).strip() for value in listed) or not list(listed):
        raise OptionError(f"--sweep {text}: expected OPTION=A..B or OPTION=A,B,…, e.g. gamma=1..8")
    return name.strip().replace("-", "_"), [str(value).strip() for value in listed]


def options_of(spec: Any, settings: dict[str, str]) -> dict[str, str]:
    """A method's part of ``--set``: OPTION=VALUE, and METHOD.OPTION=VALUE, which wins."""
    prefix = _prefix(spec)
    shared = {name: value for name, value in settings.items() if name in spec.options}
    own = {
        name.removeprefix(prefix): value
        for name, value in settings.items()
        if name.startswith(prefix)
    }
    return shared | own


def _prefix(spec: Any) -> str:
    return spec.name.replace("-", "_") + "."  # as parse_settings spells it


def make_peer(args: argparse.Namespace, directories: Sequence, prompts: Any, cases: Any) -> Any:
    """A context: the peer's process, started and warm, or None."""
    from infer.bench.peers import TransformersPeer

    if args.peer is None:
        return contextlib.nullcontext()
    gamma = next((c.options["gamma"] for c in cases if c.method == "speculative"), 4)
    return TransformersPeer(*directories, prompts, args.max_new_tokens, gamma)


def _say(text: str) -> None:
    print(f"infer.bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
