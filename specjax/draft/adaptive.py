"""SDSAT drafts (Liu et al. 2024): the target drafts for itself from adaptive tokens.

Adaptive tokens a₁ … a_k stand behind the text as probes: the model was tuned to answer at aᵢ
with the token after next, and so on. Axis legend: B rows, k adaptive tokens, N nodes, P
probes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax._util.arguments import validate_fields
from specjax._util.checks import Check
from specjax.core import probs
from specjax.core.probs import Purpose
from specjax.core.protocols import Drafter, Proposal
from specjax.core.types import (
    DETERMINISTIC,
    IID,
    NO_PARENT,
    POINT_MASS,
    ROOT,
    Draft,
    Probes,
    TreeShape,
)
from specjax.core.warp import warp
from specjax.draft.model_drafter import unwarped_in
from specjax.draft.none import NoDraft

FORMS = CHAIN, TREE = "chain", "tree"
# Nodes per level of the published trees (github.com/ainergy-ml/SDSAT, decoders/model/utils.py).
LEVELS = (
    (4, 8, 8, 5, 3),
    (4, 8, 8, 6, 5, 3, 2),
    (4, 8, 8, 6, 6, 5, 4, 3, 2),
    (4, 8, 8, 8, 6, 6, 6, 5, 4, 3, 2),
    (4, 8, 8, 8, 8, 8, 6, 6, 6, 5, 4, 3, 2),
)
MOST = len(LEVELS[-1])
# Below the first level every one holds the first of these places: (the parent's number in the
# level above, the candidate's rank).
PLACES = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0))


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Turns the k adaptive distributions into a draft below the root.

    A chain draws each token from its own distribution, warped as the target. A tree offers
    the most probable tokens of each level at the places of SDSAT's published trees
    (``LEVELS``, ``PLACES``); a k between theirs takes the first k levels of the next larger.
    """

    k: int
    form: str = CHAIN

    def __post_init__(self):
        validate_fields(self, k=Check(int, low=1), form=Check(str, choices=FORMS))

    @property
    def sampling(self) -> str:
        return IID if self.form == CHAIN else DETERMINISTIC

    @property
    def shape(self) -> TreeShape:
        if self.form == CHAIN:
            return TreeShape.chain(self.k)
        return TreeShape(len(self.parents), self.k, max_children=len(self._places[0]))

    @functools.cached_property
    def _places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(parent's number in the level above, candidate's rank) of the nodes of each level."""
        if self.form == CHAIN:
            return (((0, 0),),) * self.k
        first, *below = next(row for row in LEVELS if len(row) >= self.k)[: self.k]
        return (tuple((0, rank) for rank in range(first)), *(PLACES[:size] for size in below))

    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        parents, above = [NO_PARENT], 0
        for level in self._places:
            here = len(parents)
            parents += [above + parent for parent, _ in level]
            above = here
        return tuple(parents)

    def draft(
        self,
        inputs,
        keys,
        root: Int[Array, "B"],
        logits: Float[Array, "B k V"],
        live: Bool[Array, "B"],
    ) -> Draft:
        """The draft below ``root``; rows that are not ``live`` offer nothing."""
        log_q = warp(logits, inputs.warp)
        if self.form == CHAIN:
            nodes = jnp.broadcast_to(jnp.arange(1, self.k + 1), logits.shape[:2])
            u = probs.uniforms(keys, Purpose.DRAFT, nodes)
            below, possible = probs.sample(jnp.exp(log_q), u), jnp.ones(nodes.shape, bool)
        else:
            below, possible = self._candidates(inputs, logits, log_q)
        tokens = jnp.concatenate([root[:, None], below], axis=1)
        valid = [jnp.ones_like(live)]
        ended = inputs.is_eos(tokens)
        for node, parent in enumerate(self.parents[1:], 1):
            open_ = live if parent == ROOT else valid[parent] & ~ended[:, parent]
            valid.append(open_ & possible[:, node - 1])
        return Draft(
            tokens=tokens,
            parents=np.broadcast_to(np.array(self.parents, np.int32), tokens.shape),
            valid=jnp.stack(valid, axis=1),
            log_q=log_q if self.form == CHAIN else None,
            shape=self.shape,
            q_row=(0, *range(self.k)) if self.form == CHAIN else (),
            sampling=self.sampling,
        )

    def _candidates(self, inputs, logits, log_q):
        """Tokens of the nodes below the root, and which of them have any probability.

        A greedy row's warped distribution has one token: its siblings are ranked by the
        unwarped one.
        """
        ranked = unwarped_in(inputs.warp.greedy, logits, log_q)
        score, token = jax.lax.top_k(ranked, self.shape.max_children)
        picks = [(level, rank) for level, nodes in enumerate(self._places) for _, rank in nodes]
        level, rank = np.array(picks).T
        return token[:, level, rank].astype(jnp.int32), score[:, level, rank] > probs.NEVER


@dataclasses.dataclass(frozen=True)
class ProbePass(Drafter):
    """No draft, but the k adaptive tokens behind the root: first pass of the two-step method."""

    adaptive: tuple[int, ...]  # the ids of a₁ … a_k
    name = "adaptive"
    sampling = POINT_MASS
    shape = TreeShape.chain(0)

    @property
    def num_probes(self) -> int:
        return len(self.adaptive)

    def init(self, inputs, state):
        return _no_answers(inputs, state, len(self.adaptive))

    def propose(self, inputs, state, keys):
        draft = NoDraft().propose(inputs, state, keys).draft
        probes = _probes(self.adaptive, groups=1, rows=state.length.shape[0], nodes=1)
        return Proposal(draft.replace(probes=probes), state.drafter_state)

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        return probe_logits


@dataclasses.dataclass(frozen=True)
class VerifyPass(Drafter):
    """Drafts what the adaptive tokens answered: second pass of the two-step method."""

    candidates: Candidates
    name = "adaptive"

    @property
    def sampling(self) -> str:
        return self.candidates.sampling

    @property
    def shape(self) -> TreeShape:
        return self.candidates.shape

    def propose(self, inputs, state, keys):
        root = probs.at_token(state.tokens, state.length - 1)
        draft = self.candidates.draft(inputs, keys, root, state.drafter_state, ~state.done)
        return Proposal(draft, state.drafter_state)


@dataclasses.dataclass(frozen=True)
class SinglePass(Drafter):
    """Draft and next drafts in one pass (ours): a group of k probes behind every node.

    Group j stands behind node j and answers as if it and what precedes it were accepted;
    with j accepted, its answers are the next draft, which begins after the round's last
    token. The first round has no draft. ``groups`` of them are carried, ``(k + 1)`` for all;
    where the one needed is missing, the next round drafts nothing.
    """

    candidates: Candidates
    adaptive: tuple[int, ...]
    groups: int
    name = "adaptive"
    sampling = IID

    @property
    def shape(self) -> TreeShape:
        return self.candidates.shape

    @property
    def num_probes(self) -> int:
        return self.groups * len(self.adaptive)

    def init(self, inputs, state):
        return _no_answers(inputs, state, len(self.adaptive)), jnp.zeros(state.length.shape, bool)

    def propose(self, inputs, state, keys):
        logits, known = state.drafter_state
        root = probs.at_token(state.tokens, state.length - 1)
        draft = self.candidates.draft(inputs, keys, root, logits, known & ~state.done)
        probes = _probes(self.adaptive, self.groups, root.shape[0], self.shape.nodes)
        draft = draft.replace(probes=probes)
        return Proposal(draft, state.drafter_state)

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        rows, _, vocab = probe_logits.shape
        groups = probe_logits.reshape(rows, self.groups, -1, vocab)
        accepted = verdict.num_accepted
        mine = jnp.minimum(accepted, self.groups - 1)[:, None, None, None]
        return jnp.take_along_axis(groups, mine, axis=1)[:, 0], accepted < self.groups


def _no_answers(inputs, state, k: int) -> Float[Array, "B k V"]:
    return jnp.zeros((state.length.shape[0], k, inputs.target.vocab), jnp.float32)


def _probes(adaptive: tuple[int, ...], groups: int, rows: int, nodes: int) -> Probes:
    """``groups`` windows of adaptive tokens, window j behind node j of a chain of ``nodes``."""
    k = len(adaptive)
    # A probe's parent is the probe before it, counted after the nodes; the first one's, node j.
    parents = [
        nodes + group * k + i - 1 if i else group for group in range(groups) for i in range(k)
    ]
    tokens = np.tile(np.array(adaptive, np.int32), groups)
    return Probes(
        tokens=np.broadcast_to(tokens, (rows, len(tokens))),
        parents=np.broadcast_to(np.array(parents, np.int32), (rows, len(parents))),
    )
