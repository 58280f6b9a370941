"""A benchmark from its arguments to its report: methods first, then the cost curve."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import specjax as sj
from infer import timing
from infer.bench.cases import make_cases
from infer.bench.commands import SHAPE, SIZES
from infer.bench.energy import find_meter
from infer.bench.entropies import add_entropies
from infer.bench.metrics.protocol import Metric
from infer.bench.metrics.settings import JUDGE_KEY, Settings
from infer.bench.metrics.table import make_metric
from infer.bench.peers import TransformersPeer, peer_rows
from infer.bench.questions import read_questions
from infer.bench.report import markdown, show, write
from infer.bench.rows import (
    add_expected,
    add_metrics,
    add_quality,
    as_prompt,
    make_rows,
    pass_widths,
)
from infer.bench.timed_cases import BenchSetting, measure
from infer.cli import BAD_LINES, make_directory
from infer.loading import load_models, use_compilation_cache
from infer.prompts import PromptEncoder, stops_of
from specjax._util.program import say
from specjax.lm import SELF, base_of, quantize
from specjax.models import ModelConfig, init_params, load_pretrained, save_pretrained
from specjax.models.hf.layout import DTYPES
from specjax.registry import AUTO, METHODS
from specjax.runtime.infill import ending_middles


def run_benchmark(args: argparse.Namespace) -> int:
    """Measures, shows and writes the report."""
    home = make_directory(args.out) if args.out else None
    report = make_report(args)
    # Shown before it is written: a full disk costs the files, not the measurement.
    if args.json:
        print(json.dumps(report), flush=True)
    elif sys.stdout.isatty():
        show(report, Console(highlight=False))
    else:
        print(markdown(report), end="", flush=True)
    if home:
        files = write(home, report)
        say("infer.bench", "wrote " + ", ".join(map(str, files)))
        if len(files) < 3:
            say("infer.bench", 'no bench.png: it needs matplotlib, pip install "specjax[plots]"')
    return BAD_LINES if report["skipped"] else 0


def make_report(args: argparse.Namespace) -> dict[str, Any]:
    """Measures everything.

    Raises:
      SpecjaxError: an argument does not fit the models, or they cannot be loaded.
    """
    use_compilation_cache()
    metrics = make_metrics(args)
    meter = find_meter(jax.default_backend())
    with models(args) as (target, draft, directories):
        cases = make_cases(args, draft is not None)
        budget = args.max_new_tokens
        drafted = draft if any(METHODS[case.method].needs_draft for case in cases) else None
        encoder = PromptEncoder(target, drafted, budget, args.chat, bool(args.truncate))
        questions, skipped = read_questions(args, encoder)
        prompts = [question.tokens for question in questions]
        for metric in metrics:
            metric.check([as_prompt(question) for question in questions])
        own = stops_of(question.task for question in questions) if args.dataset else ()
        stop = tuple(args.stop) or own
        if any("suffix" in question.task for question in questions):
            target = ending_middles(target)
        say("infer.bench", f"{len(cases)} cases × {len(prompts)} prompts; warming up")
        # The peer drafts as long as ours does; its process is started and warm within.
        lengths = (case.options["gamma"] for case in cases if case.method == "speculative")
        gamma = next((length for length in lengths if length != AUTO), 4)
        peer = TransformersPeer(*directories, prompts, budget, gamma) if args.peer else None
        with peer or contextlib.nullcontext():
            between = peer.repeat if peer else lambda repeat: None
            setting = BenchSetting(target, draft, prompts, budget, args.seed, stop)
            results = measure(setting, cases, args.repeats, between, meter)
        say("infer.bench", "cost curve")
        passes = {width for case in cases for width in pass_widths(case, target)}
        v, c = timing.costs(target, draft, sorted(passes.union(timing.CURVE)))
        rows = make_rows(target, prompts, results, v, c)
        add_expected(rows, args.cost)
        if args.entropy:
            add_entropies(rows, target, draft, prompts, results)
        add_quality(rows, target, draft, questions, results)
        add_metrics(rows, questions, results, metrics)
        return {
            "machine": machine(),
            "target": args.random_target or args.target,
            "quantize": args.quantize,
            "draft": draft.source if draft else None,
            "prompts": len(prompts),
            "skipped": skipped,
            "max_new_tokens": budget,
            "repeats": args.repeats,
            "seed": args.seed,
            "mesh": args.mesh,
            "rows": rows,
            "metrics": dict(item for metric in metrics for item in metric.columns.items()),
            "energy": meter.source if meter else None,
            "peers": peer_rows(target, prompts, peer.answers, results) if peer else [],
            "v": {str(width): value for width, value in v.items()},
            "c": c,
            "cost": args.cost,
            "sweep": [option for option, _ in args.sweep],
        }


def make_metrics(args: argparse.Namespace) -> list[Metric]:
    """What ``--metric`` and ``--run-tests`` ask for, each once.

    Raises:
      OptionError: as :func:`infer.bench.metrics.make_metric`.
    """
    names = [*args.metric, *(["pass@1"] if args.run_tests else [])]
    settings = Settings(
        args.repeats, args.unsafe, args.judge_url, args.judge_model, os.environ.get(JUDGE_KEY)
    )
    return [make_metric(name, settings) for name in dict.fromkeys(names)]


@contextlib.contextmanager
def models(args: argparse.Namespace) -> Iterator[tuple[sj.LM, sj.LM | None, list[str | None]]]:
    """Target, draft or None, and the directories a peer loads the same weights from."""
    if not args.random_target:
        target, draft = load_models(args, True, args.mesh)
        names = args.target, draft.source if draft else None
        # A copy that we quantized is no model of a peer's.
        theirs = [None if name is None or name.startswith(SELF) else name for name in names]
        yield target, draft, [str(base_of(name)) if name else None for name in theirs]
        return
    with tempfile.TemporaryDirectory() as scratch:
        cfg = ModelConfig.llama(**dict(zip(SHAPE, SIZES[args.random_target], strict=True)))
        save_pretrained(scratch, cfg, init_params(cfg, jax.random.key(0)))  # for the peer, too
        loaded = load_pretrained(scratch, DTYPES[args.dtype or "float32"])
        target = sj.from_params(*loaded)
        yield quantize(target, args.quantize) if args.quantize else target, None, [scratch, None]


def machine() -> dict[str, Any]:
    """What the numbers are measured on."""
    model, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "cpu": model,
        "cores": cores,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
