"""Constrained decoding with lookaheads (CDLH) and its approximation by the draft model.

Nakshatri et al. 2025, §2.1, §3.1 and Algorithm 2. Greedy and guided by a reward: not the law
of sampling.

Axis legend: B rows, K candidates, d lookahead tokens, T tokens of the tree, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax._util.arguments import COUNT, FLAG, validate_fields
from specjax.core import probs
from specjax.core.commit import Cost, finish_round
from specjax.core.net import Net
from specjax.core.protocols import Method
from specjax.core.types import DecodeState, Inputs, Verdict
from specjax.models import KVCache
from specjax.rewards.folding import Fold
from specjax.search.drivers import DeviceDriver, Driver, Lanes, prefill_lookahead, start_lookahead


class NextTokens(NamedTuple):
    """The likeliest next tokens, best first, lower ids first on ties."""

    tokens: Int[Array, "B K"]
    possible: Bool[Array, "B K"]  # not beyond the vocabulary
    logprobs: Float[Array, "B K"]  # unwarped


def best_candidates(logits: Float[Array, "B V"], count: int) -> NextTokens:
    """The ``count`` largest of float32 logits, −inf where a token cannot occur."""
    log_p, tokens = jax.lax.top_k(probs.log_softmax(logits), count)
    return NextTokens(tokens.astype(jnp.int32), log_p > probs.NEVER, log_p)


class RollOut(NamedTuple):
    """Greedy continuations of candidates, and what they cost."""

    lanes: Lanes  # each candidate, then its lookahead, up to an end of sequence
    cache: KVCache
    calls: Int[Array, "B"]
    passes: Int[Array, ""]


def roll_out(
    inputs: Inputs,
    net: Net,
    cache: KVCache,
    base: Int[Array, "B"],
    root: Int[Array, "B"] | None,
    candidates: Int[Array, "B K"],
    alive: Bool[Array, "B K"],
    depth: int,
) -> RollOut:
    """``depth`` greedy tokens behind every candidate that is alive and no end of sequence.

    The lookaheads of all rows are one forward per depth: branches of a tree in one cache, whose
    root stands in cache position and token position ``base``. Where the cache lacks the root, it
    is given and rides along with the candidates. Finished branches only cost while others go on.
    """
    rows, branches = candidates.shape
    shape = _Branches(branches, depth)
    room = ((0, 0), (0, 0), (0, depth))
    start = _Rolling(
        level=jnp.int32(1),
        cache=cache,
        tokens=jnp.pad(candidates[:, :, None], room),
        count=jnp.ones((rows, branches), jnp.int32),
        alive=alive & ~inputs.is_eos(candidates),
        calls=jnp.zeros((rows,), jnp.int32),
    )

    def grow(r: _Rolling, root: Int[Array, "B"] | None) -> _Rolling:
        new, first = jnp.take(r.tokens, r.level - 1, axis=2), root is not None
        tokens = jnp.append(root[:, None], new, axis=1) if first else new
        positions, visible = shape.place(base, r.level, first)
        logits, cache, _ = net.logits(
            r.cache,
            tokens,
            shape.cache_position(base, r.level, first),
            positions,
            visible,
            base=base,
            tree_positions=shape.positions(base),
            at=jnp.broadcast_to(jnp.arange(branches) + first, (rows, branches)),
        )
        following = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return _Rolling(
            level=r.level + 1,
            cache=cache,
            tokens=r.tokens.at[:, :, r.level].set(following),
            count=r.count + r.alive,
            alive=r.alive & ~inputs.is_eos(following),
            calls=r.calls + r.alive.sum(-1, dtype=jnp.int32),
        )

    rolling = start if root is None else grow(start, root)
    end = jax.lax.while_loop(
        lambda r: (r.level <= depth) & jnp.any(r.alive), lambda r: grow(r, None), rolling
    )
    lanes = Lanes(end.tokens, end.count, alive.any(axis=1))
    return RollOut(lanes, end.cache, end.calls, end.level - 1)


class _Rolling(NamedTuple):
    level: Int[Array, ""]  # of the tokens fed next; candidates are level 1
    cache: KVCache
    tokens: Int[Array, "B K 1+d"]
    count: Int[Array, "B K"]
    alive: Bool[Array, "B K"]
    calls: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class _Branches:
    """The tree of a roll-out: the root is node 0, level j are nodes 1 + (j−1)K … jK."""

    branches: int
    depth: int

    def positions(self, base: Int[Array, "B"]) -> Int[Array, "B T"]:
        level = (jnp.arange(1 + self.branches * self.depth) + self.branches - 1) // self.branches
        return base[:, None] + level

    def cache_position(self, base, level, with_root: bool):
        """Where the nodes fed at a level begin in the cache."""
        return base if with_root else base + 1 + (level - 1) * self.branches

    def place(self, base, level, with_root: bool):
        """Positions and visible tree nodes of what is prefilled at a level."""
        rows, lane = base.shape[0], jnp.arange(self.branches)
        node = jnp.arange(1 + self.branches * self.depth)
        own = (node - 1) % self.branches == lane[:, None]
        visible = (node == 0) | (own & ((node - 1) // self.branches < level))
        depth = jnp.full((self.branches,), level, jnp.int32)
        if with_root:
            visible = jnp.concatenate([(node == 0)[None], visible])
            depth = jnp.append(jnp.int32(0), depth)
        return base[:, None] + depth, jnp.broadcast_to(visible, (rows, *visible.shape))


def choose(values: Float[Array, "B K"], possible: Bool[Array, "B K"]) -> Int[Array, "B"]:
    """The candidate of the highest reward; the likelier one on ties, the likeliest if all fail."""
    return jnp.argmax(jnp.where(possible, values, -jnp.inf), axis=1)


@struct.dataclass
class LookaheadRound:
    """One round between its lookaheads and its choice."""

    candidates: NextTokens
    calls: Int[Array, "B"]  # of the model that rolled out
    passes: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Lookahead(Method):
    """One token per round: the candidate whose greedy lookahead has the highest reward.

    The target's ``k`` likeliest next tokens (unwarped) are each followed by ``d`` greedy tokens
    of the target (CDLH) or, with ``drafts``, of the draft model (CDLH-appx). R is asked about the
    tokens so far, the candidate and its lookahead: the paper's pseudocode leaves the candidate
    out.
    """

    reward: Fold | None  # None: rewards come from outside, through HostDriver
    k: int = 3
    d: int = 3
    drafts: bool = False

    def __post_init__(self):
        validate_fields(self, k=COUNT, d=COUNT, drafts=FLAG)

    @property
    def host_driven(self) -> bool:
        return self.reward is None

    @property
    def round_positions(self) -> int:
        return self.k * self.d + 2

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return start_lookahead(inputs, state, self.reward, self.drafts)

    def prefill_chunk(self, inputs, state, tokens, start) -> DecodeState:
        return prefill_lookahead(inputs, state, tokens, start)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return self.round(DeviceDriver(self.reward, inputs), state)

    def round(self, drive: Driver, state: DecodeState) -> DecodeState:
        """One round under either driver."""
        state, work, lanes = drive.stage(self.look, state)
        values = drive.judge(state, lanes)
        state, token = drive.stage(self.take, state, work, values)
        return drive.commit(state, token, jnp.ones_like(state.length))

    def look(self, inputs: Inputs, state: DecodeState):
        """The target's candidates and their lookaheads."""
        base, net = state.length - 1, inputs.target
        root = probs.at_token(state.tokens, base)
        logits, cache, _ = net.logits(state.cache, root[:, None], base)
        candidates = best_candidates(logits[:, 0], self.k)
        alive = candidates.possible & ~state.done[:, None]
        tokens, kept = candidates.tokens, state.method_state
        if self.drafts:
            net, draft = inputs.draft, kept.draft
            out = roll_out(inputs, net, draft, base, root, tokens, alive, self.d)
            state = state.replace(cache=cache, method_state=kept.replace(draft=out.cache))
        else:
            out = roll_out(inputs, net, cache, base, None, tokens, alive, self.d)
            state = state.replace(cache=out.cache)
        return state, LookaheadRound(candidates, out.calls, out.passes), out.lanes

    def take(self, inputs: Inputs, state: DecodeState, work: LookaheadRound, values):
        """Appends the best candidate; returns it, too."""
        best = choose(values, work.candidates.possible)
        token = probs.at_token(work.candidates.tokens, best)[:, None]
        zero = jnp.zeros_like(best, jnp.int32)
        verdict = Verdict(zero[:, None], zero, zero, token, zero + 1)
        of_target, of_draft = (0, work.calls) if self.drafts else (work.calls, 0)
        logprobs = None
        if state.logprobs is not None:
            logprobs = probs.at_token(work.candidates.logprobs, best)[:, None]
        cost = Cost(1 + of_target, 1 + work.passes, of_draft)
        return finish_round(inputs, state, verdict, logprobs, cost), token
