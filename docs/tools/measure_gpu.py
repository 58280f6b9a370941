"""Measures decoding on one accelerator: python docs/tools/measure_gpu.py --out FILE.json

It needs only the repository: models of published shapes with random weights, bfloat16, and the
embedded pair. It prints a table per part and writes the numbers after each. The parts:

- speed: plain decoding, tokens and GB a second, relative to what one product streams from memory;
- curve: v(T), the cost of a target pass over T tokens, and c, that of a draft pass;
- acceptance: speculative decoding if every drafted token is accepted with a given chance;
- equality: greedy rows of the embedded pair whose tokens differ from plain decoding's;
- suite: the tests, those of distributions in bfloat16 among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from shapes import DRAFTS, SHAPES, pass_bytes

import specjax as sj
from infer.bench.benchmark import machine
from infer.cli import whole
from infer.timing import costs
from specjax import metrics
from specjax._util.files import markdown_table, write_text
from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.protocols import Rule, rule
from specjax.core.types import IID
from specjax.demo.heldout import held_out_functions
from specjax.models import ModelConfig, init_params
from specjax.models.cache import bucket
from specjax.verify.verdicts import chain_verdict, draft_length

Rows = list[dict[str, Any]]
LOSSLESS = ("speculative", "block", "lookup", "specinfer", "spectr")
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GAMMAS, CHANCES = (2, 4, 8), (0.6, 0.8, 0.9)
PROMPT = 128
PAIR, PASS_WIDTHS = ("demo", "demo-draft"), (None, 1, 8)
TOGETHER = 16  # rows of the part equality: up to this many, padding to eight tokens costs nothing
TINY = {  # tiny sizes, which the tests run on a CPU
    "target": ModelConfig.llama(
        vocab_size=256, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=128
    ),
    "draft": ModelConfig.llama(
        vocab_size=256, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64
    ),
}


def main(argv: list[str] | None = None) -> None:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--target", choices=[*DRAFTS, "tiny"], default="llama-3-8b")
    parser.add_argument("--batch", type=whole(1), nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--max-new-tokens", type=whole(2), default=128, metavar="N")
    parser.add_argument("--rows", type=whole(1), default=500, metavar="N", help="of equality")
    parser.add_argument("--dtype", default="bfloat16", help="of equality")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    kept: dict[str, Any] = {"machine": machine()}
    for name in args.parts or PARTS:
        began, rows = time.perf_counter(), []
        for row in PARTS[name](args):
            rows.append(row)
        said = markdown_table(list(rows[0]), [[_shown(v) for v in row.values()] for row in rows])
        print(f"\n{name}, {time.perf_counter() - began:.0f} s\n\n{said}", flush=True)
        kept[name] = rows
        if args.out:
            write_text(args.out, json.dumps(kept, indent=1) + "\n")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pair(name: str) -> tuple[sj.LM, sj.LM]:
    """A target and its draft with random weights, and no end of sequence."""
    names = {"target": name, "draft": DRAFTS.get(name)}
    shapes = TINY if name == "tiny" else {part: SHAPES[names[part]] for part in names}
    return tuple(random_model(cfg, seed) for seed, cfg in enumerate(shapes.values()))


def random_model(cfg: ModelConfig, seed: int) -> sj.LM:
    """Random params, made on the device in one program, so that no float32 copy is stored."""
    cfg = dataclasses.replace(cfg, eos_ids=())
    make = jax.jit(lambda key: init_params(cfg, key, jnp.bfloat16))
    return sj.from_params(cfg, make(jax.random.key(seed)))


def decode(args: argparse.Namespace, target: sj.LM, rows: int, **more: Any) -> sj.Generation:
    """The second of two runs on random prompts: nothing compiles in it."""
    generator = np.random.Generator(np.random.Philox(0))
    prompts = generator.integers(1, target.config.vocab_size, (rows, PROMPT))
    for _ in range(2):
        out = sj.generate(
            target,
            prompts,
            max_new_tokens=args.max_new_tokens,
            sampling=sj.Sampling(1.0),
            batch_size=rows,
            **more,
        )
    return out


def seconds(out: sj.Generation) -> float:
    """Seconds of decoding, without prefill. All rows are prefilled at the same time."""
    return float(out.share_seconds.sum() - out.prefill_seconds.max())


def per_second(out: sj.Generation) -> float:
    return float(out.lengths.sum() / seconds(out))


def speed(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Plain decoding of target and draft at each batch size."""
    streamed = memory_bandwidth(args.target == "tiny")
    for model in pair(args.target):
        cfg = model.config
        for rows in args.batch:
            out = decode(args, model, rows)
            capacity = bucket(PROMPT + args.max_new_tokens)
            passes = args.max_new_tokens / seconds(out)
            gigabytes = pass_bytes(cfg, rows, capacity) * passes / 1e9
            yield {
                "hidden size": cfg.hidden_size,
                "rows": rows,
                "tokens/s": per_second(out),
                "GB/s": gigabytes,
                "of the memory's": gigabytes / streamed,
            }


