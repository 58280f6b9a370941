"""How well a model drafts for itself when it decodes, measured during training.

The model continues held-out prompts greedily. Then one forward pass over the isolated layout has a
window before every new token. It tells what two-step SDSAT decoding (arXiv 2403.18647, §2.1) would
accept at each place. Walking over these places round by round gives the decoder's figures, for any
window length, without running the decoder.

Axes: `R` prompts, `T` tokens of a row, `N` new tokens of a prompt, `k` adaptive tokens of a window.
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

CERTAIN = 2  # tokens of a round without any accepted draft token


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Held-out prompts, and how far they are continued.

    Attributes:
      prompts: token ids.
      new_tokens: N, the most new tokens per prompt.
      length: k, adaptive tokens per round.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    length: int

    @property
    def row_tokens(self) -> int:
        """T, tokens of a row that holds the longest prompt, its continuation and one window."""
        return max(map(len, self.prompts)) + self.new_tokens + self.length


def measure_decoding(
    cfg: ModelConfig, insertion: Insertion, decoding: Decoding, params: dict
) -> tuple[dict[str, Any], list[int]]:
    """(figures of two-step greedy decoding, the new tokens of the first prompt).

    The figures, by name:

    ``decode_acceptance`` `[k]`: the share of rounds whose draft tokens 1..i are all accepted;
    ``decode_tokens_per_round``: 2 + the mean number of accepted draft tokens;
    ``decode_tokens_per_pass``: half of that, because a round is two forward passes.
    """
    target = sj.from_params(cfg, params)
    out = sj.generate(target, decoding.prompts, max_new_tokens=decoding.new_tokens)
    pairs = zip(decoding.prompts, out.tokens, strict=True)
    rows = [lay_out_windows(prompt, new, decoding, insertion) for prompt, new in pairs]
    drafts_of_rows = np.asarray(_drafts(cfg, decoding.length, params, stack(rows)))

    accepted = []
    for row, drafts, new in zip(rows, drafts_of_rows, out.tokens, strict=True):
        # The appended windows are the last tokens of the row.
        labels = row["labels"][len(row["tokens"]) - drafts.size :].reshape(drafts.shape)
        matches = np.cumprod(drafts == labels, axis=1).sum(1)
        # The last windows reach past the text: what they would draft there is not known.
        complete = max(0, len(new) - decoding.length)
        accepted += walk_rounds(matches[:complete])
    # bool [rounds, k]: whether draft tokens 1..i of a round are all accepted.
    rounds = np.asarray(accepted)[:, None] > np.arange(decoding.length)
    acceptance = rounds.mean(0) if len(rounds) else np.zeros(decoding.length)
    figures = {
        "decode_acceptance": acceptance.tolist(),
        "decode_tokens_per_round": CERTAIN + float(acceptance.sum()),
        "decode_tokens_per_pass": 1 + float(acceptance.sum()) / CERTAIN,
    }
    return figures, out.tokens[0].tolist()


def walk_rounds(matches: np.ndarray) -> list[int]:
    """Accepted draft tokens of each round, when a round starts where the one before has ended.

    Args:
      matches: for each new token, how many draft tokens of its window are right, from the first.
    """
    accepted = []
    place = 0
    while place < len(matches):
        accepted.append(int(matches[place]))
        place += CERTAIN + accepted[-1]
    return accepted


def lay_out_windows(
    prompt: tuple[int, ...], new: np.ndarray, decoding: Decoding, insertion: Insertion
) -> Batch:
    """A prompt and its continuation, padded, with a window of k tokens before every new token.

    Windows that reach past the end have labels IGNORE there and are never used.
    """
    longest = decoding.row_tokens
    used = len(prompt) + len(new)
    tokens = np.zeros(longest, np.int32)
    tokens[:used] = [*prompt, *new]
    labels = np.full(longest, IGNORE, np.int32)
    labels[: used - 1] = tokens[1:used]
    row = {
        "tokens": tokens,
        "labels": labels,
        "segments": np.ones_like(tokens),
        "positions": np.arange(longest, dtype=np.int32),
    }
    starts = len(prompt) + np.arange(decoding.new_tokens)
    lengths = np.full_like(starts, decoding.length)
    return append_windows(row, starts, lengths, lengths.sum(), insertion)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drafts(cfg: ModelConfig, length: int, params: dict, batch: Batch) -> jax.Array:
    """The most probable token at every adaptive token, `[R, N, k]`."""
    windows = isolated_streams(cfg, params, batch).adaptive
    return OutputHead.of(cfg, params).argmax(windows).reshape(len(windows), -1, length)
