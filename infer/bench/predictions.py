"""The speedup that the cost model predicts for a case, from acceptance, c and v.

c is the time of a draft pass, and v(T) that of a target pass over T tokens. The unit of both is a
target pass over one token (:mod:`infer.timing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer.bench.cases import Case
from infer.bench.estimates import Row
from specjax import metrics
from specjax.lm import LM
from specjax.registry import AUTO, METHODS, Context

Curve = Mapping[int, float]  # v(T) by T
# Predicted speedups, by method. They differ in when the draft (SCD's amateur) passes over the bonus
# position: never in speculative decoding, every round in our loop of SCD, and only if it is needed
# as SCD's paper counts.
FORMULAS = {
    "speculative": metrics.expected_speedup,
    "scd": metrics.expected_scored_speedup,
    "scd_paper": metrics.expected_scd_speedup,
}
# Methods of this drafter are predicted from tokens per round and v alone.
SELF_DRAFTING = "adaptive"


def pass_widths(case: Case, target: LM) -> tuple[int, ...]:
    """Tokens per row of each target pass of a round; empty if no speedup is predicted."""
    if case.method in FORMULAS:
        gamma = case.options["gamma"]
        # The target scores γ draft tokens and the token before them.
        return () if gamma == AUTO else (gamma + 1,)
    spec = METHODS[case.method]
    if spec.drafter != SELF_DRAFTING:
        return ()
    context = Context(target, None, greedy=case.mode == "greedy")
    built, _ = spec.build(context, case.options)
    return built.passes


def predicted_speedup(
    case: Case, row: Row, widths: Sequence[int], v: Curve, c: float | None
) -> dict[str, Any]:
    """The columns of a row that the cost model predicts.

    A speedup is predicted at batch 1, if c and v are known. Else it is None.
    """
    predicted = None
    inputs: dict[str, Any] = {}
    predictable = case.batch_size == 1 and bool(v)  # v is empty if it was not measured
    if predictable and case.method in FORMULAS:
        rate = row["acceptance_rate"]
        if widths and c is not None and rate is not None:
            gamma = case.options["gamma"]
            inputs["gamma"] = gamma
            for name, formula in FORMULAS.items():
                inputs[f"expected_{name}"] = formula(rate, gamma, c, v[gamma + 1])
            predicted = inputs[f"expected_{case.method}"]
    elif predictable and METHODS[case.method].drafter == SELF_DRAFTING:
        costs = [v[width] for width in widths]
        predicted = metrics.expected_self_draft_speedup(row["block_efficiency"], costs)

    measured_over_predicted = None
    if predicted and row["speedup"]:
        measured_over_predicted = row["speedup"] / predicted
    return {
        "predicted_speedup": predicted,
        "measured_over_predicted": measured_over_predicted,
        **inputs,
    }


def add_expected(rows: Sequence[Row], costs: Sequence[float]) -> None:
    """Adds to rows of speculative decoding and SCD the speedup expected at each given c.

    It follows from the measured acceptance; a pass over γ + 1 tokens costs as much as one token's
    (Leviathan et al. 2023, Theorem 3.8; Yuan et al. 2023, Theorem 5.1). Rows whose draft length
    changes from round to round have none.
    """
    formulas = {"speculative": FORMULAS["speculative"], "scd": FORMULAS["scd_paper"]}
    for row in rows:
        if row["method"] not in formulas or row["acceptance_rate"] is None:
            continue
        formula = formulas[row["method"]]
        gamma = row["options"]["gamma"]
        if gamma == AUTO:
            continue
        rates = row["runs"]["acceptance_rate"]
        for cost in costs:
            key = f"expected_at_{cost:g}"
            row[key] = formula(row["acceptance_rate"], gamma, cost)
            row["runs"][key] = [formula(rate, gamma, cost) for rate in rates]
