"""Settings of paths and cutoffs against transformers' processors, and by hand."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.core import loop, path_logits, tree
from specjax.core.sampling import stacked
from specjax.core.types import NO_TOKEN, Inputs
from specjax.core.warp import warp
from specjax.models import ModelConfig, init_params
from specjax.models.hf.write import save_pretrained
from specjax.registry import Context
from specjax.runtime.engine import Engine, Request
from specjax.runtime.generate import make_engine
from specjax.runtime.scheduler import Bounds, Scheduler

VOCAB, ENDS = 40, (5, 29)
SETTINGS = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition below 1": {"repetition_penalty": 0.8},
    "ngrams": {"no_repeat_ngram_size": 3},
    "1-grams": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words": ((30,), (3, 3), (36, 36, 22), (22, 21), (9, 8, 4, 6))},
    "biases": {"logit_bias": {36: 1.5, 3: -2.0}},
    "suppressed": {"suppress_tokens": (3, 36, 22, 5)},
    "minimum length": {"min_tokens": 30},
    "length decay": {"exponential_decay_length_penalty": (4, 1.2)},
}
EVERYTHING = functools.reduce(lambda a, b: a | b, SETTINGS.values()) | {
    "no_repeat_ngram_size": 3,
    "repetition_penalty": 1.2,
    "min_tokens": 8,
}
CUTOFFS = {
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.03},
    "eta": {"eta_cutoff": 0.05},
    "after top-k and top-p": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "all": {
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.02,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.01,
    },
}


def test_lists_of_any_length_have_few_shapes():
    """Each has programs of its own, and a server's clients choose the lengths."""
    shapes = set()
    for count in (1, 9, 16, 17, 100, 600, 1024, 2000, 8192):
        ids = tuple(range(count))
        lists = {"stop_token_ids": ids[:16], "allowed_token_ids": ids, "bad_words": (ids[:128],)}
        path = stacked([sj.Sampling(**lists)]).path
        shapes.add((path.stop_ids.shape, path.bias_ids.shape, path.bad_words.shape))
    stops = (1, 16)
    assert shapes == {
        (stops, (1, 512), (1, 16, 8)),
        (stops, (1, 512), (1, 16, 128)),
        (stops, (1, 8192), (1, 16, 128)),
    }


def tiny(layers):
    """Config and params of a tiny random model."""
    cfg = ModelConfig.llama(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=layers,
        num_heads=2,
        intermediate_size=32,
        max_position=128,
    )
    params = init_params(cfg, jax.random.key(0))
    params["layers"] = jax.tree.map(lambda x: 10 * x, params["layers"])
    params["embed"] = params["embed"] * 12
    return cfg, params


@functools.cache
def pair():
    """A target and a draft that often agree."""
    models = (sj.from_params(*tiny(layers)) for layers in (2, 1))
    return tuple(dataclasses.replace(model, eos_ids=ENDS) for model in models)


FULL = sj.Sampling(min_p=0.1, min_tokens=1).arrays(1)
PROMPTS = np.random.Generator(np.random.Philox(5)).integers(8, VOCAB, (20, 9))


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("sampling")
    save_pretrained(directory, *tiny(2))
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@functools.cache
def greedy_rows():
    """64 greedy tokens of every prompt under every setting, speculative and all in one batch."""
    engine = make_engine(*pair(), sj.method("speculative"), {"gamma": 3})
    requests = []
    for given in (*SETTINGS.values(), EVERYTHING):
        sampling = sj.Sampling(**given)
        for prompt in PROMPTS:
            key = jax.random.key(0)
            tokens = prompt.astype(np.int32)
            requests.append(Request(tokens, 64, key, len(requests), sampling=sampling))
    scheduler = Scheduler(engine, len(requests), sj.Sampling(), Bounds.of(requests))
    pieces = scheduler.run(requests, 2**30)
    rows = {piece.index: piece.row for piece in pieces if piece.row}
    assert sum(row.stats["accepted"].sum() for row in rows.values()) > 0
    return [rows[number].tokens[0].tolist() for number in range(len(requests))]


