"""Measure methods side by side: tokens per second, acceptance, the cost curve, and a peer.

  python -m infer.bench                          the demo pair on held-out functions
  python -m infer.bench --peer transformers --out DIR
  python -m infer.bench --random-target 100m --peer transformers

Exit codes: 0 done, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from infer.arguments import (
    Parser,
    load_models,
    make_parser,
    parse_settings,
    use_compilation_cache,
)

SIZES = {"13m": (384, 6, 6, 1024, 8192), "100m": (768, 10, 12, 2048, 32000)}
SAMPLED = {"temperature": 0.8, "top_k": 0, "top_p": 0.9}


def parser() -> Parser:
    """The command line of ``infer.bench``."""
    out = make_parser("python -m infer.bench", __doc__)
    out.add_argument("--random-target", metavar="SIZE",
                     help=f"random weights instead of --target: {', '.join(SIZES)}")  # fmt: skip
    out.add_argument("--prompts", metavar="FILE.jsonl", help="default: held-out functions")
    out.add_argument("--num-prompts", type=int, default=40, metavar="N")
    out.add_argument("--methods", metavar="A,B,…", help="default: all that the models allow")
    out.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE",
                     help="for the methods that have the option; repeatable")  # fmt: skip
    out.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    out.add_argument("--batch-size", default="1", metavar="B[,B…]")
    out.add_argument("--temperature", type=float, default=SAMPLED["temperature"], metavar="T")
    out.add_argument("--top-k", type=int, default=SAMPLED["top_k"], metavar="K")
    out.add_argument("--top-p", type=float, default=SAMPLED["top_p"], metavar="P")
    out.add_argument("--greedy-only", action="store_true", help="leave the sampled rows out")
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
        report = _run(args)
    except SpecjaxError as error:
        print(f"infer.bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    from infer.report import markdown, write

    if args.out:
        for path in write(args.out, report):
            print(f"wrote {path}", file=sys.stderr)
    print(json.dumps(report) if args.json else markdown(report), end="\n" if args.json else "")
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from infer.measure import draft_cost, measure, verify_curve
    from infer.report import machine
    from specjax.errors import OptionError

    if args.random_target and args.draft:
        raise OptionError("--random-target takes no --draft: a random model has no tokenizer")
    if args.num_prompts < 1 or args.repeats < 1 or args.max_new_tokens < 1:
        raise OptionError("--num-prompts, --repeats and --max-new-tokens must be at least 1")
    use_compilation_cache()
    options = parse_settings(args.set)
    with models(args) as (target, draft, directories):
        prompts = read_prompts(args, target)
        cases = make_cases(args, draft is not None, options)
        _say(f"{len(cases)} cases × {len(prompts)} prompts; warming up")
        peer = make_peer(args, directories, prompts, cases)
        results = measure(target, draft, prompts, cases, args.max_new_tokens, args.repeats,
                          peer.repeat if peer else lambda repeat: None)  # fmt: skip
        if peer:
            peer.close()
        _say("cost curve")
        v = verify_curve(target)
        c = draft_cost(target, draft) if draft else None
        rows = [make_row(result, results, v, c) for result in results]
        check_greedy(target, prompts, results, rows)
        return {
            "machine": machine(),
            "target": args.random_target or args.target,
            "draft": draft.source if draft else None,
            "prompts": len(prompts),
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "rows": rows,
            "peers": peer_rows(target, prompts, peer, results),
            "v": {str(width): value for width, value in v.items()},
            "c": c,
        }


@contextlib.contextmanager
def models(args: argparse.Namespace) -> Iterator[tuple]:
    """Target, draft or None, and the directories a peer loads the same weights from."""
    from specjax.lm import EMBEDDED, from_params
    from specjax.models import load_pretrained
    from specjax.models.hf import DTYPES

    if not args.random_target:
        target, draft = load_models(args.target, args.draft, args.dtype, want_draft=True)
        names = args.target, draft.source if draft else None
        yield target, draft, [str(EMBEDDED.get(n, n)) if n else None for n in names]
        return
    with tempfile.TemporaryDirectory() as scratch:
        save_random(args.random_target, scratch)
        loaded = load_pretrained(scratch, DTYPES[args.dtype or "float32"])
        yield from_params(*loaded), None, [scratch, None]


def save_random(size: str, directory: str) -> None:
    """A random Llama of about the given size, saved for us and for a peer."""
    import jax

    from specjax.errors import OptionError
    from specjax.models import ModelConfig, init_params, save_pretrained

    if size not in SIZES:
        raise OptionError(f"--random-target {size}: choose {', '.join(SIZES)}")
    hidden, layers, heads, inner, vocab = SIZES[size]
    cfg = ModelConfig.llama(vocab_size=vocab, hidden_size=hidden, num_layers=layers,
                            num_heads=heads, intermediate_size=inner)  # fmt: skip
    save_pretrained(directory, cfg, init_params(cfg, jax.random.key(0)))


def read_prompts(args: argparse.Namespace, target: Any) -> list[list[int]]:
    """Token ids: from the file, the held-out functions, or random for random weights."""
    import numpy as np

    from infer.batch import read_prompts as read_file
    from specjax.demo.heldout import held_out_functions
    from specjax.errors import OptionError

    if target.tokenizer is None:
        generator = np.random.Generator(np.random.Philox(0))
        vocab = target.config.vocab_size
        return generator.integers(5, vocab, (args.num_prompts, 96)).tolist()
    if args.prompts:
        prompts, bad = read_file(args.prompts, target, chat=False)
        if bad:
            raise OptionError(f"--prompts {args.prompts} line {bad[0].number}: {bad[0].reason}")
        return [p.tokens for p in prompts[: args.num_prompts]]
    functions, warnings = held_out_functions(args.num_prompts)
    for warning in warnings:
        _say(warning)
    return [target.tokenizer.encode(f.prompt) for f in functions]


def make_cases(args: argparse.Namespace, has_draft: bool, options: dict[str, str]) -> list:
    """Every method × sampling × batch size; plain decoding always comes first."""
    import specjax as sj
    from infer.measure import Case
    from specjax.errors import OptionError
    from specjax.methods import METHODS, method

    names = args.methods.split(",") if args.methods else [
        n for n, spec in METHODS.items() if has_draft or not spec.needs_draft
    ]  # fmt: skip
    specs = [method("autoregressive"), *(method(n) for n in names if n != "autoregressive")]
    unused = set(options) - {name for spec in specs for name in spec.options}
    if unused:
        raise OptionError(f"--set {min(unused)}: no chosen method has that option")
    try:
        sizes = [int(size) for size in args.batch_size.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise OptionError(f"--batch-size {args.batch_size}: expected numbers from 1, e.g. 1,8")
    samplings = [sj.Sampling()]
    if not args.greedy_only:
        samplings.append(sj.Sampling(args.temperature, args.top_k, args.top_p))
    return [
        Case(spec.name, spec.resolve({n: v for n, v in options.items() if n in spec.options}),
             sampling, size)
        for size in sizes for sampling in samplings for spec in specs
    ]  # fmt: skip


def make_row(result: Any, results: Sequence[Any], v: dict[int, float], c: float | None) -> dict:
    """One case as a row of the report; the prediction is made where c and v are known."""
    import numpy as np

    from specjax.metrics import expected_speedup, rates

    case = result.case
    base = next(r for r in results if r.case.method == "autoregressive"
                and (r.case.mode, r.case.batch_size) == (case.mode, case.batch_size))  # fmt: skip
    pairs = zip(result.tokens_per_second, base.tokens_per_second, strict=True)
    speedup = None if result is base else float(np.median([a / b for a, b in pairs]))
    found, predicted = rates(result.counters), None
    gamma = case.options.get("gamma")
    if case.method == "speculative" and case.batch_size == 1 and c is not None:
        cost = float(np.interp(gamma + 1, list(v), list(v.values())))
        predicted = expected_speedup(found["acceptance_rate"], gamma, c, cost)
    return {
        "method": case.method, "mode": case.mode, "batch_size": case.batch_size,
        "options": dict(case.options), "tokens_per_second": result.speed,
        "first_token_ms": 1e3 * float(np.median(result.first_token_s)), "speedup": speedup,
        "predicted_speedup": predicted,
        "measured_over_predicted": speedup / predicted if predicted and speedup else None,
        "counters": result.counters, "repeats": result.tokens_per_second,
    } | found  # fmt: skip


def check_greedy(target: Any, prompts: Any, results: Sequence[Any], rows: list[dict]) -> None:
    """Counts the greedy rows of lossless methods that differ from plain decoding."""
    from infer.measure import mismatches
    from specjax.methods import METHODS

    plain = next(r for r in results if r.case.mode == "greedy")
    for result, row in zip(results, rows, strict=True):
        if result.case.mode == "greedy" and METHODS[result.case.method].lossless:
            row["mismatches"] = mismatches(target, prompts, plain.tokens, result.tokens)
            if row["mismatches"]:
                _say(f"{row['method']}: {len(row['mismatches'])} rows differ from plain decoding")


def make_peer(args: argparse.Namespace, directories: Sequence, prompts: Any, cases: Any) -> Any:
    """The peer's process, started and warm, or None."""
    from infer.peers import PEERS, TransformersPeer
    from specjax.errors import OptionError

    if args.peer is None:
        return None
    if args.peer not in PEERS:
        raise OptionError(f"--peer {args.peer}: choose {', '.join(PEERS)}")
    gamma = next((c.options["gamma"] for c in cases if c.method == "speculative"), 4)
    return TransformersPeer(*directories, prompts, args.max_new_tokens, gamma)


def peer_rows(target: Any, prompts: Any, peer: Any, results: Sequence[Any]) -> list[dict]:
    """The peer's modes against ours: plain with plain, assisted with speculative.

    Both sides count prefill: generate() does not tell it apart.
    """
    import numpy as np

    from infer.measure import mismatches

    if peer is None:
        return []
    rows = []
    for name, ours in (("generate", "autoregressive"), ("assisted", "speculative")):
        mine = next((r for r in results if r.case.method == ours and r.case.mode == "greedy"
                     and r.case.batch_size == 1), None)  # fmt: skip
        if mine is None or name not in peer.answers[0]:
            continue
        theirs = [answer[name]["tokens_per_second"] for answer in peer.answers]
        pairs = zip(mine.whole_tokens_per_second, theirs, strict=True)
        tokens = [np.array(t) for t in peer.answers[0][name]["tokens"]]
        rows.append({
            "name": f"transformers {name}", "ours": ours,
            "tokens_per_second": float(np.median(theirs)),
            "ratio": float(np.median([a / b for a, b in pairs])),
            "mismatches": mismatches(target, prompts, mine.tokens, tokens),
        })  # fmt: skip
    return rows


def _say(text: str) -> None:
    print(f"infer.bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
