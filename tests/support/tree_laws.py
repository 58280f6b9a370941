"""The exact-joint test of ``laws`` for trees: one round, drafts of every shape and sampling.

Nodes stand level by level; within a level, the children of one parent are together, except
that k chains interleave (chain c is every k-th node). Axis legend: B rows, N nodes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import probs, vocabulary
from specjax.core.probs import Purpose
from specjax.core.types import DETERMINISTIC, IID, NO_PARENT, WITHOUT_REPLACEMENT, Draft, TreeShape
from support import laws


def layout(branching):
    """(parents, level starts): node numbers of a tree whose level i branches ``branching[i]``."""
    parents, starts, level = [NO_PARENT], [0], [0]
    for count in branching:
        starts.append(len(parents))
        # With one child each, chains keep the order of their parents.
        parents += [parent for parent in level for _ in range(count)]
        level = list(range(starts[-1], len(parents)))
    return parents, starts


def tree_draft(keys, p, q, *, branching=(2, 2, 1), sampling=WITHOUT_REPLACEMENT, stop=None):
    """A tree drawn from q by ``sampling``; ``stop``: contexts after which nothing is drafted."""
    rows = keys.shape[0]
    parents, _ = layout(branching)
    children = {n: [i for i, parent in enumerate(parents) if parent == n] for n in set(parents)}
    inner = [n for n in range(len(parents)) if children.get(n)]
    zero = jnp.zeros((rows,), jnp.int32)
    tokens, context = {0: zero}, {0: zero}
    valid = {0: jnp.ones((rows,), bool)}
    for n in inner:
        row = q[context[n]]
        alive = valid[n] if stop is None else valid[n] & ~jnp.asarray(stop)[context[n]]
        drawn, possible = draw(keys, row, children[n], sampling)
        for i, child in enumerate(children[n]):
            tokens[child] = drawn[:, i]
            valid[child] = alive & possible[:, i]
            context[child] = laws.child(context[n], drawn[:, i])
    order = range(len(parents))
    rows_q = None
    if sampling != DETERMINISTIC:
        rows_q = jnp.stack([jnp.log(q[context[n]]) for n in inner], 1)
    draft = Draft(
        tokens=jnp.stack([tokens[n] for n in order], 1),
        parents=jnp.broadcast_to(jnp.array(parents), (rows, len(parents))),
        valid=jnp.stack([valid[n] for n in order], 1),
        log_q=rows_q,
        shape=TreeShape(len(parents), len(branching), max(branching)),
        q_row=tuple(inner.index(parent) if parent in inner else 0 for parent in parents),
        sampling=sampling,
    )
    # A tree may be deeper than the table is long, but no tree of these tests is.
    return draft, jnp.log(p[jnp.stack([context[n] for n in order], 1)])


def draw(keys, row, children, law):
    """Tokens ``[B, n]`` of a node's children, and which of them can be drawn at all."""
    nodes = jnp.broadcast_to(jnp.array(children), (row.shape[0], len(children)))
    if law == IID:
        u = probs.uniforms(keys, Purpose.DRAFT, nodes)
        drawn = jnp.stack([probs.sample(row, u[:, i]) for i in range(len(children))], 1)
        return drawn, jnp.ones(drawn.shape, bool)
    score = jnp.log(row)
    if law == WITHOUT_REPLACEMENT:
        node_keys = probs.draw_keys(keys, Purpose.DRAFT, children[0])
        score += probs.gumbel(node_keys, row.shape[1], jnp.ones(row.shape[:1], bool))
    best, drawn = vocabulary.top_k(score, len(children), by_sorting)
    return drawn, best > probs.NEVER


def by_sorting(x, count):
    """``jax.lax.top_k``, which takes seconds over so many rows of three entries."""
    index = jnp.argsort(-x, axis=1)[:, :count]
    return jnp.take_along_axis(x, index, axis=1), index


LAWS = {
    "iid": functools.partial(tree_draft, sampling=IID),
    "k chains": functools.partial(tree_draft, branching=(4, 1, 1), sampling=IID),
    "without replacement": tree_draft,
    "wide": functools.partial(tree_draft, branching=(3, 2)),
    "top-j": functools.partial(tree_draft, sampling=DETERMINISTIC),
}


def reorder_siblings(draft, log_p, order):
    """A one-level tree with its children permuted per row; the root stays."""
    full = jnp.concatenate([jnp.zeros_like(order[:, :1]), order + 1], axis=1)
    take = functools.partial(jnp.take_along_axis, indices=full, axis=1)
    return (
        draft.replace(tokens=take(draft.tokens), valid=take(draft.valid)),
        jnp.take_along_axis(log_p, full[:, :, None], axis=1),
    )


def rule_counts(rule, draft_fn, tables, *, seed: int = 1, **settings):
    """(counts of the first L tokens, accepted depth per row) of one round."""

    @jax.jit
    def run(keys, p, q):  # the tables are arguments: constants, XLA would fold while compiling
        draft, log_p = draft_fn(keys, p, q)
        verdict = rule(keys, draft, log_p, **settings)
        return laws.complete(keys, verdict, p), verdict.num_accepted

    keys = jax.random.split(jax.random.key(seed), laws.SAMPLES)
    tokens, accepted = map(np.asarray, run(keys, *tables))
    return laws.histogram(tokens, laws.VOCAB), accepted


def tree_p_value(rule, draft_fn, **settings) -> float:
    """p-value of the exact joint of one round's tokens, completed from p."""
    counts, _ = rule_counts(rule, draft_fn, laws.tables(), **settings)
    return laws.p_value(counts, laws.exact_joint(laws.tables()[0]))
