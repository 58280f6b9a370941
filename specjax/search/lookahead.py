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

from specjax import probs
from specjax.decode import clip, emit
from specjax.models import KVCache, ModelConfig, forward, init_cache, logits_of
from specjax.models.forward import prefill
from specjax.search.drivers import Driver, Lanes, OnDevice, start_ahead
from specjax.stopping import is_eos
from specjax.types import DecodeState, Inputs, Verdict
from specjax.warp import limit_vocabulary


class Candidates(NamedTuple):
    """The likeliest next tokens, best first, lower ids first on ties."""

    tokens: Int[Array, "B K"]
    possible: Bool[Array, "B K"]  # not beyond the vocabulary
    logprobs: Float[Array, "B K"]  # unwarped


def best_candidates(logits: Float[Array, "B V"], count: int) -> Candidates:
    """The ``count`` largest of float32 logits, −inf where a token cannot occur."""
    log_p, tokens = jax.lax.top_k(probs.log_softmax(logits), count)
    return Candidates(tokens.astype(jnp.int32), log_p > probs.NEVER, log_p)


class RollOut(NamedTuple):
    """Greedy continuations of candidates, and what they cost."""

    lanes: Lanes  # each candidate, then its lookahead, up to an end of sequence
    cache: KVCache
    calls: Int[Array, "B"]
    passes: Int[Array, ""]


