"""The table of metrics by name, and ``NAME[:ARG]``; only those asked for are imported."""

from __future__ import annotations

import pkgutil
import re
from typing import TYPE_CHECKING, NamedTuple

from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError

if TYPE_CHECKING:  # it imports NumPy, and --help only needs the table
    from infer.bench.metrics.protocol import Metric


class MetricSpec(NamedTuple):
    """An entry of the table.

    Attributes:
      argument: the argument as users write it, in brackets if it is optional.
      says: one line for the help.
      needs: what must be installed or given.
      module: the module whose ``make`` takes an argument and settings.
    """

    argument: str
    says: str
    needs: str
    module: str


METRICS = {
    "rouge": MetricSpec(
        "[stem]", "ROUGE-1, 2, L and Lsum to the best reference", "rouge-score", "rouge"
    ),
    "exact": MetricSpec("", "equals a reference, except for white space around it", "", "exact"),
    "gsm8k": MetricSpec("", "ends in the same number as GSM8K's answer", "", "gsm8k"),
    "execution": MetricSpec(
        "DIR", "Spider's queries: the gold query's rows, in DIR/ID/ID.sqlite", "", "execution"
    ),
    "pass": MetricSpec(
        "K", "pass@K: one of K completions passes its task's test", "a sandbox", "passing"
    ),
    "diversity": MetricSpec("", "distinct n-grams of words, as SimCTG counts", "", "diversity"),
    "mauve": MetricSpec(
        "DIR", "MAUVE to the first references, by a model's features", "mauve-text", "mauve"
    ),
    "coherence": MetricSpec(
        "DIR", "cosine of a prompt's and its completion's embeddings", "torch", "coherence"
    ),
    "harmless": MetricSpec(
        "DIR", "probability of a sequence classifier's last class", "torch", "harmless"
    ),
    "llama-guard": MetricSpec("DIR", "share that Llama-Guard calls safe", "", "llama_guard"),
    "satisfaction": MetricSpec(
        "[REWARD]",
        "share of the prompts' constraints that are met, by a reward (default: lexical)",
        "",
        "satisfaction",
    ),
    "judge": MetricSpec(
        "[pair]",
        "a judge's rating, 1 to 10; pair: how often it prefers ours to the first reference",
        "--judge-url, --judge-model",
        "judge",
    ),
}


def make_metric(text: str, settings: Settings | None = None) -> Metric:
    """The metric that ``NAME``, ``NAME:ARG`` or ``pass@K`` names.

    Raises:
      OptionError: the name is unknown, the argument does not fit, or something it needs is missing.
    """
    name, argument = re.fullmatch(r"([^:@]*)[:@]?(.*)", text, re.DOTALL).groups()
    if name not in METRICS:
        raise OptionError(f"--metric {text}: choose {', '.join(METRICS)}")
    spec = METRICS[name]
    if argument and not spec.argument:
        raise OptionError(f"--metric {text}: {name} takes no argument")
    if spec.argument and not argument and not spec.argument.startswith("["):
        raise OptionError(f"--metric {text}: expected {name}:{spec.argument}")
    make = pkgutil.resolve_name(f"infer.bench.metrics.{spec.module}:make")
    return make(argument, settings or Settings())
