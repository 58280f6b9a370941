"""Score finished outputs with a model, a whole row per pass; one trace per bucket of lengths.

Axis legend: S cache positions of a row, T tokens of an output.
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
    """The log-probability in nats of each output token under the unwarped target, ``[T]``."""
    scores = np.asarray(_token_logprobs(target.mesh, target.net, padded_row(prompt, output)))
    # The token at position i is scored by the pass's position i - 1.
    return scores[len(prompt) - 1 :][: len(output)]


def mismatches(
    target: sj.LM, prompts: Prompts, expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Rows whose greedy tokens differ.

    Each has the ``position`` of the first difference, and the ``gap`` between the target's two
    best logits there. A tiny gap is a tie that rounding decided.
    """
    found = []
    for row, (prompt, want, got) in enumerate(zip(prompts, expected, actual, strict=True)):
        length = min(len(want), len(got))
        differ = np.flatnonzero(np.asarray(want[:length]) != np.asarray(got[:length]))
        if differ.size:
            position = int(differ[0])
        elif len(want) != len(got):
            position = length  # one is the beginning of the other
        else:
            continue
        gap = _top_gap(target, [*prompt, *want[:position]])
        found.append({"row": row, "position": position, "gap": gap})
    return found


def padded_row(*parts: Sequence[int]) -> np.ndarray:
    """The token ids of all parts in one row, padded to its bucket: ``[1, S]`` int32."""
    tokens = np.concatenate([np.asarray(part, np.int32) for part in parts])
    row = np.zeros((1, bucket(len(tokens))), np.int32)
    row[0, : len(tokens)] = tokens
    return row


@replicated
def _token_logprobs(net: Net, row: jax.Array) -> jax.Array:
    """``log p(row[i + 1] | row[: i + 1])`` at every i, ``[S - 1]``."""
    return probs.at_token(probs.log_softmax(net.rescore(row)[0, :-1]), row[0, 1:])


def _top_gap(target: sj.LM, tokens: Sequence[int]) -> float:
    """Difference of the two best logits after ``tokens``."""
    last = np.array([[len(tokens) - 1]])
    top = _best_two(target.mesh, target.net, padded_row(tokens), last)
    return float(top[0] - top[1])


@replicated
def _best_two(net: Net, row: jax.Array, position: jax.Array) -> jax.Array:
    """The two highest logits after ``position`` ``[1, 1]``, in falling order: ``[2]``."""
    return jax.lax.top_k(net.rescore(row, position)[0, 0], 2)[0]
