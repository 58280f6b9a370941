"""How often a token copied by lookup is right: python docs/tools/measure_matches.py TARGET PROMPTS

TARGET is a checkpoint with a chat template, and PROMPTS a JSONL file of objects with "prompt". The
target answers greedily. At each token of its answers, lookup drafts the next one from a match of
1, 2, 3, … tokens. The table has the share of these drafts that are right, by the length of the
match: the rates with which automatic draft lengths begin (specjax.draft.lookup).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax._util.files import markdown_table
from specjax.draft import Lookup
from specjax.draft.lookup import ACCEPTANCE_BY_MATCH

DRAFTER = Lookup(gamma=1, ngram=len(ACCEPTANCE_BY_MATCH))
NO_EOS = SimpleNamespace(is_eos=lambda tokens: jnp.zeros(tokens.shape, bool))


def main() -> None:
    """Answers the prompts, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()
    target = sj.load(args.target)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    prompts = [target.tokenizer.encode_chat(chat) for chat in chats]
    answers = sj.generate(
        target,
        prompts,
        max_new_tokens=args.max_new_tokens,
        batch_size=8,
        sampling=sj.Sampling(temperature=0),
    )
    capacity = max(map(len, prompts)) + args.max_new_tokens
    counts = np.zeros((len(ACCEPTANCE_BY_MATCH) + 1, 2), int)  # by match: drafts, right ones
    for prompt, answer in zip(prompts, answers.tokens, strict=True):
        counts += count(list(prompt), list(answer), capacity)
    rows = []
    for length, (drafts, right) in enumerate(counts):
        share = f"{right / drafts:.2f}" if length and drafts else ""
        rows.append([str(length), str(drafts), share])
    print(markdown_table(["tokens of the match", "places", "right"], rows), end="")


def count(prompt: list[int], answer: list[int], capacity: int) -> np.ndarray:
    """Places and right drafts of one answer, by the length of the match, ``[5, 2]``."""
    whole = np.zeros(capacity, np.int32)
    whole[: len(prompt) + len(answer)] = [*prompt, *answer]
    # A row of the batch for each token of the answer: all that is written before it.
    length = len(prompt) + np.arange(len(answer), dtype=np.int32)
    tokens = np.broadcast_to(whole, (len(answer), capacity))
    drafted, confidence = _propose(jnp.asarray(tokens), jnp.asarray(length))
    right = (np.asarray(drafted) == np.array(answer)) & (np.asarray(confidence) >= 0)
    counts = np.zeros((len(ACCEPTANCE_BY_MATCH) + 1, 2), int)
    np.add.at(counts, np.asarray(confidence) + 1, np.stack([np.ones_like(right), right], 1))
    return counts


@jax.jit
def _propose(tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The drafted token of each row, and its confidence."""
    done = jnp.zeros(length.shape, bool)
    state = SimpleNamespace(tokens=tokens, length=length, capacity=tokens.shape[1], done=done)
    proposal = DRAFTER.propose(NO_EOS, state, None)
    return proposal.draft.tokens[:, 1], proposal.confidence


if __name__ == "__main__":
    main()