def torch_tokens(model, given):
    """What transformers generates after every prompt."""
    import torch

    from support.processors import transformers_arguments

    out = model.generate(
        torch.tensor(PROMPTS),
        do_sample=False,
        max_new_tokens=64,
        eos_token_id=list(ENDS),
        pad_token_id=0,
        **transformers_arguments(given),
    )
    return out[:, PROMPTS.shape[1] :].tolist()


@pytest.fixture(scope="module")
def plain(torch_model):
    """What transformers generates without any setting."""
    return torch_tokens(torch_model, {})


@pytest.mark.torch
@pytest.mark.parametrize("name", [*SETTINGS, "everything"])
def test_greedy_tokens_are_those_of_transformers(name, torch_model, plain):
    """Rows of different settings share a batch and a program."""
    given = SETTINGS.get(name, EVERYTHING)
    first = [*SETTINGS, "everything"].index(name) * len(PROMPTS)
    ours = greedy_rows()[first : first + len(PROMPTS)]
    theirs = torch_tokens(torch_model, given)
    for got, want in zip(ours, theirs, strict=True):
        assert len(got) == 64 or got[-1] in ENDS
        assert got == want[: len(got)]
    assert theirs != plain, "the setting changes nothing here"


@jax.jit
def processed(inputs, tokens, length, logits):
    """Log p after the first ``length`` tokens of each row, of which 9 are the prompt."""
    rows = jnp.full(len(tokens), 9)
    state = SimpleNamespace(tokens=tokens, length=rows * 0 + length, prompt_length=rows)
    state.counts = path_logits.begin_counts(inputs, state)
    paths = jnp.full((len(tokens), 1, 0), NO_TOKEN)
    x = path_logits.path_logits(inputs, state, logits[:, None], paths)
    return warp(x, inputs.warp)[:, 0]


def law_of(sampling, tokens, length, logits):
    """:func:`processed` under one sampling, padded to one shape, so that all share a program."""
    rows = len(tokens)
    tokens = np.pad(tokens, ((0, 16 - rows), (0, 24 - tokens.shape[1])))
    logits = np.pad(logits, ((0, 16 - rows), (0, 0)))
    inputs = Inputs.of(pair()[0], None, sampling, 16)
    # All settings' arrays, used or not.
    inputs = inputs.replace(warp=stacked([sampling] * 16, FULL))
    return np.asarray(processed(inputs, tokens.astype(np.int32), length, logits))[:rows]


@pytest.mark.torch
@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("name", [*SETTINGS, "everything", *CUTOFFS])
def test_distribution_is_that_of_transformers(name, temperature):
    """On random logits, far from ties; with a temperature, so that the order shows."""
    torch = pytest.importorskip("torch")
    from support.processors import transformers_list

    given = (SETTINGS | CUTOFFS).get(name, EVERYTHING | CUTOFFS["all"])
    generator = np.random.Generator(np.random.Philox(1))
    tokens = generator.integers(0, 12, (16, 20))
    logits = generator.normal(size=(16, VOCAB)).astype(np.float32) * 2
    got = law_of(sj.Sampling(temperature, **given), tokens, 20, logits)
    processors = transformers_list(given | {"temperature": temperature}, ENDS, prompt_length=9)
    want = torch.log_softmax(processors(torch.tensor(tokens), torch.tensor(logits)), -1).numpy()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    kept = np.isfinite(want)
    np.testing.assert_allclose(got[kept], want[kept], atol=2e-5)


def test_presence_and_frequency_count_generated_tokens_alone():
    tokens = np.array([[5, 5, 6, 6, 6, 6, 6, 6, 6, 5, 5, 5, 4]])
    logits = np.zeros((1, VOCAB), np.float32)
    got = law_of(sj.Sampling(1.0, presence_penalty=0.5, frequency_penalty=0.25), tokens, 13, logits)
    raw = np.zeros(VOCAB)
    raw[5] -= 0.5 + 3 * 0.25
    raw[4] -= 0.5 + 0.25
    np.testing.assert_allclose(got[0], raw - np.log(np.exp(raw).sum()), atol=1e-5)


