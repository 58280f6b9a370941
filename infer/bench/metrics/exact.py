"""``exact``: completions that equal a reference."""

from __future__ import annotations

from collections.abc import Sequence

from infer.bench.metrics.protocol import Completion, PerCompletion
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError
from specjax.runtime.infill import exact_matches


class Exact(PerCompletion):
    """1 if a completion equals one of its references or its task's ``middle``, else 0."""

    columns = {"exact_match": "exact match"}  # noqa: RUF012

    def check(self, prompts: Sequence[Completion]) -> None:
        for number, prompt in enumerate(prompts, 1):
            if not _expected(prompt):
                raise OptionError(
                    f'--metric exact: prompt {number} has neither "references" nor a "middle"'
                )

    def scores(self, completions: Sequence[Completion]) -> list[list[float]]:
        scores = []
        for one in completions:
            matches = [exact_matches([one.text], [text]) for text in _expected(one)]
            scores.append([max(matches)])
        return scores


def _expected(one: Completion) -> Sequence[str]:
    """The texts that count as exact."""
    middle = one.task.get("middle")
    if isinstance(middle, str):
        return [*one.references, middle]
    return one.references


def make(argument: str, settings: Settings) -> Exact:
    """The metric."""
    return Exact()
