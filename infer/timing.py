"""What passes cost: the verify curve v(T), and the draft's relative cost c.

v(T) is the time of a target pass over T tokens, in passes over one token. c is the time of one
draft pass, in the same unit. Everything is warmed up first, so no time includes a compilation.

Axis legend: N tokens of a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import specjax as sj
from specjax.core.mesh import replicated
from specjax.core.net import Net
from specjax.draft.auto_length import APART
from specjax.lm import attach
from specjax.models.cache import bucket
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import forward
from specjax.models.head import draft_logits, fused_states

CURVE = (1, 2, 4, 8, 16, 32, 64)  # the T of v(T)
CONTEXT = 192  # committed tokens that the timed passes see
STEPS = 24  # rounds per timing, at most
TIMINGS = 16  # at most
FEWEST_STEPS = 2
FEWEST_TIMINGS = 5
SECONDS = 20.0  # default time for all timings, without the compilations
DRAFT_PASSES = 3  # draft passes between two target passes when c is measured

# One round of a timing: models, each with its tokens per pass and its number of passes.
Round = Sequence[tuple[sj.LM, int, int]]


def row_seconds(generation: sj.Generation, batch_size: int, whole: bool = False) -> np.ndarray:
    """Seconds of each row: its share of the time of all active rows.

    At batch size 1 the row's prefill is left out, unless ``whole``. At larger sizes prompts are
    prefilled between the rounds of other rows. That time cannot be told apart and is included.
    """
    if batch_size == 1 and not whole:
        return generation.share_seconds - generation.prefill_seconds
    return generation.share_seconds


def costs(
    target: sj.LM,
    draft: sj.LM | None,
    widths: Sequence[int] = CURVE,
    seconds: float = SECONDS,
) -> tuple[dict[int, float], float | None]:
    """Measures the verify curve v(T) and the draft's cost c.

    v(T) is the time of a target pass over T tokens, divided by that over one token. c is what one
    draft pass adds to a round, divided by the time of a target pass. c is measured between target
    passes: a small draft timed alone would keep its weights in the processor's cache. In decoding
    the target's weights evict them every round.

    Args:
      target: the target.
      draft: the draft model or head, or None.
      widths: the values of T; one of them is 1.
      seconds: about how long to measure. A slow model gets fewer and shorter timings, but at least
        ``FEWEST_TIMINGS`` of ``FEWEST_STEPS`` rounds.

    Returns:
      v by T, and c, or None without a draft.
    """
    rounds: list[Round] = [[(target, width, 1)] for width in widths]
    if draft:
        # The first draft pass of a round reads more than one token: a draft model two (see
        # specjax.draft.chain), a head all that a round may emit (see specjax.draft.head).
        first = 2
        if draft.is_head:
            first = DRAFT_PASSES + 1
            draft = attach(draft, target)
        rounds.append([(target, 1, 1), (draft, first, 1), (draft, 1, DRAFT_PASSES - 1)])

    timings = np.array(round_seconds(rounds, seconds))  # [timing, round]
    one_token = timings[:, [widths.index(1)]]
    relative = np.median(timings / one_token, axis=0).tolist()

    v = dict(zip(widths, relative, strict=False))  # the round with drafts comes last
    c = (relative[-1] - 1) / DRAFT_PASSES if draft else None
    return v, c


def round_seconds(rounds: Sequence[Round], budget: float = SECONDS) -> list[list[float]]:
    """Seconds of each round, in each of up to ``TIMINGS`` timings, within about ``budget`` seconds.

    The rounds are timed in turn. Ratios within one timing hold even if the machine slows down.
    """
    loops = [_round_loop(models) for models in rounds]
    for loop in loops:
        loop(FEWEST_STEPS)  # compiles

    def time_each(steps: int) -> list[float]:
        seconds = []
        for loop in loops:
            began = time.perf_counter()
            loop(steps)
            seconds.append((time.perf_counter() - began) / steps)
        return seconds

    once = sum(time_each(FEWEST_STEPS))
    steps = int(np.clip(budget / (TIMINGS * once), FEWEST_STEPS, STEPS))
    count = int(np.clip(budget / (steps * once), FEWEST_TIMINGS, TIMINGS))
    return [time_each(steps) for _ in range(count)]


def _round_loop(models: Round) -> Callable[[int], None]:
    """A function that runs so many rounds on the device, with logits and argmax, and waits."""
    # The cost of a pass depends on the cache's length, so every width gets the same length.
    widest = max(*CURVE, *(width for _, width, _ in models))
    capacity = bucket(CONTEXT + STEPS + widest + DRAFT_PASSES)

    def run_model(net, width, passes, cache, token, position):
        def one_pass(i, carry):
            cache, token = carry
            start = jnp.full((1,), position + i, jnp.int32)
            # Equal tokens would choose the same experts of a mixture.
            places = position + i + jnp.arange(width, dtype=jnp.int32)
            tokens = (token + APART * places)[None] % net.vocab
            score = score_pairs if isinstance(net.config, HeadConfig) else Net.logits
            logits, cache, _ = score(net, cache, tokens, start)
            # Every position's argmax counts, so that the compiler cannot skip one.
            return cache, jnp.max(jnp.argmax(logits[0], axis=-1)).astype(jnp.int32)

        return jax.lax.fori_loop(0, passes, one_pass, (cache, token % net.vocab))

    @replicated
    def run_rounds(nets, steps):
        def one_round(i, carry):
            caches, token = carry
            new_caches = []
            for (_, width, passes), net, cache in zip(models, nets, caches, strict=True):
                cache, token = run_model(net, width, passes, cache, token, CONTEXT + i)
                new_caches.append(cache)
            return new_caches, token

        caches = [net.cache(1, capacity) for net in nets]
        return jax.lax.fori_loop(0, steps, one_round, (caches, jnp.int32(1)))[1]

    nets = [model.net for model, _, _ in models]
    mesh = models[0][0].mesh
    return lambda steps: jax.block_until_ready(run_rounds(mesh, nets, jnp.int32(steps)))


def score_pairs(net: Net, cache, tokens: Int[Array, "1 N"], start: Int[Array, "1"]):
    """A head's logits after its last token, its cache and its auxiliary states, as ``Net.logits``.

    With several tokens it reads states of its target, with one token its own output. Here they
    are random numbers plus the token, so that the compiler cannot compute them beforehand.
    """
    cfg = net.config
    rows, count = tokens.shape
    shape = (cfg.parts, cfg.target_size) if count > 1 else (cfg.hidden_size,)

    noise = np.random.default_rng(0).normal(size=(rows, count, *shape))
    features = jnp.asarray(noise, net.params["embed"].dtype)
    features += tokens.reshape(rows, count, *(1 for _ in shape)).astype(features.dtype)
    if count > 1:
        features = fused_states(cfg, net.params, features)

    positions = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    hidden, cache, aux_states = forward(
        cfg,
        net.params,
        cache,
        tokens,
        positions,
        start,
        features=features,
        pass_width=net.padded_width(rows),
    )
    return draft_logits(cfg, net.params, hidden[:, count - 1 : count]), cache, aux_states
