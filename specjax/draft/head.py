"""Drafts of a head on the target's hidden states (EAGLE-3, Li et al. 2025, arXiv 2503.01840).

The head has read the pair (features of token i, token i + 1) of every i whose token after next is
known; what it made of the last one is the law of the first drafted token. A drafted token comes
with what the head made of the one before in place of features. After the verdict the accepted
tokens are read once more, now with features of the target's own states, which the verifying pass
handed on: what the cache holds of drafts is replaced, and no further target pass is needed.

The pair of token i + 1 stands in cache position i: the root's in cache position ``length - 2``.

Axis legend: B rows, N nodes, n nodes of a level, C candidates, T tokens, L auxiliary layers, D
hidden size, v draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax._util.arguments import COUNT, validate_fields
from specjax.core import probs
from specjax.core.net import Net
from specjax.core.protocols import Proposal
from specjax.core.types import DETERMINISTIC, NO_PARENT, ROOT, Draft, TreeShape
from specjax.core.warp import warp
from specjax.draft.chain import Chain
from specjax.draft.model_drafter import ModelDrafter, unwarped_in
from specjax.draft.tree import Tree
from specjax.models import KVCache
from specjax.models.forward_pass import forward, pad_pass
from specjax.models.head import draft_logits, fed_back, fused_states

HEAD = "head"


class Reading(NamedTuple):
    """What the head has read: its cache, and what it made of the tokens that it read last."""

    cache: KVCache
    hidden: Float[Array, "B n D"]


class HeadDrafter(ModelDrafter):
    """What chains and trees of a head share: how it reads, and its vocabulary.

    Between rounds ``hidden`` is of the row's last token, ``[B, 1, D]``.
    """

    needs_head = True

    def aux_layers(self, inputs):
        return inputs.draft.config.layer_ids

    @property
    def round_positions(self) -> int:
        return max(self.shape.nodes, self.shape.depth + 1)

    def ready(self, state):
        return ~state.done & (state.length > 1)  # before the first pair there is no law

    def init(self, inputs, state):
        net, rows = inputs.draft, state.length.shape[0]
        cache = net.cache(rows, state.capacity)
        return Reading(
            cache, jnp.zeros((rows, 1, net.config.hidden_size), net.params["embed"].dtype)
        )

    def prefill_chunk(self, inputs, state, tokens, start, aux_states):
        carried, count = state.drafter_state, tokens.shape[1]
        behind = start[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)
        behind = jnp.take_along_axis(state.tokens, behind, axis=1, mode="clip")
        read = _read_true(inputs.draft, carried.cache, behind, aux_states, start)
        last = state.length - 2 - start
        here = (last >= 0) & (last < count)
        hidden = _at(read.hidden, jnp.clip(last, 0, count - 1))
        return Reading(read.cache, jnp.where(here[:, None, None], hidden, carried.hidden))

    def begin(self, inputs, state):
        return _logits(inputs.draft, state.drafter_state.hidden)[:, 0], state.drafter_state

    def follow(self, inputs, state, carry, token, depth):
        net, start = inputs.draft, state.length - 2 + depth
        features = fed_back(net.config, net.params, carry.hidden)
        read = _read(net, carry.cache, token, features, start)
        return _logits(net, read.hidden)[:, 0], read

    def level(self, inputs, state, carry, tokens, bits, above):
        net, base = inputs.draft, state.length - 1
        bits = bits[:, 1:, 1:]  # the root's pair is committed
        features = fed_back(net.config, net.params, _rows(carry.hidden, above))
        positions = base[:, None] + bits.sum(-1, dtype=jnp.int32) - 1
        new = slice(bits.shape[-1] - tokens.shape[1], None)
        tree = {"base": base, "positions": positions[:, new], "visible": bits[:, new]}
        read = _read(net, carry.cache, tokens, features, base + new.start, **tree)
        return _logits(net, read.hidden), read

    def named(self, inputs, drafted):
        ids = inputs.draft.config.ids
        return drafted if ids is None else jnp.asarray(ids)[drafted]

    def over_target(self, inputs, rows):
        cfg = inputs.draft.config
        if cfg.ids is None:
            return rows
        place = np.full(cfg.vocab_size, cfg.draft_size)
        place[cfg.ids] = np.arange(cfg.draft_size)
        pad = [(0, 0)] * (rows.ndim - 1) + [(0, 1)]
        return jnp.pad(rows, pad, constant_values=probs.NEVER)[..., place]

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        """Reads the emitted tokens with features of the nodes that they follow."""
        path = jnp.minimum(verdict.path, draft.shape.nodes - 1)
        aux_states = jnp.take_along_axis(draft.aux_states, path[:, :, None, None], axis=1)
        net, start = inputs.draft, state.length - 1
        read = _read_true(net, carried.cache, verdict.tokens, aux_states, start)
        return Reading(read.cache, _at(read.hidden, verdict.num_tokens - 1))


@dataclasses.dataclass(frozen=True)
class HeadChain(HeadDrafter, Chain):
    """:class:`specjax.draft.Chain`, drawn from a head."""

    name = HEAD


@dataclasses.dataclass(frozen=True)
class HeadTree(HeadDrafter, Tree):
    """:class:`specjax.draft.Tree`, drawn from a head."""

    name = HEAD


class TreeCandidates(NamedTuple):
    """Nodes of a tree that grows; node 0 is the root."""

    tokens: Int[Array, "B C"]
    parents: Int[Array, "B C"]
    log_q: Float[Array, "B C"]  # of its token, given its path
    score: Float[Array, "B C"]  # log of the joint draft probability; −inf: no candidate


class Fed(NamedTuple):
    """The candidates that the head reads next, the frontier, and what it has read."""

    node: Int[Array, "B n"]  # among the candidates
    score: Float[Array, "B n"]
    bits: Bool[Array, "B F F"]  # ancestors among the nodes read, the root being the first


@dataclasses.dataclass(frozen=True)
class HeadBest(HeadDrafter):
    """A best-first tree (EAGLE-2, Li et al. 2024, arXiv 2406.16858, §4): the ``budget`` likeliest.

    Level by level the ``width`` nodes of largest joint draft probability are expanded, each by its
    ``width`` likeliest tokens, down to ``depth``; of all of them the best ``budget`` are verified.
    Candidates are chosen, not drawn: they have no law q, and every rule that takes them is
    lossless. Probabilities are warped, in greedy rows unwarped.
    """

    budget: int = 31
    depth: int = 5
    width: int = 8
    name = HEAD
    sampling = DETERMINISTIC

    def __post_init__(self):
        validate_fields(self, budget=COUNT, depth=COUNT, width=COUNT)

    @property
    def shape(self) -> TreeShape:
        most = self.width + (self.depth - 1) * self.width**2
        return TreeShape(1 + min(self.budget, most), self.depth, self.width)

    @property
    def round_positions(self) -> int:
        return max(super().round_positions, 1 + (self.depth - 1) * self.width)

    def raw_rows(self, inputs):
        return inputs.warp.greedy

    def propose(self, inputs, state, keys):
        rows, live = state.length.shape[0], self.ready(state)
        logits, carry = self.begin(inputs, state)
        logits, calls = logits[:, None], jnp.ones((rows,), jnp.int32)
        root, zero = probs.at_token(state.tokens, state.length - 1), jnp.zeros((rows, 1), jnp.int32)
        start = jnp.where(live, 0.0, probs.NEVER)[:, None]
        found = TreeCandidates(root[:, None], zero + NO_PARENT, start, start)
        prefilled = Fed(zero + ROOT, start, jnp.ones((rows, 1, 1), bool))
        for level in range(self.depth):
            first = found.tokens.shape[1]
            found = self._expanded(inputs, found, prefilled, logits)
            if level + 1 < self.depth:
                tokens, above, prefilled = self._frontier(inputs, found, prefilled, first)
                logits, carry = self.level(inputs, state, carry, tokens, prefilled.bits, above)
                calls = calls + (prefilled.score > probs.NEVER).sum(-1, dtype=jnp.int32)
        return Proposal(self._best(found), carry, calls, jnp.int32(self.depth))

    def _expanded(self, inputs, found: TreeCandidates, prefilled: Fed, logits) -> TreeCandidates:
        """The candidates with ``width`` children of each node of the frontier."""
        log_q = unwarped_in(inputs.warp.greedy, logits, warp(logits, inputs.warp))
        best, drafted = jax.lax.top_k(log_q, self.width)
        rows = drafted.shape[0]
        tokens = self.named(inputs, drafted.reshape(rows, -1).astype(jnp.int32))
        score = (prefilled.score[..., None] + best).reshape(rows, -1)
        parents = jnp.repeat(prefilled.node, self.width, axis=1)
        level = TreeCandidates(tokens, parents, best.reshape(rows, -1), score)
        return TreeCandidates(
            *(jnp.append(x, y, axis=1) for x, y in zip(found, level, strict=True))
        )

    def _frontier(self, inputs, found: TreeCandidates, prefilled: Fed, first: int):
        """Tokens of the ``width`` likeliest candidates from ``first`` on that go on, which node of
        the frontier each hangs below, and the new frontier."""
        level = found.tokens[:, first:]
        going = jnp.where(inputs.is_eos(level), probs.NEVER, found.score[:, first:])
        score, which = jax.lax.top_k(going, self.width)
        above, read, count = which // self.width, prefilled.bits.shape[-1], prefilled.node.shape[1]
        index = read + jnp.arange(self.width)
        own = jnp.arange(read + self.width) == index[:, None]
        wide = jnp.pad(prefilled.bits, ((0, 0), (0, 0), (0, self.width)))
        bits = jnp.append(wide, _rows(wide, read - count + above) | own, axis=1)
        tokens = jnp.take_along_axis(level, which, axis=1)
        return tokens, above, Fed(first + which, score, bits)

    def _best(self, found: TreeCandidates) -> Draft:
        """The ``budget`` best candidates: a parent is never worse than its children, and precedes
        them where they are equal, so what is left is a tree."""
        rows, count = found.tokens.shape[0], self.shape.nodes - 1
        chosen = jax.lax.top_k(found.score[:, 1:], count)[1]
        chosen = 1 + jnp.sort(chosen, axis=1)
        kept = jnp.zeros(found.tokens.shape, bool).at[jnp.arange(rows)[:, None], chosen].set(True)
        number = jnp.cumsum(kept, axis=1)  # of each candidate that is kept
        tokens, parents, log_q, score = (jnp.take_along_axis(x, chosen, axis=1) for x in found)
        valid = score > probs.NEVER
        log_q = jnp.where(valid, log_q, 0.0)
        below = jnp.take_along_axis(number, parents, axis=1)
        one = jnp.ones((rows, 1), jnp.int32)
        return Draft(
            tokens=jnp.append(found.tokens[:, :1], tokens, axis=1),
            parents=jnp.append(one * NO_PARENT, jnp.where(valid, below, ROOT), axis=1),
            valid=jnp.append(one > 0, valid, axis=1),
            token_log_q=jnp.pad(log_q, ((0, 0), (1, 0))),
            shape=self.shape,
            sampling=self.sampling,
        )


def _read_true(net: Net, cache, tokens, aux_states: Float[Array, "B T L D"], start) -> Reading:
    """:func:`_read` with features of the target's own states."""
    return _read(net, cache, tokens, fused_states(net.config, net.params, aux_states), start)


