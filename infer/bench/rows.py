"""Results as the rows of the report: speed, prediction, and what the output is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from infer.bench.cases import Case
from infer.bench.metrics.protocol import Completion, Drawn, Metric, PerCompletion
from infer.bench.questions import Question
from infer.bench.text_quality import UNKNOWN, exact_match, kl_to_target
from infer.bench.timed_cases import Result
from infer.rescoring import Prompts, mismatches, output_logprobs
from infer.uncertainty import ratio, speed_ratio
from specjax import metrics
from specjax.lm import LM
from specjax.registry import AUTO, METHODS, Context
from specjax.runtime.output import Generation

Row = dict[str, Any]
Curve = Mapping[int, float]  # v(T) by T
Score = Callable[[int, Generation], float | None]  # of a prompt's completion in one repeat
# What the cost model foretells, from the measured acceptance, c and v: by the method, and as the
# paper of SCD counts it. They differ in the amateur's pass over the bonus position: none, always,
# or where it is needed.
FORMULAS = {
    "speculative": metrics.expected_speedup,
    "scd": metrics.expected_scored_speedup,
    "scd_paper": metrics.expected_scd_speedup,
}
SELF_DRAFTING = "adaptive"  # this drafter's methods: foretold from tokens per round and v alone


def pass_widths(case: Case, target: LM) -> tuple[int, ...]:
    """Tokens per row of each target pass of a round, where the cost model foretells the speed."""
    if case.method in FORMULAS:
        return () if case.options["gamma"] == AUTO else (case.options["gamma"] + 1,)
    spec = METHODS[case.method]
    if spec.drafter != SELF_DRAFTING:
        return ()
    context = Context(target, None, greedy=case.mode == "greedy")
    return spec.build(context, case.options)[0].passes


def make_rows(
    target: LM, prompts: Prompts, results: Sequence[Result], v: Curve, c: float | None
) -> list[Row]:
    """The cases as rows of the report; under ``pm`` the ± of its figures.

    ``mismatches`` (greedy rows of methods that are lossless for the warped target) lists the
    outputs that differ from plain decoding's at batch 1, or at the first size measured.
    """
    plain = next((r for r in results if r.case.mode == "greedy"), None)
    rows = []
    for result in results:
        row, spec = _row(result, results), METHODS[result.case.method]
        row |= _prediction(result, row, pass_widths(result.case, target), v, c)
        surprise = _scores(
            result, lambda i, run: -output_logprobs(target, prompts[i], run.tokens[i]).sum()
        )
        lengths = np.array([run.lengths for run in result.drawn])
        put_ratio(row, "perplexity", surprise, lengths, np.exp)
        _put_mean(row, "diversity", result, lambda i, run: metrics.diversity([run.tokens[i]]))
        if result.case.mode == "greedy" and spec.lossless and spec.target_dist == "warped":
            row["mismatches"] = mismatches(target, prompts, plain.tokens, result.tokens)
        rows.append(row)
    return rows


def add_quality(
    rows: Sequence[Row],
    target: LM,
    draft: LM | None,
    questions: Sequence[Question],
    results: Sequence[Result],
) -> None:
    """Adds to each row KL to the target, energy and ROUGE-L.

    Infilling tasks with a ``middle`` add the share of completions that equal it.
    """
    prompts = [question.tokens for question in questions]
    scores = {
        "rouge_l": lambda i, run: metrics.rouge_l(run.text[i], questions[i].references),
        "exact_match": lambda i, run: exact_match(questions[i].task, run.text[i]),
    }
    for row, result in zip(rows, results, strict=True):
        kl = kl_to_target(target, draft, prompts, result)
        _put(row, "kl", (kl, None) if isinstance(kl, str) else ratio(*kl))
        row["joules_per_token"] = UNKNOWN
        if result.joules:
            tokens = [run.lengths.sum() for run in result.runs]
            _put_median(row, "joules_per_token", np.divide(result.joules, tokens))
            _put_median(row, "joules_per_pass", np.divide(result.joules, row["passes"]))
            _put_median(row, "joules_per_prompt", np.divide(result.joules, len(prompts)))
        for key, score in scores.items():
            _put_mean(row, key, result, score)


def add_metrics(
    rows: Sequence[Row],
    questions: Sequence[Question],
    results: Sequence[Result],
    metrics: Sequence[Metric],
) -> None:
    """Adds to each row the figures of ``--metric``."""
    for row, result in zip(rows, results, strict=True):
        drawn = [
            [
                dataclasses.replace(as_prompt(question), text=run.text[i], tokens=run.tokens[i])
                for run in result.drawn
            ]
            for i, question in enumerate(questions)
        ]
        for metric in metrics:
            _add_metric(row, metric, drawn)


def _add_metric(row: Row, metric: Metric, drawn: Sequence[Drawn]) -> None:
    """Its figures over all completions, and of each run: from the same scores where it is their
    mean, else measured once more."""
    if isinstance(metric, PerCompletion):
        scores = metric.scores([one for prompt in drawn for one in prompt])
        values = np.array(scores, np.float64).reshape(len(drawn), -1, len(metric.columns)).T
        for key, each in zip(metric.columns, values, strict=True):  # [R, P]
            put_ratio(row, key, np.nan_to_num(each), np.isfinite(each).astype(float))
        return
    for key, estimate in metric.measure(drawn).items():
        _put(row, key, estimate)
    count = len(drawn[0])
    if count > 1:
        runs = [metric.measure([[prompt[run]] for prompt in drawn]) for run in range(count)]
        for key in metric.columns:
            row["runs"][key] = [run[key][0] for run in runs if run[key][0] is not None]


def as_prompt(question: Question) -> Completion:
    """A prompt as metrics see it, before anything is written."""
    return Completion(question.text, "", (), question.references, question.task)


def _put(row: Row, key: str, estimate: tuple[Any, float | None]) -> None:
    """A figure, and its ± where it has one."""
    row[key], half_width = estimate
    if half_width is not None:
        row["pm"][key] = half_width


def put_ratio(
    row: Row,
    key: str,
    above: np.ndarray,
    below: np.ndarray,
    of: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    """``of(Σ above / Σ below)``, both ``[R, P]``: over all, with its ±, and of each run."""
    _put(row, key, ratio(above.sum(axis=0), below.sum(axis=0), of))
    with np.errstate(divide="ignore", invalid="ignore"):
        runs = of(above.sum(axis=1) / below.sum(axis=1))
    row["runs"][key] = runs[np.isfinite(runs)].tolist()


def _put_median(row: Row, key: str, runs: np.ndarray) -> None:
    """What is measured once a run: the runs' median."""
    row[key], row["runs"][key] = float(np.median(runs)), runs.tolist()


