"""Measure candidate settings: a method with its options, on the prompts of a file.

``TuneSetting`` is what all candidates share. ``measure_candidate`` returns a row: a dict with
calls per token, modeled and wall-clock cost, and the quality of the texts. With a reward the
quality is how far constraints are satisfied; without one it is perplexity and ROUGE-L.

Axis legend: P prompts, C rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import specjax as sj
from infer.prompts import Prompt, references_of
from infer.rescoring import output_logprobs
from infer.satisfaction import count_constraints
from infer.timing import row_seconds
from infer.uncertainty import Estimate, mean, ratio, speed_ratio, with_spread
from specjax import metrics
from specjax.core.protocols import Method
from specjax.rewards import Combined, RewardScorer, Sample

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One method with its options, under one sampling."""

    name: str
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sampling: sj.Sampling = dataclasses.field(default_factory=sj.Sampling)
    by_draft: bool = False  # the draft model decodes alone
    composed: Method | None = None  # decodes in the place of the method of that name


@dataclasses.dataclass(frozen=True)
class TuneSetting:
    """What all candidates of a table share."""

    target: sj.LM
    draft: sj.LM | None
    reward: Combined | None
    prompts: Sequence[Prompt]
    budget: int  # new tokens of a completion, at most
    batch_size: int
    seed: int
    stop: Sequence[str]
    c: float | None  # time of a draft pass over that of a target pass


def measure_candidate(setting: TuneSetting, candidate: Candidate, warm: bool = True) -> Row:
    """One row of a table.

    ``warm`` generates once more beforehand, so that no time includes a compilation.
    """
    if warm:
        _generate(setting, candidate)
    out = _generate(setting, candidate)
    seconds = row_seconds(out, setting.batch_size)
    target_calls = out.stats["target_calls"]
    draft_calls = out.stats["draft_calls"]
    if candidate.by_draft:
        draft_calls = target_calls
        target_calls = np.zeros_like(draft_calls)
    cost = modeled_cost(target_calls, draft_calls, setting.c)
    tokens = int(out.lengths.sum())
    row = {
        "name": candidate.name,
        "method": candidate.method,
        "options": dict(candidate.options),
        "rows": len(out.tokens),
        "target_calls_per_token": metrics.ratio(target_calls.sum(), tokens),
        "draft_calls_per_token": metrics.ratio(draft_calls.sum(), tokens),
        "cost": metrics.ratio(cost.sum(), tokens),
        "acceptance_rate": metrics.ratio(out.stats["accepted"].sum(), out.stats["tested"].sum()),
        "tokens": tokens,
        "seconds": float(seconds.sum()),
        "tokens_per_second": metrics.ratio(tokens, seconds.sum()),
        "texts": out.text,
        # Per prompt: what with_speedups resamples.
        "each": {
            "tokens": out.lengths.tolist(),
            "seconds": seconds.tolist(),
            "cost": cost.tolist(),
        },
    }
    return row | (_satisfaction(setting, out) if setting.reward else _text_quality(setting, out))


def _satisfaction(setting: TuneSetting, out: sj.Generation) -> Row:
    """How far the constraints are met: soft (the share that is met) and hard (all of them)."""
    # A reward that raised an error scores NaN, and counts as not met.
    failed = ~np.isfinite(out.rewards)
    scores = np.where(failed, 0.0, out.rewards)
    constraints = [prompt.constraints for prompt in setting.prompts]
    met, asked = count_constraints(setting.reward.parts, scores, constraints)
    satisfied = np.array([setting.reward.satisfied(row) for row in out.rewards])
    counts = {
        "constraints": int(asked.sum()),
        "constraints_met": int(met.sum()),
        "failed": int(failed.any(axis=1).sum()),
        "satisfied": satisfied.tolist(),
    }
    return with_spread(
        counts,
        soft_of_rows=mean(scores.mean(axis=1)),
        soft_of_constraints=ratio(met, asked),
        hard=mean(satisfied),
    )


