"""Drafts of a head on the target's hidden states (EAGLE-3, Li et al. 2025, arXiv 2503.01840).

The draft head reads pairs: the features of token i with token i + 1. From such a pair it predicts
token i + 2. So between rounds it has read every pair of known tokens, and the hidden state of the
last pair gives the distribution of the first drafted token.

Where features come from differs. Those of a committed token come from auxiliary hidden states of
the target. A drafted token has none yet: its features are the head's own hidden state of the step
before. After the verdict the accepted tokens are read again, now with features from the target,
which the verifying pass has returned. This replaces what the cache holds of drafts and costs no
target pass.

The pair with token i + 1 is at cache position i. So the root's pair is at ``length - 2``, and the
pair of a node is one below the position that the node has in the target's cache.

Three shapes are drafted: a chain, a drawn tree, and EAGLE-2's best-first tree. The head's layer and
its projections are in :mod:`specjax.models.head`.

Axis legend: B rows, N nodes, n nodes of a level, C candidates, F nodes that the head has read,
T tokens, L auxiliary layers, D hidden size, v draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import COUNT, validate_fields
from specjax.core import probs
from specjax.core.net import Net
from specjax.core.protocols import Proposal
from specjax.core.types import (
    DETERMINISTIC,
    NO_PARENT,
    NO_TOKEN,
    ROOT,
    DecodeState,
    Draft,
    Inputs,
    TreeShape,
)
from specjax.core.warp import warp
from specjax.draft.chain import Chain
from specjax.draft.model_drafter import ModelDrafter, draft_net, unwarped_in
from specjax.draft.tree import Tree
from specjax.models import KVCache
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import forward, pad_pass
from specjax.models.head import draft_logits, fed_back, fused_states

HEAD = "head"


class HeadState(NamedTuple):
    """The head's KV cache, and its hidden states of the pairs that it read last."""

    cache: KVCache
    hidden: Float[Array, "B n D"]


