"""Grammars as tables on the device: the same masks and tokens as by way of the host."""

import functools
import itertools
import json
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_grammar import FOLLOW, LENGTH, ROWS, RUNS, SAMPLING, demo, masked_law
from test_laws import PROMPT, V, tiny_pair

import specjax as sj
from specjax.core import grammar_tables, loop
from specjax.core.types import NO_PARENT, Draft, TreeShape
from specjax.registry import Context
from specjax.runtime.engine import Engine, Request
from specjax.runtime.generate import make_engine
from specjax.runtime.grammar_stack import GrammarStack
from specjax.runtime.scheduler import Bounds, Scheduler
from specjax.text.automaton import NO_TOKEN, OUT, Automaton
from specjax.text.byte_automaton import byte_automaton
from specjax.text.grammar import make_automaton, make_matcher
from specjax.text.schema_regex import NoRegex, regex_of_schema
from support import laws

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "size": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["new", "news", 1, None, True]}},
        "next": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
    },
    "required": ["age", "next"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -3, "maximum": 12}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
GRAMMARS = {
    "person": f"schema:{json.dumps(PERSON)}",
    "short texts": 'schema:{"type": "array", "items": {"type": "string", "maxLength": 3}}',
    "no end in sight": r"regex:[a-z]{3,5} \d+",
    "an end that goes on": r"regex:.*x",
    "choice": "regex:yes|no|maybe",
    "counted": r"regex:(ab){40}c?",
}


@functools.cache
def table(name):
    target = demo()
    found = make_automaton(
        GRAMMARS[name], target.tokenizer, target.config.vocab_size, tuple(target.eos_ids)
    )
    assert found is not None
    return found


# --- over bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("regex", [r"(ab|a{3})*b?", r".*x", r"a(b|ba)*", r"(?i)ab|[^a]{2}", "é+a"])
def test_an_automaton_over_bytes_has_the_texts_that_match(regex):
    automaton = byte_automaton(regex, 100)
    for length in range(6):
        for text in map(
            "".join, itertools.product("abxé"[: 4 if length < 5 else 3], repeat=length)
        ):
            state = 0
            for byte in text.encode():
                state = automaton.next_state[state, byte] if state != OUT else OUT
            accepted = state != OUT and automaton.accepts[state]
            assert accepted == bool(re.fullmatch(regex, text)), text


def test_equal_states_are_one_and_large_automata_are_none():
    assert len(byte_automaton("a(x|y)|b(x|y)", 100).accepts) == 3
    assert byte_automaton("(a|b)*a(a|b){9}", 2000) is not None
    assert byte_automaton("(a|b)*a(a|b){9}", 1000) is None
    assert byte_automaton(r"a(?=b)", 100) is None


def test_a_regex_that_explodes_is_stopped(monkeypatch):
    monkeypatch.setattr("specjax.text.byte_automaton.SECONDS", 0.5)
    assert byte_automaton("(a|b)*a(a|b){25}", 1000) is None


VALUES = [
    {"age": 0, "next": None},
    {"name": 'a"\\\n é', "age": -12, "size": 1.5e-07, "tags": ["new", 1], "next": {"x": 12}},
    {"age": 7, "tags": [], "next": {"x": -3}},
]
OTHERS = [
    {"age": 0},
    {"next": None, "age": 0},
    {"age": 1.5, "next": None},
    {"age": 0, "next": {"x": 13}},
    {"age": 0, "tags": ["other"], "next": None},
    {"age": 0, "next": None, "more": 1},
]


def test_the_expression_of_a_schema():
    regex = regex_of_schema(PERSON)
    assert all(re.fullmatch(regex, json.dumps(value, ensure_ascii=False)) for value in VALUES)
    assert not any(re.fullmatch(regex, json.dumps(value)) for value in OTHERS)


NODE = {
    "type": "object",
    "properties": {"child": {"$ref": "#/$defs/node"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"type": "string", "format": "date"},
        {"type": "integer", "multipleOf": 3},
        {"type": "string", "maxLength": 10_000},
        {"not": {}},
        True,
    ],
    ids=str,
)
def test_other_schemas_have_none(schema):
    with pytest.raises(NoRegex):
        regex_of_schema(schema)


# --- over tokens -------------------------------------------------------------------------------


