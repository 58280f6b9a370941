"""Score given texts with a model: log-probabilities and top alternatives, pass by pass.

A pass covers ``PASS_TOKENS`` tokens per row, so memory is bounded for texts of any length.

Axis legend: B rows, W tokens of a pass, T tokens of a row, K alternatives, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.errors import OptionError
from specjax.core import probs
from specjax.core.net import Net
from specjax.lm import LM
from specjax.models import KVCache
from specjax.models.cache import bucket

PASS_TOKENS = 128  # W; the logits of so many tokens per row are in memory at a time
TOP = 20  # K


class PromptScores(NamedTuple):
    """Scores of each token but the first, given all tokens before it; unwarped, in nats.

    The K most likely ids are in falling order. If a token is among them, its entry in
    ``log_probs`` is the same number, bit for bit.
    """

    log_probs: np.ndarray  # [T - 1] float32
    top_ids: np.ndarray  # [T - 1, K] int32
    top_log_probs: np.ndarray  # [T - 1, K] float32

    @property
    def is_best(self) -> np.ndarray:
        """Which tokens greedy decoding might take, ``[T - 1]`` bool."""
        return self.log_probs == self.top_log_probs[:, 0]


def check_scorable(model: LM) -> None:
    """Refuses a model whose weights are split over devices.

    Raises:
      OptionError: the model is split.
    """
    if model.mesh is not None and model.mesh.shape["model"] > 1:
        raise OptionError("texts are scored with the whole model on one device, and it is split")


def score(model: LM, rows: Sequence[Sequence[int]]) -> list[PromptScores]:
    """The scores of rows of token ids, at least one each. All rows are padded to one bucket.

    Raises:
      OptionError: the model is split over devices.
    """
    check_scorable(model)
    *_, last = passes(model, rows)
    return last


def passes(model: LM, rows: Sequence[Sequence[int]]) -> Iterator[list[PromptScores] | None]:
    """:func:`score`, pass by pass: yields None after each pass, and the scores at the end.

    A server can do other work between two passes.
    """
    longest = max(map(len, rows)) - 1  # a row's last token is scored but never read
    num_passes = max(-(-longest // PASS_TOKENS), 1)
    capacity = bucket(num_passes * PASS_TOKENS)
    # One more than the passes read: the last pass scores the token after its last one.
    tokens = np.zeros((len(rows), capacity + 1), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids

    # Every pass has the same shapes, so a bucket is compiled once. Padding is scored, too, and cut.
    cache = model.net.cache(len(rows), capacity)
    chunks = []
    for first in range(0, max(longest, 1), PASS_TOKENS):
        read = tokens[:, first : first + PASS_TOKENS]
        following = tokens[:, first + 1 : first + 1 + PASS_TOKENS]
        start = np.full(len(rows), first, np.int32)
        *chunk, cache = _pass(model.net, cache, read, following, start)
        # Fetched immediately, so that the device holds the scores of one pass only.
        chunks.append(jax.device_get(chunk))
        yield None

    fields = [np.concatenate(parts, axis=1) for parts in zip(*chunks, strict=True)]
    scores = []
    for i, ids in enumerate(rows):
        scores.append(PromptScores(*(field[i, : len(ids) - 1] for field in fields)))
    yield scores


@functools.partial(jax.jit, donate_argnums=1)
def _pass(net: Net, cache: KVCache, read: jax.Array, following: jax.Array, start: jax.Array):
    """Scores ``following``, the tokens after those of ``read``, ``[B, W]``; one trace per bucket.

    Returns log-probabilities ``[B, W]``, the top ids and theirs ``[B, W, K]``, and the cache.
    """
    logits, cache, _ = net.logits(cache, read, start)
    log_p = probs.log_softmax(logits)
    top, ids = jax.lax.top_k(log_p, min(TOP, log_p.shape[-1]))
    return probs.at_token(log_p, following), ids.astype(jnp.int32), top, cache