class HeadDrafter(ModelDrafter):
    """What all drafters with a head share: how it is run, and its vocabulary.

    Between rounds ``hidden`` is that of each row's last pair, ``[B, 1, D]``.
    """

    needs_head = True
    splits_vocabulary = False  # its vocabulary is its own

    def aux_layers(self, inputs: Inputs) -> tuple[int, ...]:
        return head_config(draft_net(inputs)).layer_ids

    @property
    def round_positions(self) -> int:
        # After the verdict up to depth + 1 emitted tokens are read from the root's position on.
        return max(self.shape.nodes, self.shape.depth + 1)

    def can_draft(self, state: DecodeState) -> Bool[Array, "B"]:
        # A row of one token has no pair yet, so there is nothing to draw from.
        return ~state.done & (state.length > 1)

    def init(self, inputs, state) -> HeadState:
        net = draft_net(inputs)
        rows = state.length.shape[0]
        cache = net.cache(rows, state.capacity)
        hidden = jnp.zeros((rows, 1, net.config.hidden_size), net.params["embed"].dtype)
        return HeadState(cache, hidden)

    def prefill_chunk(self, inputs, state, tokens, start, aux_states) -> HeadState:
        carried = state.drafter_state
        count = tokens.shape[1]
        # Each token's features are paired with the token after it.
        following = start[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)
        following = jnp.take_along_axis(state.tokens, following, axis=1, mode="clip")
        read = _run_on_target_states(draft_net(inputs), carried.cache, following, aux_states, start)
        # Rows end in different chunks: the hidden state is that of the chunk with the row's last
        # pair. Pairs past it are scratch.
        last = state.length - 2 - start
        in_chunk = (last >= 0) & (last < count)
        hidden = _gather_one(read.hidden, jnp.clip(last, 0, count - 1))
        return HeadState(read.cache, jnp.where(in_chunk[:, None, None], hidden, carried.hidden))

    def first_logits(self, inputs, state):
        # The root's pair was read when the last round ended: no pass is needed here.
        return _logits(draft_net(inputs), state.drafter_state.hidden)[:, 0], state.drafter_state

    def next_logits(self, inputs, state, carry, token, depth):
        net = draft_net(inputs)
        start = state.length - 2 + depth
        features = fed_back(head_config(net), net.params, carry.hidden)
        read = _run_head(net, carry.cache, token, features, start)
        return _logits(net, read.hidden)[:, 0], read

    def level_logits(self, inputs, state, carry, tokens, ancestors, parent_index):
        net = draft_net(inputs)
        # The tree's first cache position. The root's pair is below it, for it is committed; hence
        # the root is no node of the head's tree.
        base = state.length - 1
        ancestors = ancestors[:, 1:, 1:]
        parent_hidden = _gather_nodes(carry.hidden, parent_index)
        features = fed_back(head_config(net), net.params, parent_hidden)
        positions = base[:, None] + ancestors.sum(-1, dtype=jnp.int32) - 1
        level = slice(ancestors.shape[-1] - tokens.shape[1], None)
        read = _run_head(
            net,
            carry.cache,
            tokens,
            features,
            base + level.start,
            base=base,
            positions=positions[:, level],
            visible=ancestors[:, level],
        )
        return _logits(net, read.hidden), read

    def to_target_ids(self, inputs: Inputs, drafted: Int[Array, "..."]) -> Int[Array, "..."]:
        ids = head_config(draft_net(inputs)).ids
        return drafted if ids is None else jnp.asarray(ids)[drafted]

    def to_target_vocab(self, inputs: Inputs, rows: Float[Array, "... v"]) -> Float[Array, "... V"]:
        cfg = head_config(draft_net(inputs))
        if cfg.ids is None:
            return rows
        # A gather, not a scatter: ids that the head does not know read an added column of −inf.
        column = np.full(cfg.vocab_size, cfg.draft_size)
        column[cfg.ids] = np.arange(cfg.draft_size)
        pad = [(0, 0)] * (rows.ndim - 1) + [(0, 1)]
        return jnp.pad(rows, pad, constant_values=probs.NEVER)[..., column]

    def to_draft_vocab(self, inputs: Inputs, rows: Float[Array, "... V"]) -> Float[Array, "... v"]:
        ids = head_config(draft_net(inputs)).ids
        return rows if ids is None else rows[..., np.asarray(ids)]

    def update(self, inputs, state, carried, draft, verdict, probe_logits) -> HeadState:
        """Reads the emitted tokens with features of the nodes before them."""
        # Emitted token i follows path node i. Path entries past the accepted depth are clipped:
        # what is read there is scratch above the new length.
        assert draft.aux_states is not None, "the verifying pass adds the drafter's aux_layers"
        path = jnp.minimum(verdict.path, draft.shape.nodes - 1)
        aux_states = jnp.take_along_axis(draft.aux_states, path[:, :, None, None], axis=1)
        start = state.length - 1
        read = _run_on_target_states(
            draft_net(inputs), carried.cache, verdict.tokens, aux_states, start
        )
        return HeadState(read.cache, _gather_one(read.hidden, verdict.num_tokens - 1))


@dataclasses.dataclass(frozen=True)
class HeadChain(HeadDrafter, Chain):
    """:class:`specjax.draft.Chain`, drawn from a head."""

    name = HEAD


@dataclasses.dataclass(frozen=True)
class HeadTree(HeadDrafter, Tree):
    """:class:`specjax.draft.Tree`, drawn from a head."""

    @property
    def name(self) -> str:
        """The name of all drafters with a head."""
        return HEAD


class TreeCandidates(NamedTuple):
    """All candidate nodes of the tree, before reranking; node 0 is the root."""

    tokens: Int[Array, "B C"]
    parents: Int[Array, "B C"]
    log_q: Float[Array, "B C"]  # of its token, given its path
    score: Float[Array, "B C"]  # log of the joint draft probability; −inf: no candidate


class Frontier(NamedTuple):
    """The candidates of one level that the head reads, to be expanded next."""

    node: Int[Array, "B n"]  # their numbers among the candidates
    paths: Int[Array, "B n D"] | None  # the tokens down to each; None where no setting reads them
    score: Float[Array, "B n"]
    ancestors: Bool[Array, "B F F"]  # of all nodes that the head has read; the root is the first


