"""The data that flows through decoding: drafts, verdicts, state, counters.

Axis legend: B rows, N draft nodes (node 0 is the root), P probe nodes, M rows of draft
distributions, D draft depth, γ draft length, S cache positions, V vocabulary, L auxiliary layers,
W words of 32 bits, E end-of-sequence ids, G grammars, Q states of
all grammars, C classes of tokens. In ``aux_states`` D is the size of a hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Int8, Key

from specjax.core.net import Net

ROOT = 0  # node 0: the row's last committed token
NO_PARENT = 2**30  # parent of the root: positive and out of range, so gathers can drop it
NO_NODE = 2**30  # path entries past the accepted depth
NO_EOS = -1  # pads Inputs.eos_ids: no token has this id
NO_TOKEN = -1  # pads lists of token ids, and paths past a node's depth

# How the tokens of a draft were sampled. Each rule lists those that it accepts.
POINT_MASS = "point_mass"  # one certain token per node: lookup, argmax drafts
IID = "iid"  # each drawn from log_q after its ancestors, siblings independently
WITHOUT_REPLACEMENT = "without_replacement"  # siblings: Gumbel-top-k of log_q, in that order
DETERMINISTIC = "deterministic"  # chosen by rank or score: top-j children, beams
# The labels of a draft's sampling, in words.
SAMPLINGS = {
    POINT_MASS: "certain tokens (point_mass)",
    IID: "drafts sampled iid",
    WITHOUT_REPLACEMENT: "siblings sampled without replacement",
    DETERMINISTIC: "tokens chosen by rank or score (deterministic)",
}

# Who wrote a token, for coloring and for reports.
FROM_PROMPT = 0
FROM_DRAFT = 1
FROM_TARGET = 2

# Why a row ended.
RUNNING = 0
STOP_EOS = 1
STOP_LENGTH = 2
STOP_TEXT = 3
FINISH_REASONS = ("running", "eos", "length", "stop")


class TreeShape(NamedTuple):
    """Static size of a draft tree; hashable, so that one trace serves one shape."""

    nodes: int  # N, the root included
    depth: int  # D, edges from the root to the deepest node
    max_children: int

    @classmethod
    def chain(cls, gamma: int) -> TreeShape:
        """The root and γ tokens one below the other."""
        return cls(gamma + 1, gamma, 1)

    @property
    def is_chain(self) -> bool:
        """Whether it has one branch: a node at each depth, and no siblings."""
        return self.nodes == self.depth + 1 and self.max_children <= 1


class Probes(struct.PyTreeNode):
    """Extra nodes of the target's pass: they are no draft tokens and are never committed.

    ``parents`` index the N draft nodes, then the P probes: a probe sees its ancestors.
    """

    tokens: Int[Array, "B P"]
    parents: Int[Array | np.ndarray, "B P"]


class Draft(struct.PyTreeNode):
    """A tree of candidate tokens below the last committed token.

    Node 0 is that token, so one target pass over the nodes verifies everything. Parents come
    before children. ``valid[b, i]`` may depend only on what precedes node i, never on the
    probability of the token drawn there: a draft that stops because of the token it drew is biased.
    :meth:`chain` makes the draft of a chain, the usual case.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array | np.ndarray, "B N"]  # numpy: static, so masks of it are constants
    valid: Bool[Array, "B N"]
    # Warped draft log-probabilities. Node i was drawn from exactly row q_row[i]. The root was not
    # drawn: its entry of q_row is only a placeholder.
    log_q: Float[Array, "B M V"] | None = None
    # Raw draft logits at every node, only where a target distribution asks for them.
    logits: Float[Array, "B N V"] | None = None
    # log q of each node's own token given its path: for beams and trees of the most probable
    # tokens, which keep no rows of log_q.
    token_log_q: Float[Array, "B N"] | None = None
    # Inputs of the target's auxiliary layers at every node. The verifying pass adds them.
    aux_states: Float[Array, "B N L D"] | None = None
    probes: Probes | None = None
    # Under grammars: the tokens that may follow each node, a bit each, 32 to a word.
    allowed: Int[Array, "B N W"] | None = None
    shape: TreeShape = struct.field(pytree_node=False, default=TreeShape(1, 0, 0))
    q_row: tuple[int, ...] = struct.field(pytree_node=False, default=())
    sampling: str = struct.field(pytree_node=False, default=IID)

    @classmethod
    def chain(
        cls,
        tokens: Int[Array, "B γ"],
        log_q: Float[Array, "B γ V"] | None = None,
        *,
        root: Int[Array, "B"] | None = None,
        valid: Bool[Array, "B γ"] | None = None,
        sampling: str | None = None,
        logits: Float[Array, "B γ+1 V"] | None = None,
        token_log_q: Float[Array, "B γ+1"] | None = None,
        probes: Probes | None = None,
    ) -> Draft:
        """A draft of γ tokens, one below the other.

        Args:
          tokens: int32, the drafted tokens, without the root.
          log_q: float32, the log q that each of them was drawn from; None: q is a point mass.
          root: the last committed token of each row. By default 0, because no rule reads it.
          valid: which of them are drafted: the first ones of each row. All by default.
          sampling: how they were sampled. By default ``iid`` with ``log_q``, else ``point_mass``.
          logits, token_log_q, probes: as the fields of that name.
        """
        rows, gamma = tokens.shape
        if root is None:
            root = jnp.zeros((rows,), tokens.dtype)
        if valid is None:
            valid = jnp.ones((rows, gamma), bool)
        if sampling is None:
            sampling = POINT_MASS if log_q is None else IID
        # Parents are a numpy constant: masks made of them are constants of the program.
        parents = np.arange(-1, gamma, dtype=np.int32)
        parents[ROOT] = NO_PARENT
        return cls(
            tokens=jnp.concatenate([root[:, None], tokens], axis=1),
            parents=np.broadcast_to(parents, (rows, gamma + 1)),
            valid=jnp.concatenate([jnp.ones((rows, 1), bool), valid], axis=1),
            log_q=log_q,
            logits=logits,
            token_log_q=token_log_q,
            probes=probes,
            shape=TreeShape.chain(gamma),
            q_row=(0, *range(gamma)),
            sampling=sampling,
        )


