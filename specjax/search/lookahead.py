"""Constrained decoding with lookaheads (CDLH), and its approximation by the draft model.

Nakshatri et al. 2025, §2.1, §3.1 and Algorithm 2. Both are greedy and guided by a reward: their
output is not distributed as sampled text.

Axis legend: B rows, K candidates, d lookahead tokens, n nodes of a pass, T nodes of the tree
(root, candidates, lookaheads), V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax._util.arguments import COUNT, FLAG, validate_fields
from specjax._util.errors import OptionError
from specjax.core import probs
from specjax.core.commit import Cost, finish_round
from specjax.core.net import Net
from specjax.core.protocols import Method
from specjax.core.sampling import Sampling
from specjax.core.types import DecodeState, Inputs, Verdict
from specjax.draft.model_drafter import draft_net
from specjax.models import KVCache
from specjax.rewards.folding import Fold
from specjax.search.drivers import (
    CandidateContinuations,
    DeviceDriver,
    Driver,
    prefill_lookahead,
    start_lookahead,
)


class NextTokens(NamedTuple):
    """The likeliest next tokens, best first; of equally likely ones the lower id is first."""

    tokens: Int[Array, "B K"]
    possible: Bool[Array, "B K"]  # False past the end of a small vocabulary
    logprobs: Float[Array, "B K"]  # unwarped


def best_candidates(logits: Float[Array, "B V"], count: int) -> NextTokens:
    """The ``count`` largest of float32 logits; they are −inf where a token cannot occur."""
    log_p, tokens = probs.top_k(probs.log_softmax(logits), count)
    return NextTokens(tokens.astype(jnp.int32), log_p > probs.NEVER, log_p)


class RollOut(NamedTuple):
    """Candidates with their greedy continuations, and what these cost."""

    continuations: CandidateContinuations  # each candidate with its lookahead, up to an end
    cache: KVCache
    calls: Int[Array, "B"]
    passes: Int[Array, ""]  # batched forward passes


def roll_out(
    inputs: Inputs,
    net: Net,
    cache: KVCache,
    base: Int[Array, "B"],
    root: Int[Array, "B"] | None,
    candidates: Int[Array, "B K"],
    active: Bool[Array, "B K"],
    depth: int,
) -> RollOut:
    """``depth`` greedy tokens after every active candidate that is no end of sequence.

    The lookaheads of all rows are one forward pass per depth. They are branches of a tree in one
    cache. A branch that has ended stays in the passes while others go on.

    Args:
      net: the model whose greedy tokens they are.
      cache: its KV cache, up to the root.
      base: the root's cache position, and its token position.
      root: int32, the root's token if the cache lacks it; it is then read with the candidates.
        None if the cache holds it.
      candidates: int32, the first token of each branch.
      active: which of them are continued.
      depth: d, the most tokens after a candidate.
    """
    rows, branches = candidates.shape
    start = _RollOutLoop(
        level=jnp.int32(1),
        cache=cache,
        tokens=jnp.pad(candidates[:, :, None], ((0, 0), (0, 0), (0, depth))),
        count=jnp.ones((rows, branches), jnp.int32),
        active=active & ~inputs.is_eos(candidates),
        calls=jnp.zeros((rows,), jnp.int32),
    )
    read_level = functools.partial(_read_level, inputs, net, base, _BranchTree(branches, depth))
    if root is not None:
        start = read_level(start, root)

    def goes_on(loop: _RollOutLoop) -> Bool[Array, ""]:
        return (loop.level <= depth) & jnp.any(loop.active)

    end = jax.lax.while_loop(goes_on, lambda loop: read_level(loop, None), start)
    continuations = CandidateContinuations(end.tokens, end.count, active.any(axis=1))
    # Each pass has raised the level by one, from 1 on.
    return RollOut(continuations, end.cache, end.calls, end.level - 1)


class _RollOutLoop(NamedTuple):
    """The carry of the loop over depths; one pass per level."""

    level: Int[Array, ""]  # of the tokens that are read next; candidates are level 1
    cache: KVCache
    tokens: Int[Array, "B K 1+d"]
    count: Int[Array, "B K"]
    active: Bool[Array, "B K"]
    calls: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class _BranchTree:
    """The tree of a roll-out. The root is node 0; level j are nodes 1 + (j−1)K … jK.

    A node is written at cache position ``base`` plus its number. Its token position is ``base``
    plus its level.
    """

    branches: int
    depth: int

    @property
    def nodes(self) -> int:
        return 1 + self.branches * self.depth

    def positions(self, base: Int[Array, "B"]) -> Int[Array, "B T"]:
        """Token positions of all nodes."""
        # Rounded up: node 0 has level 0, nodes 1 … K level 1, and so on.
        level = (jnp.arange(self.nodes) + self.branches - 1) // self.branches
        return base[:, None] + level

    def cache_position(
        self, base: Int[Array, "B"], level: Int[Array, ""], with_root: bool
    ) -> Int[Array, "B"]:
        """Where the nodes that are read at a level begin in the cache."""
        return base if with_root else base + 1 + (level - 1) * self.branches

    def level_mask(
        self, base: Int[Array, "B"], level: Int[Array, ""], with_root: bool
    ) -> tuple[Int[Array, "B n"], Bool[Array, "B n T"]]:
        """Token positions of the nodes that are read at a level, and the nodes each of them sees.

        A node sees the root, and its own branch down to its level.
        """
        rows = base.shape[0]
        branch = jnp.arange(self.branches)
        node = jnp.arange(self.nodes)
        same_branch = (node - 1) % self.branches == branch[:, None]
        visible = (node == 0) | (same_branch & ((node - 1) // self.branches < level))
        depth = jnp.full((self.branches,), level, jnp.int32)
        if with_root:
            visible = jnp.concatenate([(node == 0)[None], visible])
            depth = jnp.append(jnp.int32(0), depth)
        return base[:, None] + depth, jnp.broadcast_to(visible, (rows, *visible.shape))


def _read_level(
    inputs: Inputs,
    net: Net,
    base: Int[Array, "B"],
    tree: _BranchTree,
    loop: _RollOutLoop,
    root: Int[Array, "B"] | None,
) -> _RollOutLoop:
    """One pass over the newest tokens of all branches, and the greedy token after each."""
    rows = base.shape[0]
    with_root = root is not None
    tokens = jnp.take(loop.tokens, loop.level - 1, axis=2)
    if root is not None:
        tokens = jnp.append(root[:, None], tokens, axis=1)
    positions, visible = tree.level_mask(base, loop.level, with_root)
    logits, cache, _ = net.logits(
        loop.cache,
        tokens,
        tree.cache_position(base, loop.level, with_root),
        positions,
        visible,
        base=base,
        tree_positions=tree.positions(base),
        # The root, if it is read, comes first. Its logits are not needed.
        at=jnp.broadcast_to(jnp.arange(tree.branches) + with_root, (rows, tree.branches)),
    )
    following = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return _RollOutLoop(
        level=loop.level + 1,
        cache=cache,
        tokens=loop.tokens.at[:, :, loop.level].set(following),
        count=loop.count + loop.active,
        active=loop.active & ~inputs.is_eos(following),
        calls=loop.calls + loop.active.sum(-1, dtype=jnp.int32),
    )


def choose(
    values: Float[Array | np.ndarray, "B K"], possible: Bool[Array, "B K"]
) -> Int[Array, "B"]:
    """The index of the candidate with the highest reward.

    On a tie the likelier one is chosen. So if every reward is −inf, it is the likeliest of all.
    """
    return jnp.argmax(jnp.where(possible, values, -jnp.inf), axis=1)


def check_is_greedy(sampling: Sampling) -> None:
    """Raises OptionError if tokens are to be drawn: rewards choose them."""
    if sampling.temperature > 0:
        raise OptionError(
            f"temperature={sampling.temperature}: reward-guided methods are greedy; leave it out"
        )


class LookaheadRound(struct.PyTreeNode):
    """One round between its lookaheads and its choice."""

    candidates: NextTokens
    calls: Int[Array, "B"]  # of the model that rolled out
    passes: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Lookahead(Method):
    """One token per round: the candidate whose greedy lookahead has the highest reward.

    The candidates are the target's ``k`` likeliest next tokens (unwarped). Each is followed by
    ``d`` greedy tokens of the target (CDLH) or, with ``drafts``, of the draft model (CDLH-appx).
    The reward is asked about the tokens so far, the candidate and its lookahead. The paper's
    pseudocode leaves the candidate out.
    """

    reward: Fold | None  # None: rewards come from outside, through HostDriver
    k: int = 3
    d: int = 3
    drafts: bool = False

    def __post_init__(self):
        validate_fields(self, k=COUNT, d=COUNT, drafts=FLAG)

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises OptionError for settings that it has not: it draws nothing."""
        super().check_sampling(sampling)
        check_is_greedy(sampling)

    @property
    def name(self) -> str:
        return "cdlh-appx" if self.drafts else "cdlh"

    @property
    def host_driven(self) -> bool:
        return self.reward is None

    @property
    def round_positions(self) -> int:
        # The root, K·d nodes (the last token of a lookahead is not read), and the emitted token.
        return self.k * self.d + 2

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return start_lookahead(inputs, state, self.reward, self.drafts)

    def prefill_chunk(self, inputs, state, tokens, start) -> DecodeState:
        return prefill_lookahead(inputs, state, tokens, start)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return self.round(DeviceDriver(self.reward, inputs), state)

    def round(self, driver: Driver, state: DecodeState) -> DecodeState:
        """One round under either driver."""
        state, work, continuations = driver.stage(self.look_ahead, state)
        values = driver.rewards(state, continuations)
        state, token = driver.stage(self.append_best, state, work, values)
        return driver.commit(state, token, jnp.ones_like(state.length))

    def look_ahead(
        self, inputs: Inputs, state: DecodeState
    ) -> tuple[DecodeState, LookaheadRound, CandidateContinuations]:
        """The target's candidates and their lookaheads."""
        base = state.length - 1
        root = probs.at_index(state.tokens, base)
        logits, cache, _ = inputs.target.logits(state.cache, root[:, None], base)
        candidates = best_candidates(logits[:, 0], self.k)
        active = candidates.possible & ~state.done[:, None]
        tokens = candidates.tokens
        if self.drafts:
            # The draft model's cache lacks the root; the target has just read it.
            method_state = state.method_state
            net = draft_net(inputs)
            out = roll_out(inputs, net, method_state.draft, base, root, tokens, active, self.d)
            method_state = method_state.replace(draft=out.cache)
            state = state.replace(cache=cache, method_state=method_state)
        else:
            out = roll_out(inputs, inputs.target, cache, base, None, tokens, active, self.d)
            state = state.replace(cache=out.cache)
        return state, LookaheadRound(candidates, out.calls, out.passes), out.continuations

    def append_best(
        self,
        inputs: Inputs,
        state: DecodeState,
        work: LookaheadRound,
        values: Float[Array, "B K"],
    ) -> tuple[DecodeState, Int[Array, "B 1"]]:
        """The state with the best candidate at each row's end, and that token."""
        best = choose(values, work.candidates.possible)
        token = probs.at_index(work.candidates.tokens, best)[:, None]
        zero = jnp.zeros_like(best, jnp.int32)
        verdict = Verdict(zero[:, None], zero, zero, token, zero + 1)
        target_calls = 1
        draft_calls = 0
        if self.drafts:
            draft_calls = work.calls
        else:
            target_calls = 1 + work.calls
        logprobs = None
        if state.logprobs is not None:
            logprobs = probs.at_index(work.candidates.logprobs, best)[:, None]
        cost = Cost(target_calls, 1 + work.passes, draft_calls)
        return finish_round(inputs, state, verdict, logprobs, cost), token
