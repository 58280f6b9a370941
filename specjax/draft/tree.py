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
from specjax.core import probs, tree
from specjax.core.probs import Purpose
from specjax.core.protocols import Proposal
from specjax.core.types import IID, NO_PARENT, WITHOUT_REPLACEMENT, Draft, TreeShape
from specjax.core.warp import warp
from specjax.draft.model_drafter import ModelDrafter, unwarped_in
from specjax.models.cache import commit_path


@dataclasses.dataclass(frozen=True)
class Tree(ModelDrafter):
    """A tree whose nodes at depth i have ``branching[i]`` children each.

    Children are drawn from the draft's warped distribution: independently (``replacement``)
    or as Gumbel-top-c, in the order drawn. Branching ``(k, 1, …, 1)`` with replacement is k
    i.i.d. chains. Nothing hangs below an end-of-sequence token.

    One draft pass per level, over the whole level: the tree grows in one cache, and the
    accepted path is moved into place afterwards.
    """

    branching: tuple[int, ...] = (4, 2, 2)
    replacement: bool = False

    def __post_init__(self):
        validate_fields(self, branching=BRANCHING, replacement=FLAG)

    @classmethod
    def iid(cls, gamma: int, chains: int) -> Tree:
        """``chains`` independent chains of γ tokens."""
        gamma = COUNT.parse("gamma", gamma)
        return cls((chains, *(1,) * (gamma - 1)), replacement=True)

    @property
    def name(self) -> str:
        return "iid" if self.replacement and max(self.branching[1:], default=1) == 1 else "tree"

    @property
    def sampling(self) -> str:
        return IID if self.replacement else WITHOUT_REPLACEMENT

    @property
    def shape(self) -> TreeShape:
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

    def propose(self, inputs, state, keys):
        base, rows = state.length - 1, state.length.shape[0]
        parents = np.broadcast_to(np.array(self._parents, np.int32), (rows, self.shape.nodes))
        bits = tree.ancestors(parents, self.shape.depth)
        logits, cache = self.begin(inputs, state)
        logits = logits[:, None]
        tokens = probs.at_token(state.tokens, base)[:, None]
        valid, alive = jnp.ones((rows, 1), bool), self.ready(state)[:, None]
        laws, calls = [], jnp.ones((rows,), jnp.int32)
        for level, count in enumerate(self.branching):
            log_q = self._law(inputs, logits)
            x, possible = self._children(inputs, keys, log_q, level, count)
            x, above = self.named(inputs, x), np.arange(x.shape[1])[None] // count
            alive = jnp.repeat(alive, count, axis=1) & possible
            tokens, valid = jnp.append(tokens, x, axis=1), jnp.append(valid, alive, axis=1)
            laws.append(log_q)
            alive = alive & ~inputs.is_eos(x)
            if level + 1 < len(self.branching):
                calls = calls + alive.sum(-1, dtype=jnp.int32)
                so_far = bits[:, : tokens.shape[1], : tokens.shape[1]]
                logits, cache = self.level(inputs, state, cache, x, so_far, above)
        draft = Draft(
            tokens=tokens,
            parents=parents,
            valid=valid,
            log_q=self.over_target(inputs, jnp.concatenate(laws, axis=1)),
            shape=self.shape,
            q_row=(0, *self._parents[1:]),  # inner nodes come first: a row's number is its node
            sampling=self.sampling,
        )
        return Proposal(draft, cache, calls, jnp.int32(len(self.branching)))

    def update(self, inputs, state, cache, draft, verdict, probe_logits):
        return commit_path(cache, state.length - 1, verdict.path)

    def _law(self, inputs, logits: Float[Array, "B n V"]) -> Float[Array, "B n V"]:
        """log q of the level's draws.

        A greedy row would have one child: its siblings are ranked by the unwarped draft
        instead. That stays exact, for a one-hot p accepts a child of q > 0 or not at all.
        """
        log_q = warp(logits, inputs.warp)
        return log_q if self.replacement else unwarped_in(inputs.warp.greedy, logits, log_q)

    def _children(
        self, inputs, keys: Key[Array, "B"], log_q: Float[Array, "B n V"], level: int, count: int
    ) -> tuple[Int[Array, "B n*c"], Bool[Array, "B n*c"]]:
        """The level's children, and which of them could be drawn at all."""
        rows, n, vocab = log_q.shape
        if self.replacement:
            nodes = jnp.asarray(self._levels[level + 1], jnp.int32)
            u = probs.uniforms(keys, Purpose.DRAFT, jnp.broadcast_to(nodes, (rows, n * count)))
            parents = jnp.repeat(jnp.exp(log_q), count, axis=1)
            x = probs.sample(parents, u)
            return x, jnp.ones(x.shape, bool)

        nodes = jnp.asarray(self._levels[level], jnp.int32)
        node_keys = jax.vmap(lambda node: probs.draw_keys(keys, Purpose.DRAFT, node), out_axes=1)
        noise = probs.gumbel(node_keys(nodes), vocab, ~inputs.warp.greedy)
        score, x = jax.lax.top_k(log_q + noise, count)
        return x.reshape(rows, -1).astype(jnp.int32), score.reshape(rows, -1) > probs.NEVER
