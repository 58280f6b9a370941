"""Decoding under grammars: every output is of the grammar, and its distribution is the target's."""

import functools
import gc
import json
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_laws import PROMPT, V, tiny_pair

import specjax as sj
from specjax.core import loop
from specjax.core.warp import warp
from specjax.registry import Context
from specjax.runtime import grammar_rounds
from specjax.runtime.engine import Engine, Request
from specjax.runtime.generate import make_engine
from specjax.runtime.grammar_rounds import GrammarProgress, advance_with_grammars, masks
from specjax.runtime.runner import BatchRunner
from specjax.runtime.scheduler import Bounds, Scheduler
from specjax.text.grammar import make_matcher
from support import laws
from support.schemas import validate, written_schemas


@functools.cache
def demo():
    return sj.load("demo")


def outputs(method, options, schemas, temperature, draft=None, slots=8):
    """The text of each schema's request, decoded in one batch, and the counters' sums."""
    target = demo()
    engine = make_engine(target, draft, sj.method(method), options, temperature == 0)
    requests = []
    for number, schema in enumerate(schemas):
        sampling = sj.Sampling(temperature, grammar=f"schema:{json.dumps(schema)}")
        engine.check_sampling(sampling)
        tokens = np.array(target.tokenizer.encode("data = "), np.int32)
        key = jax.random.fold_in(jax.random.key(0), number)
        requests.append(Request(tokens, 160, key, number, sampling=sampling))
    scheduler = Scheduler(engine, slots, sj.Sampling(temperature), Bounds.of(requests))
    rows = {}
    for piece in scheduler.run(requests, 2**30):
        if piece.row:
            rows[piece.index] = piece.row
    passes = sum(int(row.stats["target_calls"].sum()) for row in rows.values())
    emitted = sum(int(row.stats["emitted"].sum()) for row in rows.values())
    return [rows[number].text[0] for number in range(len(schemas))], emitted / passes


def check(texts, schemas):
    for text, schema in zip(texts, schemas, strict=True):
        validate(json.loads(text), schema)


def test_every_text_is_of_its_grammar_and_forced_tokens_are_drafted():
    """Different grammars in one batch, more requests than slots, and drafts of automatic length."""
    schemas = written_schemas(12)
    texts, per_pass = outputs("lookup", {}, schemas, 1.0)
    check(texts, schemas)
    assert per_pass >= 1.5
    texts, _ = outputs("lookup", {"gamma": 4}, schemas, 0.0)
    check(texts, schemas)


@pytest.mark.parametrize("method", ["contrastive", "scd"])
def test_what_a_grammar_allows_is_plausible_to_contrastive_targets(method):
    """Of the likeliest tokens at most places none begins an object."""
    schemas = written_schemas(4)
    options = {"alpha": 0.5} | ({"gamma": 3} if method == "scd" else {})
    texts, _ = outputs(method, options, schemas, 0.0, sj.load("demo-draft"), 4)
    check(texts, schemas)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "temperature"),
    [
        ("lookup", {"gamma": 6}, 1.0),
        pytest.param("speculative", {"gamma": 3}, 0.0, marks=pytest.mark.sweep),
        pytest.param("specinfer", {"branching": (2, 2)}, 1.0, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_two_hundred_schemas(method, options, temperature):
    schemas = written_schemas(200)
    draft = None if method == "lookup" else sj.load("demo-draft")
    texts, _ = outputs(method, options, schemas, temperature, draft)
    check(texts, schemas)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("schema:{", "the schema is no JSON schema"),
        ('schema:{"type": "nothing"}', "Invalid type: nothing"),
        ('schema:{"allOf": [{"type": "string"}, {"type": "integer"}]}', "Unsatisfiable schema"),
        ("regex:(a", "invalid regex"),
        ("lark:start: nothing", "grammar: "),
    ],
)
def test_a_grammar_that_cannot_be_met_is_one_line(grammar, message):
    with pytest.raises(sj.OptionError, match=message) as caught:
        sj.generate(demo(), "a", sampling=sj.Sampling(grammar=grammar))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("grammar", ['schema:{"const": "\ud800"}', "regex:\udc00"])
