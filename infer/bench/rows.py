"""Results as the rows of the report: speed, prediction, and the quality of the output.

A row is a dict of figures, one per case (:mod:`infer.bench.estimates` says how ± are kept).
``make_rows`` makes the rows; ``add_quality`` and ``add_metrics`` add to them.

Axis legend: R runs, P prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from infer.bench.cases import PLAIN
from infer.bench.estimates import (
    Row,
    add_estimate,
    add_median,
    add_ratio,
    add_scores_mean,
    scores_of,
)
from infer.bench.metrics.protocol import Completion, Completions, Metric, PerCompletion
from infer.bench.predictions import Curve, pass_widths, predicted_speedup
from infer.bench.questions import Question
from infer.bench.text_quality import UNKNOWN, exact_match, kl_to_target
from infer.bench.timed_cases import Result
from infer.rescoring import Prompts, mismatches, output_logprobs
from infer.uncertainty import ratio, speed_ratio
from specjax import metrics
from specjax.lm import LM
from specjax.registry import METHODS
from specjax.runtime.output import Generation

# Rates of which a row also has the mean over prompts, as ``…_of_prompt``. SDSAT's published code
# reports that mean; a ratio of sums gives long completions more weight.
OF_PROMPTS = ("acceptance_rate", "accept_rate_per_draft", "block_efficiency")


def make_rows(
    target: LM, prompts: Prompts, results: Sequence[Result], v: Curve, c: float | None
) -> list[Row]:
    """The results as rows, with speed, acceptance, prediction, perplexity and diversity.

    Greedy rows of methods that are lossless for the warped target have ``mismatches``: the outputs
    that differ from plain decoding's at batch 1, or at the first size measured.
    """

    def surprise(prompt: int, run: Generation) -> float:
        return -output_logprobs(target, prompts[prompt], run.tokens[prompt]).sum()

    def diversity(prompt: int, run: Generation) -> float | None:
        return metrics.diversity([run.tokens[prompt]])

    # Plain decoding is the first case of each mode, so this is its greedy result.
    plain = next((r for r in results if r.case.mode == "greedy"), None)
    rows = []
    for result in results:
        case = result.case
        row = _speed_row(result, _plain_result(result, results))
        row |= predicted_speedup(case, row, pass_widths(case, target), v, c)

        # Perplexity is exp of the mean over all tokens. MTAD's paper averages the prompts' own.
        lengths = np.array([run.lengths for run in result.distinct_runs])
        surprises = scores_of(result, surprise)
        add_ratio(row, "perplexity", surprises, lengths, np.exp)
        per_token = surprises / np.where(lengths > 0, lengths, np.nan)
        add_scores_mean(row, "perplexity_of_rows", np.exp(per_token))
        add_scores_mean(row, "diversity", scores_of(result, diversity))

        # Other methods may differ from plain decoding by design.
        spec = METHODS[case.method]
        if case.mode == "greedy" and spec.lossless and spec.target_dist == "warped":
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

    For infilling tasks with a ``middle`` it adds the share of completions that equal it.
    """

    def rouge_l(prompt: int, run: Generation) -> float | None:
        return metrics.rouge_l(run.text[prompt], questions[prompt].references)

    def equals_middle(prompt: int, run: Generation) -> float | None:
        return exact_match(questions[prompt].task, run.text[prompt])

    prompts = [question.tokens for question in questions]
    for row, result in zip(rows, results, strict=True):
        kl = kl_to_target(target, draft, prompts, result)
        if isinstance(kl, str):
            row["kl"] = kl
        else:
            add_estimate(row, "kl", *ratio(*kl))

        # The column says "n/a" without a counter; the other figures are then left out.
        row["joules_per_token"] = UNKNOWN
        if result.joules:
            tokens = [run.lengths.sum() for run in result.runs]
            add_median(row, "joules_per_token", np.divide(result.joules, tokens))
            add_median(row, "joules_per_pass", np.divide(result.joules, row["passes"]))
            add_median(row, "joules_per_prompt", np.divide(result.joules, len(prompts)))

        add_scores_mean(row, "rouge_l", scores_of(result, rouge_l))
        exact = scores_of(result, equals_middle)
        add_scores_mean(row, "exact_match", exact)
        for language in languages_of(questions):
            is_of = [question.task.get("language") == language for question in questions]
            add_scores_mean(row, f"exact_match_{language}", np.where(is_of, exact, np.nan))


def add_metrics(
    rows: Sequence[Row],
    questions: Sequence[Question],
    results: Sequence[Result],
    metrics: Sequence[Metric],
) -> None:
    """Adds to each row the figures of ``--metric``."""
    for row, result in zip(rows, results, strict=True):
        by_prompt = []
        for i, question in enumerate(questions):
            prompt = as_prompt(question)
            completions = []
            for run in result.distinct_runs:
                written = {"text": run.text[i], "tokens": run.tokens[i]}
                ended = run.finish_reasons[i] == "eos"
                completions.append(dataclasses.replace(prompt, **written, ended=ended))
            by_prompt.append(completions)
        for metric in metrics:
            _add_metric(row, metric, by_prompt)