@dataclasses.dataclass(frozen=True)
class HeadBest(HeadDrafter):
    """A best-first tree (EAGLE-2, Li et al. 2024, arXiv 2406.16858, §4).

    Expand: level by level, the ``width`` nodes of largest joint draft probability get their
    ``width`` likeliest tokens as children, down to ``depth``. Rerank: the best ``budget`` of all
    candidates are verified. Candidates are chosen, not drawn, so they have no distribution q. Each
    rule that accepts them keeps what it promises: a lossless one stays lossless. Probabilities are
    warped, in greedy rows unwarped.
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
        """At most ``budget`` nodes, ``depth`` deep."""
        candidates = self.width + (self.depth - 1) * self.width**2
        return TreeShape(1 + min(self.budget, candidates), self.depth, self.width)

    @property
    def round_positions(self) -> int:
        # The head reads `width` nodes of each level but the last.
        return max(super().round_positions, 1 + (self.depth - 1) * self.width)

    def raw_rows(self, inputs: Inputs) -> Bool[Array, "B"]:
        return inputs.warp.greedy

    def propose(self, inputs, state, keys: Key[Array, "B"]) -> Proposal:
        rows = state.length.shape[0]
        drafts = self.can_draft(state)
        logits, carry = self.first_logits(inputs, state)
        logits = logits[:, None]
        calls = jnp.ones((rows,), jnp.int32)
        root = probs.at_index(state.tokens, state.length - 1)
        zero = jnp.zeros((rows, 1), jnp.int32)
        # In a row that does not draft, −inf at the root makes every candidate impossible.
        score = jnp.where(drafts, 0.0, probs.NEVER)[:, None]
        candidates = TreeCandidates(root[:, None], zero + NO_PARENT, score, score)
        paths = None
        if inputs.warp.path is not None:
            paths = jnp.full((rows, 1, self.depth), NO_TOKEN)
        frontier = Frontier(zero + ROOT, paths, score, jnp.ones((rows, 1, 1), bool))
        for level in range(self.depth):
            first = candidates.tokens.shape[1]
            logits = self.with_path_settings(inputs, state, logits, frontier.paths)
            candidates = self._expand(inputs, candidates, frontier, logits)
            # The last level's nodes are candidates only: nothing is drafted after them.
            if level + 1 < self.depth:
                tokens, parent_index, frontier = self._next_frontier(
                    inputs, candidates, frontier, first, level
                )
                logits, carry = self.level_logits(
                    inputs, state, carry, tokens, frontier.ancestors, parent_index
                )
                calls = calls + (frontier.score > probs.NEVER).sum(-1, dtype=jnp.int32)
        return Proposal(self._rerank(candidates), carry, calls, jnp.int32(self.depth))

    def _expand(
        self,
        inputs: Inputs,
        candidates: TreeCandidates,
        frontier: Frontier,
        logits: Float[Array, "B n v"],
    ) -> TreeCandidates:
        """The candidates, and ``width`` children of each node of the frontier."""
        log_q = unwarped_in(inputs.warp.greedy, logits, warp(logits, inputs.warp))
        best, drafted = probs.top_k(log_q, self.width)
        rows = drafted.shape[0]
        tokens = self.to_target_ids(inputs, drafted.reshape(rows, -1).astype(jnp.int32))
        score = (frontier.score[..., None] + best).reshape(rows, -1)
        parents = jnp.repeat(frontier.node, self.width, axis=1)
        children = TreeCandidates(tokens, parents, best.reshape(rows, -1), score)
        joined = (jnp.append(x, y, axis=1) for x, y in zip(candidates, children, strict=True))
        return TreeCandidates(*joined)

    def _next_frontier(
        self,
        inputs: Inputs,
        candidates: TreeCandidates,
        frontier: Frontier,
        first: int,
        depth: int,
    ) -> tuple[Int[Array, "B n"], Int[Array, "B n"], Frontier]:
        """The ``width`` best candidates of the newest level, which begins at ``first``.

        ``depth`` is that of the old frontier. Returns their tokens, the index of each one's parent
        in the old frontier, and the new frontier.
        """
        # Nothing follows an end of sequence: such a candidate is not expanded.
        level = candidates.tokens[:, first:]
        score = jnp.where(inputs.is_eos(level), probs.NEVER, candidates.score[:, first:])
        score, chosen = probs.top_k(score, self.width)

        # Children are in the order of their parents, `width` of each.
        parent_index = chosen // self.width
        num_read = frontier.ancestors.shape[-1]
        num_parents = frontier.node.shape[1]
        number = num_read + jnp.arange(self.width)
        is_self = jnp.arange(num_read + self.width) == number[:, None]

        # A node's ancestors are its parent's and itself. The old frontier is the last nodes read.
        widened = jnp.pad(frontier.ancestors, ((0, 0), (0, 0), (0, self.width)))
        of_parent = _gather_nodes(widened, num_read - num_parents + parent_index)
        ancestors = jnp.append(widened, of_parent | is_self, axis=1)
        tokens = jnp.take_along_axis(level, chosen, axis=1)
        paths = frontier.paths
        if paths is not None:
            paths = _gather_nodes(paths, parent_index).at[:, :, depth].set(tokens)
        return tokens, parent_index, Frontier(first + chosen, paths, score, ancestors)

    def _rerank(self, candidates: TreeCandidates) -> Draft:
        """The ``budget`` best candidates as a draft.

        They always form a tree. A joint probability never grows along a path, so a parent is never
        worse than its children. On ties ``top_k`` takes the lower number, which is the parent.
        """
        rows = candidates.tokens.shape[0]
        count = self.shape.nodes - 1
        chosen = probs.top_k(candidates.score[:, 1:], count)[1]
        chosen = 1 + jnp.sort(chosen, axis=1)  # in their old order: parents before children

        # The new number of a kept candidate: how many are kept up to it. The root has 0.
        kept = jnp.zeros(candidates.tokens.shape, bool)
        kept = kept.at[jnp.arange(rows)[:, None], chosen].set(True)
        number = jnp.cumsum(kept, axis=1)

        tokens, parents, log_q, score = (jnp.take_along_axis(x, chosen, axis=1) for x in candidates)
        valid = score > probs.NEVER
        log_q = jnp.where(valid, log_q, 0.0)
        new_parents = jnp.take_along_axis(number, parents, axis=1)
        one = jnp.ones((rows, 1), jnp.int32)
        return Draft(
            tokens=jnp.append(candidates.tokens[:, :1], tokens, axis=1),
            parents=jnp.append(one * NO_PARENT, jnp.where(valid, new_parents, ROOT), axis=1),
            valid=jnp.append(one > 0, valid, axis=1),
            token_log_q=jnp.pad(log_q, ((0, 0), (1, 0))),
            shape=self.shape,
            sampling=self.sampling,
        )


def head_config(net: Net) -> HeadConfig:
    """The config of a draft model that is a head."""
    assert isinstance(net.config, HeadConfig), "a drafter with a head is refused for whole models"
    return net.config


def _run_on_target_states(
    net: Net,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    aux_states: Float[Array, "B T L D"],
    start: Int[Array, "B"],
) -> HeadState:
    """:func:`_run_head` with features from the target's auxiliary hidden states."""
    features = fused_states(head_config(net), net.params, aux_states)
    return _run_head(net, cache, tokens, features, start)


