"""Outputs scored once more by a model, whole rows at a time; one trace per bucket of lengths.

Axis legend: S cache positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import specjax as sj
from specjax.core import probs
from specjax.core.mesh import replicated
from specjax.core.net import Net
from specjax.models.cache import bucket

Prompts = Sequence[Sequence[int]]  # token ids


def output_logprobs(target: sj.LM, prompt: Sequence[int], output: np.ndarray) -> np.ndarray:
    """Log-probabilities (nats) of every output token under the unwarped target."""
    scores = np.asarray(_token_logprobs(target.mesh, target.net, padded_row(prompt, output)))
    return scores[len(prompt) - 1 :][: len(output)]


def mismatches(
    target: sj.LM, prompts: Prompts, want: Sequence[np.ndarray], got: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Rows whose greedy tokens differ, with the target's top-2 gap where they part."""
    parted = []
    for row, (prompt, a, b) in enumerate(zip(prompts, want, got, strict=True)):
        length = min(len(a), len(b))
        differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
        if differ.size or len(a) != len(b):
            at = int(differ[0]) if differ.size else length
            gap = _top_gap(target, [*prompt, *a[:at]])
            parted.append({"row": row, "position": at, "gap": gap})
    return parted


def padded_row(*parts: Sequence[int]) -> np.ndarray:
    """The token ids of all parts as one row, ``[1, S]`` int32, in its bucket."""
    text = np.concatenate([np.asarray(part, np.int32) for part in parts])
    row = np.zeros((1, bucket(len(text))), np.int32)
    row[0, : len(text)] = text
    return row


@replicated
def _token_logprobs(net: Net, row: jax.Array) -> jax.Array:
    """``log p(row[i + 1] | row[: i + 1])`` at every i, ``[S - 1]``."""
    return probs.at_token(probs.log_softmax(net.rescore(row)[0, :-1]), row[0, 1:])


def _top_gap(target: sj.LM, tokens: Sequence[int]) -> float:
    """Difference of the two best logits after ``tokens``."""
    at = np.array([[len(tokens) - 1]])
    top = _best_two(target.mesh, target.net, padded_row(tokens), at)
    return float(top[0] - top[1])


@replicated
def _best_two(net: Net, row: jax.Array, at: jax.Array) -> jax.Array:
    return jax.lax.top_k(net.rescore(row, at)[0, 0], 2)[0]
