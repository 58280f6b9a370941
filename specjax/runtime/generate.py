"""``generate`` and ``stream``: prompts in, text and statistics out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax._util.arguments import (
    COUNT,
    FLAG,
    allow_name,
    as_integer_array,
    as_prompt_list,
    as_texts,
    instance_of,
    validate_arguments,
)
from specjax._util.checks import SEED_MAX, Check
from specjax._util.errors import OptionError, PairError
from specjax.core.mesh import round_up
from specjax.core.probs import seed_key
from specjax.core.protocols import Drafter, Method, Rule, TargetDist
from specjax.core.sampling import Sampling
from specjax.lm import LM, MODEL, TARGET, attach, own_draft
from specjax.registry import Context, MethodSpec, bind, choose
from specjax.rewards import PRODUCT, RewardScorer, combine
from specjax.runtime.engine import Engine, Request
from specjax.runtime.output import Generation, Piece, concatenate
from specjax.runtime.scheduler import Bounds, Scheduler
from specjax.target import Guided

SAMPLE_STREAM = 2**31  # keys of samples s > 0 are folded with it: no prompt index is as large
ALL_ROUNDS = 2**31 - 1  # no limit between polls: the device is polled when a request ends
PREFIXES = 4  # prefilled states in the prefix cache, each with the memory of a row
MOST_SAMPLES = 2**16  # of a prompt: each is a row

OPTIONS = Check(
    dict,
    fits=lambda options: all(isinstance(name, str) for name in options),
    expected="a dict of option names and values",
    optional=True,
)


def _constraints(value: Any) -> list[dict[str, tuple[str, ...]]]:
    """One dict of reward names and texts per prompt; a dict alone is for one prompt."""
    rows = value
    if isinstance(value, Mapping):
        rows = [value]
    return [{name: as_texts(words) for name, words in dict(row).items()} for row in rows]


def _budgets(value: Any) -> int | list[int]:
    """One number for all prompts, or a list or array of one per prompt."""
    is_sequence = isinstance(value, (list, tuple))
    if getattr(value, "ndim", is_sequence):  # an array of no dimensions is one number
        return [COUNT.parse("max_new_tokens", budget) for budget in value]
    return COUNT.parse("max_new_tokens", value)


CHECKED = validate_arguments(
    target=TARGET,
    prompts=Check(as_prompt_list, fits=len, expected="at least one text or sequence of token ids"),
    draft=allow_name(dataclasses.replace(MODEL, optional=True)),
    options=OPTIONS,
    max_new_tokens=Check(_budgets, expected="a whole number ≥ 1, or one per prompt"),
    sampling=Check(
        instance_of(Sampling), expected="a specjax.Sampling, as Sampling(0.8)", optional=True
    ),
    seed=Check(int, low=0, high=SEED_MAX),
    num_samples=Check(int, low=1, high=MOST_SAMPLES),
    stop=Check(as_texts, fits=all, expected="texts, none of them empty", optional=True),
    logprobs=FLAG,
    batch_size=Check(int, low=1, optional=True),
    prefixes=Check(int, low=0),
    indices=Check(
        lambda value: as_integer_array(value).tolist(),
        fits=lambda indices: all(0 <= i < SAMPLE_STREAM for i in indices),
        expected="whole numbers from 0 to 2**31 - 1",
        optional=True,
    ),
    rounds_per_piece=Check(int, low=1, high=ALL_ROUNDS),
    constraints=Check(
        _constraints, expected="per prompt, a dict of reward names and their texts", optional=True
    ),
)


def generate(
    target: LM,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    draft: LM | str | None = None,
    method: str | Method | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    stop: Sequence[str] = (),
    num_samples: int = 1,
    logprobs: bool = False,
    batch_size: int | None = None,
    drafter: str | Drafter | None = None,
    rule: str | Rule | None = None,
    target_dist: str | TargetDist = "warped",
    reward: Any = None,
    constraints: Sequence[Mapping[str, Sequence[str]]] | None = None,
    prefixes: int = PREFIXES,
    indices: Sequence[int] | None = None,
) -> Generation:
    """Decodes prompts.

    Args:
      target: the model p.
      prompts: texts, or sequences of token ids. A text or a sequence of ids alone is one prompt; an
        array ``[n, m]`` of ids is n of them.
      draft: the model q, or a head on the target's hidden states. ``"self:int4"`` (``int8``,
        ``fp8``) is the target's own quantized copy, made anew by every call;
        :func:`specjax.quantize` makes one to keep.
      method: a name of :func:`specjax.methods`, or a :class:`specjax.Method`. By default
        ``speculative`` with a draft, ``autoregressive`` without.
      max_new_tokens: budget per row, one for all or one per prompt. The target's context bounds it,
        too. A draft's context must hold the whole row.
      sampling: how tokens are drawn; greedy by default.
      seed: together with a prompt's index it fixes the row's key. So row i of a batch draws what
        that prompt draws alone.
      options: the method's options, such as ``{"gamma": 3}``.
      stop: a string that ends a row, or several. The row's text ends before it.
      num_samples: completions per prompt.
      logprobs: also return log-probabilities of the generated tokens, nats, unwarped target.
      batch_size: batch slots: how many rows run at a time. When one ends, the next takes its slot.
        All rows by default.
      drafter, rule, target_dist: the method's parts instead of its name, each by name or as an
        object of your own (:mod:`specjax.core.protocols`).
      reward: what a completion is worth: ``NAME[:ARG]`` of :data:`specjax.rewards.REWARDS`,
        ``module:function``, a callable of the completion (and the prompt), a
        :class:`specjax.rewards.Reward`, or several of them. It guides ``cdlh``, ``cdlh-appx`` and
        ``cdsl``, and scores the completions of every method.
      constraints: per prompt, what its completion must satisfy, by reward name:
        ``{"lexical": ["tree", "grow"]}``.
      prefixes: how many prompts' caches are kept for prompts that begin with the same tokens. The
        least recently used goes first. Each takes the memory of a row.
      indices: the prompts' indices in a larger job, for their keys.

    Returns:
      A :class:`specjax.Generation` with one row per prompt and sample, prompts outermost.

    Raises:
      OptionError, PairError: an argument cannot be used; raised before anything compiles.
    """
    pieces = stream(
        target,
        prompts,
        draft=draft,
        method=method,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        options=options,
        stop=stop,
        num_samples=num_samples,
        logprobs=logprobs,
        batch_size=batch_size,
        drafter=drafter,
        rule=rule,
        target_dist=target_dist,
        reward=reward,
        constraints=constraints,
        prefixes=prefixes,
        indices=indices,
        rounds_per_piece=ALL_ROUNDS,
    )
    *_, last = pieces
    assert last.generation is not None, "the last piece of a stream has it"
    return last.generation


@CHECKED
def stream(
    target: LM,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    draft: LM | str | None = None,
    method: str | Method | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    stop: Sequence[str] = (),
    num_samples: int = 1,
    logprobs: bool = False,
    batch_size: int | None = None,
    drafter: str | Drafter | None = None,
    rule: str | Rule | None = None,
    target_dist: str | TargetDist = "warped",
    reward: Any = None,
    constraints: Sequence[Mapping[str, Sequence[str]]] | None = None,
    prefixes: int = PREFIXES,
    indices: Sequence[int] | None = None,
    rounds_per_piece: int = 1,
) -> Iterator[Piece]:
    """Decodes prompts and yields text as it comes.

    Args:
      rounds_per_piece: rounds between two polls of the device.
      target, prompts, and all others: as those of :func:`generate`.

    Returns:
      Pieces of text, each of one row. A row's last piece has its ``finish_reason`` and its own
      :class:`specjax.Generation`, the last piece of all the whole one.

    Raises:
      OptionError, PairError: an argument cannot be used; raised by the call, before anything
        compiles.
    """
    sampling = sampling or Sampling()
    options = options or {}
    if isinstance(draft, str):
        draft = own_draft(target, draft)

    prompt_ids = []
    for i, prompt in enumerate(prompts):
        prompt_ids.append(encode_prompt(target, prompt, f"prompts[{i}]"))
    budgets = max_new_tokens
    if isinstance(budgets, int):
        budgets = [budgets] * len(prompt_ids)
    per_prompt = {"indices": indices, "constraints": constraints, "max_new_tokens": budgets}
    for name, values in per_prompt.items():
        if values is not None and len(values) != len(prompt_ids):
            raise OptionError(
                f"{len(values)} {name} for {len(prompt_ids)} prompts; each needs its own"
            )
    if stop and target.tokenizer is None:
        raise OptionError("stop strings need a target with a tokenizer")

    chosen = choose(method, drafter, rule, target_dist, draft is not None)
    if constraints is None:
        constraints = [{}] * len(prompt_ids)
    scorer = None
    if reward is not None:
        per_row = [constraint for constraint in constraints for _ in range(num_samples)]
        scorer = _scorer(target, per_row, chosen, reward, options)
    engine = make_engine(target, draft, chosen, options, sampling.temperature == 0, scorer)
    engine.check_sampling(sampling)

    rows = make_rows(target, prompt_ids, constraints, indices, seed, num_samples, budgets)
    for row in rows:
        if engine.draft:
            check_draft_context(engine.draft, len(row.tokens), row.budget)
        _check_negative_prompt(engine, row.budget)
    scheduler = Scheduler(
        engine,
        num_slots(target, len(rows), batch_size),
        sampling,
        Bounds.of(rows),
        stop=stop or (),
        logprobs=logprobs,
        prefixes=prefixes,
    )
    return _pieces(scheduler, rows, rounds_per_piece)


def _pieces(scheduler: Scheduler, rows: list[Request], rounds: int) -> Iterator[Piece]:
    """Decodes the requests; a last piece has the generation of all of them."""
    done: dict[int, Generation] = {}
    for piece in scheduler.run(longest_first(rows), rounds):
        if piece.row:
            done[piece.index] = piece.row
        yield piece

    ordered = [done[row.request_id] for row in rows]
    generation = concatenate(ordered, scheduler.passes, scheduler.occupancy)
    no_tokens = np.zeros(0, np.int32)
    yield Piece(len(rows) - 1, "", no_tokens, no_tokens, generation=generation)


def check_draft_context(draft: LM, tokens: int, budget: int) -> None:
    """Checks that a prompt and its new tokens fit into the draft's context.

    Past its context a draft model is wrong without an error. The rule still gives the target's
    distribution, but hardly any draft is accepted.

    Raises:
      OptionError: names the draft and what would fit.
    """
    context = draft.config.max_position
    if tokens + budget <= context:
        return
    room = max(context - tokens, 0)
    advice = "or decode without the draft"
    if room:
        advice = f"ask for {room} new ones"
    raise OptionError(
        f"a prompt has {tokens} tokens and {budget} new ones to come, the context of draft "
        f"{draft.source} holds {context}; shorten it, {advice}"
    )


def _check_negative_prompt(engine: Engine, budget: int) -> None:
    """Checks that a negative prompt and the new tokens fit into the target's context.

    The new tokens are scored after it, too, and a target is wrong past its context.

    Raises:
      OptionError: names the lengths and what would fit.
    """
    target_dist = getattr(engine.method, "target", None)
    if not isinstance(target_dist, Guided):
        return
    tokens = len(target_dist.negative)
    context = engine.target.config.max_position
    if tokens + budget <= context:
        return
    advice = "shorten it"
    if tokens < context:
        advice = f"shorten it, or ask for {context - tokens} new ones"
    raise OptionError(
        f"the negative prompt has {tokens} tokens and {budget} new ones to come, the context of "
        f"target {engine.target.source} holds {context}; {advice}"
    )


def longest_first(rows: Sequence[Request]) -> list[Request]:
    """Requests in the order in which they are decoded: large budgets first, then long prompts.

    So no long request is left at the end while the other batch slots are free. Requests of
    similar length run at the same time, and share a capacity bucket.
    """
    return sorted(rows, key=lambda row: (-row.budget, -len(row.tokens)))


def num_slots(target: LM, rows: int, batch_size: int | None) -> int:
    """The number of batch slots: at most one per row, and an equal number on each device."""
    size = min(batch_size or rows, rows)
    if target.mesh is None:
        return size
    return round_up(size, target.mesh)


@validate_arguments(target=TARGET, draft=dataclasses.replace(MODEL, optional=True), options=OPTIONS)
def make_engine(
    target: LM,
    draft: LM | None,
    chosen: MethodSpec | Method,
    options: Mapping[str, Any],
    greedy: bool = True,
    scorer: RewardScorer | None = None,
) -> Engine:
    """Binds a method to its models; nothing is compiled yet.

    Raises:
      OptionError, PairError: method, models and options do not fit together.
    """
    if draft is not None and draft.is_head:
        draft = attach(draft, target)
    context = Context(target, draft, greedy, scorer.fold if scorer else None)
    method, settings = bind(chosen, context, options, has_reward=scorer is not None)
    if isinstance(chosen, MethodSpec) and not chosen.needs_draft:
        draft = None  # e.g. plain decoding, compared with a speculative run
    threshold = settings.get("r_t")
    if scorer and isinstance(threshold, float):
        scorer.combined.check_threshold(threshold)
    return Engine(target, draft, method, settings, scorer)


def _scorer(target: LM, constraints, chosen, reward, options) -> RewardScorer:
    """The reward, bound to the rows; as a fold if it guides the method."""
    guides = isinstance(chosen, MethodSpec) and chosen.needs_reward
    combined = combine(reward, options.get("combine") == PRODUCT)
    return RewardScorer.bind(combined, target, constraints, guides)


def make_rows(
    target: LM,
    prompts,
    constraints,
    indices,
    seed: int,
    samples: int,
    budgets,
    *,
    with_text: bool = True,
) -> list[Request]:
    """One request per sample of each prompt, samples innermost, numbered from 0.

    Budgets are cut to the target's context. A request's key depends on ``seed``, its prompt's
    index and its sample alone, so it draws the same tokens in any batch. Rewards read the prompt's
    text; decoding it takes long if the prompt is.
    """
    if indices is None:
        indices = range(len(prompts))
    root_key = seed_key(seed)
    rows: list[Request] = []
    for index, tokens, constraint, budget in zip(
        indices, prompts, constraints, budgets, strict=True
    ):
        budget = min(budget, target.config.max_position - len(tokens))
        text = target.tokenizer.decode(tokens) if with_text and target.tokenizer else ""
        prompt_key = jax.random.fold_in(root_key, index)
        for sample in range(samples):
            key = prompt_key
            if sample > 0:
                key = jax.random.fold_in(prompt_key, SAMPLE_STREAM + sample)
            rows.append(Request(tokens, budget, key, len(rows), text, constraint))
    return rows


def encode_prompt(target: LM, prompt: str | Sequence[int], name: str = "the prompt") -> np.ndarray:
    """A prompt's token ids, int32, checked against the model's vocabulary and context.

    Error messages call the prompt ``name``.

    Raises:
      OptionError: it is empty, longer than the context, neither text nor ids, or an id is out of
        range.
      PairError: it is a text, and the model has no tokenizer.
    """
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise PairError(f"{name}: this model has no tokenizer: give prompts as token ids")
        try:
            prompt = target.tokenizer.encode(prompt)
        except OptionError as error:
            raise OptionError(f"{name}: {error}") from None
    tokens = Check(as_integer_array, expected="a text, or token ids").parse(name, prompt)
    context = target.config.max_position
    vocab_size = target.config.vocab_size
    if tokens.size == 0:
        raise OptionError(f"{name} is empty; it needs at least one token")
    if tokens.size >= context:
        raise OptionError(
            f"{name} has {tokens.size} tokens, the model's context holds {context}; shorten it"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise OptionError(f"{name}: token ids must be from 0 to {vocab_size - 1}")
    return tokens.astype(np.int32)
