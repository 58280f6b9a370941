"""Suffix drafts: what most often followed the same words, in any row or earlier request of the job.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). Its suffix trees become one flat pool
of text here, because an accelerator can compare all of it with a row's last words at once.

Axis legend: B rows, C tokens of a row's ring buffer, P = B·C tokens of the pool, K occurrences that
vote, S token positions, γ draft length.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Key

from specjax._util.arguments import COUNT, validate_fields
from specjax.core import probs
from specjax.core.protocols import Drafter, Proposal
from specjax.core.types import POINT_MASS, DecodeState, Draft, Inputs, TreeShape
from specjax.draft.lookup import ACCEPTANCE_BY_MATCH

END = -1  # in the pool: a text ends here; no token has this id
NOTHING = -2  # before a row's first token; equal to nothing in the pool
MAX_VOTERS = 32  # K


class Pool(struct.PyTreeNode):
    """The job's latest text. Each batch slot has a ring buffer of its own.

    A slot's requests follow each other in it, with END after each. The oldest tokens are
    overwritten.
    """

    tokens: Int[Array, "B C"]
    head: Int[Array, "B"]  # where the next token goes; until then END is there

    @classmethod
    def empty(cls, rows: int, size: int) -> Pool:
        """A pool without text."""
        return cls(jnp.full((rows, size), END, jnp.int32), jnp.zeros((rows,), jnp.int32))

    def append(self, new: Int[Array, "B n"], count: Int[Array, "B"]) -> Pool:
        """The pool with the first ``count`` of each row's ``new`` tokens, and END after them.

        If there are more tokens than a ring holds, only the last ones are written.
        """
        size = self.tokens.shape[1]
        at = jnp.arange(new.shape[1] + 1)
        # `count` tokens and END, but no more than fit: no place is written twice.
        kept = (at <= count[:, None]) & (at > count[:, None] - size)
        with_end = jnp.pad(new, ((0, 0), (0, 1)))
        with_end = jnp.where(at < count[:, None], with_end, END)
        # `size` is out of range: a token that is not kept is dropped by the scatter.
        place = jnp.where(kept, (self.head[:, None] + at) % size, size)
        rows = jnp.arange(new.shape[0])[:, None]
        return Pool(
            tokens=self.tokens.at[rows, place].set(with_end.astype(jnp.int32), mode="drop"),
            # The head moves to the END, so the next token of this text replaces it.
            head=(self.head + count) % size,
        )


class Occurrences(NamedTuple):
    """Places of the pool with a row's last n-gram."""

    continuations: Int[Array, "B K γ"]
    exists: Bool[Array, "B K"]
    is_own: Bool[Array, "B K"]  # in the row's own text
    # n where the first one is the row's own; half as much in other texts, which say less; 0: none
    strength: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Suffix(Drafter):
    """What most often followed the row's last n-gram, token by token.

    The longest n-gram at the row's end, up to ``ngram`` tokens, that occurs anywhere in the pool is
    chosen. If the row itself has it, the newest such place is followed: an edited text keeps to its
    latest words. Otherwise its occurrences vote for the next token. Those that agree with the
    outcome vote for the one after it, and so on. The tokens are certain, so q is a point mass and
    no model is run.

    The pool holds ``pool`` tokens, shared evenly by the rows of a batch (on a mesh: of a device).
    What a row writes in its last round is not remembered.
    """

    gamma: int = 10
    ngram: int = 8
    pool: int = 2**15
    name = "suffix"
    sampling = POINT_MASS
    ends_early = True
    # A draft may depend on other rows. With this rule, a row's tokens do not depend on its draft.
    usual_rule = "match"
    splits_vocabulary = True

    def __post_init__(self):
        validate_fields(self, gamma=COUNT, ngram=COUNT, pool=COUNT)

    @property
    def shape(self) -> TreeShape:
        """A chain of γ nodes."""
        return TreeShape.chain(self.gamma)

    def init(self, inputs: Inputs, state: DecodeState) -> tuple[Pool, Int[Array, "B"]]:
        """The pool, and how many tokens of each row are in it."""
        rows = state.length.shape[0]
        return self._add_prompts(Pool.empty(rows, max(self.pool // rows, 2)), state)

    def on_slot_reuse(self, before, state):
        return self._add_prompts(before.drafter_state[0], state)

    def _add_prompts(self, pool: Pool, state: DecodeState) -> tuple[Pool, Int[Array, "B"]]:
        """The pool with the prompts of the rows that are not done."""
        # Start after the END of the slot's earlier text, so that this END stays. A row that is done
        # from the beginning only fills the batch: nothing of it is remembered.
        pool = pool.replace(head=(pool.head + 1) % pool.tokens.shape[1])
        return pool.append(state.tokens, jnp.where(state.done, 0, state.length)), state.length

    @property
    def prior_acceptance(self) -> tuple[float, ...]:
        """By the length of the match; in other texts it counts half."""
        return ACCEPTANCE_BY_MATCH[: self.ngram]

    def propose(self, inputs: Inputs, state: DecodeState, keys: Key[Array, "B"]) -> Proposal:
        pool, num_added = state.drafter_state
        # Add what the last round wrote. It is read only now that EOS and the budget have cut it.
        new = num_added[:, None] + jnp.arange(self.gamma + 1)
        new = jnp.take_along_axis(state.tokens, new, axis=1, mode="clip")
        # In an empty batch slot the length may be smaller than before.
        pool = pool.append(new, jnp.maximum(state.length - num_added, 0))

        found = self._occurrences(pool, state)
        drafted, voted = _vote(found)
        # The first end of sequence is drafted, nothing after it.
        ended = inputs.is_eos(drafted)
        valid = voted & (jnp.cumsum(ended, axis=1) - ended == 0)
        root = probs.at_index(state.tokens, state.length - 1)
        draft = Draft.chain(jnp.where(valid, drafted, 0), root=root, valid=valid)
        confidence = jnp.minimum(found.strength, len(self.prior_acceptance)) - 1
        return Proposal(draft, (pool, state.length), confidence=confidence)

    def _match_lengths(self, pool: Pool, state: DecodeState) -> Int[Array, "B P"]:
        """How many tokens that end at each place of the pool equal the row's last ones.

        A place counts only if a token follows it.
        """
        rows, size = pool.tokens.shape
        # The ring's end stands before it once more, its beginning after it. So the tokens n places
        # earlier are a slice. Rolls of the ring take a CPU three times as long.
        around = jnp.pad(pool.tokens, ((0, 0), (self.ngram - 1, 1)), mode="wrap")

        def shifted(places: int) -> Int[Array, "P"]:
            begin = self.ngram - 1 - places
            return around[:, begin : begin + size].reshape(-1)

        same = jnp.broadcast_to(shifted(-1) != END, (rows, rows * size))
        length = jnp.zeros(same.shape, jnp.int32)
        # One gather for all of the last tokens: XLA on a CPU would repeat what is computed for one
        # of them, as a choice between it and NOTHING, at each place of the pool.
        tokens = jnp.pad(state.tokens, ((0, 0), (self.ngram, 0)), constant_values=NOTHING)
        places = self.ngram + state.length[:, None] - 1 - jnp.arange(self.ngram)
        last = jnp.take_along_axis(tokens, places, axis=1, mode="clip")
        for n in range(self.ngram):
            same &= shifted(n) == last[:, n, None]
            length += same
        return length

    def _occurrences(self, pool: Pool, state: DecodeState) -> Occurrences:
        """The K newest occurrences of the longest n-gram; a row's own come first."""
        rows, size = pool.tokens.shape
        length = self._match_lengths(pool, state)
        longest = jnp.max(length, axis=1, keepdims=True)

        # Newness: 1 … size, `size` more for a row's own places, 0 for no occurrence. So one top-k
        # sorts by both, and its score tells the three kinds apart.
        age = pool.head[:, None] - jnp.arange(size)
        age = jnp.where(age < 0, age + size, age)
        newness = jnp.where((length == longest) & (longest > 0), size - age.reshape(-1), 0)
        is_own = jnp.arange(rows * size) // size == jnp.arange(rows)[:, None]
        newness += is_own * size * (newness > 0)
        newness = newness.astype(jnp.float32)  # exact below 2²⁴
        score, at = probs.top_k(newness, min(MAX_VOTERS, rows * size))
        following = (at[..., None] % size + 1 + jnp.arange(self.gamma)) % size
        continuations = pool.tokens[(at // size)[..., None], following]
        exists, is_own = score > 0, score > size
        half = jnp.maximum(longest // 2, jnp.minimum(longest, 1))
        strength = jnp.where(is_own[:, :1], longest, half)
        return Occurrences(continuations, exists, is_own, strength[:, 0])


def _vote(found: Occurrences) -> tuple[Int[Array, "B γ"], Bool[Array, "B γ"]]:
    """The elected token at each place, and whether there is one.

    If the first voter is the row's own text, it decides alone. Otherwise the token with the most
    votes wins; on a tie, the one whose voter comes first. An occurrence that has another token
    there, or has reached an END, does not vote again.
    """

    def step(votes, token):
        votes &= token != END
        agree = (token[:, :, None] == token[:, None, :]) & votes[:, None, :]
        first = jnp.argmax(votes, axis=1)
        most = jnp.argmax(jnp.where(votes, agree.sum(-1), 0), axis=1)
        elected = jnp.where(probs.at_index(found.is_own, first), first, most)
        chosen = probs.at_index(token, elected)
        return votes & (token == chosen[:, None]), (chosen, votes.any(1))

    # Unrolled, or a GPU's round would not be one CUDA graph: no graph holds the scan's writes.
    by_place = jnp.moveaxis(found.continuations, 2, 0)
    _, (chosen, voted) = jax.lax.scan(step, found.exists, by_place, unroll=True)
    return chosen.T, voted.T
