"""Constrained decoding with speculative lookaheads (CDSL; Nakshatri et al. 2025, Algorithm 1).

Greedy and guided by a reward: not the law of sampling.

Axis legend: B rows, K candidates, d draft tokens, M tokens of a round, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import COUNT, FLAG, validate_fields
from specjax._util.checks import Check
from specjax.core import probs
from specjax.core.commit import Cost, DraftOutcome, finish_round
from specjax.core.probs import Purpose
from specjax.core.protocols import Method
from specjax.core.types import DecodeState, Inputs, Verdict
from specjax.draft.model_drafter import draw_chain, last_two, run_pair
from specjax.models import KVCache
from specjax.rewards.folding import Fold
from specjax.search.drivers import DeviceDriver, Driver, Lanes, prefill_lookahead, start_lookahead
from specjax.search.lookahead import NextTokens, best_candidates, choose, roll_out

HARD, RATIO, EXACT = "hard", "ratio", "exact"
ACCEPTS = (HARD, RATIO, EXACT)


class Written(NamedTuple):
    """Greedy draft tokens behind two known ones."""

    tokens: Int[Array, "B d"]
    count: Int[Array, "B"]
    log_q: Float[Array, "B d"]  # of each token, unwarped, where asked for
    cache: KVCache
    calls: Int[Array, "B"]
    passes: Int[Array, ""]


def write_draft(
    inputs: Inputs,
    cache: KVCache,
    last: Int[Array, "B 2"],
    first: Int[Array, "B"],
    alive: Bool[Array, "B"],
    depth: int,
    with_log_q: bool = False,
) -> Written:
    """Up to ``depth`` greedy tokens of the draft model; a row ends with an end of sequence.

    ``last`` stands at positions ``first`` and ``first + 1``; the cache may lack both.
    """

    def draw(step, logits, alive, more):
        count, log_q = more
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if with_log_q:
            log_q = log_q.at[:, step].set(probs.log_softmax(logits).max(-1))
        return token, alive & ~inputs.is_eos(token), (count + alive, log_q)

    rows = last.shape[0]
    start = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows, depth), jnp.float32)

    def follow(cache, token, step):
        logits, cache, _ = inputs.draft.logits(cache, token, first + 1 + step)
        return logits[:, 0], cache

    begun = run_pair(inputs.draft, cache, last, first)
    chain = draw_chain(begun, follow, last, alive, depth, draw, start)
    count, log_q = chain.more
    return Written(chain.window[:, 2:], count, log_q, chain.cache, chain.calls, chain.step)


@struct.dataclass
class Round:
    """One round on its way: the path that it will emit, and what is still open."""

    path: Int[Array, "B M"]  # x₁ … x_n, then the target's greedy tokens or the chosen one
    count: Int[Array, "B"]  # how much of it stands
    logprobs: Float[Array, "B M"]  # of the path, unwarped target
    logits: Float[Array, "B d+1 V"]  # target, after the root and every draft token
    after: Float[Array, "B V"]  # target logits after the path
    verified: Int[Array, "B"]  # n, before keep_verified
    kept: Int[Array, "B"]  # draft tokens on the path
    drafted: Int[Array, "B"]
    trying: Bool[Array, "B"]  # S2 and S3: greedy tokens of the target are being tried
    tries: Int[Array, "B"]
    open: Bool[Array, "B"]  # will take one CDLH-appx token
    target_calls: Int[Array, "B"]
    draft_calls: Int[Array, "B"]
    passes: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class CDSL(Method):
    """Drafts ``d`` greedy tokens, verifies them, and asks the reward what to do with them.

    With n tokens verified, acceptance a = n / drafted and reward r of prefix and x₁ … x_n:

    * S1, a ≥ a_t and r ≥ r_t: x₁ … x_n are emitted, without a bonus token.
    * S2 and S3, a < a_t: the target's greedy tokens are appended, up to ``b`` of them, until a
      draft lookahead of d tokens behind them has R ≥ r_t; if none has, as S4.
    * S4, a ≥ a_t and r < r_t: one CDLH-appx token behind x₁ … x_n.

    S1 with n = 0 takes the CDLH-appx token, too: every round emits. ``accept``: ``hard`` (the
    target's argmax), ``ratio`` (u ≤ min(1, p/q) of unwarped p and q: the paper's sampling,
    biased on greedy tokens) or ``exact`` (with probability p). ``keep_verified=False`` drops
    x₁ … x_n in S2 to S4, as the paper's text says; its pseudocode keeps them.

    Counters: ``accepted`` is the verified n, kept or not; a lookahead over k branches is k draft
    calls per depth, and the first target token of S2 and S3 costs none: it was scored already.
    """

    reward: Fold | None  # None: rewards come from outside, through HostDriver
    k: int = 3
    d: int = 3
    b: int = 1
    accept: str = HARD
    keep_verified: bool = True

    def __post_init__(self):
        accept = Check(str, choices=ACCEPTS)
        validate_fields(
            self, k=COUNT, d=COUNT, b=Check(int, low=0), accept=accept, keep_verified=FLAG
        )

    @property
    def host_driven(self) -> bool:
        return self.reward is None

    @property
    def depth(self) -> int:
        return self.d

    @property
    def most(self) -> int:
        """M: tokens that one round can emit."""
        return self.d + max(self.b, 1)

    @property
    def round_positions(self) -> int:
        return self.most + max(self.k, 1) * self.d + 2

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return start_lookahead(inputs, state, self.reward, drafts=True)

    def prefill_chunk(self, inputs, state, tokens, start) -> DecodeState:
        return prefill_lookahead(inputs, state, tokens, start)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return self.round(DeviceDriver(self.reward, inputs), state)

    def round(self, drive: Driver, state: DecodeState) -> DecodeState:
        """One round under either driver; rows may be in different states."""
        state, work, lanes = drive.stage(self.verify, state)
        work = drive.stage(self.sort, work, state.done, drive.judge(state, lanes))

        def attempt(carried):
            state, work, lanes = drive.stage(self.attempt, *carried)
            return state, drive.stage(self.weigh, work, drive.judge(state, lanes))

        def again(carried):
            return attempt(drive.stage(self.extend, *carried))

        def look(carried):
            state, work, candidates, lanes = drive.stage(self.look, *carried)
            return state, drive.stage(self.take, work, candidates, drive.judge(state, lanes))

        carried = state, work
        if self.b > 0:
            carried = drive.run_once(lambda c: c[1].trying, attempt, carried)
        if self.b > 1:
            carried = drive.repeat(lambda c: c[1].trying, again, carried)
        state, work = drive.run_once(lambda c: c[1].open, look, carried)
        state = drive.stage(self.finish, state, work)
        return drive.commit(state, work.path, work.count)

    def verify(self, inputs: Inputs, state: DecodeState):
        """The draft, and how much of it the target accepts."""
        keys = probs.round_keys(state.keys, state.stats.rounds)
        start = state.length - 1
        cache, last = state.method_state.draft, last_two(state)
        draft = write_draft(
            inputs, cache, last, start - 1, ~state.done, self.d, self.accept == RATIO
        )
        root = probs.at_token(state.tokens, start)
        nodes = jnp.append(root[:, None], draft.tokens, axis=1)
        logits, cache, _ = inputs.target.logits(state.cache, nodes, start)
        log_p = probs.at_token(probs.log_softmax(logits[:, :-1]), draft.tokens)
        passed = self._passed(keys, logits, log_p, draft)
        real = jnp.arange(self.d) < draft.count[:, None]
        n = jnp.cumprod(passed & real, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
        room = ((0, 0), (0, self.most - self.d))
        work = Round(
            path=jnp.pad(draft.tokens, room),
            count=n,
            logprobs=jnp.pad(log_p, room),
            logits=logits,
            after=probs.at_node(logits, n),
            verified=n,
            kept=n,
            drafted=draft.count,
            trying=jnp.zeros_like(state.done),
            tries=jnp.zeros_like(n),
            open=jnp.zeros_like(state.done),
            target_calls=jnp.ones_like(n),
            draft_calls=draft.calls,
            passes=1 + draft.passes,
        )
        lanes = Lanes(draft.tokens[:, None], n[:, None], ~state.done)
        return _drafted(state, draft.cache).replace(cache=cache), work, lanes

    def _passed(self, keys: Key[Array, "B"], logits, log_p, draft: Written) -> Bool[Array, "B d"]:
        if self.accept == HARD:
            return jnp.argmax(logits[:, :-1], axis=-1) == draft.tokens
        nodes = jnp.broadcast_to(jnp.arange(1, self.d + 1), log_p.shape)
        log_u = jnp.log(probs.uniforms(keys, Purpose.ACCEPT, nodes))
        return log_u <= (log_p - draft.log_q if self.accept == RATIO else log_p)

    def sort(self, inputs: Inputs, work: Round, done: Bool[Array, "B"], values) -> Round:
        """Sorts the rows into the four states."""
        a = work.verified / jnp.maximum(work.drafted, 1).astype(jnp.float32)
        agreed = a >= inputs.settings["a_t"]
        good = agreed & (values[:, 0] >= inputs.settings["r_t"])
        n = work.verified if self.keep_verified else jnp.where(good, work.verified, 0)
        last = probs.at_token(work.path, jnp.maximum(n - 1, 0))
        ended = done | ((n > 0) & inputs.is_eos(last))
        trying = ~agreed & ~ended & (self.b > 0)
        settled = good & (n > 0)
        return work.replace(
            count=n,
            kept=n,
            after=probs.at_node(work.logits, n),
            trying=trying,
            open=~(ended | settled | trying),
        )

    def attempt(self, inputs: Inputs, state: DecodeState, work: Round):
        """The target's greedy token on the path, and the draft's lookahead behind it."""
        log_p = probs.log_softmax(work.after)
        z = jnp.argmax(log_p, axis=-1).astype(jnp.int32)
        before = self._last(state, work)
        work = self._append(work, work.trying, z, log_p.max(-1))
        at = state.length + work.count - work.trying  # of the token behind the path
        known, alive = jnp.stack([before, z], axis=1), work.trying & ~inputs.is_eos(z)
        ahead = write_draft(inputs, state.method_state.draft, known, at - 1, alive, self.d)
        lanes = Lanes(ahead.tokens[:, None], ahead.count[:, None], work.trying)
        lanes = self._behind(work, lanes)
        work = work.replace(
            tries=work.tries + work.trying,
            draft_calls=work.draft_calls + ahead.calls,
            passes=work.passes + ahead.passes,
        )
        return _drafted(state, ahead.cache), work, lanes

    def weigh(self, inputs: Inputs, work: Round, values) -> Round:
        """Ends the attempts of rows that succeeded or have none left."""
        good = work.trying & (values[:, 0] >= inputs.settings["r_t"])
        z = probs.at_token(work.path, jnp.maximum(work.count - 1, 0))
        over = (work.tries >= self.b) | inputs.is_eos(z)
        failed = work.trying & ~good & over
        return work.replace(
            count=jnp.where(failed, work.kept, work.count),
            after=jnp.where(failed[:, None], probs.at_node(work.logits, work.kept), work.after),
            trying=work.trying & ~good & ~failed,
            open=work.open | failed,
        )

    def extend(self, inputs: Inputs, state: DecodeState, work: Round):
        """The target's logits behind the greedy token that did not suffice."""
        # Rows that are not trying feed their path's last token again, into its own cache position.
        at = state.length - 1 + work.count
        token = self._last(state, work)
        logits, cache, _ = inputs.target.logits(state.cache, token[:, None], at)
        work = work.replace(
            after=jnp.where(work.trying[:, None], logits[:, 0], work.after),
            target_calls=work.target_calls + work.trying,
            passes=work.passes + 1,
        )
        return state.replace(cache=cache), work

    def look(self, inputs: Inputs, state: DecodeState, work: Round):
        """CDLH-appx behind the path: candidates of the target, lookaheads of the draft model."""
        candidates = best_candidates(work.after, self.k)
        out = roll_out(
            inputs,
            inputs.draft,
            state.method_state.draft,
            state.length - 1 + work.count,
            self._last(state, work),
            candidates.tokens,
            candidates.possible & work.open[:, None],
            self.d,
        )
        work = work.replace(
            draft_calls=work.draft_calls + out.calls, passes=work.passes + out.passes
        )
        return _drafted(state, out.cache), work, candidates, self._behind(work, out.lanes)

    def take(self, inputs: Inputs, work: Round, candidates: NextTokens, values) -> Round:
        """The best candidate on the path of the rows that asked for one."""
        best = choose(values, candidates.possible)
        token, logprob = (probs.at_token(x, best) for x in (candidates.tokens, candidates.logprobs))
        return self._append(work, work.open, token, logprob)

    def finish(self, inputs: Inputs, state: DecodeState, work: Round) -> DecodeState:
        """Emits the path and counts."""
        at = jnp.broadcast_to(jnp.arange(self.most + 1), (work.count.shape[0], self.most + 1))
        verdict = Verdict(at, work.kept, work.kept, work.path, work.count)
        tested = jnp.minimum(work.verified + 1, work.drafted)
        cost = Cost(work.target_calls, work.passes, work.draft_calls)
        drafts = DraftOutcome(work.drafted, tested, work.verified)
        logprobs = None if state.logprobs is None else work.logprobs
        return finish_round(inputs, state, verdict, logprobs, cost, drafts)

    def _last(self, state: DecodeState, work: Round) -> Int[Array, "B"]:
        """The last token of each row's path, or its root."""
        root = probs.at_token(state.tokens, state.length - 1)
        last = probs.at_token(work.path, jnp.maximum(work.count - 1, 0))
        return jnp.where(work.count > 0, last, root)

    def _append(self, work: Round, rows: Bool[Array, "B"], token, logprob) -> Round:
        here = rows[:, None] & (jnp.arange(self.most) == work.count[:, None])
        return work.replace(
            path=jnp.where(here, token[:, None], work.path),
            logprobs=jnp.where(here, logprob[:, None], work.logprobs),
            count=work.count + rows,
        )

    def _behind(self, work: Round, lanes: Lanes) -> Lanes:
        """The lanes with the path in front of each."""
        size = lanes.tokens.shape[2]
        at = jnp.arange(self.most + size) - work.count[:, None]
        inside = jnp.clip(at, 0, size - 1)[:, None]
        lane = jnp.take_along_axis(lanes.tokens, inside, axis=2)
        path = jnp.pad(work.path, ((0, 0), (0, size)))
        joined = jnp.where((at < 0)[:, None], path[:, None], lane)
        return lanes.replace(tokens=joined, count=work.count[:, None] + lanes.count)


def _drafted(state: DecodeState, cache: KVCache) -> DecodeState:
    """The state with the draft model's next cache."""
    return state.replace(method_state=state.method_state.replace(draft=cache))