def walks_differ(automaton, grammar, walks=30, steps=40):
    """Whether masks or forced tokens differ from llguidance's on some random walk."""
    target = demo()
    vocab = target.config.vocab_size
    draw = random.Random(0)
    start = make_matcher(grammar, target.tokenizer, vocab, target.eos_ids)
    for _ in range(walks):
        matcher, state = start.copy(), 0
        for _ in range(steps):
            bits = np.zeros(-(-vocab // 32), np.int32)
            matcher.fill(bits)
            forced = matcher.forced()
            if (bits != automaton.allowed[state]).any():
                return True
            if automaton.forced[state] != (forced[0] if forced else NO_TOKEN):
                return True
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            token = draw.choice(allowed.tolist())
            if token in target.eos_ids:
                break
            assert matcher.advance(token)
            state = automaton.next_state[state, automaton.token_class[token]]
            if state == OUT:
                return True
    return False


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_llguidance_s_along_random_walks(name):
    assert not walks_differ(table(name), GRAMMARS[name])


def eos_early(automaton):
    """An end is allowed one token before the text may end."""
    (end,) = demo().eos_ids
    word, bit = end // 32, np.int32(1 << end % 32)
    ends = np.append((automaton.allowed[:, word] & bit) != 0, False)  # the last one is OUT
    early = ends[automaton.next_state].any(1)
    allowed = automaton.allowed.copy()
    allowed[early, word] |= bit
    return automaton._replace(allowed=allowed)


def merged_by_masks(automaton):
    """States with equal masks are one state."""
    _, first, same = np.unique(automaton.allowed, axis=0, return_index=True, return_inverse=True)
    joined = np.append(first[same.reshape(-1)], OUT)
    return automaton._replace(next_state=joined[automaton.next_state])


@pytest.mark.parametrize("mutant", [eos_early, merged_by_masks])
def test_a_mutant_of_a_table_is_caught(mutant):
    assert walks_differ(mutant(table("counted")), GRAMMARS["counted"])


def outputs(method, options, temperature, by_host):
    """The tokens of a batch: rows with tables, one with a grammar for the host, two with none."""
    target = demo()
    draft = None if method == "lookup" else sj.load("demo-draft")
    engine = make_engine(target, draft, sj.method(method), options, temperature == 0)
    if by_host:
        object.__setattr__(engine, "automaton", lambda sampling: None)
    requests = []
    for number, grammar in enumerate([*list(GRAMMARS.values())[:5], "", "json", ""]):
        sampling = sj.Sampling(temperature, grammar=grammar)
        tokens = np.array(target.tokenizer.encode("data = "), np.int32)
        key = jax.random.fold_in(jax.random.key(0), number)
        budget = 8 if grammar == "json" else 32  # so that the others soon need no host
        requests.append(Request(tokens, budget, key, number, sampling=sampling))
    scheduler = Scheduler(engine, 8, sj.Sampling(temperature), Bounds.of(requests))
    rows = {piece.index: piece.row for piece in scheduler.run(requests, 2**30) if piece.row}
    return [rows[number].tokens[0].tolist() for number in range(len(requests))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "temperature"),
    [
        ("lookup", {"gamma": 3}, 1.0),
        pytest.param("specinfer", {"branching": (2, 2)}, 1.0, marks=pytest.mark.sweep),
        pytest.param("lookup", {}, 1.0, marks=pytest.mark.sweep),
        pytest.param("speculative", {"gamma": 3}, 1.0, marks=pytest.mark.sweep),
        pytest.param("specinfer", {"branching": (2, 2)}, 0.0, marks=pytest.mark.sweep),
        pytest.param("speculative", {"gamma": 3}, 0.0, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_tokens_are_those_by_way_of_the_host(method, options, temperature):
    by_table = outputs(method, options, temperature, by_host=False)
    assert by_table == outputs(method, options, temperature, by_host=True)


# --- rounds ------------------------------------------------------------------------------------


def small(next_state, forced):
    """An automaton over a tiny vocabulary, a class for each token."""
    after = np.array(next_state, np.int32)
    bits = ((after != OUT) << np.arange(after.shape[1])).sum(1).astype(np.int32)
    return Automaton(after, np.arange(V, dtype=np.int32), bits[:, None], np.array(forced, np.int32))


def follow_table():
    """FOLLOW, whose states are the last token; the prompt's last one is the first."""
    order = [PROMPT[-1], *(token for token in range(V) if token != PROMPT[-1])]
    number = {token: place for place, token in enumerate(order)}
    next_state = [
        [number[token] if token in FOLLOW[last] else OUT for token in range(V)] for last in order
    ]
    return small(next_state, [3 if last == 2 else NO_TOKEN for last in order])


def table_counts(name, options):
    method, settings = sj.method(name).build(Context(*tiny_pair()), options)
    engine = Engine(*tiny_pair(), method, settings)
    tables = GrammarStack().tables([follow_table()] * ROWS)
    inputs = engine.inputs(SAMPLING, ROWS).replace(grammars=tables)
    budget = np.full(ROWS, LENGTH, np.int32)
    total = np.zeros((V,) * LENGTH, np.int64)
    for seed in range(RUNS):
        keys = jax.random.split(jax.random.key(seed), ROWS)
        prompts = [np.array(PROMPT)] * ROWS
        state = loop.start(method, inputs, prompts, budget, keys, chunk=4, capacity=32)
        state = loop.with_grammar_states(method)(inputs, state)
        state = loop.run_rounds(method)(inputs, state, np.int32(LENGTH))
        new = np.asarray(state.tokens[:, len(PROMPT) : len(PROMPT) + LENGTH])
        total += laws.histogram(new, V)
    loop.forget(method)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("specinfer", {"branching": (2, 2)}),
        pytest.param("speculative", {"gamma": 2}, marks=pytest.mark.sweep),
        pytest.param("block", {"gamma": 2}, marks=pytest.mark.sweep),
        pytest.param("lookup", {"gamma": 2}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_the_law_is_the_masked_target(name, options):
    assert laws.p_value(table_counts(name, options), masked_law()) > laws.ALPHA


def sibling_s_state(*args):
    states = NODE_STATES(*args)
    return states.at[:, 1:].set(states[:, [*range(2, states.shape[1]), 1]])


def stale_state(inputs, state, tokens, emitted):
    """The last token of a round does not count."""
    return STATES_AFTER(inputs, state, tokens, emitted - 1)


NODE_STATES = grammar_tables._node_states
STATES_AFTER = grammar_tables.states_after


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        ("specjax.core.grammar_tables._node_states", sibling_s_state),
        ("specjax.core.commit.states_after", stale_state),
    ],
)
def test_a_mutant_of_the_states_is_caught(place, mutant, monkeypatch):
    monkeypatch.setattr(place, mutant)
    counts = table_counts("specinfer", {"branching": (2, 2)})
    assert laws.p_value(counts, masked_law()) < laws.ALPHA


def test_states_of_a_tree_are_those_along_its_paths():
    """Two rows with one grammar each, and one without."""
    ring = small([[1, OUT, OUT, OUT], [OUT, 2, 0, OUT], [0, 0, 0, 0]], [0, NO_TOKEN, NO_TOKEN])
    line = small([[OUT, 1, 1, OUT], [OUT, OUT, OUT, 0]], [NO_TOKEN, 3])
    tables = GrammarStack().tables([ring, line, None])
    draft = Draft(
        tokens=jnp.array([[0, 0, 0, 1, 2], [0, 1, 0, 3, 1], [0, 0, 1, 2, 3]]),
        parents=np.tile([NO_PARENT, 0, 0, 1, 2], (3, 1)),
        valid=jnp.ones((3, 5), bool),
        shape=TreeShape(5, 2, 2),
    )
    first = np.asarray(tables.first)
    states = np.asarray(grammar_tables._node_states(tables, tables.first, draft))
    assert (states[0] - first[0]).tolist() == [0, 1, 1, 2, 0]
    # The second child may not follow, so nothing is known of it and below it.
    assert states[1].tolist() == [first[1], first[1] + 1, 0, first[1], 0]
    assert (states[2] == 0).all()


def test_another_grammar_compiles_nothing():
    """Sizes are rounded up, and the stack keeps grammars while there is room."""
    stack = GrammarStack()
    one, other = follow_table(), small([[0] * V], [NO_TOKEN])
    shapes = jax.tree.map(np.shape, stack.tables([one, None]))
    again = stack.tables([other, one])
    assert jax.tree.map(np.shape, again) == shapes
    assert np.asarray(again.grammar).tolist() == [2, 1]
    assert np.asarray(again.first).tolist() == [1 + len(one.forced), 1]
    assert GrammarStack().tables([None, None]) is None