def test_a_grammar_with_half_a_surrogate_pair_is_refused(grammar):
    with pytest.raises(sj.OptionError, match="a grammar: json, schema:SCHEMA"):
        sj.Sampling(grammar=grammar)


def test_methods_and_models_without_grammars_say_so():
    target, _ = tiny_pair()
    json_object = sj.Sampling(grammar="json")
    with pytest.raises(sj.PairError, match="grammar: needs a target with a tokenizer"):
        sj.generate(target, [PROMPT], sampling=json_object)
    with pytest.raises(sj.OptionError, match="grammar: this method does not"):
        sj.generate(demo(), "a", method="beam", sampling=json_object)
    with pytest.raises(sj.OptionError, match="grammar: not supported with gamma=auto"):
        how = {"draft": sj.load("demo-draft"), "options": {"gamma": "auto"}}
        sj.generate(demo(), "a", sampling=json_object, **how)


def test_rows_without_a_grammar_beside_others_are_plain_decodings():
    """Rounds under grammars and rounds of automatic length take turns in one job."""
    target = demo()
    engine = make_engine(target, None, sj.method("lookup"), {})
    prompts = ["def f(x):\n", "import os\n", "data = ", "class A:\n"]
    requests = []
    for number, prompt in enumerate(prompts):
        sampling = sj.Sampling(grammar="json") if prompt == "data = " else sj.Sampling()
        tokens = np.array(target.tokenizer.encode(prompt), np.int32)
        key = jax.random.key(number)
        budget = 12 if sampling.grammar else 48
        requests.append(Request(tokens, budget, key, number, sampling=sampling))
    scheduler = Scheduler(engine, 2, sj.Sampling(), Bounds.of(requests))
    made = {piece.index: piece.row for piece in scheduler.run(requests, 4) if piece.row}
    plain = sj.generate(target, prompts, max_new_tokens=48)
    for number in (0, 1, 3):
        assert made[number].tokens[0].tolist() == plain.tokens[number].tolist()


def test_programs_of_grammars_are_dropped_with_their_method():
    """Unless a method that stays runs them: the one with such drafts from the start."""
    method = make_engine(demo(), None, sj.method("lookup"), {}).method
    longest = grammar_rounds.longest_drafts(method)
    programs = (loop.run_rounds, loop.resize_state, grammar_rounds._programs)
    for made in programs:
        made(method)
        made(longest)
    grammar_rounds.forget([method], [longest])
    assert all(method not in made.made and longest in made.made for made in programs)
    grammar_rounds.forget([method], [])
    assert not any(longest in made.made for made in programs)


def test_masks_are_those_of_each_node():
    """A tree: { and [ below the root, and an object's first key below the first."""
    tokenizer = demo().tokenizer
    vocab = demo().config.vocab_size
    matcher = make_matcher(
        'schema:{"anyOf": [{"type": "object"}, {"type": "array"}]}', tokenizer, vocab, (0,)
    )
    opening, closing, bracket = (tokenizer.token_to_id(text) for text in ("{", "}", "["))
    tokens = np.array([[7, opening, bracket, opening]])
    parents = np.array([[2**30, 0, 0, 2]])
    bits = masks([GrammarProgress(matcher, 1)], tokens, parents, np.ones((1, 4), bool), vocab)
    allowed = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")[0]
    assert [row[opening] for row in allowed] == [1, 0, 1, 0]
    assert [row[closing] for row in allowed] == [0, 1, 0, 1]


