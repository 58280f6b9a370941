"""Suffix drafts: what most often followed the same words in any row or earlier request of the job.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), whose suffix trees become one flat pool
of text: comparing all of it with a row's last words is what an accelerator does well.

Axis legend: B rows, C tokens of a row's ring, P = B·C tokens of the pool, K occurrences that vote,
S token positions, γ draft length.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax._util.arguments import COUNT, validate_fields
from specjax.core import probs
from specjax.core.protocols import Drafter, Proposal
from specjax.core.types import POINT_MASS, Draft, TreeShape

END = -1  # in the pool: here a text ends; equal to no token
NOTHING = -2  # before a row's first token; equal to nothing in the pool
VOTERS = 32  # K


@struct.dataclass
class Pool:
    """The text of the job, the oldest forgotten: each slot of the batch writes a ring of its own.

    A request's tokens stand one behind the other, with END after them.
    """

    tokens: Int[Array, "B C"]
    head: Int[Array, "B"]  # where the next token goes; END stands there until then

    @classmethod
    def empty(cls, rows: int, size: int) -> Pool:
        return cls(jnp.full((rows, size), END, jnp.int32), jnp.zeros((rows,), jnp.int32))

    def append(self, new: Int[Array, "B n"], count: Int[Array, "B"]) -> Pool:
        """With the first ``count`` of each row's ``new`` tokens, or the last of them that fit."""
        size = self.tokens.shape[1]
        at = jnp.arange(new.shape[1] + 1)
        kept = (at <= count[:, None]) & (at > count[:, None] - size)
        ended = jnp.pad(new, ((0, 0), (0, 1)))
        ended = jnp.where(at < count[:, None], ended, END)
        slot = jnp.where(kept, (self.head[:, None] + at) % size, size)
        rows = jnp.arange(new.shape[0])[:, None]
        return Pool(
            tokens=self.tokens.at[rows, slot].set(ended.astype(jnp.int32), mode="drop"),
            head=(self.head + count) % size,
        )


@dataclasses.dataclass(frozen=True)
class Suffix(Drafter):
    """What most often followed the longest known ending of the row, token by token.

    The longest n-gram at the row's end, up to ``ngram`` tokens, that occurs anywhere in the pool
    is chosen. Where it stands in the row itself the newest such place is followed, for a text that
    is being edited keeps to its latest words; else its occurrences vote for the next token, those
    that agree with the outcome for the one after it, and so on. The tokens are certain, so q is a
    point mass and no model is run.

    ``pool`` tokens are remembered, shared evenly by the rows of a batch (on a mesh: of a device).
    What a row writes in its last round is not.
    """

    gamma: int = 10
    ngram: int = 8
    pool: int = 2**15
    name = "suffix"
    sampling = POINT_MASS
    ends_early = True
    # Drafts come of other rows, too: this rule's tokens do not depend on what was drafted.
    usual_rule = "match"

    def __post_init__(self):
        validate_fields(self, gamma=COUNT, ngram=COUNT, pool=COUNT)

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chain(self.gamma)

    def init(self, inputs, state):
        rows = state.length.shape[0]
        return self._begin(Pool.empty(rows, max(self.pool // rows, 2)), state)

    def on_slot_reuse(self, before, state):
        return self._begin(before.drafter_state[0], state)

    def _begin(self, pool: Pool, state) -> tuple[Pool, Int[Array, "B"]]:
        """The END of the text before stays; a row that only fills the batch has nothing to say."""
        pool = pool.replace(head=(pool.head + 1) % pool.tokens.shape[1])
        return pool.append(state.tokens, jnp.where(state.done, 0, state.length)), state.length

    def propose(self, inputs, state, keys):
        pool, read = state.drafter_state
        # What the rows have written since: end of sequence and budget have cut it by now.
        new = read[:, None] + jnp.arange(self.gamma + 1)
        new = jnp.take_along_axis(state.tokens, new, axis=1, mode="clip")
        pool = pool.append(new, jnp.maximum(state.length - read, 0))  # less in an empty seat
        drafted, voted = _elect(*self._occurrences(pool, state))
        ended = inputs.is_eos(drafted)
        valid = voted & (jnp.cumsum(ended, axis=1) - ended == 0)
        root = probs.at_token(state.tokens, state.length - 1)
        draft = Draft.chain(jnp.where(valid, drafted, 0), root=root, valid=valid)
        return Proposal(draft, (pool, state.length))

    def _occurrences(
        self, pool: Pool, state
    ) -> tuple[Int[Array, "B K γ"], Bool[Array, "B K"], Bool[Array, "B K"]]:
        """What follows the K newest occurrences of the longest ending, a row's own first.

        With it: which of them exist, and which are the row's own.
        """
        rows, size = pool.tokens.shape
        followed = jnp.roll(pool.tokens, -1, axis=1).reshape(-1) != END
        same = jnp.broadcast_to(followed, (rows, rows * size))
        length = jnp.zeros(same.shape, jnp.int32)
        for n in range(self.ngram):
            last = probs.at_token(state.tokens, jnp.maximum(state.length - 1 - n, 0))
            last = jnp.where(n < state.length, last, NOTHING)[:, None]
            same &= jnp.roll(pool.tokens, n, axis=1).reshape(-1) == last
            length += same
        longest = jnp.max(length, axis=1, keepdims=True)
        age = (pool.head[:, None] - jnp.arange(size)) % size
        own = jnp.arange(rows * size) // size == jnp.arange(rows)[:, None]
        newness = jnp.where((length == longest) & (longest > 0), size - age.reshape(-1), 0)
        newness = (newness + own * size * (newness > 0)).astype(jnp.float32)  # exact below 2²⁴
        score, at = jax.lax.top_k(newness, min(VOTERS, rows * size))
        behind = (at[..., None] % size + 1 + jnp.arange(self.gamma)) % size
        follow = pool.tokens[(at // size)[..., None], behind]
        return follow, score > 0, score > size


def _elect(
    follow: Int[Array, "B K γ"], votes: Bool[Array, "B K"], own: Bool[Array, "B K"]
) -> tuple[Int[Array, "B γ"], Bool[Array, "B γ"]]:
    """Place by place a token, and whether there is one: the first voter's if that is the row's own,
    else the one with most votes, a tie going to the first.

    Who has voted for another token, or has come to an END, votes no more.
    """

    def step(votes, token):
        votes &= token != END
        agree = (token[:, :, None] == token[:, None, :]) & votes[:, None, :]
        first = jnp.argmax(votes, axis=1)
        most = jnp.argmax(jnp.where(votes, agree.sum(-1), 0), axis=1)
        chosen = probs.at_token(token, jnp.where(probs.at_token(own, first), first, most))
        return votes & (token == chosen[:, None]), (chosen, votes.any(1))

    _, (chosen, voted) = jax.lax.scan(step, votes, jnp.moveaxis(follow, 2, 0))
    return chosen.T, voted.T
