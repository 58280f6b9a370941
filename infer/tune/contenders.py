"""Measuring constrained decoding: satisfaction, calls per token, modeled and wall-clock cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import specjax as sj
from infer.prompts import Prompt, references_of
from infer.rescoring import output_logprobs
from infer.timing import row_seconds
from infer.uncertainty import Estimate, mean, ratio, speed_ratio, with_spread
from specjax import metrics
from specjax.rewards import Combined, Judge, Lexical, Reward, Sample

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One method with its options under one sampling."""

    name: str
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sampling: sj.Sampling = dataclasses.field(default_factory=sj.Sampling)


@dataclasses.dataclass(frozen=True)
class TuneSetting:
    """What every contender of a table shares."""

    target: sj.LM
    draft: sj.LM | None
    reward: Combined | None
    prompts: Sequence[Prompt]
    budget: int
    batch_size: int
    seed: int
    stop: Sequence[str]
    c: float | None  # time of a draft pass over that of a target pass


def run_contender(setting: TuneSetting, contender: Contender, warm: bool = True) -> Row:
    """One row of a table; ``warm`` runs it twice, so that no time holds a compilation.

    With a reward it says how far constraints are met, without one what the texts are worth.
    """
    if warm:
        _generate(setting, contender, setting.prompts)
    out = _generate(setting, contender, setting.prompts)
    worth = _satisfaction(setting, out) if setting.reward else _worth(setting, out)
    seconds = row_seconds(out, setting.batch_size)
    target, draft = (out.stats[name] for name in ("target_calls", "draft_calls"))
    cost = modelled_cost(target, draft, setting.c)
    tokens = int(out.lengths.sum())
    row = {
        "name": contender.name,
        "method": contender.method,
        "options": dict(contender.options),
        "rows": len(out.tokens),
        "target_calls_per_token": metrics.ratio(target.sum(), tokens),
        "draft_calls_per_token": metrics.ratio(draft.sum(), tokens),
        "cost": metrics.ratio(cost.sum(), tokens),
        "acceptance_rate": metrics.ratio(out.stats["accepted"].sum(), out.stats["tested"].sum()),
        "tokens": tokens,
        "seconds": float(seconds.sum()),
        "tokens_per_second": metrics.ratio(tokens, seconds.sum()),
        "texts": out.text,
        "each": {
            "tokens": out.lengths.tolist(),
            "seconds": seconds.tolist(),
            "cost": cost.tolist(),
        },
    }
    return row | worth


def _satisfaction(setting: TuneSetting, out: sj.Generation) -> Row:
    failed = ~np.isfinite(out.rewards)
    scores = np.where(failed, 0.0, out.rewards)
    met, asked = count_constraints(setting.reward.parts, scores, setting.prompts)
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


def _worth(setting: TuneSetting, out: sj.Generation) -> Row:
    """Perplexity under the target, and ROUGE-L where prompts have references."""
    surprise, scores = [], []
    for prompt, tokens, text in zip(setting.prompts, out.tokens, out.text, strict=True):
        surprise.append(-output_logprobs(setting.target, prompt.tokens, tokens).sum())
        scores.append(metrics.rouge_l(text, references_of(prompt.entry)))
    scores = np.array([score for score in scores if score is not None])
    return with_spread(
        {},
        perplexity=ratio(np.array(surprise), out.lengths, np.exp),
        rouge_l=mean(scores) if len(scores) else (None, None),
    )


def count_constraints(
    parts: Sequence[Reward], scores: np.ndarray, prompts: Sequence[Prompt]
) -> tuple[np.ndarray, np.ndarray]:
    """(constraints met, all constraints) of each row with these ``scores`` ``[rows, parts]``.

    Each word of a word reward is a constraint; any other reward is one, met by a full score.
    """
    met, asked = np.zeros((2, len(prompts)), int)
    for i, (prompt, row) in enumerate(zip(prompts, scores, strict=True)):
        for part, score in zip(parts, row.tolist(), strict=True):
            words = isinstance(part, Lexical)
            count = len(part.words_of(prompt.constraints)) if words else 1
            met[i] += round(score * count) if words else int(score >= part.full)
            asked[i] += count
    return met, asked


def with_measures(
    rows: Sequence[Row], prompts: Sequence[Prompt], measures: Combined, tokenizer
) -> list[Row]:
    """The rows with what further text rewards, which guided nothing, say of the completions.

    Each one's share of full scores under its name, and under ``all`` the share of completions
    that satisfy these and the guiding rewards.
    """
    judge = Judge(measures, tokenizer, frozenset())
    full_scores = [part.full for part in measures.parts]
    measured = []
    for row in rows:
        samples = [
            Sample(text, prompt.text, (), prompt.constraints)
            for text, prompt in zip(row["texts"], prompts, strict=True)
        ]
        full = np.array(judge.scores(samples)) >= full_scores
        names = [part.name for part in measures.parts]
        figures = {name: mean(share) for name, share in zip(names, full.T, strict=True)}
        figures["all"] = mean(full.all(axis=1) & np.array(row["satisfied"]))
        measured.append(with_spread(row, **figures))
    return measured


def modelled_cost(target: np.ndarray, draft: np.ndarray, c: float | None) -> np.ndarray:
    """c · draft calls + target calls of each row: over its tokens, P of Nakshatri et al. 2025, §4.

    The time in target passes if every branch of a lookahead cost a pass of its own.
    """
    return (c or 0.0) * draft + target


def with_speedups(rows: Sequence[Row], base: Row) -> list[Row]:
    """The rows with their modeled and their wall-clock speedup over ``base``."""

    def over_base(row: Row, time: str) -> Estimate:
        ours, theirs = (np.array([[r["each"][n]] for n in ("tokens", time)]) for r in (row, base))
        value, half_width = speed_ratio(ours, theirs)
        return value, None if row is base else half_width

    return [
        with_spread(row, modelled_speedup=over_base(row, "cost"), speedup=over_base(row, "seconds"))
        for row in rows
    ]


def _generate(
    setting: TuneSetting, contender: Contender, prompts: Sequence[Prompt]
) -> sj.Generation:
    return sj.generate(
        setting.target,
        [prompt.tokens for prompt in prompts],
        method=contender.method,
        draft=setting.draft,
        options=contender.options,
        sampling=contender.sampling,
        max_new_tokens=setting.budget,
        batch_size=setting.batch_size,
        seed=setting.seed,
        stop=setting.stop,
        reward=setting.reward,
        constraints=[prompt.constraints for prompt in prompts] if setting.reward else None,
    )
