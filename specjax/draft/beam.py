"""Beam drafts (MTAD, Qin et al. 2024, §3.2): beam search or beam sampling in the draft model.

Beams are a growing tree in one draft cache. So no cache is copied when one beam is dropped and
another is continued twice. :mod:`specjax.search.beam` must copy caches.

Axis legend: B rows, N nodes, n nodes so far, W beams, S beams of a step (1, then W), V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import COUNT, FLAG, validate_fields
from specjax._util.checks import Check
from specjax.core import probs, tree
from specjax.core.probs import Purpose
from specjax.core.protocols import Proposal
from specjax.core.types import DETERMINISTIC, NO_PARENT, ROOT, DecodeState, Draft, Inputs, TreeShape
from specjax.core.warp import draw_joint, warp
from specjax.draft.model_drafter import (
    ModelDrafter,
    draft_net,
    last_two,
    run_last_two,
    run_level,
    unwarped_in,
)
from specjax.models import KVCache
from specjax.models.cache import commit_path
from specjax.verify.verdicts import root_path

VERIFIED = ("top1", "all")
JOINTS = ("warped", "raw")


class Beams(NamedTuple):
    """The tree so far, and where each beam ends in it."""

    cache: KVCache
    tokens: Int[Array, "B n"]
    parents: Int[Array, "B n"]
    valid: Bool[Array, "B n"]
    token_log_q: Float[Array, "B n"]
    ancestors: Bool[Array, "B n n"]
    node: Int[Array, "B S"]  # each beam's last node
    score: Float[Array, "B S"]  # log of its joint draft probability; −inf: no beam
    ended: Bool[Array, "B S"]
    limit: Int[Array, "B"]  # most tokens of a beam
    calls: Int[Array, "B"]


class Continuations(NamedTuple):
    """The W continuations that are kept. Each is a beam of the step before and one more token."""

    source: Int[Array, "B W"]  # the beam that is continued
    token: Int[Array, "B W"]
    score: Float[Array, "B W"]
    log_q: Float[Array, "B W"]  # of the token, given its path
    possible: Bool[Array, "B W"]  # the others only fill the array


@dataclasses.dataclass(frozen=True)
class Beam(ModelDrafter):
    """``width`` beams of ``gamma`` steps, ranked by the joint draft probability.

    A greedy row searches: it keeps the best W of all continuations, scored without warping. A
    sampled row draws W continuations without replacement from their joint. With ``warped`` that is
    the product of warped conditionals. With ``raw`` it is the joint of unwarped ones, warped as a
    whole for the draw (eq. 2) and unwarped as a score. A beam that ended keeps its score.

    ``verify_beams``: the best beam as a chain (``top1``), or the tree of ``all``. If W reaches
    V^(γ − 1), the search is exact.
    """

    gamma: int = 4
    width: int = 8
    verify_beams: str = "top1"
    joint: str = "warped"
    drawn: bool = True  # whether sampled rows draw their beams
    of_target: bool = False  # searches the target model itself, for MTJD
    name = "beam"
    sampling = DETERMINISTIC

    def __post_init__(self):
        verified = Check(str, choices=VERIFIED)
        joint = Check(str, choices=JOINTS)
        validate_fields(self, gamma=COUNT, width=COUNT, verify_beams=verified, joint=joint)
        validate_fields(self, drawn=FLAG, of_target=FLAG)

    def _level_nodes(self, step: int) -> range:
        """Node numbers of a step: always W. With a smaller vocabulary some are never valid."""
        return range(1 + step * self.width, 1 + (step + 1) * self.width)

    @property
    def round_positions(self) -> int:
        return 1 + self.gamma * self.width  # the whole tree, even if only one beam is verified

    @property
    def shape(self) -> TreeShape:
        """A chain of γ nodes for the best beam, or the tree of all beams."""
        if self.verify_beams == "top1":
            return TreeShape.chain(self.gamma)
        return self._tree_shape

    @property
    def _tree_shape(self) -> TreeShape:
        return TreeShape(self.round_positions, self.gamma, self.width)

    def raw_rows(self, inputs: Inputs) -> Bool[Array, "B"]:
        return inputs.warp.greedy | (self.joint == "raw")

    def propose(self, inputs, state, keys) -> Proposal:
        draft, beams = self.search(inputs, state, keys, state.drafter_state)
        passes = jnp.int32(self.gamma)
        if self.verify_beams == "all":
            return Proposal(draft, beams.cache, beams.calls, passes)

        # The best beam is moved into place before it is verified. From then on it is a chain like
        # any other.
        chain, path = self.beam_as_chain(draft, beams, jnp.argmax(beams.score, axis=1))
        cache = commit_path(beams.cache, state.length - 1, path)
        return Proposal(chain, cache, beams.calls, passes)

    def search(
        self,
        inputs: Inputs,
        state: DecodeState,
        keys: Key[Array, "B"],
        cache: KVCache,
        limit: Int[Array, "B"] | None = None,
    ) -> tuple[Draft, Beams]:
        """The tree of all beams, and where each ends.

        ``cache`` is that of the searched model. No beam has more than ``limit[B]`` tokens.
        """
        base = state.length - 1
        net = inputs.target if self.of_target else draft_net(inputs)
        logits, cache = run_last_two(net, cache, last_two(state), base - 1)
        logits = logits[:, None]
        if limit is None:
            limit = jnp.full_like(state.length, self.gamma)
        beams = self._start(state, cache, limit)
        for step in range(self.gamma):
            beams = beams._replace(ended=beams.ended | (limit <= step)[:, None])
            beams = self._extend(inputs, keys, beams, logits, step)
            if step + 1 < self.gamma:
                first = self._level_nodes(step).start
                level = beams.tokens[:, first:]
                logits, cache = run_level(net, beams.cache, level, base, first, beams.ancestors)
                calls = beams.calls + (~beams.ended).sum(-1, dtype=jnp.int32)
                beams = beams._replace(cache=cache, calls=calls)
        draft = Draft(
            tokens=beams.tokens,
            parents=beams.parents,
            valid=beams.valid,
            token_log_q=beams.token_log_q,
            shape=self._tree_shape,
            sampling=self.sampling,
        )
        return draft, beams

    def _start(self, state: DecodeState, cache: KVCache, limit: Int[Array, "B"]) -> Beams:
        """One beam: the root."""
        rows = state.length.shape[0]
        one = jnp.ones((rows, 1), jnp.int32)
        return Beams(
            cache=cache,
            tokens=probs.at_index(state.tokens, state.length - 1)[:, None],
            parents=one * NO_PARENT,
            valid=one > 0,
            token_log_q=jnp.zeros((rows, 1), jnp.float32),
            ancestors=jnp.ones((rows, 1, 1), bool),
            node=one * ROOT,
            score=jnp.zeros((rows, 1), jnp.float32),
            ended=state.done[:, None],
            limit=limit,
            calls=jnp.ones((rows,), jnp.int32),
        )

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        if self.verify_beams == "top1":
            return carried  # `propose` has already moved the best beam into place
        return commit_path(carried, state.length - 1, verdict.path)

    def _extend(
        self,
        inputs: Inputs,
        keys: Key[Array, "B"],
        beams: Beams,
        logits: Float[Array, "B S V"],
        step: int,
    ) -> Beams:
        """The beams with one more token each."""
        level = self._level_nodes(step)
        best = self.continuations(inputs, keys, beams, logits, step)

        def of_source(x):
            return jnp.take_along_axis(x, best.source, axis=1)

        # A beam that ended is carried on without a new node: its node of this level is invalid.
        stays = of_source(beams.ended)
        parent = of_source(beams.node)
        grown = best.possible & ~stays
        index = jnp.asarray(level, jnp.int32)
        token_log_q = jnp.where(grown, best.log_q, 0.0)

        # A node's ancestors are its parent's and itself.
        is_self = jnp.arange(level.stop) == index[:, None]
        widened = jnp.pad(beams.ancestors, ((0, 0), (0, 0), (0, len(level))))
        of_parent = jnp.take_along_axis(widened, parent[:, :, None], axis=1)
        return beams._replace(
            tokens=jnp.append(beams.tokens, best.token, axis=1),
            parents=jnp.append(beams.parents, parent, axis=1),
            valid=jnp.append(beams.valid, grown, axis=1),
            token_log_q=jnp.append(beams.token_log_q, token_log_q, axis=1),
            ancestors=jnp.append(widened, of_parent | is_self, axis=1),
            node=jnp.where(stays, parent, index),
            score=jnp.where(best.possible, best.score, probs.NEVER),
            ended=stays | ~best.possible | inputs.is_eos(best.token),
        )

    def continuations(
        self,
        inputs: Inputs,
        keys: Key[Array, "B"],
        beams: Beams,
        logits: Float[Array, "B S V"],
        step: int,
    ) -> Continuations:
        """The W best, or first drawn, of the S·V continuations."""
        log_q = unwarped_in(self.raw_rows(inputs), logits, warp(logits, inputs.warp))
        rows, _, vocab = log_q.shape
        # A beam that ended is its own only continuation, in the column of token 0.
        only_itself = jnp.where(jnp.arange(vocab) == 0, 0.0, probs.NEVER)
        total = beams.score[..., None] + jnp.where(beams.ended[..., None], only_itself, log_q)
        ranked = total.reshape(rows, -1)
        if self.drawn:
            step_keys = probs.draw_keys(keys, Purpose.DRAFT, step)
            ranked = draw_joint(step_keys, ranked, inputs.warp, whole=self.joint == "raw")

        # The first step may have fewer continuations than W: the rest is padding with −inf.
        missing = max(0, self.width - ranked.shape[1])
        ranked = jnp.pad(ranked, ((0, 0), (0, missing)), constant_values=probs.NEVER)
        rank, flat = probs.top_k(ranked, self.width)
        # Padding has indices past the end: they are clamped, and `possible` is False there.
        flat = jnp.minimum(flat, total[0].size - 1)
        return Continuations(
            source=flat // vocab,
            token=(flat % vocab).astype(jnp.int32),
            # Drawn beams are ranked with noise, but scored without.
            score=jnp.take_along_axis(total.reshape(rows, -1), flat, axis=1),
            log_q=jnp.take_along_axis(log_q.reshape(rows, -1), flat, axis=1),
            possible=rank > probs.NEVER,
        )

    def beam_as_chain(
        self, draft: Draft, beams: Beams, beam: Int[Array, "B"]
    ) -> tuple[Draft, Int[Array, "B γ+1"]]:
        """One beam of each row as a chain, and its nodes in the tree."""
        node = probs.at_index(beams.node, beam)
        depth = probs.at_index(jnp.asarray(tree.depths(beams.ancestors)), node)
        path = root_path(draft, node, depth)
        # A beam that ended early has a shorter path.
        on_path = jnp.arange(self.gamma + 1) <= depth[:, None]
        path = jnp.where(on_path, path, ROOT)

        def along_path(x, fill):
            return jnp.where(on_path, jnp.take_along_axis(x, path, axis=1), fill)

        tokens = along_path(beams.tokens, 0)
        valid = along_path(beams.valid, False)
        token_log_q = along_path(beams.token_log_q, 0.0)
        chain = Draft.chain(
            tokens[:, 1:],
            root=tokens[:, 0],
            valid=valid[:, 1:],
            sampling=self.sampling,
            token_log_q=token_log_q,
        )
        return chain, path
