"""A benchmark from its arguments to its report: methods first, then the cost curve.

The package's docstring (:mod:`infer.bench`) explains case, question, result and row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

import specjax as sj
from infer import timing
from infer.bench.cases import Case, make_cases
from infer.bench.commands import SHAPE, SIZES
from infer.bench.energy import EnergyMeter, find_meter
from infer.bench.entropies import add_entropies
from infer.bench.estimates import Row
from infer.bench.metrics.protocol import Metric
from infer.bench.metrics.settings import JUDGE_KEY, Settings
from infer.bench.metrics.table import make_metric
from infer.bench.peer_process import PeerJob
from infer.bench.peers import Peer, peer_rows, peer_weights
from infer.bench.predictions import Curve, add_expected, pass_widths
from infer.bench.questions import NoPromptError, Question, read_questions
from infer.bench.report import markdown, plotted, read_beside, show, write
from infer.bench.rows import add_metrics, add_quality, as_prompt, languages_of, make_rows
from infer.bench.timed_cases import BenchSetting, Result, measure
from infer.cli import BAD_LINES, check_results, make_directory
from infer.loading import load_models, saying_rewards, use_compilation_cache
from infer.prompts import PromptEncoder, stops_of
from infer.timing import row_seconds
from specjax._util.files import append_line, write_text
from specjax._util.platform import usable_cores
from specjax._util.program import require_output, say
from specjax.lm import SELF, base_of, quantize, resolve_dtype
from specjax.models import ModelConfig, init_params, load_pretrained, save_pretrained
from specjax.models.hf.layout import DTYPES
from specjax.registry import AUTO, METHODS
from specjax.runtime.infill import ending_middles

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}  # by Linux' names of them, the widest first
PEER_GAMMA = 4  # the peer's draft length if no case has a fixed one


class Models(NamedTuple):
    """Target and draft, and the files or directories that a peer loads the same weights from.

    A draft has none where no peer reads it: a head, or a copy that we quantized.
    """

    target: sj.LM
    draft: sj.LM | None
    sources: list[str | None]


def run_benchmark(args: argparse.Namespace) -> int:
    """Measures, shows and writes the report; returns the exit code."""
    if not args.out:
        require_output("--out")
    directory = make_directory(args.out) if args.out else None
    if directory:
        check_results(directory / "runs.jsonl", '{"label": ')
    try:
        with saying_rewards("infer.bench"):
            report = make_report(args, directory)
    except NoPromptError as error:  # what is wrong with each line has been said
        say("infer.bench", error)
        return BAD_LINES

    # A full disk or a closed pipe costs the files or what is shown, not the measurement.
    try:
        _show(report, args.json)
    finally:
        if directory:
            _write(directory, report)
    if args.chat and not args.json and args.target:
        say("infer.bench", f"next: {_server_command(args)}")
    return BAD_LINES if report["skipped"] else 0


def _server_command(args: argparse.Namespace) -> str:
    """The command that serves the models with the last of the methods that were measured."""
    words = ["python -m infer.serve", f"--target {args.target}"]
    if args.draft:
        words.append(f"--draft {args.draft}")
    last = (args.methods or "all").rpartition(",")[2]
    if last != "all":
        words.append(f"--method {last}")
    return " ".join(words)


def _show(report: dict[str, Any], as_json: bool) -> None:
    """Prints the report: as JSON, as a table on a terminal, or as Markdown."""
    if as_json:
        print(json.dumps(report), flush=True)
    elif sys.stdout and sys.stdout.isatty():
        show(report, Console(highlight=False))
    else:
        print(markdown(report), end="", flush=True)


def _write(directory: Path, report: dict[str, Any]) -> None:
    """Writes the report's files and says which."""
    files = write(directory, report)
    say("infer.bench", "wrote " + ", ".join(map(str, files)))
    if len(files) < 3:
        say("infer.bench", 'no bench.png: it needs matplotlib, pip install "specjax[plots]"')


def make_report(args: argparse.Namespace, directory: Path | None = None) -> dict[str, Any]:
    """Measures everything. What each case generated goes to ``runs.jsonl`` as soon as it is there.

    Raises:
      SpecjaxError: an argument does not fit the models, or they cannot be loaded.
    """
    use_compilation_cache()
    metrics = make_metrics(args)
    sweep = list(dict(args.sweep))  # an option that is given twice has its last values
    beside = [read_beside(directory, sweep) for directory in args.beside]
    meter = find_meter(jax.default_backend())
    with open_models(args) as models:
        target = models.target
        cases = make_cases(args, models.draft is not None, target.tokenizer, target.mesh)
        questions, skipped = _read_questions(args, models, cases)
        # What a metric cannot measure is refused before the long part begins.
        for metric in metrics:
            metric.check([as_prompt(question) for question in questions])
        heads = _metric_heads(metrics, questions)
        plot = plotted(args.plot, heads)
        if any("suffix" in question.task for question in questions):
            models = models._replace(target=ending_middles(models.target))

        say("infer.bench", f"{len(cases)} cases × {len(questions)} prompts; warming up")
        record = _run_recorder(args.repeats, directory)
        results, peers = _decode(args, models, cases, questions, meter, record)
        v, c = _measure_costs(args, models, cases)

        rows = _make_rows(args, models, questions, results, v, c)
        add_metrics(rows, questions, results, metrics)
        return _settings(args, models) | {
            "prompts": len(questions),
            "skipped": skipped,
            "rows": rows,
            "metrics": heads,
            "energy": meter.source if meter else None,
            "peers": _rows_of_peers(models.target, questions, peers, results),
            "v": {str(width): value for width, value in v.items()},
            "c": c,
            "sweep": sweep,
            "plot": plot,
            "beside": beside,
        }


