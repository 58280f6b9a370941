"""``gsm8k``: whether a completion ends in the right number (Cobbe et al. 2021)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from infer.bench.metrics.protocol import Completion, PerCompletion
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError

# The dataset's mark of an answer, and what its authors' code reads after it.
MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")
# A model that is not tuned for instructions continues with more questions of its own.
NEXT = re.compile(r"\n\s*(?:Question|Q|Problem)\s*:", re.IGNORECASE)


class Gsm8k(PerCompletion):
    """1 if the number after ``####`` is the answer's; without a mark, the last number counts.

    Numbers are compared by value: 1,000 equals 1000.00.
    """

    columns = {"gsm8k": "GSM8K"}  # noqa: RUF012

    def check(self, prompts: Sequence[Completion]) -> None:
        for number, prompt in enumerate(prompts, 1):
            if _gold(prompt) is None:
                raise OptionError(
                    f'--metric gsm8k: prompt {number} has no number under "answer" or as its '
                    "reference"
                )

    def scores(self, completions: Sequence[Completion]) -> list[list[float]]:
        scores = []
        for one in completions:
            gold = _gold(one)
            scores.append([float(gold is not None and answer(one.text) == gold)])
        return scores


def answer(text: str) -> Decimal | None:
    """The number that a solution gives; None if it gives none."""
    text = NEXT.split(text, maxsplit=1)[0]
    marked = MARKED.search(text)
    numbers = [marked[1]] if marked else NUMBER.findall(text)
    if not numbers:
        return None
    try:
        return Decimal(numbers[-1].rstrip(".").replace(",", ""))
    except InvalidOperation:
        return None


def _gold(one: Completion) -> Decimal | None:
    """The right number: of the task's answer, else of the first reference."""
    default = one.references[0] if one.references else ""
    return answer(str(one.task.get("answer", default)))


def make(argument: str, settings: Settings) -> Gsm8k:
    """The metric."""
    return Gsm8k()