def _run_head(
    net: Net,
    cache: KVCache,
    tokens: Int[Array, "B n"],
    features: Float[Array, "B n D"],
    start: Int[Array, "B"],
    positions: Int[Array, "B n"] | None = None,
    visible: Bool[Array | np.ndarray, "B n F"] | None = None,
    base: Int[Array, "B"] | None = None,
) -> HeadState:
    """The head's hidden states of new pairs, and its cache with these pairs from ``start`` on.

    A chain by default. ``positions``, ``visible`` and ``base`` are those of a level of a tree, as
    :func:`specjax.models.forward_pass.forward` takes them.
    """
    rows, count = tokens.shape
    if positions is None:
        positions = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    hidden, cache, _ = forward(
        net.config,
        net.params,
        cache,
        tokens,
        positions,
        start,
        visible,
        base=base,
        pass_width=net.padded_width(rows),
        features=features,
    )
    return HeadState(cache, hidden[:, :count])


def _logits(net: Net, hidden: Float[Array, "B n D"]) -> Float[Array, "B n v"]:
    """float32 logits over the draft vocabulary; −inf where the target never emits the id."""
    cfg = head_config(net)
    rows, count = hidden.shape[:2]
    padded = pad_pass(hidden, max(count, net.padded_width(rows)))
    logits = draft_logits(cfg, net.params, padded)[:, :count].astype(jnp.float32)
    ids = np.arange(cfg.vocab_size) if cfg.ids is None else cfg.ids
    forbidden = (ids >= net.vocab_limit) | np.isin(ids, cfg.adaptive_ids)
    return jnp.where(forbidden, probs.NEVER, logits) if forbidden.any() else logits


def _gather_nodes(x: Array, index: Int[Array | np.ndarray, "B n"]) -> Array:
    """``x[b, index[b, i]]``."""
    return jnp.take_along_axis(x, index[:, :, None], axis=1)


def _gather_one(x: Float[Array, "B n D"], index: Int[Array, "B"]) -> Float[Array, "B 1 D"]:
    """``x[b, index[b]]``, with an axis of length 1."""
    return _gather_nodes(x, index[:, None])
