"""How well a model drafts for itself when it decodes, measured during training.

The model continues held-out prompts greedily. Along greedy text the next token is the model's
own choice, so the windows of the isolated layout, one before every token, say what two-step
SDSAT decoding (ALGORITHMS.md §11) would accept there: rounds are walked over them, which
gives the decoder's own figures for any window length, without running the decoder.

Axes: `R` prompts, `T` tokens of a row, `N` new tokens of one, `k` adaptive tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import specjax as sj
from specjax.models import ModelConfig
from train.data.packing import IGNORE, Batch, stack
from train.engine.losses import OutputHead
from train.sdsat.insertion import Insertion, append_windows
from train.sdsat.losses import isolated_streams

CERTAIN = 2  # tokens of a round whose drafts all fail


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Held-out prompts to continue, and how.

    Attributes:
      prompts: token ids, of one length.
      new_tokens: N, at most, per prompt.
      length: k, adaptive tokens per round.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    length: int


def measure_decoding(
    cfg: ModelConfig, insertion: Insertion, decoding: Decoding, params: dict
) -> dict[str, Any]:
    """Figures of two-step greedy decoding, by name.

    ``decode_acceptance`` `[k]`: the share of rounds whose drafts 1..i are all accepted;
    ``decode_tokens_per_round``: 2 + the mean number of accepted drafts; a round is two passes.
    Empty without prompts.
    """
    if not decoding.prompts:
        return {}
    target = sj.from_params(cfg, params)
    made = sj.generate(target, decoding.prompts, max_new_tokens=decoding.new_tokens)
    pairs = zip(decoding.prompts, made.tokens, strict=True)
    rows = [lay_windows(prompt, new, decoding, insertion) for prompt, new in pairs]
    guesses = np.asarray(_drafts(cfg, decoding.length, params, stack(rows)))
    accepted = []
    for row, drafts, new in zip(rows, guesses, made.tokens, strict=True):
        labels = row["labels"][len(row["tokens"]) - drafts.size :].reshape(drafts.shape)
        runs = np.cumprod(drafts == labels, axis=1).sum(1)[: max(0, len(new) - decoding.length)]
        accepted += walk_rounds(runs)
    rounds = np.asarray(accepted)[:, None] > np.arange(decoding.length)
    acceptance = rounds.mean(0) if len(rounds) else np.zeros(decoding.length)
    return {
        "decode_acceptance": acceptance.tolist(),
        "decode_tokens_per_round": CERTAIN + float(acceptance.sum()),
    }


def walk_rounds(runs: np.ndarray) -> list[int]:
    """Accepted drafts of each round, from those of the windows at every new token, in order."""
    accepted, at = [], 0
    while at < len(runs):
        accepted.append(int(runs[at]))
        at += CERTAIN + accepted[-1]
    return accepted


def lay_windows(
    prompt: tuple[int, ...], new: np.ndarray, decoding: Decoding, insertion: Insertion
) -> Batch:
    """A prompt and its continuation, padded, with a window of k before every new token.

    Windows that reach past the end have labels IGNORE there and are never used.
    """
    longest = len(prompt) + decoding.new_tokens + decoding.length
    tokens, labels = np.zeros(longest, np.int32), np.full(longest, IGNORE, np.int32)
    used = len(prompt) + len(new)
    tokens[:used] = [*prompt, *new]
    labels[: used - 1] = tokens[1:used]
    places = np.arange(longest, dtype=np.int32)
    row = {"tokens": tokens, "labels": labels, "segments": np.ones_like(tokens)}
    starts = len(prompt) + np.arange(decoding.new_tokens)
    lengths = np.full_like(starts, decoding.length)
    return append_windows(row | {"positions": places}, starts, lengths, lengths.sum(), insertion)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drafts(cfg: ModelConfig, length: int, params: dict, batch: Batch) -> jax.Array:
    """The most probable token of every adaptive one, `[R, N, k]`."""
    windows = isolated_streams(cfg, params, batch)[1]
    return OutputHead.of(cfg, params).argmax(windows).reshape(len(windows), -1, length)