def roll_out(
    model: ModelConfig,
    params: dict,
    cache: KVCache,
    base: Int[Array, "B"],
    root: Int[Array, "B"] | None,
    candidates: Int[Array, "B K"],
    alive: Bool[Array, "B K"],
    depth: int,
    eos_ids: Int[Array, "E"],
    vocab_limit: int,
) -> RollOut:
    """``depth`` greedy tokens behind every candidate that is alive and no end of sequence.

    The lookaheads of all rows are one forward per depth: branches of a tree in one cache, whose
    root stands in slot and position ``base``. Where the cache lacks the root, it is given and
    rides along with the candidates. Finished branches only cost while others go on.
    """
    rows, width = candidates.shape
    shape = _Branches(width, depth)
    room = ((0, 0), (0, 0), (0, depth))
    start = _Rolling(
        level=jnp.int32(1),
        cache=cache,
        tokens=jnp.pad(candidates[:, :, None], room),
        count=jnp.ones((rows, width), jnp.int32),
        alive=alive & ~is_eos(candidates, eos_ids),
        calls=jnp.zeros((rows,), jnp.int32),
    )

    def grow(r: _Rolling, root: Int[Array, "B"] | None) -> _Rolling:
        new = jnp.take(r.tokens, r.level - 1, axis=2)
        fed = new if root is None else jnp.append(root[:, None], new, axis=1)
        positions, visible = shape.place(base, r.level, root is not None)
        hidden, cache = forward(
            model,
            params,
            r.cache,
            fed,
            positions,
            shape.slot(base, r.level, root is not None),
            visible,
            base=base,
            tree_positions=shape.positions(base),
        )
        logits = logits_of(model, params, hidden[:, -width:]).astype(jnp.float32)
        following = jnp.argmax(limit_vocabulary(logits, vocab_limit), axis=-1).astype(jnp.int32)
        return _Rolling(
            level=r.level + 1,
            cache=cache,
            tokens=r.tokens.at[:, :, r.level].set(following),
            count=r.count + r.alive,
            alive=r.alive & ~is_eos(following, eos_ids),
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

    width: int
    depth: int

    def positions(self, base: Int[Array, "B"]) -> Int[Array, "B T"]:
        level = (jnp.arange(1 + self.width * self.depth) + self.width - 1) // self.width
        return base[:, None] + level

    def slot(self, base, level, with_root: bool):
        """Where the nodes fed at a level begin in the cache."""
        return base if with_root else base + 1 + (level - 1) * self.width

    def place(self, base, level, with_root: bool):
        """Positions and visible tree nodes of what is fed at a level."""
        rows, lane = base.shape[0], jnp.arange(self.width)
        node = jnp.arange(1 + self.width * self.depth)
        own = (node - 1) % self.width == lane[:, None]
        visible = (node == 0) | (own & ((node - 1) // self.width < level))
        depth = jnp.full((self.width,), level, jnp.int32)
        if with_root:
            visible = jnp.concatenate([(node == 0)[None], visible])
            depth = jnp.append(jnp.int32(0), depth)
        return base[:, None] + depth, jnp.broadcast_to(visible, (rows, *visible.shape))


def choose(values: Float[Array, "B K"], possible: Bool[Array, "B K"]) -> Int[Array, "B"]:
    """The candidate of the highest reward; the likelier one on ties, the likeliest if all fail."""
    return jnp.argmax(jnp.where(possible, values, -jnp.inf), axis=1)


@struct.dataclass
class Looked:
    """One round between its lookaheads and its choice."""

    candidates: Candidates
    calls: Int[Array, "B"]  # of the model that rolled out
    passes: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """One token per round: the candidate whose greedy lookahead has the highest reward.

    The target's ``k`` likeliest next tokens (unwarped) are each followed by ``d`` greedy tokens
    of the target (CDLH) or, where ``draft`` is set, of the draft model (CDLH-appx). R is asked
    about the tokens so far, the candidate and its lookahead: the paper's pseudocode leaves the
    candidate out.
    """

    model: ModelConfig
    vocab_limit: int
    k: int
    d: int
    reward: object | None  # a Fold; None: rewards come from outside, through OnHost
    draft: ModelConfig | None = None
    draft_limit: int = 0
    reserves = False

    @property
    def width(self) -> int:
        return self.k * self.d + 2

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> DecodeState:
        return fill_caches(self, inputs, state, chunk)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return self.round(OnDevice(self.reward, inputs), state)

    def round(self, drive: Driver, state: DecodeState) -> DecodeState:
        """One round under either driver."""
        state, looked, lanes = drive.stage(self.look, state)
        values = drive.judge(state, lanes)
        state, token = drive.stage(self.take, state, looked, values)
        return drive.commit(state, token, jnp.ones_like(state.length))

    def look(self, inputs: Inputs, state: DecodeState):
        """The target's candidates and their lookaheads."""
        base = state.length - 1
        root = probs.at_token(state.tokens, base)
        hidden, cache = forward(
            self.model, inputs.target, state.cache, root[:, None], base[:, None], base
        )
        logits = logits_of(self.model, inputs.target, hidden)[:, 0].astype(jnp.float32)
        found = best_candidates(limit_vocabulary(logits, self.vocab_limit), self.k)
        alive = found.possible & ~state.done[:, None]
        if self.draft is None:
            out = roll_out(
                self.model,
                inputs.target,
                cache,
                base,
                None,
                found.tokens,
                alive,
                self.d,
                inputs.eos_ids,
                self.vocab_limit,
            )
            state = state.replace(cache=out.cache)
        else:
            out = roll_out(
                self.draft,
                inputs.draft,
                state.drafter.draft,
                base,
                root,
                found.tokens,
                alive,
                self.d,
                inputs.eos_ids,
                self.draft_limit,
            )
            state = state.replace(cache=cache, drafter=state.drafter.replace(draft=out.cache))
        return state, Looked(found, out.calls, out.passes), out.lanes

    def take(self, inputs: Inputs, state: DecodeState, looked: Looked, values):
        """Appends the best candidate; returns it, too."""
        best = choose(values, looked.candidates.possible)
        token = probs.at_token(looked.candidates.tokens, best)[:, None]
        zero = jnp.zeros_like(best, jnp.int32)
        verdict = Verdict(zero[:, None], zero, zero, token, zero + 1)
        emitted, finish = clip(inputs, state, verdict)
        live = (~state.done).astype(jnp.int32)
        of_target, of_draft = (0, looked.calls) if self.draft else (looked.calls, 0)
        stats = state.stats
        stats = stats.replace(
            target_calls=stats.target_calls + live * (1 + of_target),
            draft_calls=stats.draft_calls + live * of_draft,
            rounds=stats.rounds + live,
            emitted=stats.emitted + emitted,
            passes=stats.passes + 1 + looked.passes,
        )
        logprobs = None
        if state.logprobs is not None:
            logprobs = probs.at_token(looked.candidates.logprobs, best)[:, None]
        return emit(state, verdict, emitted, finish, logprobs).replace(stats=stats), token

    def finalize(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return state


def fill_caches(method, inputs: Inputs, state: DecodeState, chunk: int) -> DecodeState:
    """The prompt in the caches of the target and of the draft model, where there is one."""
    rows, slots = state.tokens.shape

    def filled(model, params):
        cache = init_cache(model, rows, slots, params["embed"].dtype)
        return prefill(model, params, cache, state.tokens, state.length, chunk)

    draft = () if method.draft is None else filled(method.draft, inputs.draft)
    cache = filled(method.model, inputs.target)
    return state.replace(cache=cache, drafter=start_ahead(method, inputs, state, draft))
