"""How likely a model finds texts that it did not write, in passes of bounded memory.

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

WIDTH = 128  # tokens a row of a pass, whose logits are held
TOP = 20  # alternatives that are kept


class PromptScores(NamedTuple):
    """Of a row's tokens but its first, each after all before it, by the unwarped model, in nats.

    The K most likely ids stand in falling order; ``log_probs`` of one of them is its very number.
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
      OptionError: it is.
    """
    if model.mesh is not None and model.mesh.shape["model"] > 1:
        raise OptionError("texts are scored with the whole model on one device, and it is split")


def score(model: LM, rows: Sequence[Sequence[int]]) -> list[PromptScores]:
    """The scores of rows of token ids, at least one each; rows of a call share a bucket.

    Raises:
      OptionError: the model is split over devices.
    """
    check_scorable(model)
    *_, last = passes(model, rows)
    return last


def passes(model: LM, rows: Sequence[Sequence[int]]) -> Iterator[list[PromptScores] | None]:
    """:func:`score` pass by pass: None after each, the scores at the end."""
    longest = max(map(len, rows)) - 1
    capacity = bucket(max(-(-longest // WIDTH), 1) * WIDTH)
    tokens = np.zeros((len(rows), capacity + 1), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    cache, found = model.net.cache(len(rows), capacity), []
    for first in range(0, max(longest, 1), WIDTH):
        read, following = (tokens[:, at : at + WIDTH] for at in (first, first + 1))
        start = np.full(len(rows), first, np.int32)
        *parts, cache = _pass(model.net, cache, read, following, start)
        found.append(jax.device_get(parts))
        yield None
    whole = [np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)]
    yield [PromptScores(*(part[i, : len(ids) - 1] for part in whole)) for i, ids in enumerate(rows)]


@functools.partial(jax.jit, donate_argnums=1)
def _pass(net: Net, cache: KVCache, read: jax.Array, following: jax.Array, start: jax.Array):
    """Scores of ``following`` ``[B, W]``, each after the token beside it; one trace per bucket."""
    logits, cache, _ = net.logits(cache, read, start)
    log_p = probs.log_softmax(logits)
    top, ids = jax.lax.top_k(log_p, min(TOP, log_p.shape[-1]))
    return probs.at_token(log_p, following), ids.astype(jnp.int32), top, cache
