"""Measures decoding on one accelerator: python docs/tools/measure_gpu.py --out FILE.json

It needs only the repository: models of published shapes with random weights, bfloat16, and the
embedded pair. Each part is a process of its own, so that one that fails leaves the others as they
are. It prints a table per part and writes the numbers after each. The parts, in this order:

- tests: our attention kernels, the laws and the greedy equalities of the default tests, on this
  device;
- speed: plain decoding, tokens and GB a second, relative to what one product streams from memory;
- acceptance: chains with a stand-in rule, which accepts every drafted token with a given chance;
- equality: greedy rows of the embedded pair whose tokens differ from plain decoding's;
- switches: plain decoding of the draft's shape with and without CUDA graphs and our kernels;
- attention: the kernels for long rows, forward and backward: their error, and their operations a
  second relative to a product's;
- training: steps of the draft's shape, and the part of the device's peak that they reach;
- curve: v(T), the cost of a target pass over T tokens, and c, that of a draft pass;
- suite: all tests.

`--seconds` bounds all of them together, and the part that runs then is killed. On an H100 speed
took 104 s and acceptance 98 s; on an H200 speed took 149 s, attention 30 s, and the first two of
equality's methods 100 to 140 s beside tests. `suite` runs if it is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
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
from specjax.core.protocols import rule
from specjax.core.types import IID
from specjax.demo.heldout import held_out_functions
from specjax.models import ModelConfig, param_shapes
from specjax.models.attention import range_kernel
from specjax.models.attention.dense import causal_mask, dense_attention
from specjax.verify.verdicts import chain_verdict, draft_length
from train.config import Optim
from train.engine.loop import make_step
from train.engine.operations import causal_operations
from train.engine.optim import make_optimizer
from train.lm.losses import data_loss

ROW = "row: "  # before each row that a part's process prints
TESTS = (
    "tests/models/test_decode_kernel.py",
    "tests/models/test_range_kernel.py",
    "tests/decoding/test_laws.py",
    "tests/decoding/test_decode.py",
    "tests/decoding/test_pass_width.py",
    "tests/decoding/test_sdsat.py",
    "tests/decoding/test_beam_laws.py",
)
LOSSLESS = ("speculative", "lookup", "specinfer")
WIDTHS = (1, 4, 8, 16, 64, 256)
GAMMAS, CHANCES = (4,), (0.6, 0.8, 0.9)
MOST_ROWS = 8  # of acceptance
PROMPT = 128
PAIR, PASS_WIDTHS = ("demo", "demo-draft"), (8, 1)
SWITCHES = ("", "SPECJAX_GPU_GRAPHS", "SPECJAX_GPU_KERNELS")
BATCH, LENGTH = 8, 1024  # of training
LENGTHS, DENSE_LENGTH = (2048, 16384), 2048  # of attention; dense scores of more do not fit
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
    parser.add_argument("--seconds", type=whole(1), default=540, metavar="N", help="of all parts")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args(argv)
    if args.only:
        for row in PARTS[args.only](args):
            print(ROW + json.dumps(row), flush=True)
        return
    _run_parts(args, sys.argv[1:] if argv is None else argv)


def _run_parts(args: argparse.Namespace, argv: list[str]) -> None:
    """Each part in a process, its rows printed and written as they come."""
    end = time.monotonic() + args.seconds
    kept: dict[str, Any] = {}
    for name in args.parts or [name for name in PARTS if name not in NAMED]:
        began, rows = time.monotonic(), []
        for row in _rows_of([*argv, "--only", name], end):
            rows.append(row)
            kept[name] = rows
            if args.out:
                write_text(args.out, json.dumps(kept, indent=1) + "\n")
        print(f"\n{name}, {time.monotonic() - began:.0f} s\n")
        if rows:
            shown = [[_shown(v) for v in row.values()] for row in rows]
            print(markdown_table(list(rows[0]), shown), flush=True)


def _rows_of(argv: list[str], end: float | None, **environment: str) -> Iterator[dict[str, Any]]:
    """What a process of this file prints as rows, until ``end``: then its group is killed."""
    command = [sys.executable, __file__, *argv]
    if end is not None:
        seconds = max(1, int(end - time.monotonic()))
        command = ["timeout", "--signal=KILL", str(seconds), *command]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        for line in process.stdout:
            if line.startswith(ROW):
                yield json.loads(line.removeprefix(ROW))
            else:
                sys.stderr.write(line)
    if process.returncode:
        sys.stderr.write(f"{' '.join(argv)}: ended with {process.returncode}\n")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shape(name: str, part: str) -> ModelConfig:
    """The shape of a target or of its draft, without an end of sequence."""
    cfg = TINY[part] if name == "tiny" else SHAPES[{"target": name, "draft": DRAFTS[name]}[part]]
    return dataclasses.replace(cfg, eos_ids=())


def random_model(cfg: ModelConfig) -> sj.LM:
    """A model with random bfloat16 params."""
    return sj.from_params(cfg, random_params(cfg, jnp.bfloat16))


def random_params(cfg: ModelConfig, dtype: Any) -> Any:
    """Params, made on the device with one program per shape: one for all compiles for minutes.

    A norm's scale is random as well: the costs do not depend on it.
    """
    keys = iter(jax.random.split(jax.random.key(0), 1 << 12))
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return jax.tree.map(lambda x: 0.02 * normal(next(keys), x.shape, dtype), param_shapes(cfg))


def models(name: str) -> tuple[sj.LM, sj.LM]:
    """A target and its draft."""
    return random_model(shape(name, "target")), random_model(shape(name, "draft"))


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
    """Seconds of decoding, without prefill. Rows prefilled together have the same time of it."""
    return float(out.share_seconds.sum() - np.unique(out.prefill_seconds).sum())


def per_second(out: sj.Generation) -> float:
    return float(out.lengths.sum() / seconds(out))


def speed(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Plain decoding of target and draft at each batch size."""
    streamed = memory_bandwidth(args.target == "tiny")
    for part in ("draft", "target"):
        cfg = shape(args.target, part)
        model = random_model(cfg)
        for rows in args.batch:
            out = decode(args, model, rows)
            # The decode kernel reads what a row holds: on average half of the new tokens, too.
            held = PROMPT + args.max_new_tokens // 2
            passes = args.max_new_tokens / seconds(out)
            gigabytes = pass_bytes(cfg, rows, held) * passes / 1e9
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
    return 2 * table.size / fastest(product, x, table) / 1e9


