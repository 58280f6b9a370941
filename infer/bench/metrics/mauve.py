"""``mauve:DIR``: MAUVE of completions against human continuations (Pillutla et al. 2021)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from infer.bench.metrics.protocol import Completion, Drawn, library, need_references
from infer.bench.metrics.settings import Settings
from infer.uncertainty import Estimate
from specjax import lm
from specjax._util.errors import OptionError
from specjax.core.net import Net
from specjax.lm import LM
from specjax.models import hidden_states
from specjax.models.cache import bucket

MOST_TOKENS = 1024  # of a text, as the library's own
RESAMPLES = 20  # each is a clustering
LEAST = 2


class Mauve:
    """MAUVE of prompt and completion against prompt and first reference; mauve-text's settings.

    A text's feature is the final hidden state of its last token, of a model that specjax reads
    (the paper's is gpt2-large). A sampled case is compared seed by seed: the figure is the mean of
    its seeds. ± is 1.96 standard deviations over bootstrap resamples of the prompts, of both
    sides at once: clusterings are too slow for percentiles.
    """

    columns = {"mauve": "MAUVE"}  # noqa: RUF012

    def __init__(self, directory: str):
        self._library = library("mauve", "mauve")
        model = lm.load(directory)
        if model.tokenizer is None:
            raise OptionError(f"--metric mauve: {directory} has no tokenizer")
        # Prompts' references come with every case.
        self._feature = functools.lru_cache(1 << 14)(functools.partial(feature, model))

    def check(self, prompts: Sequence[Completion]) -> None:
        need_references("mauve", prompts, "human continuation")
        if len(prompts) < LEAST:
            raise OptionError(f"--metric mauve compares sets of texts: {len(prompts)} is too few")

    def measure(self, drawn: Sequence[Drawn]) -> dict[str, Estimate]:
        human = self.features([prompt[0].prompt + prompt[0].reference for prompt in drawn])
        seeds = [
            self.features([prompt[seed].prompt + prompt[seed].text for prompt in drawn])
            for seed in range(min(map(len, drawn)))
        ]
        figures = [self._figure(human, ours) for ours in seeds]
        drawing, count = np.random.Generator(np.random.Philox(0)), len(drawn)
        spread = []
        for resample in range(RESAMPLES):
            taken = drawing.integers(0, count, count)
            spread.append(self._figure(human[taken], seeds[resample % len(seeds)][taken]))
        return {"mauve": (float(np.mean(figures)), 1.96 * float(np.std(spread, ddof=1)))}

    def _figure(self, human: np.ndarray, ours: np.ndarray) -> float:
        found = self._library.compute_mauve(p_features=human, q_features=ours)
        return float(found.mauve)

    def features(self, texts: Sequence[str]) -> np.ndarray:
        """Each text's feature, ``[texts, D]`` float32."""
        return np.stack([self._feature(text) for text in texts])


def feature(model: LM, text: str) -> np.ndarray:
    """The final hidden state of a text's last token, ``[D]`` float32; of no text that of BOS."""
    most = min(MOST_TOKENS, model.config.max_position)
    tokens = model.tokenizer.encode(text)[:most] or [model.config.bos_id or 0]
    row = np.zeros((1, bucket(len(tokens))), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_final(model.net, row)[0, len(tokens) - 1], np.float32)


@jax.jit
def _final(net: Net, row: jax.Array) -> jax.Array:
    """Final hidden states of a row, ``[1, S, D]``; one trace per bucket."""
    positions = np.arange(row.shape[1])[None]
    return hidden_states(net.config, net.params, row, positions, np.ones_like(positions)).hidden


def make(argument: str, settings: Settings) -> Mauve:
    """The metric; ``argument`` is the featurising model's directory."""
    return Mauve(argument)