def _add_metric(row: Row, metric: Metric, by_prompt: Sequence[Completions]) -> None:
    """Adds a metric's figures over all completions, and those of each run.

    A metric that is a mean scores each completion only once. Others are measured again per run.
    """
    if isinstance(metric, PerCompletion):
        scores = metric.scores([one for prompt in by_prompt for one in prompt])
        # The scores are flat, prompts outermost.
        shape = (len(by_prompt), -1, len(metric.columns))  # [P, R, columns]
        columns = np.array(scores, np.float64).reshape(shape).T  # [columns, R, P]
        for key, column in zip(metric.columns, columns, strict=True):
            add_scores_mean(row, key, column)
        return

    for key, (value, half_width) in metric.measure(by_prompt).items():
        add_estimate(row, key, value, half_width)
    count = len(by_prompt[0])
    if count > 1:
        runs = [metric.measure([[prompt[run]] for prompt in by_prompt]) for run in range(count)]
        for key in metric.columns:
            values = [figures[key][0] for figures in runs]
            row["runs"][key] = [value for value in values if value is not None]


def languages_of(questions: Sequence[Question]) -> list[str]:
    """The languages of infilling tasks, sorted; empty if they all have the same."""
    languages = set()
    for question in questions:
        language = question.task.get("language")
        if "suffix" in question.task and isinstance(language, str):
            languages.add(language)
    return sorted(languages) if len(languages) > 1 else []


def as_prompt(question: Question) -> Completion:
    """A prompt as metrics see it, with no completion yet."""
    return Completion(question.text, "", (), question.references, question.task)


def _plain_result(result: Result, results: Sequence[Result]) -> Result:
    """Plain decoding's result of the same mode and batch size."""
    for other in results:
        same_size = other.case.batch_size == result.case.batch_size
        if other.case.method == PLAIN and other.case.mode == result.case.mode and same_size:
            return other
    raise LookupError("plain decoding is a case under every sampling and batch size")


def _speed_row(result: Result, plain: Result) -> Row:
    """A row with the case's speed, its speedup over ``plain``, its counters and its rates."""
    case = result.case
    counters, hist = _counters(result)
    # Times are over all runs. What depends on the tokens alone is over distinct runs.
    speeds = result.tokens_per_second()
    row: Row = {
        "method": case.method,
        "label": case.label,
        "mode": case.mode,
        "temperature": case.sampling.temperature,
        "batch_size": case.batch_size,
        "options": dict(case.options),
        "tokens_per_second": float(np.median(speeds)),
        "first_token_ms": 1e3 * float(np.median([r.first_token_seconds for r in result.runs])),
        "draft_calls": counters["draft_calls"],
        "target_calls_per_token": metrics.ratio(counters["target_calls"], counters["emitted"]),
        "draft_calls_per_token": metrics.ratio(counters["draft_calls"], counters["emitted"]),
        "counters": counters,
        "accepted_hist": hist,
        "accepted_at_position": accepted_at_positions(hist),
        "repeats": speeds.tolist(),
        "passes": float(np.median([run.passes for run in result.runs])),
        "pm": {},
        "runs": {"tokens_per_second": speeds.tolist()},
    }
    seconds = np.array([run.share_seconds.sum() for run in result.runs])
    add_median(row, "seconds_per_pass", seconds / row["passes"])
    add_median(row, "seconds_per_prompt", seconds / len(result.tokens))

    if result is plain:
        row["speedup"] = None
    else:
        add_estimate(row, "speedup", *speed_ratio(result.speed(), plain.speed()))
        row["runs"]["speedup"] = (speeds / plain.tokens_per_second()).tolist()

    for key, (numerator, denominator) in metrics.RATES.items():
        numerators = np.array([run.stats[numerator] for run in result.distinct_runs])
        denominators = np.array([run.stats[denominator] for run in result.distinct_runs])
        add_ratio(row, key, numerators, denominators)
        if key in OF_PROMPTS:
            add_scores_mean(row, f"{key}_of_prompt", _quotients(numerators, denominators))
    add_scores_mean(row, "tokens_per_second_of_prompt", _quotients(*result.speed()))
    return row


def _quotients(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Elementwise, ``[R, P]`` float64; NaN where the denominator is 0."""
    unknown = np.full(numerators.shape, np.nan)
    return np.divide(numerators, denominators, out=unknown, where=denominators > 0)


def accepted_at_positions(hist: list[int]) -> list[float]:
    """The share of rounds that accept a draft token at each position, from the first on."""
    rounds = sum(hist)
    return [sum(hist[depth:]) / rounds for depth in range(1, len(hist))] if rounds else []


def _counters(result: Result) -> tuple[dict[str, int], list[int]]:
    """Sums of the counters over runs and prompts, and the histogram of accepted tokens."""
    runs = result.distinct_runs
    stats = {name: sum(run.stats[name] for run in runs) for name in result.runs[0].stats}
    hist = stats.pop("accepted_hist").sum(axis=0)
    counters = {name: int(values.sum()) for name, values in stats.items()}
    return counters, hist.tolist()