def fastest(run: Any, *arrays: Any) -> float:
    """Seconds of the fastest of ten calls of a compiled program."""
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(10):
        began = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        times.append(time.perf_counter() - began)
    return min(times)


def curve(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """v(T) of the target and c of its draft."""
    v, c = costs(*models(args.target), WIDTHS)
    yield from ({"tokens": width, "v": value, "c": c} for width, value in v.items())


@rule(accepts=(IID,), lossless=False, settings=("chance",))
def coin(keys, draft, log_p, chance):
    """Accepts each drafted token with a given chance, since no draft fits random weights.

    It stands in for the rule of speculative decoding, and compares no p and q.
    """
    nodes = jnp.broadcast_to(jnp.arange(1, draft.tokens.shape[1]), draft.valid[:, 1:].shape)
    passed = (probs.uniforms(keys, Purpose.ACCEPT, nodes) < chance) & draft.valid[:, 1:]
    accepted = jnp.cumprod(passed, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
    p = jnp.exp(probs.at_node(log_p, accepted))
    return chain_verdict(keys, draft, accepted, accepted < draft_length(draft), p)


def acceptance(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Speed over plain decoding at each batch size, draft length and chance of acceptance."""
    target, draft = models(args.target)
    for rows in (rows for rows in args.batch if rows <= MOST_ROWS):
        plain = per_second(decode(args, target, rows))
        for gamma in GAMMAS:
            for chance in CHANCES:
                options = {"gamma": gamma, "chance": chance}
                parts = {"drafter": "chain", "rule": coin, "options": options}
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


def switches(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The draft's shape, one row, with one part of the GPU's choices turned off."""
    for name in SWITCHES:
        off = {name: "0"} if name else {}
        given = ["--target", args.target, "--max-new-tokens", str(args.max_new_tokens)]
        for row in _rows_of([*given, "--only", "draft"], None, **off):
            yield {"off": name or "nothing", **row}


def draft_alone(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Plain decoding of the draft's shape, one row."""
    model = random_model(shape(args.target, "draft"))
    yield {"tokens/s": per_second(decode(args, model, 1))}


def attention(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Causal attention of one row with the target's heads, forward and backward, bfloat16."""
    cfg = shape(args.target, "target")
    tiny = args.target == "tiny"
    peak = product_rate(tiny)
    for tokens in (256,) if tiny else LENGTHS:
        meta = {
            "segment": jnp.ones((1, tokens), jnp.int32),
            "position": jnp.arange(tokens, dtype=jnp.int32)[None],
        }
        keys = jax.random.split(jax.random.key(0), 3)
        heads = cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads
        q, k, v = (
            jax.random.normal(key, (1, count, tokens, cfg.head_dim), jnp.bfloat16)
            for key, count in zip(keys, heads, strict=True)
        )
        q = q.transpose(0, 2, 1, 3)
        run = jax.jit(functools.partial(attention_grads, by_kernel, meta))
        row = {"tokens": tokens, "error": None}
        if tokens <= DENSE_LENGTH:
            dense = jax.jit(functools.partial(attention_grads, by_dense, meta))
            row["error"] = largest_error(run(q, k, v), dense(q, k, v))
        # Two products forward and five backward, over half of the scores.
        count = 7 * cfg.num_heads * cfg.head_dim * tokens**2
        rate = count / fastest(run, q, k, v)
        yield row | {"TFLOP/s": rate / 1e12, "of a product's": rate / peak}


def by_kernel(meta: Any, q: Any, k: Any, v: Any) -> Any:
    """Causal attention by the kernels; without a GPU, in Pallas' interpreter."""
    tables = range_kernel.make_tables(causal_mask, meta)
    interpret = jax.default_backend() != "gpu"
    return range_kernel.sequence_attention(q, k, v, tables, interpret=interpret)


def by_dense(meta: Any, q: Any, k: Any, v: Any) -> Any:
    """Causal attention by plain products of float32."""
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        return dense_attention(*wide, causal_mask(meta, meta))


def attention_grads(attend: Any, meta: Any, q: Any, k: Any, v: Any) -> Any:
    """The result, and the gradients of the sum of its squares."""

    def total(q, k, v):
        out = attend(meta, q, k, v)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    grads, out = jax.grad(total, (0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads


def largest_error(got: Any, want: Any) -> float:
    """The root mean square error over the largest entry, of the array where it is largest."""
    errors = []
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(array, np.float32) for array in (x, y))
        errors.append(float(np.sqrt(np.mean((x - y) ** 2)) / np.abs(y).max()))
    return max(errors)


def training(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps of the draft's shape: AdamW, bfloat16 passes of float32 params, blocks recomputed."""
    cfg = shape(args.target, "draft")
    batch, length = (1, 64) if args.target == "tiny" else (BATCH, LENGTH)
    tokens = jax.random.randint(jax.random.key(0), (1, batch, length), 0, cfg.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    batches = {
        "tokens": tokens,
        "labels": tokens,
        "segments": jnp.ones_like(tokens),  # 0 is padding, which no query sees
        "positions": positions,
    }
    optimizer = make_optimizer(Optim(total_steps=10))
    params = random_params(cfg, jnp.float32)
    state = jax.jit(optimizer.init)(params)
    step = make_step(data_loss(cfg, "bfloat16", remat=True), optimizer)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        params, state, *_ = jax.block_until_ready(step(params, state, None, batches))
        times.append(time.perf_counter() - began)
    seconds = float(np.median(times[2:]))
    # Backward twice forward, nothing for recomputation.
    rate = 3 * causal_operations(cfg, length) * tokens.size / seconds
    peak = product_rate(args.target == "tiny")
    yield {"tokens/s": tokens.size / seconds, "TFLOP/s": rate / 1e12, "of a product's": rate / peak}


def product_rate(tiny: bool) -> float:
    """FLOPs a second of a bfloat16 product of 8,192³."""
    size = 64 if tiny else 8192
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / fastest(jax.jit(lambda x: x @ x), x)


def device(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is measured."""
    yield machine()


def tests(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The tests of the rounds' kernels, laws and equalities."""
    yield _run_tests("not slow", *TESTS)


def suite(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Both halves of the tests, in processes of their own."""
    for marker in ("not slow", "slow"):
        yield _run_tests(marker)


def _run_tests(marker: str, *files: str) -> dict[str, Any]:
    """What pytest says last. Eight processes share the device, so none may reserve its memory."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=--strict-markers", "-v", "--tb=short"]
    shared = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    last = ""
    with subprocess.Popen(
        [*command, "-n", "8", "-m", marker, *files],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=shared,
    ) as process:
        for last in process.stdout:
            sys.stderr.write(last)
    return {"tests": marker, "exit": process.returncode, "said": last.strip()}


PARTS = {
    "device": device,
    "tests": tests,
    "speed": speed,
    "acceptance": acceptance,
    "equality": equality,
    "switches": switches,
    "attention": attention,
    "training": training,
    "curve": curve,
    "suite": suite,
    "draft": draft_alone,  # of switches
}
NAMED = ("suite", "draft")  # they run only if they are named

if __name__ == "__main__":
    main()
