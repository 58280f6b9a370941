"""``harmless:DIR``: a sequence classifier's score of the completions."""

from __future__ import annotations

from collections.abc import Sequence

from infer.bench.metrics.protocol import Completion, PerCompletion
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError, errors_as
from specjax.rewards.classifier import Classifier
from specjax.rewards.protocol import Sample


class Harmless(PerCompletion):
    """The probability of the classifier's last class, for prompt and completion.

    It is the same number as that of the reward ``classifier:DIR``. The last class must be the
    wanted one.
    """

    columns = {"harmless": "harmless"}  # noqa: RUF012

    def __init__(self, directory: str):
        self._classifier = Classifier(directory)

    def check(self, prompts: Sequence[Completion]) -> None:
        with errors_as("--metric harmless: the classifier cannot score a text", OptionError):
            self._classifier.score(Sample("b", "a ", (), {}))

    def scores(self, completions: Sequence[Completion]) -> list[list[float]]:
        samples = [Sample(one.text, one.prompt, one.tokens, {}) for one in completions]
        return [[score] for score in self._classifier.score_many(samples)]


def make(argument: str, settings: Settings) -> Harmless:
    """The metric; ``argument`` is the classifier's directory."""
    return Harmless(argument)