def _text_quality(setting: TuneSetting, out: sj.Generation) -> Row:
    """Perplexity under the target, over tokens and of rows; ROUGE-L if prompts have references."""
    surprises = []  # nats of each text, under the target
    per_row = []
    scores = []
    for prompt, tokens, text in zip(setting.prompts, out.tokens, out.text, strict=True):
        surprises.append(-output_logprobs(setting.target, prompt.tokens, tokens).sum())
        if len(tokens):
            per_row.append(np.exp(surprises[-1] / len(tokens)))
        score = metrics.rouge_l(text, references_of(prompt.entry))
        if score is not None:
            scores.append(score)
    return with_spread(
        {},
        perplexity=ratio(np.array(surprises), out.lengths, np.exp),
        perplexity_of_rows=mean(np.array(per_row)) if per_row else (None, None),
        rouge_l=mean(np.array(scores)) if scores else (None, None),
    )


def with_measures(
    rows: Sequence[Row], prompts: Sequence[Prompt], measures: Combined, tokenizer
) -> list[Row]:
    """The rows with the figures of further text rewards, which did not guide decoding.

    Each reward's share of full scores is added under its name. ``all`` is the share of completions
    that satisfy these and the guiding rewards.
    """
    scorer = RewardScorer(measures, tokenizer, frozenset())
    names = [part.name for part in measures.parts]
    full_scores = [part.full for part in measures.parts]
    measured = []
    for row in rows:
        samples = []
        for text, prompt in zip(row["texts"], prompts, strict=True):
            samples.append(Sample(text, prompt.text, (), prompt.constraints))
        full = np.array(scorer.scores(samples)) >= full_scores  # [P, C]
        figures = {name: mean(column) for name, column in zip(names, full.T, strict=True)}
        figures["all"] = mean(full.all(axis=1) & np.array(row["satisfied"]))
        measured.append(with_spread(row, **figures))
    return measured


def modeled_cost(target_calls: np.ndarray, draft_calls: np.ndarray, c: float | None) -> np.ndarray:
    """c · draft calls + target calls of each row, ``[P]``, in target passes.

    Divided by the row's tokens it is P of Nakshatri et al. 2025, §4.3: the time if every branch of
    a lookahead took its own pass.
    """
    return (c or 0.0) * draft_calls + target_calls


def with_speedups(rows: Sequence[Row], base: Row) -> list[Row]:
    """The rows with their modeled and their wall-clock speedup over ``base``."""

    def speed(row: Row, time: str) -> tuple[np.ndarray, np.ndarray]:
        return np.array([row["each"]["tokens"]]), np.array([row["each"][time]])

    # The base's speedup over itself is 1 in every resample: it has no ±.
    def over_base(row: Row, time: str) -> Estimate:
        value, half_width = speed_ratio(speed(row, time), speed(base, time))
        return value, None if row is base else half_width

    return [
        with_spread(row, modelled_speedup=over_base(row, "cost"), speedup=over_base(row, "seconds"))
        for row in rows
    ]


def _generate(setting: TuneSetting, candidate: Candidate) -> sj.Generation:
    prompts = setting.prompts
    target = setting.target
    draft = setting.draft
    if candidate.by_draft:
        assert draft is not None, "tuning loads a draft"
        # Its texts end where the target's do, and are read with the same tokenizer.
        target = dataclasses.replace(draft, tokenizer=target.tokenizer, eos_ids=target.eos_ids)
        draft = None
    return sj.generate(
        target,
        [prompt.tokens for prompt in prompts],
        method=candidate.composed or candidate.method,
        draft=draft,
        options=candidate.options,
        sampling=candidate.sampling,
        max_new_tokens=setting.budget,
        batch_size=setting.batch_size,
        seed=setting.seed,
        stop=setting.stop,
        reward=setting.reward,
        constraints=[prompt.constraints for prompt in prompts] if setting.reward else None,
    )
