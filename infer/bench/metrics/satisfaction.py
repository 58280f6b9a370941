"""``satisfaction[:REWARD]``: how far completions meet their prompts' constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from infer.bench.metrics.protocol import Completion, Completions
from infer.bench.metrics.settings import Settings
from infer.formats import constraints_of
from infer.satisfaction import count_constraints
from infer.uncertainty import Estimate, ratio
from specjax._util.errors import OptionError
from specjax.rewards import Lexical, RewardScorer, Sample, combine

LEXICAL = "lexical"


class Satisfaction:
    """The constraint satisfaction of Nakshatri et al. 2025, §4.3, for any method.

    Soft is the share of all constraints that are met, and the mean of the completions' scores. Hard
    is the share of completions that meet all of theirs. A completion without a score meets none.
    """

    columns = {  # noqa: RUF012
        "soft_of_rows": "soft, mean of rows",
        "soft_of_constraints": "soft, of all constraints",
        "hard": "hard",
    }

    def __init__(self, reward: str):
        self._reward = combine([reward])
        self._scorer = RewardScorer(self._reward, None, frozenset())

    def check(self, prompts: Sequence[Completion]) -> None:
        all_constraints = []
        for number, prompt in enumerate(prompts, 1):
            try:
                constraints = constraints_of(prompt.task)
            except ValueError as error:
                message = f"--metric satisfaction: prompt {number}: {error}"
                raise OptionError(message) from None
            for part in self._reward.parts:
                if isinstance(part, Lexical) and not part.words_of(constraints):
                    raise OptionError(
                        f"--metric satisfaction: prompt {number} has no words for {part.name}: "
                        'give it "constraints"'
                    )
            all_constraints.append(constraints)
        for part in self._reward.parts:
            if isinstance(part, Lexical):
                part.warn_of_regular_forms(all_constraints)

    def measure(self, by_prompt: Sequence[Completions]) -> Mapping[str, Estimate]:
        sums = []
        for completions in by_prompt:
            sums.append(self._sums(completions))
        # [P]: sums over each prompt's completions.
        soft, met, asked, satisfied, count = np.array(sums, float).T
        return {
            "soft_of_rows": ratio(soft, count),
            "soft_of_constraints": ratio(met, asked),
            "hard": ratio(satisfied, count),
        }

    def _sums(self, completions: Completions) -> tuple[float, int, int, int, int]:
        """Sums over a prompt's completions: scores, met, asked, wholly satisfied, how many."""
        constraints = [constraints_of(one.task) for one in completions]
        samples = [
            Sample(one.text, one.prompt, one.tokens, own, one.ended)
            for one, own in zip(completions, constraints, strict=True)
        ]
        found = np.array(self._scorer.scores(samples), float)
        scores = np.where(np.isfinite(found), found, 0.0)
        met, asked = count_constraints(self._reward.parts, scores, constraints)
        satisfied = sum(self._reward.satisfied(row) for row in found)
        return scores.mean(axis=1).sum(), met.sum(), asked.sum(), satisfied, len(samples)


def make(argument: str, settings: Settings) -> Satisfaction:
    """The metric; ``argument`` is a reward, ``lexical`` by default."""
    return Satisfaction(argument or LEXICAL)
