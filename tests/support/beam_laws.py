"""The distribution (law) of sampled beams by enumeration, in plain Python and float64.

A ``table`` maps every prefix (a tuple of tokens) to the raw log-probabilities of the next token. A
hypothesis is a pair (score, prefix). A law maps an outcome to its probability. Nothing here is
shared with the library.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from support.laws import continuation_logits


class Rule(NamedTuple):
    """How beams are sampled; the fields with a default are for mutants."""

    joint: str  # raw: joint warped; warped: conditionals; tempered: those, not renormalized
    likeliest: bool  # keep the likeliest drawn continuations, not the first
    replaced: bool = False  # draw with replacement
    spare: int | None = None  # draws per beam; default: 1 + number of EOS ids, at least 2


RULES = {
    "raw": Rule("raw", False),
    "warped": Rule("warped", False),
    "transformers": Rule("tempered", True),
}


def table_of(lm, prompt, length: int) -> dict[tuple, np.ndarray]:
    """The raw log-probabilities after every continuation shorter than ``length``."""
    grid, logits = continuation_logits(lm, prompt, length)
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {
        tuple(tokens[:i].tolist()): rows[i]
        for tokens, rows in zip(grid, log_p, strict=True)
        for i in range(length)
    }


def cut(scores: np.ndarray, sampling, fewest: int = 1) -> np.ndarray:
    """Temperature, top-k and top-p by sorting, not renormalized; keeps at least ``fewest``."""
    scores = scores / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    count = max(sampling.top_k or len(scores), fewest)
    kept = order[:count]
    p = np.exp(scores[kept] - scores.max())
    above = (np.cumsum(p) - p) / p.sum()
    kept = kept[(above < sampling.top_p) | (np.arange(len(kept)) < fewest)]
    out = np.full(scores.shape, -np.inf)
    out[kept] = scores[kept]
    return out


def normalized(scores: np.ndarray) -> np.ndarray:
    return scores - np.logaddexp.reduce(scores)


def grown(table, running, ended, rule, sampling, ends):
    """All continuations ``[(score, tokens)]``, and the probabilities that they are drawn with."""
    scored = []
    for score, tokens in running:
        if tokens in ended:
            scored.append((score, tokens))
            continue
        row = table[tokens]
        if rule.joint == "warped":
            row = normalized(cut(row, sampling))
        elif rule.joint == "tempered":
            row = cut(row, sampling, 1 + max(1, len(ends)))
        scored += [(score + s, (*tokens, x)) for x, s in enumerate(row) if s > -np.inf]
    joint = np.array([score for score, _ in scored])
    if rule.joint == "raw":
        joint = cut(joint, sampling)
    return scored, np.exp(normalized(joint)).tolist()


def draws(weights, rule, enough, chosen=(), chance=1.0):
    """Yields every sequence of draws (indices) with its probability.

    A sequence ends as soon as ``enough(sequence)``, or when no weight is left.
    """
    left = sum(w for i, w in enumerate(weights) if rule.replaced or i not in chosen)
    if left <= 0 or enough(chosen):
        yield chosen, chance
        return
    for i, w in enumerate(weights):
        if w > 0 and (rule.replaced or i not in chosen):
            yield from draws(weights, rule, enough, (*chosen, i), chance * w / left)


def drafted_law(table, rule, width, steps, sampling, ends=()) -> dict:
    """Law of a draft's ordered beams. Ended beams stay and keep their score."""
    law = {((0.0, ()),): 1.0}
    for _ in range(steps):
        after = defaultdict(float)
        for running, chance in law.items():
            ended = {tokens for _, tokens in running if tokens and tokens[-1] in ends}
            scored, weights = grown(table, running, ended, rule, sampling, ends)
            for chosen, part in draws(weights, rule, lambda c: len(c) == width):
                after[tuple(scored[i] for i in chosen)] += chance * part
        law = after
    return law


def search_law(table, rule, width, budget, sampling, ends=()) -> list[dict]:
    """Law of ``(running, finished)`` after each round.

    Running hypotheses stand in beam order, with total scores; finished ones have mean scores. A
    search that has ended has none running.
    """
    law, after_rounds = {(((0.0, ()),), ()): 1.0}, []
    for length in range(1, budget + 1):
        after = defaultdict(float)
        for (running, finished), chance in law.items():
            if not running:
                after[running, finished] += chance
                continue
            for state, part in _step(table, rule, width, length, budget, sampling, ends, running):
                after[_merge(*state, finished, width, length)] += chance * part
        law = after
        after_rounds.append(dict(law))
    return after_rounds


def _step(table, rule, width, length, budget, sampling, ends, running):
    """Yields ((running, ended), probability) for each sequence of draws."""
    scored, weights = grown(table, running, (), rule, sampling, ends)
    over = [length == budget or tokens[-1] in ends for _, tokens in scored]
    spare = rule.spare or 1 + max(1, len(ends))

    def enough(chosen):
        if length == budget:
            return len(chosen) == width  # at the budget every draw ends
        if rule.likeliest or rule.replaced:  # drawing until W run might not stop
            return len(chosen) == spare * width
        return len(chosen) >= width and sum(not over[i] for i in chosen) >= width

    for chosen, chance in draws(weights, rule, enough):
        closing = tuple(scored[i] for i in chosen[:width] if over[i])
        going = [scored[i] for i in chosen if not over[i]]
        if rule.likeliest:
            going.sort(reverse=True)
        yield (tuple(going[:width]), closing), chance


def _merge(going, closing, finished, width, length):
    finished = (*finished, *((score / length, tokens) for score, tokens in closing))
    finished = tuple(sorted(finished, reverse=True)[:width])
    if len(finished) == width and going and max(going)[0] / length <= finished[-1][0]:
        going = ()
    return going, finished


def block_law(table, joint, length, sampling, ends=()) -> dict:
    """Law of MTJD's block, by enumeration of all continuations. EOS is absorbing."""
    blocks = {}
    for block in itertools.product(range(len(table[()])), repeat=length):
        stop = next((i + 1 for i, x in enumerate(block) if x in ends), length)
        rows = [table[block[:i]] for i in range(stop)]
        if joint == "warped":
            rows = [normalized(cut(row, sampling)) for row in rows]
        blocks[block[:stop]] = sum(row[x] for row, x in zip(rows, block, strict=False))
    scores = np.array(list(blocks.values()))
    if joint == "raw":
        scores = cut(scores, sampling)
    return dict(zip(blocks, np.exp(normalized(scores)), strict=True))


def sequences(law: dict, of) -> dict:
    """The law of ``of(outcome)``: sums the probabilities of outcomes that it maps to one."""
    out = defaultdict(float)
    for outcome, chance in law.items():
        out[of(outcome)] += chance
    return out
