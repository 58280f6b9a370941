"""The cost of passes: the verify curve v(T), and the draft's relative cost c.

Everything is warmed up first, so no time holds a compilation.
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
from specjax.lm import attach
from specjax.models.cache import bucket
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import forward
from specjax.models.head import draft_logits, fused_states

CURVE = (1, 2, 4, 8, 16, 32, 64)
STEPS = 24  # passes per timing of the curve
CONTEXT = 192  # committed tokens the passes of the curve see
TIMINGS = 16
DRAFT_PASSES = 3  # draft passes between two target passes where c is measured

# One round of a timing: models, each with its tokens per pass and its passes.
Round = Sequence[tuple[sj.LM, int, int]]


def row_seconds(generation: sj.Generation, batch_size: int, whole: bool = False) -> np.ndarray:
    """Seconds of each row: its share of the time of all rows in flight.

    At batch size 1 without its prefill, unless ``whole``. With more rows in flight prompts are
    fed between the rounds of others, and their time is part of it.
    """
    apart = generation.prefill_seconds if batch_size == 1 and not whole else 0.0
    return generation.share_seconds - apart


def costs(
    target: sj.LM, draft: sj.LM | None, widths: Sequence[int] = CURVE
) -> tuple[dict[int, float], float | None]:
    """The verify curve v(T) by width, and c, or None without a draft. ``widths`` hold 1.

    v(T) = time of a target pass over T tokens / over one. c = what one draft pass adds to a
    round / the time of a target step. It is measured between target passes: a small draft
    timed alone would keep its weights in the processor's cache, which the target's empty in
    every round of decoding.
    """
    rounds: list[Round] = [[(target, width, 1)] for width in widths]
    if draft:
        # The others read one token. The first one: two, see specjax.draft.chain; of a head all
        # that a round may emit, see specjax.draft.head.
        first = DRAFT_PASSES + 1 if draft.is_head else 2
        draft = attach(draft, target) if draft.is_head else draft
        rounds.append([(target, 1, 1), (draft, first, 1), (draft, 1, DRAFT_PASSES - 1)])
    turns = np.array(round_seconds(rounds))
    relative = np.median(turns / turns[:, [widths.index(1)]], axis=0).tolist()
    v = dict(zip(widths, relative, strict=False))
    return v, (relative[-1] - 1) / DRAFT_PASSES if draft else None


def round_seconds(rounds: Sequence[Round]) -> list[list[float]]:
    """Seconds of each round, once per turn: ratios within one stand though the machine drifts."""
    loops = [_round_loop(models) for models in rounds]
    for loop in loops:
        loop()  # compiles
    turns: list[list[float]] = []
    for _ in range(TIMINGS):
        turns.append([])
        for loop in loops:
            began = time.perf_counter()
            loop()
            turns[-1].append((time.perf_counter() - began) / STEPS)
    return turns


def _round_loop(models: Round) -> Callable[[], None]:
    """Runs STEPS rounds on the device, logits and argmax included, and waits for them."""
    # The cost of a pass follows the cache's length: one length for every width.
    widest = max(*CURVE, *(width for _, width, _ in models))
    capacity = bucket(CONTEXT + STEPS + widest + DRAFT_PASSES)

    def run_model(net, width, passes, cache, token, at):
        def one_pass(i, carry):
            cache, token = carry
            start, tokens = jnp.full((1,), at + i, jnp.int32), jnp.full((1, width), token)
            score = score_pairs if isinstance(net.config, HeadConfig) else Net.logits
            logits, cache, _ = score(net, cache, tokens, start)
            # Every row's argmax counts: a compiler may not skip what a verification needs.
            return cache, jnp.max(jnp.argmax(logits[0], axis=-1)).astype(jnp.int32)

        return jax.lax.fori_loop(0, passes, one_pass, (cache, token % net.vocab))

    @replicated
    def many(nets):
        def one_round(i, carry):
            caches, token = carry
            out = []
            for (_, *shape), net, cache in zip(models, nets, caches, strict=True):
                cache, token = run_model(net, *shape, cache, token, CONTEXT + i)
                out.append(cache)
            return out, token

        caches = [net.cache(1, capacity) for net in nets]
        return jax.lax.fori_loop(0, STEPS, one_round, (caches, jnp.int32(1)))[1]

    nets, mesh = [model.net for model, *_ in models], models[0][0].mesh
    return lambda: jax.block_until_ready(many(mesh, nets))


def score_pairs(net: Net, cache, tokens: Int[Array, "1 N"], start: Int[Array, "1"]):
    """A head's logits after its last token, and its cache.

    It reads states of its target where there are several tokens, else its own output: of either
    any numbers that no compiler knows before.
    """
    cfg, (rows, count) = net.config, tokens.shape
    shape = (cfg.parts, cfg.target_size) if count > 1 else (cfg.hidden_size,)
    some = np.random.default_rng(0).normal(size=(rows, count, *shape))
    features = jnp.asarray(some, net.params["embed"].dtype)
    features += tokens.reshape(rows, count, *(1 for _ in shape)).astype(features.dtype)
    if count > 1:
        features = fused_states(cfg, net.params, features)
    positions = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    arguments = cfg, net.params, cache, tokens, positions, start
    hidden, cache, _ = forward(*arguments, features=features, pass_width=net.narrow(rows))
    return draft_logits(cfg, net.params, hidden[:, count - 1 : count]), cache
