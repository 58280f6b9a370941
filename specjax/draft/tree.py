"""Token trees from a draft model (SpecInfer, Miao et al. 2024) and k i.i.d. chains (SpecTr).

Axis legend: B rows, N nodes, n nodes of a level, c children per node, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import BRANCHING, COUNT, FLAG, validate_fields
from specjax.core import probs, tree, vocabulary
from specjax.core.probs import Purpose
from specjax.core.protocols import Proposal
from specjax.core.types import IID, NO_PARENT, WITHOUT_REPLACEMENT, Draft, TreeShape
from specjax.core.warp import warp
from specjax.draft.model_drafter import ModelDrafter, unwarped_in
from specjax.models.cache import commit_path


@dataclasses.dataclass(frozen=True)
class Tree(ModelDrafter):
    """A tree whose nodes at depth i have ``branching[i]`` children each.

    Children are drawn from the draft's warped distribution: independently (``replacement``), or
    without replacement by Gumbel-top-c, in the order drawn. Branching ``(k, 1, …, 1)`` with
    replacement is k i.i.d. chains. An end-of-sequence token has no children.

    One draft pass runs over a whole level. The tree grows in one cache, and the accepted path is
    moved into place afterwards.
    """

    branching: tuple[int, ...] = (4, 2, 2)
    replacement: bool = False
    splits_vocabulary = True

    def __post_init__(self):
        validate_fields(self, branching=BRANCHING, replacement=FLAG)

    @classmethod
    def iid(cls, gamma: int, chains: int) -> Tree:
        """``chains`` independent chains of γ tokens."""
        gamma = COUNT.parse("gamma", gamma)
        return cls((chains, *(1,) * (gamma - 1)), replacement=True)

    @property
    def name(self) -> str:
        """``iid`` for independent chains, else ``tree``."""
        only_chains = max(self.branching[1:], default=1) == 1
        return "iid" if self.replacement and only_chains else "tree"

    @property
    def sampling(self) -> str:
        """How siblings are drawn: i.i.d., or without replacement."""
        return IID if self.replacement else WITHOUT_REPLACEMENT

    @property
    def shape(self) -> TreeShape:
        """A node's children at each level, as ``branching`` says."""
        return TreeShape(len(self._parents), len(self.branching), max(self.branching))

    @functools.cached_property
    def _levels(self) -> tuple[range, ...]:
        """Node numbers, level by level."""
        levels = [range(1)]
        for count in self.branching:
            first = levels[-1].stop
            levels.append(range(first, first + count * len(levels[-1])))
        return tuple(levels)

    @functools.cached_property
    def _parents(self) -> tuple[int, ...]:
        parents = [NO_PARENT]
        for level, count in zip(self._levels, self.branching, strict=False):
            parents += [node for node in level for _ in range(count)]
        return tuple(parents)

    def propose(self, inputs, state, keys) -> Proposal:
        base = state.length - 1
        rows = state.length.shape[0]
        # Parents in numpy are static: the ancestors, and the masks made of them, are constants of
        # the program.
        parents = np.broadcast_to(np.array(self._parents, np.int32), (rows, self.shape.nodes))
        ancestors = tree.ancestors(parents, self.shape.depth)

        logits, carry = self.first_logits(inputs, state)
        logits = logits[:, None]
        tokens = probs.at_index(state.tokens, base)[:, None]
        valid = jnp.ones((rows, 1), bool)
        active = self.can_draft(state)[:, None]
        log_qs = []
        calls = jnp.ones((rows,), jnp.int32)
        for level, count in enumerate(self.branching):
            paths = self._paths(inputs, tokens, parents, level)
            logits = self.with_path_settings(inputs, state, logits, paths)
            log_q = self._child_log_q(inputs, logits)
            drawn, possible = self._children(inputs, keys, log_q, level, count)
            children = self.to_target_ids(inputs, drawn)
            parent_index = np.arange(children.shape[1])[None] // count
            active = jnp.repeat(active, count, axis=1) & possible
            tokens = jnp.append(tokens, children, axis=1)
            valid = jnp.append(valid, active, axis=1)
            log_qs.append(log_q)

            # A valid end of sequence is a candidate, but nothing is drafted after it.
            active = active & ~inputs.is_eos(children)
            if level + 1 < len(self.branching):
                calls = calls + active.sum(-1, dtype=jnp.int32)
                so_far = ancestors[:, : tokens.shape[1], : tokens.shape[1]]
                logits, carry = self.level_logits(
                    inputs, state, carry, children, so_far, parent_index
                )

        draft = Draft(
            tokens=tokens,
            parents=parents,
            valid=valid,
            log_q=self.to_target_vocab(inputs, jnp.concatenate(log_qs, axis=1)),
            shape=self.shape,
            # A child's q is that of its parent. Inner nodes come first, so the rows of log_q have
            # their numbers.
            q_row=(0, *self._parents[1:]),
            sampling=self.sampling,
        )
        return Proposal(draft, carry, calls, jnp.int32(len(self.branching)))

    def _paths(
        self, inputs, tokens: Int[Array, "B n"], parents: Int[np.ndarray, "B N"], level: int
    ) -> Int[Array, "B n D"] | None:
        """The tokens down to each node of the newest level; None where no setting reads them."""
        if inputs.warp.path is None:
            return None
        so_far = parents[:, : tokens.shape[1]]
        return tree.paths(tokens, so_far, self.shape.depth)[:, self._levels[level].start :]

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        return commit_path(carried, state.length - 1, verdict.path)

    def _child_log_q(self, inputs, logits: Float[Array, "B n V"]) -> Float[Array, "B n V"]:
        """log q that the level's children are drawn from.

        In a greedy row the warped q has a single token. Its children are therefore ranked by the
        unwarped draft. That stays exact: p is a single token, too, so a child is accepted with
        probability 1 or 0.
        """
        log_q = warp(logits, inputs.warp)
        if self.replacement:
            return log_q
        return unwarped_in(inputs.warp.greedy, logits, log_q)

    def _children(
        self, inputs, keys: Key[Array, "B"], log_q: Float[Array, "B n V"], level: int, count: int
    ) -> tuple[Int[Array, "B n*c"], Bool[Array, "B n*c"]]:
        """The children of a level's nodes, and which of them have any probability."""
        rows, n, vocab = log_q.shape
        if self.replacement:
            children = jnp.asarray(self._levels[level + 1], jnp.int32)
            index = jnp.broadcast_to(children, (rows, n * count))
            u = probs.uniforms(keys, Purpose.DRAFT, index)
            q = jnp.repeat(jnp.exp(log_q), count, axis=1)
            drawn = probs.sample(q, u)
            return drawn, jnp.ones(drawn.shape, bool)

        # Gumbel noise per parent: the c largest of log q plus noise are c draws without
        # replacement, in the order drawn. Greedy rows get no noise and take the c likeliest.
        nodes = jnp.asarray(self._levels[level], jnp.int32)
        node_keys = jax.vmap(lambda node: probs.draw_keys(keys, Purpose.DRAFT, node), out_axes=1)
        noise = probs.gumbel(node_keys(nodes), vocab, ~inputs.warp.greedy)
        score, drawn = vocabulary.top_k(log_q + noise, count, probs.top_k)
        possible = score.reshape(rows, -1) > probs.NEVER
        return drawn.reshape(rows, -1).astype(jnp.int32), possible
