"""Score given texts with a model: log-probabilities and top alternatives, pass by pass.

A pass covers ``PASS_TOKENS`` tokens per row, so memory is bounded for texts of any length.

Axis legend: B rows, W tokens of a pass, T tokens of a row, K alternatives, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core import probs
from specjax.core.mesh import program, round_up
from specjax.core.sampling import Sampling
from specjax.core.types import Inputs
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


def score(model: LM, rows: Sequence[Sequence[int]]) -> list[PromptScores]:
    """The scores of rows of token ids, at least one each. All rows are padded to one bucket.

    On a mesh each device has its share of the rows and of the weights, as in decoding.
    """
    *_, last = passes(model, rows)
    return last


def passes(model: LM, rows: Sequence[Sequence[int]]) -> Iterator[list[PromptScores] | None]:
    """:func:`score`, pass by pass: yields None after each pass, and the scores at the end.

    A server can do other work between two passes.
    """
    longest = max(map(len, rows)) - 1  # a row's last token is scored but never read
    num_passes = max(-(-longest // PASS_TOKENS), 1)
    capacity = bucket(num_passes * PASS_TOKENS)
    size = len(rows)
    if model.mesh is not None:
        size = round_up(size, model.mesh)  # the rows split evenly over its devices
    # One more than the passes read: the last pass scores the token after its last one.
    tokens = np.zeros((size, capacity + 1), np.int32)
    for row, ids in zip(tokens, rows, strict=False):
        row[: len(ids)] = ids

    # Every pass has the same shapes, so a bucket is compiled once. Padding is scored, too, and cut.
    inputs = Inputs.of(model, None, Sampling(), size)
    cache = _programs().begin(inputs, tokens[:, :capacity])
    chunks = []
    for first in range(0, max(longest, 1), PASS_TOKENS):
        read = tokens[:, first : first + PASS_TOKENS]
        following = tokens[:, first + 1 : first + 1 + PASS_TOKENS]
        start = np.full(size, first, np.int32)
        *chunk, cache = _programs().run(inputs, cache, read, following, start)
        # Fetched immediately, so that the device holds the scores of one pass only.
        chunks.append(jax.device_get(chunk))
        yield None

    fields = [np.concatenate(parts, axis=1) for parts in zip(*chunks, strict=True)]
    scores = []
    for i, ids in enumerate(rows):
        scores.append(PromptScores(*(field[i, : len(ids) - 1] for field in fields)))
    yield scores


class _Programs(NamedTuple):
    """The two programs of scoring."""

    begin: Callable[..., KVCache]
    run: Callable[..., tuple]


@functools.cache
def _programs() -> _Programs:
    # Made at the first call: options of programs depend on the device.
    return _Programs(program(_begin), program(_pass, donate_argnums=1))


def _begin(inputs: Inputs, tokens: Int[Array, "B S"]) -> KVCache:
    """An empty cache for S tokens of each row."""
    return inputs.target.cache(*tokens.shape)


def _pass(
    inputs: Inputs,
    cache: KVCache,
    read: Int[Array, "B W"],
    following: Int[Array, "B W"],
    start: Int[Array, "B"],
) -> tuple[Float[Array, "B W"], Int[Array, "B W K"], Float[Array, "B W K"], KVCache]:
    """Scores ``following``, the tokens after those of ``read``; one trace per bucket.

    Returns log-probabilities, the top ids and theirs, and the cache.
    """
    logits, cache, _ = inputs.target.logits(cache, read, start)
    log_p = probs.log_softmax(logits)
    top, ids = jax.lax.top_k(log_p, min(TOP, log_p.shape[-1]))
    return probs.at_token(log_p, following), ids.astype(jnp.int32), top, cache
