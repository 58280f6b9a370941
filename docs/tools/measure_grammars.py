"""What a round costs under grammars: python docs/tools/measure_grammars.py [MODEL] [METHOD ...]

Rows have one JSON schema each. The same rounds run with its table on the device, with masks from
the host, and without a grammar, by turns, in one process. Each turn gives a ratio to the rounds
without; ± is half of the 95 % interval of their mean over the turns (Student's t). A round decodes
nothing new: every turn begins at the same state, and ends after as many rounds. It also prints how
long a table takes to make.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from measure_head_losses import said

import specjax as sj
from infer.loading import use_compilation_cache
from specjax.core import loop
from specjax.core.round import DraftVerify
from specjax.core.types import DecodeState, Inputs
from specjax.runtime.engine import Engine
from specjax.runtime.generate import make_engine
from specjax.runtime.grammar_rounds import (
    GrammarProgress,
    advance_with_grammars,
    longest_drafts,
)
from specjax.runtime.grammar_stack import GrammarStack
from specjax.text.grammar import make_automaton, make_matcher

TEXT = {"type": "string"}
NAMES = ("title", "author", "year", "summary", "review", "country", "language", "note")
PROMPT = "Write a record of a book as JSON.\n"
Run = Callable[[], DecodeState]


def main() -> None:
    """Prints a row per method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("methods", nargs="*", default=["lookup", "speculative"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="of a turn")
    parser.add_argument("--turns", type=int, default=12)
    args = parser.parse_args()
    use_compilation_cache()
    target = sj.load(args.model)
    began = time.perf_counter()
    automata = [automaton(target, name) for name in schemas(args.batch)]
    seconds = (time.perf_counter() - began) / args.batch
    states = sorted(len(found.forced) for found in automata)
    print(f"tables of {states[0]} to {states[-1]} states, {seconds:.1f} s each")
    print("| method | ms | table | host |\n| --- | ---: | ---: | ---: |")
    for name in args.methods:
        plain, table, host = times(args, target, name, automata)
        milliseconds = statistics.median(plain) * 1e3 / args.rounds
        print(f"| {name} | {milliseconds:.1f} | {ratio(table, plain)} | {ratio(host, plain)} |")


def schemas(count: int) -> list[str]:
    """Records of texts without end, so that no row ends while rounds are timed."""
    records = []
    for number in range(count):
        names = [NAMES[(number + place) % len(NAMES)] for place in range(4)]
        record = {
            "type": "object",
            "properties": dict.fromkeys(names, TEXT),
            "required": names,
            "additionalProperties": False,
        }
        records.append(f"schema:{json.dumps(record)}")
    return records


def automaton(target: sj.LM, grammar: str):
    found = make_automaton(*spelled(target, grammar))
    assert found is not None, "the schemas are small"
    return found


def spelled(target: sj.LM, grammar: str):
    return grammar, target.tokenizer, target.config.vocab_size, tuple(target.eos_ids)


def times(args: argparse.Namespace, target: sj.LM, name: str, automata) -> list[list[float]]:
    """Seconds of each turn: without grammars, with tables, by way of the host."""
    draft = target if name == "speculative" else None  # costs are compared, not speed
    options = {"gamma": 4}
    engine = make_engine(target, draft, sj.method(name), options, greedy=True)
    method = engine.method
    assert isinstance(method, DraftVerify), "grammars need a drafter and a rule"
    method = longest_drafts(method)
    inputs, begin = started(engine, method, target, args.batch)
    tables = inputs.replace(grammars=GrammarStack().tables(automata))
    rounds = np.int32(args.rounds)

    # Each prepares rounds, which are not a part of what is timed, and returns what runs them.
    def plain() -> Run:
        state = begin()
        return lambda: loop.run_rounds(method)(inputs, state, rounds)

    def with_tables() -> Run:
        state = jax.block_until_ready(loop.with_grammar_states(method)(tables, begin()))
        return lambda: loop.run_rounds(method)(tables, state, rounds)

    def by_host() -> Run:
        state = begin()
        length = int(state.length[0])
        matchers = [make_matcher(*spelled(target, text)) for text in schemas(args.batch)]
        places = [GrammarProgress(matcher, length) for matcher in matchers]
        seen = np.zeros(args.batch, bool)
        return lambda: advance_with_grammars(method, inputs, state, args.rounds, seen, places)

    ways = (plain, with_tables, by_host)
    for way in ways:
        seconds_of(way())
    measured: list[list[float]] = [[] for _ in ways]
    for _ in range(args.turns):
        for way, found in zip(ways, measured, strict=True):
            found.append(seconds_of(way()))
    return measured


def started(
    engine: Engine, method: DraftVerify, target: sj.LM, batch: int
) -> tuple[Inputs, Callable[[], DecodeState]]:
    """The inputs, and a function that makes a fresh copy of the state after the prompts."""
    assert target.tokenizer is not None, "grammars need a tokenizer"
    tokens = np.array(target.tokenizer.encode(PROMPT), np.int32)
    inputs = engine.inputs(sj.Sampling(), batch)
    keys = jax.random.split(jax.random.key(0), batch)
    budget = np.full(batch, 2048, np.int32)
    state = loop.start(method, inputs, [tokens] * batch, budget, keys, chunk=16, capacity=256)
    return inputs, lambda: jax.block_until_ready(jax.tree.map(jax.numpy.copy, state))


def seconds_of(run: Run) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def ratio(times: list[float], to: list[float]) -> str:
    """The mean of the turns' ratios, with its ±."""
    return said(np.divide(times, to))


if __name__ == "__main__":
    main()
