"""``mauve:DIR``: MAUVE of completions against human continuations (Pillutla et al. 2021).

Axis legend: P prompts, S tokens of a text, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from infer.bench.metrics.protocol import Completion, Completions, library, need_references
from infer.bench.metrics.settings import Settings
from infer.uncertainty import Estimate
from specjax import lm
from specjax._util.errors import OptionError
from specjax.core.net import Net
from specjax.lm import LM
from specjax.models import hidden_states
from specjax.models.cache import bucket

MAX_TOKENS = 1024  # of a text, as in mauve-text
RESAMPLES = 20  # each one is a clustering for each seed, which takes seconds
MIN_PROMPTS = 2
CACHED_FEATURES = 1 << 14


class Mauve:
    """MAUVE of prompt and completion against prompt and first reference; mauve-text's settings.

    A text's feature is the final hidden state of its last token, from a model that specjax reads
    (gpt2-large in the paper). With several seeds, the figure is the mean over seeds. ± is 1.96
    standard deviations of that mean over bootstrap resamples of the prompts. Clusterings are too
    slow for the many resamples that percentiles need.
    """

    columns = {"mauve": "MAUVE"}  # noqa: RUF012

    def __init__(self, directory: str):
        self._library = library("mauve", "mauve")
        model = lm.load(directory)
        if model.tokenizer is None:
            raise OptionError(f"--metric mauve: {directory} has no tokenizer")
        # Every case has the same references, whose features are computed once.
        cache = functools.lru_cache(CACHED_FEATURES)
        self._feature = cache(functools.partial(feature, model))

    def check(self, prompts: Sequence[Completion]) -> None:
        need_references("mauve", prompts, "human continuation")
        if len(prompts) < MIN_PROMPTS:
            raise OptionError(f"--metric mauve compares sets of texts: {len(prompts)} is too few")

    def measure(self, by_prompt: Sequence[Completions]) -> dict[str, Estimate]:
        human = self.features([prompt[0].prompt + prompt[0].reference for prompt in by_prompt])
        by_seed = []
        for seed in range(min(map(len, by_prompt))):
            texts = [prompt[seed].prompt + prompt[seed].text for prompt in by_prompt]
            by_seed.append(self.features(texts))
        value = self._mean(human, by_seed)

        generator = np.random.Generator(np.random.Philox(0))
        count = len(by_prompt)
        resampled = []
        for _ in range(RESAMPLES):
            drawn = generator.integers(0, count, count)
            resampled.append(self._mean(human[drawn], [ours[drawn] for ours in by_seed]))
        return {"mauve": (value, 1.96 * float(np.std(resampled, ddof=1)))}

    def _mean(self, human: np.ndarray, by_seed: Sequence[np.ndarray]) -> float:
        """The mean over seeds; features are ``[P, D]``."""
        return float(np.mean([self._mauve(human, ours) for ours in by_seed]))

    def _mauve(self, human: np.ndarray, ours: np.ndarray) -> float:
        """MAUVE of two sets of features, ``[P, D]`` both."""
        return float(self._library.compute_mauve(p_features=human, q_features=ours).mauve)

    def features(self, texts: Sequence[str]) -> np.ndarray:
        """Each text's feature, ``[texts, D]`` float32."""
        return np.stack([self._feature(text) for text in texts])


def feature(model: LM, text: str) -> np.ndarray:
    """The final hidden state of a text's last token, ``[D]`` float32; of BOS if it is empty."""
    max_tokens = min(MAX_TOKENS, model.config.max_position)
    tokens = model.tokenizer.encode(text)[:max_tokens] or [model.config.bos_id or 0]
    row = np.zeros((1, bucket(len(tokens))), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_final_states(model.net, row)[0, len(tokens) - 1], np.float32)


@jax.jit
def _final_states(net: Net, row: jax.Array) -> jax.Array:
    """Final hidden states of a row, ``[1, S, D]``; one trace per bucket."""
    positions = np.arange(row.shape[1])[None]
    return hidden_states(net.config, net.params, row, positions, np.ones_like(positions)).hidden


def make(argument: str, settings: Settings) -> Mauve:
    """The metric; ``argument`` is the directory of the model that computes the features."""
    return Mauve(argument)