def _put_mean(row: Row, key: str, result: Result, score: Score) -> None:
    """The mean over all completions that have a score."""
    values = _scores(result, score)
    put_ratio(row, key, np.nan_to_num(values), np.isfinite(values).astype(float))


def _scores(result: Result, score: Score) -> np.ndarray:
    """Each completion's, ``[R, P]``; NaN where it has none."""
    count = len(result.tokens)
    scores = [[score(i, run) for i in range(count)] for run in result.drawn]
    return np.array(scores, np.float64)


def _row(result: Result, results: Sequence[Result]) -> Row:
    """One case, with its speedup over plain decoding of the same mode and batch size."""
    case = result.case
    stats = {name: sum(run.stats[name] for run in result.drawn) for name in result.runs[0].stats}
    hist = stats.pop("accepted_hist").sum(axis=0)
    counters = {name: int(values.sum()) for name, values in stats.items()}
    speeds = result.tokens_per_second()
    plain = [r for r in results if r.case.method == "autoregressive"]
    alike = (case.mode, case.batch_size)
    base = next(r for r in plain if (r.case.mode, r.case.batch_size) == alike)
    row: Row = {
        "method": case.method,
        "label": case.label,
        "mode": case.mode,
        "batch_size": case.batch_size,
        "options": dict(case.options),
        "tokens_per_second": float(np.median(speeds)),
        "first_token_ms": 1e3 * float(np.median([r.first_token_seconds for r in result.runs])),
        "draft_calls": counters["draft_calls"],
        "target_calls_per_token": metrics.ratio(counters["target_calls"], counters["emitted"]),
        "draft_calls_per_token": metrics.ratio(counters["draft_calls"], counters["emitted"]),
        "counters": counters,
        "accepted_hist": hist.tolist(),
        "repeats": speeds.tolist(),
        "passes": float(np.median([run.passes for run in result.runs])),
        "pm": {},
        "runs": {"tokens_per_second": speeds.tolist()},
    }
    seconds = np.array([run.share_seconds.sum() for run in result.runs])
    _put_median(row, "seconds_per_pass", seconds / row["passes"])
    _put_median(row, "seconds_per_prompt", seconds / len(result.tokens))
    alone = result is base
    _put(row, "speedup", (None, None) if alone else speed_ratio(result.speed(), base.speed()))
    if not alone:
        row["runs"]["speedup"] = (speeds / base.tokens_per_second()).tolist()
    for key, names in metrics.RATES.items():
        above, below = (np.array([run.stats[name] for run in result.drawn]) for name in names)
        put_ratio(row, key, above, below)
    return row


def add_expected(rows: Sequence[Row], costs: Sequence[float]) -> None:
    """Adds to rows of speculative decoding and SCD the speedup that theory foretells at each c of
    ``costs`` from the measured acceptance, a pass over γ + 1 tokens costing one (Leviathan et al.
    2023, Theorem 3.8; Yuan et al. 2023, Theorem 5.1)."""
    formulas = {"speculative": FORMULAS["speculative"], "scd": FORMULAS["scd_paper"]}
    for row in rows:
        if row["method"] not in formulas or row["acceptance_rate"] is None:
            continue
        of, gamma = formulas[row["method"]], row["options"]["gamma"]
        for cost in costs:
            row[f"expected_at_{cost:g}"] = of(row["acceptance_rate"], gamma, cost)
            runs = [of(rate, gamma, cost) for rate in row["runs"]["acceptance_rate"]]
            row["runs"][f"expected_at_{cost:g}"] = runs


def _prediction(
    result: Result, row: Mapping[str, Any], widths: Sequence[int], v: Curve, c: float | None
) -> dict[str, Any]:
    """What the cost model foretells, at batch 1 and where c and v are known."""
    case, rate = result.case, row["acceptance_rate"]
    predicted, inputs, alone = None, {}, case.batch_size == 1
    if alone and case.method in FORMULAS and widths and c is not None and rate is not None:
        gamma = case.options["gamma"]
        expected = {name: of(rate, gamma, c, v[gamma + 1]) for name, of in FORMULAS.items()}
        predicted = expected[case.method]
        inputs = {"gamma": gamma} | {f"expected_{name}": x for name, x in expected.items()}
    elif alone and METHODS[case.method].drafter == SELF_DRAFTING:
        passes = [v[width] for width in widths]
        predicted = metrics.expected_self_draft_speedup(row["block_efficiency"], passes)
    over = row["speedup"] / predicted if predicted and row["speedup"] else None
    return {"predicted_speedup": predicted, "measured_over_predicted": over} | inputs