def test_dry_penalizes_by_the_length_of_the_repetition():
    # 1 2 3 4 … 1 2 3: a 4 would be the fourth of a repetition of three. A 9 follows 3 elsewhere.
    tokens = np.array([[1, 2, 3, 4, 8, 3, 9, 8, 0, 1, 2, 3]])
    logits = np.zeros((1, VOCAB), np.float32)
    dry = {"dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 1}
    got = law_of(sj.Sampling(1.0, **dry), tokens, 12, logits)
    raw = np.zeros(VOCAB)
    raw[4] -= 0.8 * 2.0**2
    raw[9] -= 0.8
    np.testing.assert_allclose(got[0], raw - np.log(np.exp(raw).sum()), atol=1e-5)
    # A breaker ends the repetition.
    broken = law_of(sj.Sampling(1.0, **dry, dry_sequence_breakers=(2,)), tokens, 12, logits)
    raw[4] = -0.8
    np.testing.assert_allclose(broken[0], raw - np.log(np.exp(raw).sum()), atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"no_repeat_ngram_size": 2**31 - 1},
        {"exponential_decay_length_penalty": (0, 1e30)},
        {"exponential_decay_length_penalty": (2**31 - 1, 1e30)},
        {"exponential_decay_length_penalty": (0, 1e30), "presence_penalty": 1e30},
        {"repetition_penalty": 1e30},
        {"repetition_penalty": 1e-30, "frequency_penalty": -1e30},
        {"dry_multiplier": 1e30, "dry_base": 1e30, "dry_allowed_length": 0},
        {"logit_bias": {5: 1e30, 6: -1e30}},
        {"min_tokens": 2**31 - 1},
        {"top_p": 1e-30, "top_n_sigma": 1e-30, "min_p": 1.0},
    ],
    ids=str,
)
def test_extreme_settings_leave_a_distribution_and_take_no_longer(given):
    """A client of a server may ask for them. A loop over 2³¹ tokens would never end."""
    generator = np.random.Generator(np.random.Philox(1))
    tokens = generator.integers(0, 12, (16, 20))
    logits = generator.normal(size=(16, VOCAB)).astype(np.float32)
    logits[3] = 0
    for temperature in (1.0, 1e-30):
        got = law_of(sj.Sampling(temperature, **given), tokens, 20, logits)
        np.testing.assert_allclose(np.exp(got).sum(-1), 1, atol=1e-4)


def test_top_n_sigma_keeps_logits_near_the_largest():
    logits = np.random.Generator(np.random.Philox(2)).normal(size=(4, VOCAB)).astype(np.float32)
    got = law_of(sj.Sampling(3.0, top_n_sigma=1.0), np.zeros((4, 9), int), 9, logits)
    kept = logits >= logits.max(-1, keepdims=True) - logits.std(-1, keepdims=True)
    np.testing.assert_array_equal(np.isfinite(got), kept)


def test_only_allowed_tokens_are_left_and_bans_of_everything_are_dropped():
    logits = np.zeros((1, VOCAB), np.float32)
    tokens = np.zeros((1, 9), int)
    got = law_of(sj.Sampling(1.0, allowed_token_ids=(4, 6)), tokens, 9, logits)
    assert np.flatnonzero(np.isfinite(got[0])).tolist() == [4, 6]
    nothing = sj.Sampling(1.0, allowed_token_ids=(4,), suppress_tokens=(4,))
    np.testing.assert_allclose(law_of(nothing, tokens, 9, logits)[0], -np.log(VOCAB), atol=1e-5)


@pytest.mark.parametrize("method", ["contrastive", "scd", "block-scd", "tree-scd"])
def test_bans_act_before_a_contrastive_target_asks_what_is_plausible(method):
    """Only the likeliest tokens are plausible: a ban of them all would count for nothing."""
    target, draft = pair()
    prompts = PROMPTS[:4].tolist()

    def written(**given):
        sampling = sj.Sampling(ignore_eos=True, **given)
        how = {"draft": draft, "method": method, "options": {"alpha": 0.9}, "max_new_tokens": 8}
        return np.array(sj.generate(target, prompts, sampling=sampling, **how).tokens)

    favorites = tuple(np.unique(written()).tolist())
    assert not np.isin(written(suppress_tokens=favorites), favorites).any()
    assert np.isin(written(allowed_token_ids=(20, 21, 22)), (20, 21, 22)).all()


