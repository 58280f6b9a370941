"""``generate`` and ``stream``: prompts in, text and statistics out.

The host side of decoding. It prepares arrays, calls the device loop in chunks of rounds, and
turns what comes back into text; it never looks at the device once per token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import compat, decode
from specjax.errors import OptionError, PairError
from specjax.lm import LM
from specjax.mesh import DATA, Layout, round_up
from specjax.methods import Context, compose
from specjax.methods import method as find_method
from specjax.models.cache import chunk_width
from specjax.protocols import Method, Rule
from specjax.rewards import PRODUCT, Judge, combine
from specjax.search.drivers import advance_hosted
from specjax.text import IncrementalDecoder
from specjax.types import FINISH_REASONS, FROM_DRAFT, DecodeState, Inputs
from specjax.warp import Sampling

NO_EOS = -1  # pads the eos array: no token has this id
SAMPLE_STREAM = 2**31  # apart from prompt indices: sample s > 0 of a prompt has its own key
ALL_ROUNDS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated, one entry per prompt and sample, prompts outermost.

    ``stats`` are counters per row (int), see :class:`specjax.types.Stats`; ``origins`` say for
    each token whether the draft or the target wrote it; ``logprobs`` (where asked) are nats
    under the unwarped target. Times are seconds of the row's batch, compilation included;
    ``batch`` is that batch's number: prompts of like length are decoded together. ``rewards``
    (where there is a reward) are the scores of the whole completions, one column per reward.
    """

    text: list[str]
    tokens: list[np.ndarray]
    finish_reasons: list[str]
    origins: list[np.ndarray]
    logprobs: list[np.ndarray] | None
    prompt_tokens: list[int]
    stats: dict[str, np.ndarray]
    prefill_seconds: np.ndarray
    first_token_seconds: np.ndarray
    decode_seconds: np.ndarray
    batch: np.ndarray
    passes: int
    rewards: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Number of generated tokens per row."""
        return np.array([len(tokens) for tokens in self.tokens])


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of one row. The last piece of a stream carries the whole generation."""

    index: int
    text: str
    tokens: np.ndarray
    origins: np.ndarray
    finish_reason: str | None = None
    generation: Generation | None = None

    @property
    def accepted(self) -> np.ndarray:
        """Which of the tokens are accepted draft tokens."""
        return self.origins == FROM_DRAFT


def generate(
    target: LM, prompts: str | Sequence[str] | Sequence[Sequence[int]], **options: Any
) -> Generation:
    """Decodes prompts; the arguments are those of :func:`stream`.

    Raises:
      OptionError, PairError: an argument cannot be used; raised before anything compiles.
    """
    pieces = stream(target, prompts, rounds_per_piece=ALL_ROUNDS, **options)
    return [piece for piece in pieces if piece.generation is not None][-1].generation


