"""SDSAT drafts (Liu et al. 2024): the target drafts for itself with adaptive tokens.

The adaptive tokens a₁ … a_k follow the text as probes: nodes of the target's pass that are no
candidates. The model was tuned so that it predicts the token after next at a₁, the one after that
at a₂, and so on. Three drafters use their logits, in two ways:

* :class:`ProbePass` and :class:`VerifyPass` are the two passes of the paper's rounds
  (:mod:`specjax.search.sdsat`).
* :class:`SinglePass` verifies one draft and probes for the next in the same pass.

Axis legend: B rows, k adaptive tokens, N nodes, P probes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import validate_fields
from specjax._util.checks import Check
from specjax.core import probs
from specjax.core.path_logits import path_logits
from specjax.core.probs import Purpose
from specjax.core.protocols import Drafter, Proposal
from specjax.core.types import (
    DETERMINISTIC,
    IID,
    NO_PARENT,
    POINT_MASS,
    ROOT,
    DecodeState,
    Draft,
    Inputs,
    Probes,
    TreeShape,
)
from specjax.core.warp import warp
from specjax.draft.model_drafter import unwarped_in
from specjax.draft.none import NoDraft

CHAIN = "chain"
TREE = "tree"
FORMS = (CHAIN, TREE)
# Nodes per level of the published trees (github.com/ainergy-ml/SDSAT, decoders/model/utils.py).
LEVELS = (
    (4, 8, 8, 5, 3),
    (4, 8, 8, 6, 5, 3, 2),
    (4, 8, 8, 6, 6, 5, 4, 3, 2),
    (4, 8, 8, 8, 6, 6, 6, 5, 4, 3, 2),
    (4, 8, 8, 8, 8, 8, 6, 6, 6, 5, 4, 3, 2),
)
MOST = len(LEVELS[-1])  # levels of the deepest tree, and so its adaptive tokens
# The nodes of a level, as (index of the parent in the level above, rank of the candidate). The
# first level holds the best candidates in order. A deeper level of n nodes has the first n places.
PLACES = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0))


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Makes a draft from the distributions at the k adaptive tokens.

    A chain draws each token from its own distribution, warped as the target. A tree has the most
    probable tokens of each level, at the places of SDSAT's published trees (``LEVELS``,
    ``PLACES``). If no published tree has k levels, it has the first k of the next deeper one.
    """

    k: int
    form: str = CHAIN

    def __post_init__(self):
        validate_fields(self, k=Check(int, low=1), form=Check(str, choices=FORMS))

    @property
    def sampling(self) -> str:
        """I.i.d. for a chain; the nodes of a tree are the likeliest tokens."""
        return IID if self.form == CHAIN else DETERMINISTIC

    @property
    def shape(self) -> TreeShape:
        """A chain of k nodes, or a tree of depth k."""
        if self.form == CHAIN:
            return TreeShape.chain(self.k)
        return TreeShape(len(self.parents), self.k, max_children=len(self._places[0]))

    @functools.cached_property
    def _places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(index of the parent in the level above, rank of the candidate), level by level."""
        if self.form == CHAIN:
            return (((0, 0),),) * self.k
        deep_enough = next(sizes for sizes in LEVELS if len(sizes) >= self.k)
        first_size, *sizes = deep_enough[: self.k]
        first_level = tuple((0, rank) for rank in range(first_size))
        return (first_level, *(PLACES[:size] for size in sizes))

    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node; NO_PARENT for the root."""
        parents = [NO_PARENT]
        level_above = 0  # the first node of the level above
        for level in self._places:
            first = len(parents)
            parents += [level_above + index for index, _ in level]
            level_above = first
        return tuple(parents)

    def draft(
        self,
        inputs: Inputs,
        state: DecodeState,
        keys: Key[Array, "B"],
        root: Int[Array, "B"],
        logits: Float[Array, "B k V"],
        live: Bool[Array, "B"],
    ) -> Draft:
        """The draft below ``root``; rows that are not ``live`` have no draft.

        ``keys`` are the round's keys. ``logits`` are the raw ones at the k adaptive tokens. They do
        not know the tokens drafted before them, so settings that read a row's tokens see only the
        committed ones.
        """
        if inputs.warp.path is not None:
            no_paths = jnp.zeros((*logits.shape[:2], 0), jnp.int32)
            logits = path_logits(inputs, state, logits, no_paths)
        log_q = warp(logits, inputs.warp)
        if self.form == CHAIN:
            nodes = jnp.broadcast_to(jnp.arange(1, self.k + 1), logits.shape[:2])
            u = probs.uniforms(keys, Purpose.DRAFT, nodes)
            drafted = probs.sample(jnp.exp(log_q), u)
            possible = jnp.ones(nodes.shape, bool)
        else:
            drafted, possible = self._candidates(inputs, logits, log_q)

        tokens = jnp.concatenate([root[:, None], drafted], axis=1)
        # Node by node, parents first: a node is valid if its parent is, and has not ended the text.
        # The root may be an end of sequence of the prompt, so only `live` decides for it.
        valid = [jnp.ones_like(live)]
        ended = inputs.is_eos(tokens)
        for node, parent in enumerate(self.parents[1:], 1):
            allowed = live if parent == ROOT else valid[parent] & ~ended[:, parent]
            valid.append(allowed & possible[:, node - 1])
        return Draft(
            tokens=tokens,
            parents=np.broadcast_to(np.array(self.parents, np.int32), tokens.shape),
            valid=jnp.stack(valid, axis=1),
            log_q=log_q if self.form == CHAIN else None,
            shape=self.shape,
            q_row=(0, *range(self.k)) if self.form == CHAIN else (),
            sampling=self.sampling,
        )

    def _candidates(
        self, inputs: Inputs, logits: Float[Array, "B k V"], log_q: Float[Array, "B k V"]
    ) -> tuple[Int[Array, "B N-1"], Bool[Array, "B N-1"]]:
        """Tokens of the nodes below the root, and which of them have any probability.

        The warped distribution of a greedy row has only one token. Its siblings are ranked by the
        unwarped one.
        """
        ranked = unwarped_in(inputs.warp.greedy, logits, log_q)
        score, token = probs.top_k(ranked, self.shape.max_children)
        picks = [(level, rank) for level, nodes in enumerate(self._places) for _, rank in nodes]
        level, rank = np.array(picks).T
        return token[:, level, rank].astype(jnp.int32), score[:, level, rank] > probs.NEVER