def test_no_other_request_gets_the_place_of_one_that_has_ended():
    """Places are found by a request's identity, so a request stays as long as its place does."""
    runner = BatchRunner.__new__(BatchRunner)
    runner._places = {}
    runner._automata = {}
    runner._engine = SimpleNamespace(automaton=lambda _: None, matcher=lambda _: "its own")
    runner._sampling = sj.Sampling()
    request = Request(np.array([1]), 1, None, 0, sampling=sj.Sampling(grammar="json"))
    (place,) = runner._grammar_places([request])
    alive = weakref.ref(request)
    del request
    gc.collect()
    assert place.matcher == "its own" and alive() is not None


# --- the law, over an automaton of a tiny vocabulary -------------------------------------------

# What may follow, by the last token of the prompt or the output: 3 alone after 2.
FOLLOW = {0: (0, 1, 3), 1: (1, 2), 2: (3,), 3: (0, 1, 2)}


class Follows:
    """A matcher of FOLLOW."""

    def __init__(self):
        self.seen = [PROMPT[-1]]

    def advance(self, token):
        if token not in FOLLOW[self.seen[-1]]:
            return False
        self.seen.append(token)
        return True

    def back(self, count):
        del self.seen[len(self.seen) - count :]

    def fill(self, bits):
        bits[0] = sum(1 << token for token in FOLLOW[self.seen[-1]])

    def forced(self):
        return [3] if self.seen[-1] == 2 else []


LENGTH, ROWS, RUNS = 4, 2048, 12
SAMPLING = sj.Sampling(1.1, presence_penalty=0.3)


def masked_law():
    def next_p(prefixes):
        target, _ = tiny_pair()
        tokens = laws.texts_after(PROMPT, prefixes)
        logits = np.array(laws.logits_of_texts(target, tokens)[:, -1], np.float32)
        logits -= 0.3 * (prefixes[:, :, None] == np.arange(V)).any(1)
        for row, last in zip(logits, tokens[:, -1], strict=True):
            row[[token for token in range(V) if token not in FOLLOW[last]]] = -np.inf
        plain = sj.Sampling(1.1).arrays(len(tokens))
        return np.exp(np.asarray(warp(logits[:, None], plain), np.float64))[:, 0]

    return laws.joint(next_p, V, LENGTH)


def masked_counts(name, options):
    method, settings = sj.method(name).build(Context(*tiny_pair()), options)
    engine = Engine(*tiny_pair(), method, settings)
    inputs = engine.inputs(SAMPLING, ROWS)
    budget = np.full(ROWS, LENGTH, np.int32)
    total = np.zeros((V,) * LENGTH, np.int64)
    for seed in range(RUNS):
        keys = jax.random.split(jax.random.key(seed), ROWS)
        prompts = [np.array(PROMPT)] * ROWS
        state = loop.start(method, inputs, prompts, budget, keys, chunk=4, capacity=32)
        places = [GrammarProgress(Follows(), len(PROMPT)) for _ in range(ROWS)]
        for _ in range(LENGTH):
            seen = np.asarray(state.done)
            state = advance_with_grammars(method, inputs, state, 1, seen, places)
        new = np.asarray(state.tokens[:, len(PROMPT) : len(PROMPT) + LENGTH])
        total += laws.histogram(new, V)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speculative", {"gamma": 2}),
        ("specinfer", {"branching": (2, 2)}),
        pytest.param("block", {"gamma": 2}, marks=pytest.mark.sweep),
        pytest.param("lookup", {"gamma": 2}, marks=pytest.mark.sweep),
        pytest.param("tree-match", {"branching": (2, 1)}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_the_law_is_the_masked_target(name, options):
    assert laws.p_value(masked_counts(name, options), masked_law()) > laws.ALPHA


@pytest.mark.slow
def test_a_mask_of_the_siblings_state_is_caught(monkeypatch):
    def shifted(*args):
        bits = masks(*args)
        return np.concatenate([bits[:, :1], bits[:, 2:], bits[:, 1:2]], axis=1)

    monkeypatch.setattr("specjax.runtime.grammar_rounds.masks", shifted)
    counts = masked_counts("specinfer", {"branching": (2, 2)})
    assert laws.p_value(counts, masked_law()) < laws.ALPHA