def stream(
    target: LM,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    method: str | Method = "autoregressive",
    draft: LM | None = None,
    drafter: str | None = None,
    rule: str | Rule | None = None,
    target_dist: str = "warped",
    options: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    num_samples: int = 1,
    stop: Sequence[str] = (),
    logprobs: bool = False,
    batch_size: int | None = None,
    indices: Sequence[int] | None = None,
    rounds_per_piece: int = 1,
    reward: Any = None,
    constraints: Sequence[Mapping[str, Sequence[str]]] | None = None,
) -> Iterator[Piece]:
    """Decodes prompts and yields text as it comes.

    Args:
      target: the model p.
      prompts: texts, or sequences of token ids.
      method: a name of :func:`specjax.methods`, or a :class:`specjax.protocols.Method`.
      draft: the model q, where the method needs one.
      drafter, rule, target_dist: instead of ``method``, parts by name; ``rule`` may also be a
        :class:`specjax.protocols.Rule` of your own.
      options: the method's options, e.g. ``{"gamma": 3}``.
      max_new_tokens: budget per row; also bounded by the model's context.
      sampling: how tokens are drawn; greedy by default.
      seed: with a prompt's index it fixes the row's key: row i of a batch draws what that
        prompt draws alone.
      num_samples: completions per prompt.
      stop: strings that end a row; its text ends before the string.
      logprobs: also return log-probabilities of the generated tokens, unwarped target.
      batch_size: rows decoded together; all of them by default.
      indices: the prompts' indices in a larger job, for their keys.
      rounds_per_piece: rounds between looks at the device.
      reward: what the completions are worth: ``NAME[:ARG]`` of :data:`specjax.rewards.REWARDS`,
        ``module:function``, a callable of the completion (and the prompt), a
        :class:`specjax.rewards.Reward`, or several of them. It guides ``cdlh``, ``cdlh-appx``
        and ``cdsl``, and scores the completions of every method.
      constraints: per prompt, what its completion must satisfy, by reward name:
        ``{"lexical": ["tree", "grow"]}``.
    """
    sampling = sampling or Sampling()
    rows = _rows(target, prompts, num_samples, seed, max_new_tokens, indices, constraints)
    judge = None if reward is None else _judge(target, rows, method, reward, options)
    engine = Engine.create(
        target, method, draft, drafter, rule, target_dist, options, sampling.temperature == 0, judge
    )
    size = min(batch_size or len(rows), len(rows))
    if target.mesh is not None:
        size = round_up(size, target.mesh)
    if size < 1:
        raise OptionError(f"batch_size={batch_size} must be at least 1")
    if stop and target.tokenizer is None:
        raise OptionError("stop strings need a target with a tokenizer")
    done: list[Generation] = []
    # Rows of like length share a batch: a batch pays for its longest prompt in every row.
    order = np.argsort([len(row.tokens) for row in rows], kind="stable")
    for first in range(0, len(rows), size):
        chosen = order[first : first + size]
        batch = Batch(engine, [rows[i] for i in chosen], size, sampling, tuple(stop), logprobs)
        for piece in batch.run(rounds_per_piece):
            yield dataclasses.replace(piece, index=int(chosen[piece.index]))
        done.append(batch.result(len(done)))
    nothing = np.zeros(0, np.int32)
    whole = _concatenate(done, np.argsort(order))
    yield Piece(len(rows) - 1, "", nothing, nothing, None, whole)


