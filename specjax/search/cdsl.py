"""Constrained decoding with speculative lookaheads (CDSL; Nakshatri et al. 2025, Algorithm 1).

It is greedy and guided by a reward: its output is not distributed as sampled text. How rewards are
computed is not known here: the round asks a driver (:mod:`specjax.search.drivers`).

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
from specjax.core.sampling import Sampling
from specjax.core.types import DecodeState, Inputs, Verdict
from specjax.draft.model_drafter import draft_net, draw_chain, last_two, run_last_two
from specjax.models import KVCache
from specjax.rewards.folding import Fold
from specjax.search.drivers import (
    CandidateContinuations,
    DeviceDriver,
    Driver,
    prefill_lookahead,
    start_lookahead,
)
from specjax.search.lookahead import (
    NextTokens,
    best_candidates,
    check_is_greedy,
    choose,
    roll_out,
)

HARD = "hard"
RATIO = "ratio"
EXACT = "exact"
ACCEPTS = (HARD, RATIO, EXACT)


class GreedyDraft(NamedTuple):
    """Greedy tokens of the draft model, after two known ones."""

    tokens: Int[Array, "B d"]
    count: Int[Array, "B"]
    log_q: Float[Array, "B d"]  # of each token, unwarped; 0 unless it was asked for
    cache: KVCache
    calls: Int[Array, "B"]
    passes: Int[Array, ""]


def draft_greedily(
    inputs: Inputs,
    cache: KVCache,
    last: Int[Array, "B 2"],
    first: Int[Array, "B"],
    active: Bool[Array, "B"],
    depth: int,
    with_log_q: bool = False,
) -> GreedyDraft:
    """Up to ``depth`` greedy tokens of the draft model; a row stops after an end of sequence.

    ``last`` are the tokens at positions ``first`` and ``first + 1``; the cache may lack both.
    """
    net = draft_net(inputs)

    def draw(step, logits, active, extra):
        count, log_q = extra
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if with_log_q:
            log_q = log_q.at[:, step].set(probs.log_softmax(logits).max(-1))
        return token, active & ~inputs.is_eos(token), (count + active, log_q)

    def next_logits(cache, token, step):
        logits, cache, _ = net.logits(cache, token, first + 1 + step)
        return logits[:, 0], cache

    rows = last.shape[0]
    extra = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows, depth), jnp.float32)
    after_last = run_last_two(net, cache, last, first)
    chain = draw_chain(after_last, next_logits, last, active, depth, draw, extra)
    count, log_q = chain.extra
    return GreedyDraft(chain.window[:, 2:], count, log_q, chain.carry, chain.calls, chain.step)


class Round(struct.PyTreeNode):
    """One round in progress: each row's path, which it will emit, and what the row still needs."""

    path: Int[Array, "B M"]  # x₁ … x_n, then greedy tokens of the target, or the best candidate
    count: Int[Array, "B"]  # how many tokens of it count so far; the rest is scratch
    logprobs: Float[Array, "B M"]  # of the path, unwarped target
    logits: Float[Array, "B d+1 V"]  # target, after the root and every draft token
    after: Float[Array, "B V"]  # target logits after the path
    verified: Int[Array, "B"]  # n, the verified draft tokens
    kept: Int[Array, "B"]  # those of them on the path: n, or 0 without keep_verified
    drafted: Int[Array, "B"]  # draft tokens of the round
    extending: Bool[Array, "B"]  # S2, S3: greedy tokens of the target are being appended
    num_extended: Int[Array, "B"]  # how many of them so far
    needs_lookahead: Bool[Array, "B"]  # S4, or S2 and S3 without success: one CDLH-appx token
    target_calls: Int[Array, "B"]
    draft_calls: Int[Array, "B"]
    passes: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class CDSL(Method):
    """Drafts ``d`` greedy tokens, verifies them, and asks the reward what to do with them.

    With n tokens verified, acceptance a = n / drafted and reward r of prefix and x₁ … x_n:

    * S1, a ≥ a_t and r ≥ r_t: x₁ … x_n are emitted, without a bonus token.
    * S2 and S3, a < a_t with any r: greedy tokens of the target are appended, up to ``b``. After
      each, the draft model looks d tokens ahead. If the reward R with this lookahead is at least
      r_t, the tokens so far are emitted. If none reaches r_t, the row goes on as in S4.
    * S4, a ≥ a_t and r < r_t: one CDLH-appx token follows x₁ … x_n.

    S1 with n = 0 goes on as in S4, too, so that every round emits a token. A CDLH-appx token is
    chosen from ``k`` candidates, as in :class:`specjax.search.Lookahead` with ``drafts``.

    ``accept`` says how draft tokens are verified. ``hard``: by the target's argmax. ``ratio``: with
    u ≤ min(1, p/q) of unwarped p and q, the paper's sampling, which is biased for greedy tokens.
    ``exact``: with probability p. ``keep_verified=False`` drops x₁ … x_n in S2 to S4, as the
    paper's text says; its pseudocode keeps them.

    Counters: ``accepted`` is the verified n, kept or not. A lookahead over k branches is k draft
    calls per depth. The first target token of S2 and S3 costs no call: its logits are known from
    the verifying pass.
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
    def name(self) -> str:
        return "cdsl"

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises OptionError for settings that it has not: it draws nothing."""
        super().check_sampling(sampling)
        check_is_greedy(sampling)

    @property
    def host_driven(self) -> bool:
        return self.reward is None

    @property
    def depth(self) -> int:
        return self.d

    @property
    def max_emitted(self) -> int:
        """M: the most tokens that one round can emit."""
        return self.d + max(self.b, 1)

    @property
    def round_positions(self) -> int:
        # The whole path, and after it the k branches of a lookahead.
        return self.max_emitted + max(self.k, 1) * self.d + 2

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return start_lookahead(inputs, state, self.reward, drafts=True)

    def prefill_chunk(self, inputs, state, tokens, start) -> DecodeState:
        return prefill_lookahead(inputs, state, tokens, start)

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        return self.round(DeviceDriver(self.reward, inputs), state)

    def round(self, driver: Driver, state: DecodeState) -> DecodeState:
        """One round under either driver. Rows may be in different states S1 to S4.

        Each stage runs for the whole batch and changes only the rows that need it.
        """
        state, work, continuations = driver.stage(self.verify, state)
        work = driver.stage(self.classify, work, state.done, driver.rewards(state, continuations))

        def extend_first(carried):
            # The target's logits after the path are known from the verifying pass.
            state, work, continuations = driver.stage(self.append_greedy, *carried)
            return state, driver.stage(
                self.check_reward, work, driver.rewards(state, continuations)
            )

        def extend_again(carried):
            return extend_first(driver.stage(self.read_greedy, *carried))

        def look_ahead(carried):
            state, work, candidates, continuations = driver.stage(self.look_ahead, *carried)
            values = driver.rewards(state, continuations)
            return state, driver.stage(self.append_best, work, candidates, values)

        def extending(carried):
            return carried[1].extending

        def needs_lookahead(carried):
            return carried[1].needs_lookahead

        carried = state, work
        if self.b > 0:  # S2, S3
            carried = driver.run_once(extending, extend_first, carried)
        if self.b > 1:
            carried = driver.repeat(extending, extend_again, carried)
        # S4 and what S2 and S3 could not finish.
        state, work = driver.run_once(needs_lookahead, look_ahead, carried)
        state = driver.stage(self.finish, state, work)
        return driver.commit(state, work.path, work.count)

    def verify(
        self, inputs: Inputs, state: DecodeState
    ) -> tuple[DecodeState, Round, CandidateContinuations]:
        """Drafts, and verifies the draft with one pass of the target."""
        keys = probs.round_keys(state.keys, state.stats.rounds)
        start = state.length - 1
        cache = state.method_state.draft
        last = last_two(state)
        with_log_q = self.accept == RATIO
        draft = draft_greedily(inputs, cache, last, start - 1, ~state.done, self.d, with_log_q)
        root = probs.at_index(state.tokens, start)
        nodes = jnp.append(root[:, None], draft.tokens, axis=1)
        logits, cache, _ = inputs.target.logits(state.cache, nodes, start)
        log_p = probs.at_token(probs.log_softmax(logits[:, :-1]), draft.tokens)
        passed = self._passed(keys, logits, log_p, draft)
        drafted = jnp.arange(self.d) < draft.count[:, None]
        # n: the tokens before the first that did not pass.
        n = jnp.cumprod(passed & drafted, axis=1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
        pad = ((0, 0), (0, self.max_emitted - self.d))
        work = Round(
            path=jnp.pad(draft.tokens, pad),
            count=n,
            logprobs=jnp.pad(log_p, pad),
            logits=logits,
            after=probs.at_node(logits, n),
            verified=n,
            kept=n,
            drafted=draft.count,
            extending=jnp.zeros_like(state.done),
            num_extended=jnp.zeros_like(n),
            needs_lookahead=jnp.zeros_like(state.done),
            target_calls=jnp.ones_like(n),
            draft_calls=draft.calls,
            passes=1 + draft.passes,
        )
        continuations = CandidateContinuations(draft.tokens[:, None], n[:, None], ~state.done)
        return _with_draft_cache(state, draft.cache).replace(cache=cache), work, continuations

    def _passed(
        self,
        keys: Key[Array, "B"],
        logits: Float[Array, "B d+1 V"],
        log_p: Float[Array, "B d"],
        draft: GreedyDraft,
    ) -> Bool[Array, "B d"]:
        """Which draft tokens pass, each by itself."""
        if self.accept == HARD:
            return jnp.argmax(logits[:, :-1], axis=-1) == draft.tokens
        nodes = jnp.broadcast_to(jnp.arange(1, self.d + 1), log_p.shape)
        log_u = jnp.log(probs.uniforms(keys, Purpose.ACCEPT, nodes))
        if self.accept == RATIO:
            return log_u <= log_p - draft.log_q
        return log_u <= log_p

    def classify(
        self, inputs: Inputs, work: Round, done: Bool[Array, "B"], values: Float[Array, "B 1"]
    ) -> Round:
        """Decides each row's state, S1 to S4."""
        acceptance = work.verified / jnp.maximum(work.drafted, 1).astype(jnp.float32)
        agreed = acceptance >= inputs.settings["a_t"]  # S1, S4
        is_s1 = agreed & (values[:, 0] >= inputs.settings["r_t"])
        n = work.verified
        if not self.keep_verified:
            n = jnp.where(is_s1, work.verified, 0)

        # A path that ends the text is final, whatever its reward.
        last = probs.at_index(work.path, jnp.maximum(n - 1, 0))
        ended = done | ((n > 0) & inputs.is_eos(last))
        is_s2_or_s3 = ~agreed & ~ended & (self.b > 0)
        # S1 without a token has nothing to emit: it takes a lookahead token, as S4 does. So do S2
        # and S3 with b = 0, because they may append nothing.
        is_finished = is_s1 & (n > 0)
        return work.replace(
            count=n,
            kept=n,
            after=probs.at_node(work.logits, n),
            extending=is_s2_or_s3,
            needs_lookahead=~(ended | is_finished | is_s2_or_s3),
        )

    def append_greedy(
        self, inputs: Inputs, state: DecodeState, work: Round
    ) -> tuple[DecodeState, Round, CandidateContinuations]:
        """S2, S3: the target's greedy token on the path, and the draft's lookahead after it."""
        log_p = probs.log_softmax(work.after)
        token = jnp.argmax(log_p, axis=-1).astype(jnp.int32)
        before = self._last_token(state, work)
        work = self._append(work, work.extending, token, log_p.max(-1))

        # Position of the appended token: in rows that are extending, the count already includes it.
        at = state.length + work.count - work.extending
        last = jnp.stack([before, token], axis=1)
        active = work.extending & ~inputs.is_eos(token)
        ahead = draft_greedily(inputs, state.method_state.draft, last, at - 1, active, self.d)
        continuations = CandidateContinuations(
            ahead.tokens[:, None], ahead.count[:, None], work.extending
        )
        continuations = self._after_path(work, continuations)
        work = work.replace(
            num_extended=work.num_extended + work.extending,
            draft_calls=work.draft_calls + ahead.calls,
            passes=work.passes + ahead.passes,
        )
        return _with_draft_cache(state, ahead.cache), work, continuations

    def check_reward(self, inputs: Inputs, work: Round, values: Float[Array, "B 1"]) -> Round:
        """S2, S3: ends the extension of rows that reach r_t, or have no token left to append."""
        reached = work.extending & (values[:, 0] >= inputs.settings["r_t"])
        token = probs.at_index(work.path, jnp.maximum(work.count - 1, 0))
        no_more = (work.num_extended >= self.b) | inputs.is_eos(token)
        failed = work.extending & ~reached & no_more
        # A row that failed drops the appended tokens and goes on as in S4.
        after_kept = probs.at_node(work.logits, work.kept)
        return work.replace(
            count=jnp.where(failed, work.kept, work.count),
            after=jnp.where(failed[:, None], after_kept, work.after),
            extending=work.extending & ~reached & ~failed,
            needs_lookahead=work.needs_lookahead | failed,
        )

    def read_greedy(
        self, inputs: Inputs, state: DecodeState, work: Round
    ) -> tuple[DecodeState, Round]:
        """S2, S3: the target's logits after the greedy token whose reward was too low."""
        # Rows that are not extending read their path's last token again, into its own cache
        # position: that changes nothing.
        at = state.length - 1 + work.count
        token = self._last_token(state, work)
        logits, cache, _ = inputs.target.logits(state.cache, token[:, None], at)
        work = work.replace(
            after=jnp.where(work.extending[:, None], logits[:, 0], work.after),
            target_calls=work.target_calls + work.extending,
            passes=work.passes + 1,
        )
        return state.replace(cache=cache), work

    def look_ahead(
        self, inputs: Inputs, state: DecodeState, work: Round
    ) -> tuple[DecodeState, Round, NextTokens, CandidateContinuations]:
        """S4: candidates of the target after the path, and lookaheads of the draft model."""
        candidates = best_candidates(work.after, self.k)
        out = roll_out(
            inputs,
            draft_net(inputs),
            state.method_state.draft,
            state.length - 1 + work.count,
            self._last_token(state, work),
            candidates.tokens,
            candidates.possible & work.needs_lookahead[:, None],
            self.d,
        )
        work = work.replace(
            draft_calls=work.draft_calls + out.calls, passes=work.passes + out.passes
        )
        continuations = self._after_path(work, out.continuations)
        return _with_draft_cache(state, out.cache), work, candidates, continuations

    def append_best(
        self, inputs: Inputs, work: Round, candidates: NextTokens, values: Float[Array, "B K"]
    ) -> Round:
        """S4: the best candidate on the path of the rows that need one."""
        best = choose(values, candidates.possible)
        token = probs.at_index(candidates.tokens, best)
        logprob = probs.at_index(candidates.logprobs, best)
        return self._append(work, work.needs_lookahead, token, logprob)

    def finish(self, inputs: Inputs, state: DecodeState, work: Round) -> DecodeState:
        """Emits the path and counts."""
        rows = work.count.shape[0]
        path_nodes = jnp.broadcast_to(
            jnp.arange(self.max_emitted + 1), (rows, self.max_emitted + 1)
        )
        verdict = Verdict(path_nodes, work.kept, work.kept, work.path, work.count)
        # The first token that did not pass was tested, too, if there was one.
        tested = jnp.minimum(work.verified + 1, work.drafted)
        cost = Cost(work.target_calls, work.passes, work.draft_calls)
        outcome = DraftOutcome(work.drafted, tested, work.verified)
        logprobs = None if state.logprobs is None else work.logprobs
        return finish_round(inputs, state, verdict, logprobs, cost, outcome)

    def _last_token(self, state: DecodeState, work: Round) -> Int[Array, "B"]:
        """The last token of each row's path, or its root."""
        root = probs.at_index(state.tokens, state.length - 1)
        last = probs.at_index(work.path, jnp.maximum(work.count - 1, 0))
        return jnp.where(work.count > 0, last, root)

    def _append(
        self,
        work: Round,
        rows: Bool[Array, "B"],
        token: Int[Array, "B"],
        logprob: Float[Array, "B"],
    ) -> Round:
        """The round with one more token on the path of the rows that ``rows`` marks."""
        here = rows[:, None] & (jnp.arange(self.max_emitted) == work.count[:, None])
        return work.replace(
            path=jnp.where(here, token[:, None], work.path),
            logprobs=jnp.where(here, logprob[:, None], work.logprobs),
            count=work.count + rows,
        )

    def _after_path(
        self, work: Round, continuations: CandidateContinuations
    ) -> CandidateContinuations:
        """The continuations with the path before each: a reward is asked about all new tokens."""
        size = continuations.tokens.shape[2]
        # Index into the continuation; negative where the path's own tokens stand.
        at = jnp.arange(self.max_emitted + size) - work.count[:, None]
        inside = jnp.clip(at, 0, size - 1)[:, None]
        continuation = jnp.take_along_axis(continuations.tokens, inside, axis=2)
        path = jnp.pad(work.path, ((0, 0), (0, size)))
        joined = jnp.where((at < 0)[:, None], path[:, None], continuation)
        return continuations.replace(tokens=joined, count=work.count[:, None] + continuations.count)


def _with_draft_cache(state: DecodeState, cache: KVCache) -> DecodeState:
    """The state with the draft model's next cache."""
    return state.replace(method_state=state.method_state.replace(draft=cache))
