"""Measuring constrained decoding: satisfaction, calls per token, modelled and wall-clock cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import specjax as sj
from infer.prompts import Prompt, references_of
from infer.rescoring import output_logprobs
from infer.timing import row_seconds
from specjax.metrics import ratio, rouge_l
from specjax.rewards import Combined, Judge, Lexical, Reward, Sample


@dataclasses.dataclass(frozen=True)
class Contender:
    """One method with its options under one sampling."""

    name: str
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sampling: sj.Sampling = dataclasses.field(default_factory=sj.Sampling)


@dataclasses.dataclass(frozen=True)
class Setting:
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


def run_contender(setting: Setting, contender: Contender, warm: bool = True) -> dict[str, Any]:
    """One row of a table; ``warm`` runs it twice, so that no time holds a compilation.

    With a reward it says how far constraints are met, without one what the texts are worth.
    """
    if warm:
        _generate(setting, contender, setting.prompts)
    out = _generate(setting, contender, setting.prompts)
    worth = _satisfaction(setting, out) if setting.reward else _worth(setting, out)
    tokens = int(out.lengths.sum())
    seconds = float(row_seconds(out, setting.batch_size).sum())
    target, draft = (int(out.stats[n].sum()) for n in ("target_calls", "draft_calls"))
    row = {
        "name": contender.name,
        "method": contender.method,
        "options": dict(contender.options),
        "rows": len(out.tokens),
        "target_calls_per_token": ratio(target, tokens),
        "draft_calls_per_token": ratio(draft, tokens),
        "acceptance_rate": ratio(out.stats["accepted"].sum(), out.stats["tested"].sum()),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": ratio(tokens, seconds),
        "texts": out.text,
    }
    return row | worth | {"cost": modelled_cost(row, setting.c)}


def _satisfaction(setting: Setting, out: sj.Generation) -> dict[str, Any]:
    failed = ~np.isfinite(out.rewards)
    scores = np.where(failed, 0.0, out.rewards)
    met, asked = count_constraints(setting.reward.parts, scores, setting.prompts)
    satisfied = [setting.reward.satisfied(row) for row in out.rewards]
    return {
        "soft_of_rows": float(scores.mean()),
        "soft_of_constraints": ratio(met, asked),
        "constraints": asked,
        "constraints_met": met,
        "hard": float(np.mean(satisfied)),
        "failed": int(failed.any(axis=1).sum()),
        "satisfied": satisfied,
    }


def _worth(setting: Setting, out: sj.Generation) -> dict[str, Any]:
    """Perplexity under the target, and ROUGE-L where prompts have references."""
    each = zip(setting.prompts, out.tokens, out.text, strict=True)
    surprise, scores = 0.0, []
    for prompt, tokens, text in each:
        surprise -= float(output_logprobs(setting.target, prompt.tokens, tokens).sum())
        scores.append(rouge_l(text, references_of(prompt.entry)))
    scores = [score for score in scores if score is not None]
    return {
        "perplexity": float(np.exp(surprise / out.lengths.sum())),
        "rouge_l": float(np.mean(scores)) if scores else None,
    }


def count_constraints(
    parts: Sequence[Reward], scores: np.ndarray, prompts: Sequence[Prompt]
) -> tuple[int, int]:
    """(constraints met, all constraints) of rows with these ``scores`` ``[rows, parts]``.

    Each word of a word reward is a constraint; any other reward is one, met by a full score.
    """
    met = asked = 0
    for prompt, row in zip(prompts, scores, strict=True):
        for part, score in zip(parts, row.tolist(), strict=True):
            words = isinstance(part, Lexical)
            count = len(part.words_of(prompt.constraints)) if words else 1
            met += round(score * count) if words else int(score >= part.full)
            asked += count
    return met, asked


def add_measures(
    rows: Sequence[dict[str, Any]], prompts: Sequence[Prompt], measures: Combined, tokenizer
) -> None:
    """Adds what further text rewards, which guided nothing, say of the completions.

    Each one's share of full scores under its name, and under ``all`` the share of completions
    that satisfy these and the guiding rewards.
    """
    judge = Judge(measures, tokenizer, frozenset())
    full_scores = [part.full for part in measures.parts]
    for row in rows:
        samples = [
            Sample(text, prompt.text, (), prompt.constraints)
            for text, prompt in zip(row["texts"], prompts, strict=True)
        ]
        full = np.array(judge.scores(samples)) >= full_scores
        for part, share in zip(measures.parts, full.mean(axis=0), strict=True):
            row[part.name] = float(share)
        row["all"] = float((full.all(axis=1) & np.array(row["satisfied"])).mean())


def modelled_cost(row: Mapping[str, Any], c: float | None) -> float:
    """P = c · draft calls per token + target calls per token (Nakshatri et al. 2025, §4): the
    time of a token in target passes if every branch of a lookahead cost a pass of its own."""
    return (c or 0.0) * row["draft_calls_per_token"] + row["target_calls_per_token"]


def add_speedups(rows: Sequence[dict[str, Any]], base: Mapping[str, Any]) -> None:
    """Modelled and wall-clock speedup of every row over ``base``."""
    for row in rows:
        row["modelled_speedup"] = ratio(base["cost"], row["cost"])
        row["speedup"] = ratio(row["tokens_per_second"], base["tokens_per_second"])


def _generate(setting: Setting, contender: Contender, prompts: Sequence[Prompt]) -> sj.Generation:
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
