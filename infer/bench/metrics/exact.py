"""``exact``: completions that equal a reference."""

from __future__ import annotations

from collections.abc import Sequence

from infer.bench.metrics.protocol import Completion, PerCompletion
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError
from specjax.runtime.infill import exact_matches


class Exact(PerCompletion):
    """1 where a completion is one of its references, or the ``middle`` of its task."""

    columns = {"exact_match": "exact match"}  # noqa: RUF012

    def check(self, prompts: Sequence[Completion]) -> None:
        for number, prompt in enumerate(prompts, 1):
            if not _known(prompt):
                raise OptionError(
                    f'--metric exact: prompt {number} has neither "references" nor a "middle"'
                )

    def scores(self, done: Sequence[Completion]) -> list[list[float]]:
        return [[max(exact_matches([one.text], [text]) for text in _known(one))] for one in done]


def _known(one: Completion) -> Sequence[str]:
    middle = one.task.get("middle")
    return [*one.references, *([middle] if isinstance(middle, str) else [])]


def make(argument: str, settings: Settings) -> Exact:
    """The metric."""
    return Exact()
