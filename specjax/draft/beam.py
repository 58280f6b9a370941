"""Beam drafts (MTAD, Qin et al. 2024 §4.2): beam search or beam sampling in the draft model.

Beams are a growing tree in one draft cache; no cache is ever copied per beam.
Axis legend: B rows, N nodes, W beams, S beams of a step (1, then W), V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax._util.arguments import COUNT, FLAG, validate_fields
from specjax._util.checks import Check
from specjax.core import probs, tree
from specjax.core.probs import Purpose
from specjax.core.protocols import Proposal
from specjax.core.types import DETERMINISTIC, NO_PARENT, ROOT, Draft, TreeShape
from specjax.core.warp import draw_joint, warp
from specjax.draft.model_drafter import ModelDrafter, last_two, run_level, run_pair, unwarped_in
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
    bits: Bool[Array, "B n n"]
    node: Int[Array, "B S"]
    score: Float[Array, "B S"]
    ended: Bool[Array, "B S"]
    calls: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Beam(ModelDrafter):
    """``width`` beams of ``gamma`` steps, ranked by the joint draft probability.

    A greedy row searches (the best W of all continuations, scored without warping); a sampled
    row draws W continuations without replacement from their joint: of ``warped`` conditionals,
    or the ``raw`` one, warped as a whole (eq. 2) where it is drawn and unwarped as a score. A
    beam that ended keeps its score. ``verify_beams``: the best beam as a chain (``top1``), or
    the tree of ``all``. Where W reaches V^(γ − 1), the search is exact.
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
        verified, joint = Check(str, choices=VERIFIED), Check(str, choices=JOINTS)
        validate_fields(self, gamma=COUNT, width=COUNT, verify_beams=verified, joint=joint)
        validate_fields(self, drawn=FLAG, of_target=FLAG)

    def _level(self, step: int) -> range:
        """Node numbers of a step: W each; where the vocabulary has not that many, some are
        never valid."""
        return range(1 + step * self.width, 1 + (step + 1) * self.width)

    @property
    def round_positions(self) -> int:
        return 1 + self.gamma * self.width  # the whole tree, whatever of it is verified

    @property
    def shape(self) -> TreeShape:
        if self.verify_beams == "top1":
            return TreeShape.chain(self.gamma)
        return self._whole

    @property
    def _whole(self) -> TreeShape:
        return TreeShape(self.round_positions, self.gamma, self.width)

    def raw_rows(self, inputs) -> Bool[Array, "B"]:
        """Rows whose draft probabilities are unwarped."""
        return inputs.warp.greedy | (self.joint == "raw")

    def propose(self, inputs, state, keys):
        draft, beams = self.search(inputs, state, keys, state.drafter_state)
        passes = jnp.int32(self.gamma)
        if self.verify_beams == "all":
            return Proposal(draft, beams.cache, beams.calls, passes)
        chain, path = self.follow(draft, beams, jnp.argmax(beams.score, axis=1))
        cache = commit_path(beams.cache, state.length - 1, path)
        return Proposal(chain, cache, beams.calls, passes)

    def search(self, inputs, state, keys, cache, limit=None) -> tuple[Draft, Beams]:
        """The tree of all beams, and where each ends; none is longer than ``limit[B]``."""
        base, rows = state.length - 1, state.length.shape[0]
        net = inputs.target if self.of_target else inputs.draft
        logits, cache = run_pair(net, cache, last_two(state), base - 1)
        logits = logits[:, None]
        one = jnp.ones((rows, 1), jnp.int32)
        beams = Beams(
            cache=cache,
            tokens=probs.at_token(state.tokens, base)[:, None],
            parents=one * NO_PARENT,
            valid=one > 0,
            token_log_q=jnp.zeros((rows, 1), jnp.float32),
            bits=jnp.ones((rows, 1, 1), bool),
            node=one * ROOT,
            score=jnp.zeros((rows, 1), jnp.float32),
            ended=state.done[:, None],
            calls=jnp.ones((rows,), jnp.int32),
        )
        for step in range(self.gamma):
            if limit is not None:
                beams = beams._replace(ended=beams.ended | (limit <= step)[:, None])
            beams = self._extend(inputs, keys, beams, logits, step)
            if step + 1 < self.gamma:
                first = self._level(step).start
                level = beams.tokens[:, first:]
                logits, cache = run_level(net, beams.cache, level, base, first, beams.bits)
                calls = beams.calls + (~beams.ended).sum(-1, dtype=jnp.int32)
                beams = beams._replace(cache=cache, calls=calls)
        draft = Draft(
            tokens=beams.tokens,
            parents=beams.parents,
            valid=beams.valid,
            token_log_q=beams.token_log_q,
            shape=self._whole,
            sampling=self.sampling,
        )
        return draft, beams

    def update(self, inputs, state, cache, draft, verdict, probe_logits):
        if self.verify_beams == "top1":
            return cache  # the best beam stands in place since it was proposed
        return commit_path(cache, state.length - 1, verdict.path)

    def _extend(self, inputs, keys, b: Beams, logits, step) -> Beams:
        """One more token on every beam: the W best of all S·V continuations."""
        log_q = unwarped_in(self.raw_rows(inputs), logits, warp(logits, inputs.warp))
        rows, _, vocab = log_q.shape
        # A beam that ended is its own only continuation, in the column of token 0.
        frozen = jnp.where(jnp.arange(vocab) == 0, 0.0, probs.NEVER)
        total = b.score[..., None] + jnp.where(b.ended[..., None], frozen, log_q)
        ranked = total.reshape(rows, -1)
        if self.drawn:
            step_keys = probs.draw_keys(keys, Purpose.DRAFT, step)
            ranked = draw_joint(step_keys, ranked, inputs.warp, whole=self.joint == "raw")
        level = self._level(step)
        missing = max(0, len(level) - ranked.shape[1])
        ranked = jnp.pad(ranked, ((0, 0), (0, missing)), constant_values=probs.NEVER)
        best, flat = jax.lax.top_k(ranked, len(level))
        flat = jnp.minimum(flat, total[0].size - 1)
        source, token = flat // vocab, (flat % vocab).astype(jnp.int32)

        def of_source(x):
            return jnp.take_along_axis(x, source, axis=1)

        possible, stays, parent = best > probs.NEVER, of_source(b.ended), of_source(b.node)
        grown = possible & ~stays
        index = jnp.asarray(level, jnp.int32)
        conditional = jnp.take_along_axis(log_q.reshape(rows, -1), flat, axis=1)
        score = jnp.take_along_axis(total.reshape(rows, -1), flat, axis=1)
        own = jnp.arange(level.stop) == index[:, None]
        above = jnp.pad(b.bits, ((0, 0), (0, 0), (0, len(level))))
        inherited = jnp.take_along_axis(above, parent[:, :, None], axis=1)
        return b._replace(
            tokens=jnp.append(b.tokens, token, axis=1),
            parents=jnp.append(b.parents, parent, axis=1),
            valid=jnp.append(b.valid, grown, axis=1),
            token_log_q=jnp.append(b.token_log_q, jnp.where(grown, conditional, 0.0), axis=1),
            bits=jnp.append(above, inherited | own, axis=1),
            node=jnp.where(stays, parent, index),
            score=jnp.where(possible, score, probs.NEVER),
            ended=stays | ~possible | inputs.is_eos(token),
        )

    def follow(
        self, draft: Draft, b: Beams, beam: Int[Array, "B"]
    ) -> tuple[Draft, Int[Array, "B γ+1"]]:
        """One beam of each row as a chain, and its nodes in the tree."""
        node = probs.at_token(b.node, beam)
        depth = probs.at_token(tree.depths(b.bits), node)
        path = root_path(draft, node, depth)
        real = jnp.arange(self.gamma + 1) <= depth[:, None]
        path = jnp.where(real, path, ROOT)

        def along(x, fill):
            return jnp.where(real, jnp.take_along_axis(x, path, axis=1), fill)

        tokens, valid, log_q = along(b.tokens, 0), along(b.valid, False), along(b.token_log_q, 0.0)
        chain = Draft.chain(
            tokens[:, 1:],
            root=tokens[:, 0],
            valid=valid[:, 1:],
            sampling=self.sampling,
            token_log_q=log_q,
        )
        return chain, path