class Verdict(struct.PyTreeNode):
    """What a rule decided, before the end-of-sequence and budget cuts."""

    path: Int[Array, "B D+1"]  # node 0, then the accepted nodes, then NO_NODE
    num_accepted: Int[Array, "B"]  # accepted depth
    num_tested: Int[Array, "B"]  # accepted depth, plus one if a draft token was rejected
    tokens: Int[Array, "B D+1"]  # accepted tokens, then the correction or bonus token
    num_tokens: Int[Array, "B"]  # at least 1


class Stats(struct.PyTreeNode):
    """Counters per row, counted while the row is live. int32 each.

    ``drafted`` adds up the depths of the drafts. ``tested`` and ``accepted`` are draft tokens,
    counted before the end-of-sequence and budget cuts. ``emitted`` are new tokens, counted after
    them. A prefill counts as no call and no round.
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


class DecodeState(struct.PyTreeNode):
    """Everything a round reads and writes.

    Invariant between rounds: the target's cache holds exactly the first ``length - 1``
    tokens of each row and equals a fresh prefill of them. The last token is the root of the next
    round, whose target pass adds it to the cache.
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
    method_state: Any  # of the method itself; () if it keeps nothing
    stats: Stats
    counts: TokenCounts | None = None  # None: no row has settings that need them
    # Of each row's grammar, counted from its beginning; None: no row has had one that is a table.
    grammar_state: Int[Array, "B"] | None = None

    @property
    def done(self) -> Bool[Array, "B"]:
        """Which rows have ended."""
        return self.finish != RUNNING

    @property
    def capacity(self) -> int:
        """S, the cache positions that each row has."""
        return self.tokens.shape[1]


class Cutoffs(struct.PyTreeNode):
    """Truncations beside top-k and top-p, one value per row; :mod:`specjax.core.cutoffs`."""

    min_p: Float[Array, "B"]  # 0 is off
    typical_p: Float[Array, "B"]  # 1 is off
    epsilon_cutoff: Float[Array, "B"]  # 0 is off
    eta_cutoff: Float[Array, "B"]  # 0 is off
    top_n_sigma: Float[Array, "B"]  # 0 is off


class PathSettings(struct.PyTreeNode):
    """Settings that read a row's tokens, or differ by token; :mod:`specjax.core.path_logits`.

    Lists of ids are padded with NO_TOKEN.
    """

    repetition_penalty: Float[Array, "B"]  # 1 is off
    presence_penalty: Float[Array, "B"]  # 0 is off
    frequency_penalty: Float[Array, "B"]  # 0 is off
    no_repeat_ngram_size: Int[Array, "B"]  # 0 is off
    dry_multiplier: Float[Array, "B"]  # 0 is off
    dry_base: Float[Array, "B"]
    dry_allowed_length: Int[Array, "B"]
    dry_breakers: Int[Array, "B K"]
    bad_words: Int[Array, "B W L"]  # each ends at the last place
    bias_ids: Int[Array, "B K"]
    biases: Float[Array, "B K"]  # −inf bans a token
    only_biased: Bool[Array, "B"]  # whether all other tokens are banned
    min_tokens: Int[Array, "B"]  # 0 is off
    ignore_eos: Bool[Array, "B"]
    stop_ids: Int[Array, "B K"]
    decay_start: Int[Array, "B"]
    decay_factor: Float[Array, "B"]  # 1 is off