def _settings(args: argparse.Namespace, models: Models) -> dict[str, Any]:
    """What a report says of the machine, the models and the arguments."""
    return {
        "machine": machine(),
        "target": args.random_target or args.target,
        "quantize": args.quantize,
        "draft": models.draft.source if models.draft else None,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "seed": args.seed,
        "mesh": args.mesh,
        "cost": args.cost,
        "data": data_name(args),
    }


def _metric_heads(metrics: Sequence[Metric], questions: Sequence[Question]) -> dict[str, str]:
    """Heads of the columns that depend on ``--metric`` and on the prompts, by key."""
    heads: dict[str, str] = {}
    for metric in metrics:
        heads |= metric.columns
    for language in languages_of(questions):
        heads[f"exact_match_{language}"] = f"exact match, {language}"
    return heads


def data_name(args: argparse.Namespace) -> str:
    """What the prompts are, in a table or a legend: the dataset, or the file's name."""
    if args.dataset:
        return args.dataset
    return Path(args.prompts).name if args.prompts else "held-out functions"


def _read_questions(
    args: argparse.Namespace, models: Models, cases: Sequence[Case]
) -> tuple[list[Question], int]:
    """The questions that fit the models in use, and how many were left out."""
    # A prompt must fit the draft's context only if a method uses the draft.
    needs_draft = any(METHODS[case.method].needs_draft for case in cases)
    draft = models.draft if needs_draft else None
    encoder = PromptEncoder(
        models.target, draft, args.max_new_tokens, args.chat, bool(args.truncate)
    )
    return read_questions(args, encoder)


def _decode(
    args: argparse.Namespace,
    models: Models,
    cases: Sequence[Case],
    questions: Sequence[Question],
    meter: EnergyMeter | None,
    record: Callable[[Case, int, sj.Generation], None],
) -> tuple[list[Result], list[Peer]]:
    """The results of all cases, and the peers with their answers."""
    prompts = [question.tokens for question in questions]
    dataset_stops = stops_of(question.task for question in questions) if args.dataset else ()
    stop = tuple(args.stop) or dataset_stops
    budget = args.max_new_tokens
    setting = BenchSetting(models.target, models.draft, prompts, budget, args.seed, stop)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = _peers(args, models, setting, cases, scratch)
        for peer in peers:
            stack.enter_context(peer)  # starts its process and warms it up

        def time_peers(repeat: int) -> None:
            for peer in peers:
                peer.repeat(repeat)

        return measure(setting, cases, args.repeats, time_peers, meter, record), peers


def _peers(
    args: argparse.Namespace,
    models: Models,
    setting: BenchSetting,
    cases: Sequence[Case],
    scratch: Path,
) -> list[Peer]:
    """The peers of the arguments, with the same weights, prompts and number of threads."""
    peers = []
    target, draft = models.sources
    ignores_eos = any(case.sampling.ignore_eos for case in cases)
    for name in args.peer:
        job = PeerJob(
            target=peer_weights(name, str(target), args.quantize, scratch),
            draft=draft,
            prompts=[list(map(int, prompt)) for prompt in setting.prompts],
            budget=setting.budget,
            gamma=_peer_gamma(cases),
            eos_ids=[] if ignores_eos else list(setting.target.eos_ids),
            threads=usable_cores(),
            on_cpu=jax.default_backend() == "cpu",
            dtype=setting.target.dtype.name,
        )
        peers.append(Peer(name, job))
    return peers


def _rows_of_peers(
    target: sj.LM, questions: Sequence[Question], peers: Sequence[Peer], results: Sequence[Result]
) -> list[Row]:
    """The rows of all peers, one after the other."""
    prompts = [question.tokens for question in questions]
    rows: list[Row] = []
    for peer in peers:
        rows += peer_rows(target, prompts, peer, results)
    return rows


