"""The data that flows through decoding: drafts, verdicts, state, counters.

Axis legend: B rows, N draft nodes (node 0 is the root), P probe nodes, M rows of draft
distributions, D draft depth, S token positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int8, Key

from specjax.core.net import Net

ROOT = 0  # node 0: the row's last committed token
NO_PARENT = 2**30  # parent of the root: positive and out of range, so gathers can drop it
NO_NODE = 2**30  # path entries past the accepted depth

# How a draft's tokens were sampled; each rule lists those that it accepts.
POINT_MASS = "point_mass"  # one certain token per node: lookup, argmax drafts
IID = "iid"  # drawn independently from log_q
WITHOUT_REPLACEMENT = "without_replacement"  # siblings: Gumbel-top-k of log_q, in that order
DETERMINISTIC = "deterministic"  # chosen by rank or score: top-j children, beams

# Who wrote a token, for coloring and for reports.
FROM_PROMPT, FROM_DRAFT, FROM_TARGET = 0, 1, 2

# Why a row ended.
RUNNING, STOP_EOS, STOP_LENGTH, STOP_TEXT = 0, 1, 2, 3
FINISH_REASONS = ("running", "eos", "length", "stop")


class TreeShape(NamedTuple):
    """Static size of a draft tree; hashable, so that one trace serves one shape."""

    nodes: int  # N, the root included
    depth: int  # D, edges from the root to the deepest node
    max_children: int

    @classmethod
    def chain(cls, gamma: int) -> TreeShape:
        return cls(gamma + 1, gamma, 1)

    @property
    def is_chain(self) -> bool:
        return self.nodes == self.depth + 1


@struct.dataclass
class Probes:
    """Nodes that ride along in the target's pass but are no candidates and never commit.

    ``parents`` index the N draft nodes, then the P probes: a probe sees its ancestors.
    """

    tokens: Int[Array, "B P"]
    parents: Int[Array, "B P"]


@struct.dataclass
class Draft:
    """A tree of candidate tokens below the last committed token.

    Node 0 is that token, so one target pass over the nodes verifies everything. Parents
    come before children. ``valid[b, i]`` may depend only on what precedes node i, never on
    the probability of the token drawn there: stopping on the drawn token is biased.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    # Warped draft log-probabilities; row q_row[i] is the exact law node i was drawn from.
    log_q: Float[Array, "B M V"] | None = None
    # Raw draft logits at every node, only where a target distribution asks for them.
    logits: Float[Array, "B N V"] | None = None
    # log q of each node's own token given its path, for beams, whose rows are not kept.
    token_log_q: Float[Array, "B N"] | None = None
    # What the target's layers that the drafter asks for read at every node; the verifying pass
    # adds it.
    aux_states: Float[Array, "B N L D"] | None = None
    probes: Probes | None = None
    shape: TreeShape = struct.field(pytree_node=False, default=TreeShape(1, 0, 0))
    q_row: tuple[int, ...] = struct.field(pytree_node=False, default=())
    sampling: str = struct.field(pytree_node=False, default=IID)


@struct.dataclass
class Verdict:
    """What a rule decided, before the end-of-sequence and budget cuts."""

    path: Int[Array, "B D+1"]  # node 0, then the accepted nodes, then NO_NODE
    num_accepted: Int[Array, "B"]  # accepted depth
    num_tested: Int[Array, "B"]  # accepted depth, plus one if a draft token was refused
    tokens: Int[Array, "B D+1"]  # accepted tokens, then the correction or bonus token
    num_tokens: Int[Array, "B"]  # at least 1


@struct.dataclass
class Stats:
    """Counters per row, counted while the row is live. int32 each.

    ``drafted`` is draft depth offered, ``tested`` and ``accepted`` are counted before the
    end-of-sequence and budget cuts, ``emitted`` after. Prefill is no call and no round.
    """

    target_calls: Int[Array, "B"]
    draft_calls: Int[Array, "B"]
    rounds: Int[Array, "B"]
    drafted: Int[Array, "B"]
    tested: Int[Array, "B"]
    accepted: Int[Array, "B"]
    emitted: Int[Array, "B"]
    passes: Int[Array, ""]  # batched forwards launched, of any model
    accepted_hist: Int[Array, "B D+1"]  # rounds by accepted depth


@struct.dataclass
class DecodeState:
    """Everything a round reads and writes.

    Invariant between rounds: the target's cache holds exactly the first ``length - 1``
    tokens of each row and equals a fresh prefill of them.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    max_length: Int[Array, "B"]  # prompt plus budget
    finish: Int[Array, "B"]  # RUNNING, STOP_EOS, STOP_LENGTH or STOP_TEXT
    origin: Int8[Array, "B S"]  # FROM_PROMPT, FROM_DRAFT, FROM_TARGET
    logprobs: Float[Array, "B S"] | None  # of emitted tokens, unwarped target, where asked
    keys: Key[Array, "B"]
    cache: Any  # the target's KVCache
    target_state: Any  # of the target distribution
    drafter_state: Any  # of the drafter
    method_state: Any  # of a method that is not one draft and one verification
    stats: Stats

    @property
    def done(self) -> Bool[Array, "B"]:
        return self.finish != RUNNING

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]


@struct.dataclass
class Warp:
    """Sampling settings as arrays, one per row: changing them never recompiles."""

    temperature: Float[Array, "B"]  # 0 is greedy
    top_k: Int[Array, "B"]  # 0 is off
    top_p: Float[Array, "B"]  # 1 is off

    @property
    def greedy(self) -> Bool[Array, "B"]:
        return self.temperature == 0


@struct.dataclass
class Inputs:
    """What a step reads and never changes: models, sampling and stop settings."""

    target: Net
    draft: Net | None  # its logits are over the target's ids
    warp: Warp
    eos_ids: Int[Array, "E"]  # padded with an id that never occurs
    settings: dict[str, jax.Array]  # scalar options of drafter, target distribution and rule
    reward: Any = ()  # arrays of a reward inside the loop: a specjax.rewards.Data
    mesh: Any = struct.field(pytree_node=False, default=None)  # of several devices

    def is_eos(self, tokens: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether each token ends a sequence."""
        return jnp.any(tokens[..., None] == self.eos_ids, axis=-1)