@dataclasses.dataclass(frozen=True)
class Engine:
    """A method bound to its models: what every batch of a job shares."""

    target: LM
    draft: LM | None
    method: Method
    settings: dict[str, float]
    judge: Judge | None = None

    @classmethod
    def create(
        cls, target, method, draft, drafter, rule, target_dist, options, greedy=True, judge=None
    ) -> Engine:
        """Checks that everything fits together; nothing is compiled yet."""
        if draft is not None:
            compat.check_models(target, draft)
        if not isinstance(method, str):
            return cls(target, draft, method, dict(options or {}), judge)
        if isinstance(rule, Rule):
            base = compose(drafter or ("chain" if draft else "none"), "match", target_dist)
            context = Context(target, draft, greedy=greedy)
            settings = {n: v for n, v in (options or {}).items() if n in rule.settings}
            rest = {n: v for n, v in (options or {}).items() if n not in rule.settings}
            missing = [name for name in rule.settings if name not in settings]
            if missing:
                raise OptionError(f"rule {rule.name} needs options={{{missing[0]!r}: …}}")
            built, more = base.build(context, rest)
            built = dataclasses.replace(built, rule=rule)  # refuses a pair that does not fit
            return cls(target, draft, built, more | settings, judge)
        if drafter or rule or target_dist != "warped":
            spec = compose(drafter or "none", rule or "speculative", target_dist)
        else:
            spec = find_method(method)
        if draft is not None and not spec.needs_draft:
            draft = None  # e.g. the baseline beside a speculative run
        if spec.needs_reward and judge is None:
            raise OptionError(f"method {spec.name} needs a reward: give --reward (or reward=)")
        fold = judge.fold if judge else None
        context = Context(target, draft, greedy=greedy, reward=fold)
        built, settings = spec.build(context, options or {})
        if judge and "r_t" in settings:
            judge.combined.check_threshold(settings["r_t"])
        return cls(target, draft, built, settings, judge)

    @property
    def hosted(self) -> bool:
        """Whether rounds are driven from the host, for the reward needs text."""
        return getattr(self.method, "reward", False) is None

    def inputs(self, sampling: Sampling, batch: int, cases: Sequence[int] = ()) -> Inputs:
        """Params and settings as the step reads them; ``cases`` are the rows' numbers."""
        eos = list(self.target.eos_ids) or [NO_EOS]
        return Inputs(
            target=self.target.params,
            draft=self.draft.params if self.draft else None,
            warp=sampling.arrays(batch),
            eos_ids=jnp.asarray(eos + [NO_EOS] * (-len(eos) % 4), jnp.int32),
            settings={n: jnp.asarray(v, jnp.float32) for n, v in self.settings.items()},
            reward=self.judge.rows(cases) if self.judge else (),
            layout=self._layout(),
        )

    def chunk(self, rows: Sequence[Row]) -> int:
        """Tokens per prefill pass of a batch."""
        share = 1 if self.target.mesh is None else self.target.mesh.shape[DATA]
        heads = self.target.config.num_heads
        return chunk_width(max(len(row.tokens) for row in rows), len(rows) // share, heads)

    def _layout(self) -> Layout | None:
        if self.target.mesh is None:
            return None
        configs = [model.config if model else None for model in (self.target, self.draft)]
        return Layout(self.target.mesh, *(c if c and c.shards > 1 else None for c in configs))


@dataclasses.dataclass(frozen=True)
class Row:
    """One sample of one prompt. ``case`` is the row's number in the job; ``prompt`` (its text)
    and ``constraints`` are what rewards read."""

    tokens: np.ndarray
    budget: int
    key: jax.Array
    case: int = 0
    prompt: str = ""
    constraints: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


def _judge(target, rows: list[Row], method, reward, options) -> Judge:
    """The reward, bound to the rows; as a fold where the method is guided by it."""
    guides = isinstance(method, str) and find_method(method).needs_reward
    combined = combine(reward, (options or {}).get("combine") == PRODUCT)
    return Judge.bind(combined, target, [row.constraints for row in rows], guides)


def _rows(target, prompts, num_samples, seed, max_new_tokens, indices, constraints) -> list[Row]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if not prompts:
        raise OptionError("no prompt was given")
    if max_new_tokens < 1 or num_samples < 1:
        raise OptionError(
            f"max_new_tokens={max_new_tokens} and num_samples={num_samples} must be at least 1"
        )
    indices = range(len(prompts)) if indices is None else indices
    root = jax.random.key(seed)
    rows = []
    constraints = [{}] * len(prompts) if constraints is None else constraints
    if len(constraints) != len(prompts):
        raise OptionError(
            f"{len(constraints)} constraints for {len(prompts)} prompts; give each prompt its own"
        )
    for index, prompt, asked in zip(indices, prompts, constraints, strict=True):
        tokens = encode_prompt(target, prompt)
        budget = min(max_new_tokens, target.config.max_position - len(tokens))
        key = jax.random.fold_in(root, index)
        keys = [key, *(jax.random.fold_in(key, SAMPLE_STREAM + s) for s in range(1, num_samples))]
        text = target.tokenizer.decode(tokens) if target.tokenizer else ""
        rows += [Row(tokens, budget, key, len(rows) + s, text, asked) for s, key in enumerate(keys)]
    return rows


def encode_prompt(target: LM, prompt: str | Sequence[int]) -> np.ndarray:
    """A prompt's token ids, checked against the model's vocabulary and context.

    Raises:
      OptionError: empty, longer than the context, or ids out of range.
      PairError: a text for a model without tokenizer.
    """
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise PairError("this model has no tokenizer: give prompts as token ids")
        prompt = target.tokenizer.encode(prompt)
    tokens = np.asarray(prompt, np.int32)
    if tokens.size == 0:
        raise OptionError("a prompt is empty; it needs at least one token")
    if tokens.size >= target.config.max_position:
        raise OptionError(
            f"a prompt has {tokens.size} tokens, the model's context holds "
            f"{target.config.max_position}; shorten it"
        )
    if tokens.min() < 0 or tokens.max() >= target.config.vocab_size:
        raise OptionError(f"token ids must be from 0 to {target.config.vocab_size - 1}")
    return tokens


class Batch:
    """Rows decoded together. Short batches are padded with rows that are done from the start."""

    def __init__(
        self,
        engine: Engine,
        rows: list[Row],
        size: int,
        sampling: Sampling,
        stop: tuple[str, ...],
        logprobs: bool,
    ):
        self._engine, self._rows, self._stop, self._logprobs = engine, rows, stop, logprobs
        padding = [Row(np.zeros(1, np.int32), 0, rows[0].key)] * (size - len(rows))
        self._all = rows + padding
        self._inputs = engine.inputs(sampling, size, [row.case for row in self._all])
        self._shown = np.array([len(row.tokens) for row in self._all])
        self._readers = [_Reader(engine.target.tokenizer, stop) for _ in rows]
        self._times = {"prefill": 0.0, "first": 0.0, "total": 0.0}
        self._state: dict[str, np.ndarray] = {}

    def run(self, rounds: int) -> Iterator[Piece]:
        """Decodes, yielding what is new after every ``rounds`` rounds."""
        began = time.perf_counter()
        method, inputs = self._engine.method, self._inputs
        state = decode.start(
            method,
            inputs,
            [row.tokens for row in self._all],
            np.array([row.budget for row in self._all], np.int32),
            jnp.stack([row.key for row in self._all]),
            logprobs=self._logprobs,
            chunk=self._engine.chunk(self._all),
        )
        jax.block_until_ready(state)
        self._times["prefill"] = time.perf_counter() - began
        # One round first: it dates the first token.
        step = 1
        while True:
            state = self._advance(state, step)
            finish = np.asarray(state.finish)
            self._times["total"] = time.perf_counter() - began
            if step == 1 and not self._times["first"]:
                self._times["first"] = self._times["total"]
            stopped, pieces = self._read(state, finish)
            yield from pieces
            if stopped.any():
                state = decode.mark_stopped(state, jnp.asarray(stopped))
                finish = np.asarray(state.finish)
            if finish.all():
                break
            # Text stops are only seen here, and counters must not run past them.
            step = 1 if self._stop else rounds
        state = method.finalize(inputs, state)
        self._keep(state)

    def _advance(self, state: DecodeState, rounds: int) -> DecodeState:
        engine = self._engine
        if not engine.hosted:
            return decode.advance(engine.method, self._inputs, state, rounds)
        state = decode.make_room(engine.method, state)

        def score(state, lanes):
            return engine.judge.lanes(self._all, state, lanes)

        return advance_hosted(engine.method, self._inputs, state, rounds, score)

    def _rewards(self, tokens: list[np.ndarray]) -> np.ndarray | None:
        """Each reward of each whole completion."""
        judge = self._engine.judge
        if judge is None:
            return None
        samples = [judge.sample(*pair) for pair in zip(self._rows, tokens, strict=True)]
        return np.array([judge.scores(sample) for sample in samples], np.float64)

    def _read(self, state: DecodeState, finish: np.ndarray) -> tuple[np.ndarray, list[Piece]]:
        length, tokens, origin = jax.device_get((state.length, state.tokens, state.origin))
        stopped, pieces = np.zeros(len(self._all), bool), []
        for i, reader in enumerate(self._readers):
            fresh = slice(self._shown[i], length[i])
            ended = bool(finish[i])
            if reader.closed or (fresh.start == fresh.stop and not ended):
                continue
            text, kept = reader.read(tokens[i, fresh], ended)
            stopped[i] = reader.stopped
            reason = FINISH_REASONS[finish[i]] if ended else None
            new = slice(fresh.start, fresh.start + kept)
            pieces.append(
                Piece(i, text, tokens[i, new], origin[i, new], "stop" if reader.stopped else reason)
            )
            self._shown[i] = length[i]
        return stopped, pieces

    def _keep(self, state: DecodeState) -> None:
        wanted = {
            name: getattr(state, name)
            for name in ("tokens", "origin", "logprobs", "prompt_length", "finish")
        }
        self._state = jax.device_get(wanted)
        self._stats = jax.device_get(state.stats)

    def result(self, number: int) -> Generation:
        """The finished rows of batch ``number``; call it after :meth:`run` is exhausted."""
        count, state = len(self._rows), self._state
        spans = [
            slice(int(n), int(n) + reader.count)
            for n, reader in zip(state["prompt_length"], self._readers, strict=False)
        ]

        def cut(name):
            return [state[name][i, span].copy() for i, span in enumerate(spans)]

        stats = {
            field.name: getattr(self._stats, field.name)[:count].copy()
            for field in dataclasses.fields(self._stats)
            if field.name != "passes"
        }
        stats["emitted"] = np.array([reader.count for reader in self._readers])
        times, tokens = self._times, cut("tokens")
        return Generation(
            text=[reader.text for reader in self._readers],
            tokens=tokens,
            finish_reasons=[FINISH_REASONS[f] for f in state["finish"][:count]],
            origins=cut("origin"),
            logprobs=None if state["logprobs"] is None else cut("logprobs"),
            prompt_tokens=[len(row.tokens) for row in self._rows],
            stats=stats,
            prefill_seconds=np.full(count, times["prefill"]),
            first_token_seconds=np.full(count, times["first"]),
            decode_seconds=np.full(count, times["total"] - times["prefill"]),
            batch=np.full(count, number),
            passes=int(self._stats.passes),
            rewards=self._rewards(tokens),
        )


class _Reader:
    """Turns one row's tokens into text and finds stop strings in it."""

    def __init__(self, tokenizer, stop: tuple[str, ...]):
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = IncrementalDecoder(tokenizer) if tokenizer else None
        self.text, self.count = "", 0
        self.stopped = self.closed = False
        self._held = max((len(s) - 1 for s in stop), default=0)
        self._shown = 0

    def read(self, tokens: np.ndarray, ended: bool) -> tuple[str, int]:
        """New text that can be shown, and how many of ``tokens`` the row keeps."""
        kept = len(tokens)
        if self._decoder is None:
            pass
        elif not self._stop:
            self.text += self._decoder.push(tokens)
        else:
            kept = self._search(tokens)
        self.count += kept
        self.closed = ended or self.stopped
        if self.closed and self._decoder and not self.stopped:
            self.text += self._decoder.flush()
            self._cut_at_stop()
        # What may be the beginning of a stop string is held back.
        end = len(self.text) if self.closed else max(self._shown, len(self.text) - self._held)
        text, self._shown = self.text[self._shown : end], max(end, self._shown)
        return text, kept

    def _search(self, tokens: np.ndarray) -> int:
        for n, token in enumerate(tokens, 1):
            self.text += self._decoder.push([token])
            if self._cut_at_stop():
                return n
        return len(tokens)

    def _cut_at_stop(self) -> bool:
        found = [at for at in (self.text.find(s) for s in self._stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return bool(found)


def _concatenate(parts: list[Generation], order: np.ndarray) -> Generation:
    """Batches of one job as one generation, its rows put in ``order``."""

    def join(values):
        if values[0] is None:
            return None
        if isinstance(values[0], list):
            flat = [item for value in values for item in value]
            return [flat[i] for i in order]
        return np.concatenate(values)[order]

    stats = {n: join([part.stats[n] for part in parts]) for n in parts[0].stats}
    names = {f.name for f in dataclasses.fields(Generation)} - {"stats", "passes"}
    rest = {name: join([getattr(part, name) for part in parts]) for name in names}
    return Generation(stats=stats, passes=sum(part.passes for part in parts), **rest)
