"""``llama-guard:DIR``: a Llama-Guard's verdict on the completions (Inan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from infer.bench.metrics.protocol import Completion, PerCompletion
from infer.bench.metrics.settings import Settings
from infer.llama_guard import Guard


class LlamaGuard(PerCompletion):
    """1 if the model calls the completion ``safe``, 0 if not, and no score without a verdict."""

    columns = {"llama_guard": "safe, Llama-Guard"}  # noqa: RUF012

    def __init__(self, directory: str):
        self._guard = Guard(directory, "--metric llama-guard")

    def scores(self, completions: Sequence[Completion]) -> list[list[float | None]]:
        found = self._guard.verdicts([(one.prompt, one.text) for one in completions])
        return [[score] for score in found]


def make(argument: str, settings: Settings) -> LlamaGuard:
    """The metric; ``argument`` is the model's directory."""
    return LlamaGuard(argument)
