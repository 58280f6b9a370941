"""Results as the rows of the report: speed, prediction, and what the output is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer.bench.cases import Case
from infer.bench.questions import Question
from infer.bench.rescoring import Prompts, mismatches, output_logprobs
from infer.bench.sandbox import pass_at_1
from infer.bench.text_quality import UNKNOWN, exact_match, kl_to_target, mean_rouge
from infer.bench.timed_cases import Result
from specjax import metrics
from specjax.lm import LM
from specjax.methods import METHODS, Context

Curve = Mapping[int, float]  # v(T) by T
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
        return (case.options["gamma"] + 1,)
    spec = METHODS[case.method]
    if spec.drafter != SELF_DRAFTING:
        return ()
    context = Context(target, None, greedy=case.mode == "greedy")
    return spec.build(context, case.options)[0].passes


def make_rows(
    target: LM, prompts: Prompts, results: Sequence[Result], v: Curve, c: float | None
) -> list[dict[str, Any]]:
    """The cases as rows of the report.

    ``mismatches`` (greedy rows of methods that are lossless for the warped target) lists the
    outputs that differ from plain decoding's at batch 1, or at the first size measured.
    """
    plain = next((r for r in results if r.case.mode == "greedy"), None)
    rows = []
    for result in results:
        row, spec = _row(result, results), METHODS[result.case.method]
        row |= _prediction(result, row, pass_widths(result.case, target), v, c)
        logprobs = output_logprobs(target, prompts, result.tokens)
        row["perplexity"] = metrics.perplexity(np.concatenate(logprobs))
        row["diversity"] = metrics.diversity(result.tokens)
        if result.case.mode == "greedy" and spec.lossless and spec.target_dist == "warped":
            row["mismatches"] = mismatches(target, prompts, plain.tokens, result.tokens)
        rows.append(row)
    return rows


def add_quality(
    rows: Sequence[dict[str, Any]],
    target: LM,
    draft: LM | None,
    questions: Sequence[Question],
    results: Sequence[Result],
) -> None:
    """Adds to each row KL to the target, energy and ROUGE-L.

    Infilling tasks with a ``middle`` add the share of completions that equal it.
    """
    prompts = [question.tokens for question in questions]
    references = [question.references for question in questions]
    tasks = [question.task for question in questions]
    for row, result in zip(rows, results, strict=True):
        row["kl"] = kl_to_target(target, draft, prompts, result)
        row["joules_per_token"] = UNKNOWN
        if result.joules:
            tokens = sum(map(len, result.tokens))
            row["joules_per_token"] = float(np.median(result.joules)) / tokens
        row["rouge_l"] = mean_rouge(result.text, references)
        row["exact_match"] = exact_match(tasks, result.text)


def add_pass_at_1(
    rows: Sequence[dict[str, Any]],
    questions: Sequence[Question],
    results: Sequence[Result],
    guard: str | None,
) -> None:
    """Runs what the models wrote, under ``guard``, and adds the share that passes its test."""
    tasks = [question.task for question in questions]
    for row, result in zip(rows, results, strict=True):
        row["pass_at_1"] = pass_at_1(tasks, result.text, guard)


def _row(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """One case, with its speedup over plain decoding of the same mode and batch size."""
    case, counters = result.case, result.counters
    plain = [r for r in results if r.case.method == "autoregressive"]
    alike = (case.mode, case.batch_size)
    base = next(r for r in plain if (r.case.mode, r.case.batch_size) == alike)
    pairs = zip(result.tokens_per_second, base.tokens_per_second, strict=True)
    return {
        "method": case.method,
        "label": case.label,
        "mode": case.mode,
        "batch_size": case.batch_size,
        "options": dict(case.options),
        "tokens_per_second": result.speed,
        "first_token_ms": 1e3 * float(np.median(result.first_token_s)),
        "speedup": None if result is base else float(np.median([a / b for a, b in pairs])),
        "draft_calls": counters["draft_calls"],
        "target_calls_per_token": metrics.ratio(counters["target_calls"], counters["emitted"]),
        "draft_calls_per_token": metrics.ratio(counters["draft_calls"], counters["emitted"]),
        "counters": counters,
        "accepted_hist": result.accepted_hist,
        "repeats": result.tokens_per_second,
    } | metrics.rates(counters)


def _prediction(
    result: Result, row: Mapping[str, Any], widths: Sequence[int], v: Curve, c: float | None
) -> dict[str, Any]:
    """What the cost model foretells, at batch 1 and where c and v are known."""
    case, rate = result.case, row["acceptance_rate"]
    predicted, inputs, alone = None, {}, case.batch_size == 1
    if alone and case.method in FORMULAS and c is not None and rate is not None:
        gamma = case.options["gamma"]
        expected = {name: of(rate, gamma, c, v[gamma + 1]) for name, of in FORMULAS.items()}
        predicted = expected[case.method]
        inputs = {"gamma": gamma} | {f"expected_{name}": x for name, x in expected.items()}
    elif alone and METHODS[case.method].drafter == SELF_DRAFTING:
        passes = [v[width] for width in widths]
        predicted = metrics.expected_self_draft_speedup(row["block_efficiency"], passes)
    over = row["speedup"] / predicted if predicted and row["speedup"] else None
    return {"predicted_speedup": predicted, "measured_over_predicted": over} | inputs
