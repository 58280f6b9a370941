"""``gsm8k``: whether a completion ends in the right number (Cobbe et al. 2021)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from infer.bench.metrics.protocol import Completion, PerCompletion
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError

# The dataset's own mark, and what its authors' code reads behind it.
MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")
# A model without instructions goes on with questions of its own.
NEXT = re.compile(r"\n\s*(?:Question|Q|Problem)\s*:", re.IGNORECASE)


class Gsm8k(PerCompletion):
    """1 where the number behind ``####`` is the answer's; where there is no mark, the last one.

    Numbers are compared by value: 1,000 is 1000.00.
    """

    columns = {"gsm8k": "GSM8K"}  # noqa: RUF012

    def check(self, prompts: Sequence[Completion]) -> None:
        for number, prompt in enumerate(prompts, 1):
            if _gold(prompt) is None:
                raise OptionError(
                    f'--metric gsm8k: prompt {number} has no number under "answer" or as its '
                    "reference"
                )

    def scores(self, done: Sequence[Completion]) -> list[list[float]]:
        return [[float(_gold(one) is not None and answer(one.text) == _gold(one))] for one in done]


def answer(text: str) -> Decimal | None:
    """The number that a solution gives; None where it gives none."""
    text = NEXT.split(text, maxsplit=1)[0]
    marked = MARKED.search(text)
    numbers = [marked[1]] if marked else NUMBER.findall(text)[-1:]
    try:
        return Decimal(numbers[0].rstrip(".").replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def _gold(one: Completion) -> Decimal | None:
    known = one.task.get("answer", one.references[0] if one.references else "")
    return answer(str(known))


def make(argument: str, settings: Settings) -> Gsm8k:
    """The metric."""
    return Gsm8k()
