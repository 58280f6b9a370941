"""``generate`` and ``stream``: prompts in, text and statistics out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.engine import Batch, Engine, Row
from specjax.errors import OptionError, PairError
from specjax.lm import LM
from specjax.mesh import round_up
from specjax.methods import Context, MethodSpec, bind, choose
from specjax.output import Generation, Piece, concatenate
from specjax.protocols import Drafter, Method, Rule, TargetDist
from specjax.rewards import PRODUCT, Judge, combine
from specjax.warp import Sampling

SAMPLE_STREAM = 2**31  # apart from prompt indices: sample s > 0 of a prompt has its own key
ALL_ROUNDS = 2**31 - 1


def generate(
    target: LM,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    method: str | Method = "autoregressive",
    draft: LM | None = None,
    drafter: str | Drafter | None = None,
    rule: str | Rule | None = None,
    target_dist: str | TargetDist = "warped",
    options: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    num_samples: int = 1,
    stop: Sequence[str] = (),
    logprobs: bool = False,
    batch_size: int | None = None,
    indices: Sequence[int] | None = None,
    reward: Any = None,
    constraints: Sequence[Mapping[str, Sequence[str]]] | None = None,
) -> Generation:
    """Decodes prompts; the arguments are those of :func:`stream`.

    Raises:
      OptionError, PairError: an argument cannot be used; raised before anything compiles.
    """
    *_, last = stream(**locals(), rounds_per_piece=ALL_ROUNDS)
    return last.generation


def stream(
    target: LM,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    method: str | Method = "autoregressive",
    draft: LM | None = None,
    drafter: str | Drafter | None = None,
    rule: str | Rule | None = None,
    target_dist: str | TargetDist = "warped",
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
      drafter, rule, target_dist: instead of ``method``, its parts, each by name or as an object
        of your own (:mod:`specjax.protocols`).
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
    sampling, options = sampling or Sampling(), options or {}
    rows = _rows(target, prompts, num_samples, seed, max_new_tokens, indices, constraints)
    chosen = choose(method, drafter, rule, target_dist, draft is not None)
    judge = None if reward is None else _judge(target, rows, chosen, reward, options)
    engine = make_engine(target, draft, chosen, options, sampling.temperature == 0, judge)
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
        mates = order[first : first + size]
        batch = Batch(engine, [rows[i] for i in mates], size, sampling, tuple(stop), logprobs)
        for piece in batch.run(rounds_per_piece):
            yield dataclasses.replace(piece, index=int(mates[piece.index]))
        done.append(batch.result(len(done)))
    nothing = np.zeros(0, np.int32)
    whole = concatenate(done, np.argsort(order))
    yield Piece(len(rows) - 1, "", nothing, nothing, None, whole)


def make_engine(
    target: LM,
    draft: LM | None,
    chosen: MethodSpec | Method,
    options: Mapping[str, Any],
    greedy: bool = True,
    judge: Judge | None = None,
) -> Engine:
    """A method bound to its models, what every batch of a job shares; nothing is compiled yet.

    Raises:
      OptionError, PairError: what does not fit together.
    """
    context = Context(target, draft, greedy, judge.fold if judge else None)
    method, settings = bind(chosen, context, options, guided=judge is not None)
    if isinstance(chosen, MethodSpec) and not chosen.needs_draft:
        draft = None  # e.g. the baseline beside a speculative run
    if judge and "r_t" in settings:
        judge.combined.check_threshold(settings["r_t"])
    return Engine(target, draft, method, settings, judge)


def _judge(target, rows: list[Row], chosen, reward, options) -> Judge:
    """The reward, bound to the rows; as a fold where the method is guided by it."""
    guides = isinstance(chosen, MethodSpec) and chosen.needs_reward
    combined = combine(reward, options.get("combine") == PRODUCT)
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