def memory_bandwidth(tiny: bool) -> float:
    """GB a second that a product of eight rows reads of a bfloat16 table of 2 GiB."""
    table = jnp.ones((1 << (12 if tiny else 18), 4096), jnp.bfloat16)
    x = jnp.ones((8, 4096), jnp.bfloat16)
    product = jax.jit(lambda x, table: jnp.max(x @ table.T))
    product(x, table).block_until_ready()
    times = []
    for _ in range(10):
        began = time.perf_counter()
        product(x, table).block_until_ready()
        times.append(time.perf_counter() - began)
    return 2 * table.size / min(times) / 1e9


def curve(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """v(T) of the target and c of its draft."""
    v, c = costs(*pair(args.target), WIDTHS)
    yield from ({"tokens": width, "v": value, "c": c} for width, value in v.items())


def coin(chance: float) -> Rule:
    """Accepts each drafted token with a given chance: a rule's cost without its distribution."""

    @rule(accepts=(IID,), lossless=False)
    def accept(keys, draft, log_p):
        nodes = jnp.broadcast_to(jnp.arange(1, draft.tokens.shape[1]), draft.valid[:, 1:].shape)
        passed = (probs.uniforms(keys, Purpose.ACCEPT, nodes) < chance) & draft.valid[:, 1:]
        accepted = jnp.cumprod(passed, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
        p = jnp.exp(probs.at_node(log_p, accepted))
        return chain_verdict(keys, draft, accepted, accepted < draft_length(draft), p)

    return accept


def acceptance(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Speed over plain decoding at each batch size, draft length and chance of acceptance."""
    target, draft = pair(args.target)
    for rows in args.batch:
        plain = per_second(decode(args, target, rows))
        for gamma in GAMMAS:
            for chance in CHANCES:
                parts = {"drafter": "chain", "rule": coin(chance), "options": {"gamma": gamma}}
                out = decode(args, target, rows, draft=draft, **parts)
                counted = {name: values.sum() for name, values in out.stats.items()}
                yield {
                    "rows": rows,
                    "γ": gamma,
                    "chance": chance,
                    "λ": metrics.rates(counted)["acceptance_rate"],
                    "speed over plain": per_second(out) / plain,
                }


def equality(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Greedy tokens of lossless methods against plain decoding's, with padding and without."""
    texts = [function.prompt for function in held_out_functions()[0]]
    texts = (texts * -(-args.rows // len(texts)))[: args.rows]
    # If prompts repeat, each repetition is cut at another place.
    target = sj.load("demo", args.dtype)
    prompts = [target.tokenizer.encode(text)[: 32 + i % 64] for i, text in enumerate(texts)]
    for width in PASS_WIDTHS:
        target, draft = (sj.load(name, args.dtype, pass_width=width) for name in PAIR)
        common = {"max_new_tokens": args.max_new_tokens, "batch_size": TOGETHER}
        plain = sj.generate(target, prompts, **common)
        for method in LOSSLESS:
            drafted = draft if sj.method(method).needs_draft else None
            out = sj.generate(target, prompts, method=method, draft=drafted, **common)
            pairs = zip(plain.tokens, out.tokens, strict=True)
            differ = sum(not np.array_equal(a, b) for a, b in pairs)
            yield {"pass width": target.pass_width, "method": method, "differ": differ}


def suite(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Both halves of the tests, in processes of their own."""
    for marker in ("not slow", "slow"):
        command = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-m", marker]
        ended = subprocess.run(command, capture_output=True, text=True)
        sys.stderr.write(ended.stdout[-4000:])
        last = (ended.stdout.strip().splitlines() or [ended.stderr[-200:]])[-1]
        yield {"tests": marker, "exit": ended.returncode, "said": last}


PARTS = {
    "speed": speed,
    "curve": curve,
    "acceptance": acceptance,
    "equality": equality,
    "suite": suite,
}

if __name__ == "__main__":
    main()
