"""``rouge``: ROUGE by Google's rouge-score, whose words are ASCII letters and digits."""

from __future__ import annotations

from collections.abc import Sequence

from infer.bench.metrics.protocol import Completion, PerCompletion, library, need_references
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError

STEM = "stem"


class Rouge(PerCompletion):
    """F1 of words, word pairs and longest common subsequences (Lin 2004), of the best reference.

    ``stem`` compares Porter stems instead of words, as is usual for summaries.
    """

    columns = {  # noqa: RUF012
        "rouge1": "rouge-score 1",
        "rouge2": "rouge-score 2",
        "rougeL": "rouge-score L",
        "rougeLsum": "rouge-score Lsum",
    }

    def __init__(self, stem: bool):
        scorer = library("rouge_score.rouge_scorer", "rouge")
        self._scorer = scorer.RougeScorer(list(self.columns), use_stemmer=stem)

    def check(self, prompts: Sequence[Completion]) -> None:
        need_references("rouge", prompts)

    def scores(self, completions: Sequence[Completion]) -> list[list[float]]:
        scores = []
        for one in completions:
            by_key = self._scorer.score_multi(one.references, one.text)
            scores.append([by_key[key].fmeasure for key in self.columns])
        return scores


def make(argument: str, settings: Settings) -> Rouge:
    """The metric; ``argument`` is empty or ``stem``."""
    if argument not in ("", STEM):
        raise OptionError(f"--metric rouge:{argument}: expected rouge or rouge:{STEM}")
    return Rouge(argument == STEM)