@dataclasses.dataclass(frozen=True)
class ProbePass(Drafter):
    """No draft, but k adaptive tokens after the root: the first pass of the two-step method.

    Its state is the logits at these tokens.
    """

    adaptive: tuple[int, ...]  # the ids of a₁ … a_k
    name = "adaptive"
    sampling = POINT_MASS
    shape = TreeShape.chain(0)

    @property
    def num_probes(self) -> int:
        """Adaptive tokens of one group."""
        return len(self.adaptive)

    def init(self, inputs: Inputs, state: DecodeState) -> Any:
        return _empty_logits(inputs, state, len(self.adaptive))

    def propose(self, inputs, state, keys) -> Proposal:
        draft = NoDraft().propose(inputs, state, keys).draft
        probes = probe_groups(self.adaptive, groups=1, rows=state.length.shape[0], nodes=1)
        return Proposal(draft.replace(probes=probes), state.drafter_state)

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        return probe_logits


@dataclasses.dataclass(frozen=True)
class VerifyPass(Drafter):
    """Drafts from the logits at the adaptive tokens: the second pass of the two-step method."""

    candidates: Candidates
    name = "adaptive"

    @property
    def sampling(self) -> str:
        """That of its candidates."""
        return self.candidates.sampling

    @property
    def shape(self) -> TreeShape:
        """That of its candidates."""
        return self.candidates.shape

    def propose(self, inputs, state, keys) -> Proposal:
        root = probs.at_index(state.tokens, state.length - 1)
        draft = self.candidates.draft(inputs, state, keys, root, state.drafter_state, ~state.done)
        return Proposal(draft, state.drafter_state)


@dataclasses.dataclass(frozen=True)
class SinglePass(Drafter):
    """Verifies one draft and probes for the next in one pass (ours).

    A group of k adaptive tokens follows each of the first ``groups`` nodes. Group j predicts as if
    node j and all before it were accepted. After a verdict with j accepted tokens, its logits give
    the next draft, which begins after the round's last token. So the first round has no draft.
    ``k + 1`` groups cover every verdict. With fewer, the next round has no draft if its group is
    missing.
    """

    candidates: Candidates
    adaptive: tuple[int, ...]
    groups: int
    name = "adaptive"
    sampling = IID

    @property
    def shape(self) -> TreeShape:
        """That of its candidates."""
        return self.candidates.shape

    @property
    def num_probes(self) -> int:
        """Adaptive tokens of all groups."""
        return self.groups * len(self.adaptive)

    def init(self, inputs: Inputs, state: DecodeState) -> Any:
        """The logits for the next draft, and the rows that have any."""
        known = jnp.zeros(state.length.shape, bool)
        return _empty_logits(inputs, state, len(self.adaptive)), known

    def propose(self, inputs, state, keys) -> Proposal:
        logits, known = state.drafter_state
        root = probs.at_index(state.tokens, state.length - 1)
        draft = self.candidates.draft(inputs, state, keys, root, logits, known & ~state.done)
        probes = probe_groups(self.adaptive, self.groups, root.shape[0], self.shape.nodes)
        return Proposal(draft.replace(probes=probes), state.drafter_state)

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        assert probe_logits is not None, "every draft of this drafter has probes"
        rows, _, vocab = probe_logits.shape
        groups = probe_logits.reshape(rows, self.groups, -1, vocab)
        accepted = verdict.num_accepted
        group = jnp.minimum(accepted, self.groups - 1)[:, None, None, None]
        return jnp.take_along_axis(groups, group, axis=1)[:, 0], accepted < self.groups


def _empty_logits(inputs: Inputs, state: DecodeState, k: int) -> Float[Array, "B k V"]:
    return jnp.zeros((state.length.shape[0], k, inputs.target.vocab), jnp.float32)


def probe_groups(adaptive: tuple[int, ...], groups: int, rows: int, nodes: int) -> Probes:
    """``groups`` groups of the adaptive tokens: group j follows node j of a chain of ``nodes``."""
    k = len(adaptive)
    parents = []
    for group in range(groups):
        # The first probe's parent is its node. Every other's is the probe before it, and probes are
        # numbered after the nodes.
        first = nodes + group * k
        parents += [group, *range(first, first + k - 1)]
    tokens = np.tile(np.array(adaptive, np.int32), groups)
    return Probes(
        tokens=jnp.asarray(np.broadcast_to(tokens, (rows, len(tokens)))),
        parents=np.broadcast_to(np.array(parents, np.int32), (rows, len(parents))),
    )