def _run_recorder(
    repeats: int, directory: Path | None
) -> Callable[[Case, int, sj.Generation], None]:
    """A function that shows a run's figures, and appends them to ``runs.jsonl`` of ``directory``.

    So a benchmark that is stopped has not lost what it had measured.
    """
    path = directory / "runs.jsonl" if directory else None
    if path:
        write_text(path, "")

    def record(case: Case, repeat: int, run: sj.Generation) -> None:
        seconds = row_seconds(run, case.batch_size)
        tokens = run.lengths.sum()
        speed = tokens / seconds.sum()
        per_round = tokens / max(1, run.stats["rounds"].sum())
        where = f"{case.label}, {case.mode}, batch {case.batch_size}"
        figures = f"{speed:.1f} tokens/s, {per_round:.2f} tokens/round"
        say("infer.bench", f"{where}, repeat {repeat + 1} of {repeats}: {figures}")
        if path:
            line = {
                "label": case.label,
                "method": case.method,
                "mode": case.mode,
                "batch_size": case.batch_size,
                "repeat": repeat,
                "tokens_per_second": float(speed),
                "seconds": seconds.tolist(),
                "tokens": [row.tolist() for row in run.tokens],
                "stats": {name: values.tolist() for name, values in run.stats.items()},
            }
            append_line(path, json.dumps(line))

    return record


def _peer_gamma(cases: Sequence[Case]) -> int:
    """The first fixed draft length of speculative decoding, which the peer uses too."""
    for case in cases:
        if case.method == "speculative" and case.options["gamma"] != AUTO:
            return case.options["gamma"]
    return PEER_GAMMA


def _measure_costs(
    args: argparse.Namespace, models: Models, cases: Sequence[Case]
) -> tuple[dict[int, float], float | None]:
    """(v(T) by T, for the T that the chosen methods use; c). Both are empty with ``--no-curve``."""
    if args.no_curve:
        return {}, None
    needed = {1}
    for case in cases:
        needed.update(pass_widths(case, models.target))
    widths = sorted({width for width in timing.CURVE if width < max(needed)} | needed)

    # v(T) is measured for each T that is needed, never interpolated.
    say("infer.bench", f"cost curve, {len(widths)} widths in about {args.curve_seconds:g} seconds")
    draft = models.draft if any(METHODS[case.method].needs_draft for case in cases) else None
    return timing.costs(models.target, draft, widths, args.curve_seconds)


def _make_rows(
    args: argparse.Namespace,
    models: Models,
    questions: Sequence[Question],
    results: Sequence[Result],
    v: Curve,
    c: float | None,
) -> list[Row]:
    """The rows of the report, except for the figures of ``--metric``."""
    target, draft, _ = models
    prompts = [question.tokens for question in questions]
    rows = make_rows(target, prompts, results, v, c)
    add_expected(rows, args.cost)
    if args.entropy:
        add_entropies(rows, target, draft, prompts, results)
    add_quality(rows, target, draft, questions, results)
    return rows


def make_metrics(args: argparse.Namespace) -> list[Metric]:
    """The metrics of ``--metric`` and ``--run-tests``, without duplicates.

    Raises:
      OptionError: as :func:`infer.bench.metrics.make_metric`.
    """
    names = list(args.metric)
    if args.run_tests:
        names.append("pass@1")
    settings = Settings(
        args.repeats, args.unsafe, args.judge_url, args.judge_model, os.environ.get(JUDGE_KEY)
    )
    return [make_metric(name, settings) for name in dict.fromkeys(names)]


@contextlib.contextmanager
def open_models(args: argparse.Namespace) -> Iterator[Models]:
    """The models of the arguments; random weights stay on disk until the block ends."""
    if not args.random_target:
        target, draft = load_models(args, True, args.mesh)
        sources = [_source_of(args.target, args.base), None]
        if draft is not None and not draft.is_head:
            sources[1] = _source_of(draft.source, args.base)
        yield Models(target, draft, sources)
        return

    dtype = DTYPES[resolve_dtype(args.dtype or "float32")]  # checked before weights are drawn
    with tempfile.TemporaryDirectory() as scratch:
        cfg = ModelConfig.llama(**dict(zip(SHAPE, SIZES[args.random_target], strict=True)))
        save_pretrained(scratch, cfg, init_params(cfg, jax.random.key(0)))  # for the peer, too
        loaded = load_pretrained(scratch, dtype)
        settings = {"pass_width": args.pass_width, "cache_dtype": args.cache_dtype}
        target = sj.from_params(*loaded, **settings)
        if args.quantize:
            target = quantize(target, args.quantize)
        yield Models(target, None, [scratch, None])


def _source_of(name: str | None, base: str | None) -> str | None:
    """The directory or GGUF file of a model; None for a copy that we quantized."""
    if not name or name.startswith(SELF):
        return None
    return str(base_of(name, base=base))


def machine() -> dict[str, Any]:
    """What the numbers are measured on."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "cpu": _processor(),
        "cores": usable_cores(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The processor's name and its widest vectors; Linux tells more than ``platform``.

    Virtual machines of several generations have one name, and differ in their vectors.
    """
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    return processor_of(info.read_text())


def processor_of(info: str) -> str:
    """The processor that ``info``, the text of ``/proc/cpuinfo``, is about: ``name, vectors``."""
    fields = {}
    for line in info.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    features = fields.get("flags", "").split()
    vectors = [name for feature, name in VECTORS.items() if feature in features]
    return ", ".join([fields.get("model name") or platform.machine(), *vectors[:1]])