class GrammarTables(struct.PyTreeNode):
    """Grammars of the rows as automata, stacked; :mod:`specjax.core.grammar_tables`.

    State 0 allows every token and stays: it is that of rows without a table. A token leads there,
    too, where a grammar does not allow it.
    """

    next_state: Int[Array, "Q C"]  # by class of the token
    token_class: Int[Array, "G V"]
    allowed: Int[Array, "Q W"]  # the tokens that may follow, a bit each, 32 to a word
    forced: Int[Array, "Q"]  # the token of the only text that may follow, or NO_TOKEN
    grammar: Int[Array, "B"]  # of each row
    first: Int[Array, "B"]  # the state at the beginning of each row's grammar


class TokenCounts(struct.PyTreeNode):
    """What :class:`PathSettings` need of each row between rounds. The prompt never changes."""

    bias: Float[Array, "B V"]
    ends: Bool[Array, "B V"]  # which tokens end the row
    in_prompt: Bool[Array, "B V"]
    generated: Int[Array, "B V"]  # how often each token is among the new ones


class Warp(struct.PyTreeNode):
    """Sampling settings as arrays, one per row: changing them never recompiles."""

    temperature: Float[Array, "B"]  # 0 is greedy
    top_k: Int[Array, "B"]  # 0 is off
    top_p: Float[Array, "B"]  # 1 is off
    cutoffs: Cutoffs | None = None  # None: no row has any
    path: PathSettings | None = None  # None: no row has any

    @property
    def greedy(self) -> Bool[Array, "B"]:
        """Which rows take the likeliest token: those at temperature 0."""
        return self.temperature == 0


class HasNet(Protocol):
    """A loaded model: :class:`specjax.LM`, or an object of yours with these attributes."""

    @property
    def net(self) -> Net:
        """Params and what is static about them."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """The devices that it is spread over; None for one."""
        ...


class HasArrays(Protocol):
    """Sampling settings: :class:`specjax.Sampling`."""

    def arrays(self, batch: int) -> Warp:
        """The settings as arrays of ``batch`` rows."""
        ...


class Inputs(struct.PyTreeNode):
    """What a step reads and never changes: models, sampling and stop settings."""

    target: Net
    draft: Net | None  # its logits are over the target's ids
    warp: Warp
    eos_ids: Int[Array, "E"]  # padded with NO_EOS
    settings: dict[str, jax.Array]  # scalar options of drafter, target distribution and rule
    reward: Any = ()  # arrays of a reward inside the loop: a specjax.rewards.Data
    grammars: GrammarTables | None = None  # None: no row has had a grammar that is a table
    mesh: Any = struct.field(pytree_node=False, default=None)  # None: a single device

    @classmethod
    def of(
        cls,
        target: HasNet,
        draft: HasNet | None,
        sampling: HasArrays,
        batch: int = 1,
        settings: Mapping[str, float | Sequence[float]] | None = None,
    ) -> Inputs:
        """The inputs of a step, made of loaded models.

        Args:
          target: the model p.
          draft: the model q; None where the drafter needs none.
          sampling: a :class:`specjax.Sampling`, for every row.
          batch: number of rows B.
          settings: options of drafter, target distribution and rule that are numbers, such as
            ``{"max_kl": 0.1}``.
        """
        p = target.net
        q = None if draft is None else draft.net.over(p)
        eos = list(target.eos_ids) or [NO_EOS]
        # Padded to a multiple of 4, so that models with one to four such ids share a program.
        eos += [NO_EOS] * (-len(eos) % 4)
        numbers = {name: jnp.asarray(x, jnp.float32) for name, x in (settings or {}).items()}
        return cls(
            target=p,
            draft=q,
            warp=sampling.arrays(batch),
            eos_ids=jnp.asarray(eos, jnp.int32),
            settings=numbers,
            mesh=target.mesh,
        )

    def is_eos(self, tokens: Int[Array, "B *n"]) -> Bool[Array, "B *n"]:
        """Whether each token ends its row."""
        ends = jnp.any(tokens[..., None] == self.eos_ids, axis=-1)
        path = self.warp.path
        if path is None:
            return ends
        rows = tokens.shape[0], *(1,) * (tokens.ndim - 1)
        stops = jnp.any(tokens[..., None] == path.stop_ids.reshape(*rows, -1), axis=-1)
        return (ends & ~path.ignore_eos.reshape(rows)) | (stops & (tokens != NO_TOKEN))