def _read(
    net: Net,
    cache: KVCache,
    tokens: Int[Array, "B n"],
    features: Float[Array, "B n D"],
    start: Int[Array, "B"],
    positions: Int[Array, "B n"] | None = None,
    visible: Bool[Array, "B n F"] | None = None,
    base: Int[Array, "B"] | None = None,
) -> Reading:
    """What the head makes of new pairs, and its cache that holds them from ``start`` on.

    A chain by default; a level of a tree as
    :func:`specjax.models.forward_pass.forward` has it.
    """
    rows, count = tokens.shape
    if positions is None:
        positions = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    arguments = (net.config, net.params, cache, tokens, positions, start, visible)
    hidden, cache, _ = forward(
        *arguments, base=base, pass_width=net.narrow(rows), features=features
    )
    return Reading(cache, hidden[:, :count])


def _logits(net: Net, hidden: Float[Array, "B n D"]) -> Float[Array, "B n v"]:
    """float32 logits over the draft vocabulary; −inf where the target never emits the id."""
    cfg, (rows, count) = net.config, hidden.shape[:2]
    wide = pad_pass(hidden, max(count, net.narrow(rows)))
    logits = draft_logits(cfg, net.params, wide)[:, :count].astype(jnp.float32)
    ids = np.arange(cfg.vocab_size) if cfg.ids is None else cfg.ids
    barred = (ids >= net.vocab_limit) | np.isin(ids, cfg.adaptive_ids)
    return jnp.where(barred, probs.NEVER, logits) if barred.any() else logits


def _rows(x: Array, at: Int[Array, "B n"]) -> Array:
    """``x[b, at[b, i]]``."""
    return jnp.take_along_axis(x, at[:, :, None], axis=1)


def _at(x: Float[Array, "B n D"], at: Int[Array, "B"]) -> Float[Array, "B 1 D"]:
    return _rows(x, at[:, None])