def test_ends_of_each_row():
    rows = [sj.Sampling(), sj.Sampling(ignore_eos=True), sj.Sampling(stop_token_ids=(9,))]
    inputs = Inputs.of(pair()[0], None, sj.Sampling(), 3).replace(warp=stacked(rows))
    ends = inputs.is_eos(jnp.tile(jnp.array([5, 9, 11]), (3, 1)))
    assert ends.tolist() == [
        [True, False, False],
        [False, False, False],
        [True, True, False],
    ]


def test_paths_of_a_tree():
    tokens = jnp.array([[5, 6, 7, 8, 9]])
    parents = np.array([[2**30, 0, 0, 1, 3]])
    want = [[-1] * 3, [6, -1, -1], [7, -1, -1], [6, 8, -1], [6, 8, 9]]
    assert tree.paths(tokens, parents, 3)[0].tolist() == want
    assert tree.paths(tokens, jnp.asarray(parents), 3)[0].tolist() == want


def rounds_text(method, sampling):
    """The lowered program of rounds."""
    target, draft = pair()
    engine = Engine(target, draft, method, {})
    inputs = engine.inputs(sampling, 2)
    keys = jax.random.split(jax.random.key(0), 2)
    budget = np.full(2, 8, np.int32)
    state = loop.start(method, inputs, list(PROMPTS[:2]), budget, keys, chunk=16)
    return loop.run_rounds(method).lower(inputs, state, np.int32(4)).as_text()


@pytest.mark.parametrize("options", [{"gamma": 2}, {"branching": (2, 1)}], ids=str)
def test_a_batch_without_such_settings_runs_the_program_without_them(options, monkeypatch):
    name = "speculative" if "gamma" in options else "specinfer"
    method, _ = sj.method(name).build(Context(*pair()), options)
    off = rounds_text(method, sj.Sampling(0.8))
    loop.forget(method)
    # Without the code: what it is called through does nothing.
    for place in ("specjax.target.node_law", "specjax.draft.model_drafter"):
        monkeypatch.setattr(f"{place}.path_logits", lambda inputs, state, logits, paths: logits)
    monkeypatch.setattr("specjax.core.commit.count_new", lambda counts, tokens, emitted: None)
    monkeypatch.setattr("specjax.core.loop.begin_counts", lambda inputs, state: None)
    monkeypatch.setattr("specjax.core.round.under_grammars", lambda inputs, state, draft: draft)
    monkeypatch.setattr("specjax.core.commit.states_after", lambda *args: None)
    monkeypatch.setattr("specjax.core.warp.cut_off", lambda logits, cutoffs: logits)
    assert rounds_text(method, sj.Sampling(0.8)) == off
    monkeypatch.undo()
    loop.forget(method)
    assert rounds_text(method, sj.Sampling(0.8, presence_penalty=1.0)) != off


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_p": 2}, "min_p=2: expected"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: expected"),
        ({"logit_bias": {-1: 2}}, "logit_bias=dict: expected a bias per token id"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"stop_token_ids": "ab"}, "stop_token_ids=ab: expected token ids"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(sj.OptionError, match=message):
        sj.Sampling(**given)


def test_ids_beyond_the_vocabulary_and_methods_without_settings_are_refused():
    target, draft = pair()
    beyond = sj.Sampling(logit_bias={VOCAB: 1.0})
    with pytest.raises(sj.OptionError, match="logit_bias: token id 40 is beyond the vocabulary"):
        sj.generate(target, PROMPTS, sampling=beyond)
    for method, name in (("beam", "beam"), ("mtad", "beam+joint"), ("mtjd", "mtjd")):
        says = re.escape(f"presence_penalty: method {name} does not support it")
        with pytest.raises(sj.OptionError, match=says):
            sj.generate(
                target,
                PROMPTS,
                draft=draft,
                method=method,
                sampling=sj.Sampling(1.0, presence_penalty=1),
            )


def test_seeds_of_64_bits():
    key = sj.probs.seed_key(2**40 + 3)
    assert jax.random.key_data(key).tolist() == [2**8, 3]
    assert jax.random.key_data(sj.probs.seed_key(7)).tolist() == [0, 7]
