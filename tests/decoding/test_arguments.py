"""What the public functions accept, and what they refuse before anything compiles."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import specjax as sj
from specjax import rewards, search
from specjax._util.checks import Check, format_value
from specjax.core import loop
from specjax.text.tokenizer import Tokenizer

IDS = [[5, 6, 7], [8, 9, 10]]
ROWS = {"prompts": IDS}


@pytest.fixture(scope="module")
def models(target, draft):
    vocab = {f"w{i}": i for i in range(98)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    target = dataclasses.replace(target, tokenizer=tokenizer)
    return target, dataclasses.replace(draft, tokenizer=tokenizer)


@pytest.fixture
def no_compilation(monkeypatch):
    """Fails if a key is made (the first thing that compiles) or a batch starts."""

    def fail(*_, **__):
        raise AssertionError("something compiled")

    monkeypatch.setattr(jax.random, "key", fail)
    monkeypatch.setattr(loop, "start", fail)


def cases(name, *values):
    return [{name: value} for value in values]


WRONG_ARGUMENTS = [
    *cases("prompts", 7, 7.0, None, True, b"w1", {"w1": 1}, {"w1"}, [], (), "", [""], iter(())),
    *cases("prompts", [None], [b"w1"], [[]], [["w1"]], [[1, "a"]], [[1, None]], [[1.5]], [[True]]),
    *cases("prompts", [[[1]]], [1, [2]], [[98]], [[-1]], [[2**40]], [[1] * 512], [{"role": "x"}]),
    *cases("prompts", np.ones(3), np.ones((2, 3), bool), np.ones((1, 1, 1), int), np.int32(7)),
    *cases("prompts", jnp.ones(3), np.zeros((0, 3), int), "w1 \ud800", object),
    *cases("seed", "abc", 1.5, None, -1, 2**64, True, [1], 10**5000, float("nan"), "1" * 5000),
    *cases("batch_size", 0, -1, 1.5, "two", True, [2], np.array([2]), float("inf")),
    *cases("max_new_tokens", 0, -1, None, 2.5, "many", float("inf"), float("nan"), {}, 3j),
    *cases("num_samples", 0, -1, 1.5, 10**9, "x", None),
    *cases("stop", 7, [7], [""], "", b"x", [None], [["a"]], 1.5),
    *cases("logprobs", "maybe", 2, None, [], np.ones(2)),
    *cases("indices", 3, [1], [1, 2, 3], [-1, 0], [0, 2**31], [0.5, 1.5], "01"),
    *cases("rounds_per_piece", 0, -1, 1.5, None),
    *cases("sampling", 0.8, {"temperature": 1}, sj.Sampling, "greedy"),
    *cases("method", 7, 0.5, "specluative", ["beam"], sj.draft.Chain(), search.BeamSearch),
    *cases("drafter", 7, "", "chian", sj.draft.Chain, "speculative", len),
    *cases("rule", 7, "", "blok", len, sj.draft.Chain()),
    *cases("target_dist", 7, "", "warpd", len),
    *cases("draft", "demo-draft", 7, {}),
    *cases("options", 7, "gamma=3", ["gamma"], {7: 1}, {"gama": 3}),
    *cases("constraints", 7, "tree", [{}], [{}] * 3, [7, 7], [{"lexical": 7}] * 2),
    *cases("reward", 7, "lexicla", [], [7], ""),
    {"target": "demo"},
    {"target": None},
]
BAD_OPTIONS = [
    *cases("gamma", "x", 0, 2.5, "2.5", None, True, [3], float("inf"), 65, np.array([3]), b"3"),
    *cases("draft_warp", "perhaps", 2, None, []),
    *cases("stop", 7, "sometimes", None),
    *cases("tau1", "x", -1, 2, None, True, float("nan")),
]


def case_id(call):
    name, value = next(iter(call.items()))
    return f"{name}={format_value(value)}"


def assert_refused(function, name, *args, **named):
    with pytest.raises((sj.OptionError, TypeError)) as error:
        function(*args, **named)
    message = str(error.value)
    # The message may say "option" for options, and "target distribution" for target_dist.
    assert name.replace("target_dist", "target").removesuffix("s") in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize("wrong", WRONG_ARGUMENTS, ids=case_id)
def test_a_wrong_argument_is_named_before_anything_compiles(models, no_compilation, wrong):
    function = sj.stream if "rounds_per_piece" in wrong else sj.generate
    assert_refused(function, next(iter(wrong)), **{"target": models[0]} | ROWS | wrong)


@pytest.mark.parametrize("wrong", BAD_OPTIONS, ids=case_id)
def test_a_wrong_option_is_named_before_anything_compiles(models, no_compilation, wrong):
    target, draft = models
    given = {"method": "speculative", "draft": draft, "options": wrong}
    assert_refused(sj.generate, next(iter(wrong)), target, IDS, **given)


WRONG_VALUES = [
    (sj.Sampling, "temperature", ("x", None, True, -1, float("nan"), float("inf"), 1e39, [1])),
    (sj.Sampling, "top_k", (-1, 1.5, "x", None, True, 2**31)),
    (sj.Sampling, "top_p", (0, 2, -0.5, "x", None, True, float("nan"))),
    (sj.draft.Chain, "gamma", (0, -1, 2.5, "x", None, True, [3])),
    (sj.draft.Chain, "stop", (7, "sometimes", None)),
    (sj.draft.Chain, "draft_warp", ("maybe", 2, None)),
    (sj.draft.Lookup, "ngram", (0, 1.5, "x")),
    (
        sj.draft.Tree,
        "branching",
        (4, (), "", (4, 0), (2.5,), "4,x", (64, 64), ((1,),), None, (True,)),
    ),
    (sj.draft.Tree.iid, "gamma", (0, "x", 1.5)),
    (sj.draft.Beam, "width", (0, "x", 1.5)),
    (sj.draft.Beam, "joint", (7, "cooked")),
    (search.BeamSearch, "beams", (0, "x", 1.5)),
    (search.MTJD, "block", (0, "x", 1.5)),
    (sj.Contrastive, "variant", (7, "better")),
    (rewards.Lexical, "words", (7, [7])),
    (rewards.Length, "low", (-1, "x")),
    (rewards.Regex, "pattern", ("a+", 7)),
    (sj.make_mesh, "data", (0, "x", 1.5, True)),
    (sj.load, "path_or_id", (7, None, b"demo", ["demo"])),
    (sj.load, "pickles", ("maybe", None)),
    (sj.load, "mesh", ("data=2", (1, 2))),
    (sj.on_mesh, "mesh", (None, (1, 2))),
    (sj.from_params, "config", (None, {}, "demo")),
    (sj.from_params, "params", (None, 7, "demo")),
    (sj.from_params, "tokenizer", ("demo", 7)),
    (sj.from_params, "eos_ids", (7, "7", [0.5], [None])),
    (sj.method, "method", (7, None, ["beam"])),
    (sj.compose, "drafter", (7, None, sj.draft.Chain)),
    (sj.compose, "rule", (7, None, len)),
    (sj.DraftVerify, "drafter", (7, "chain")),
    (sj.DraftVerify, "rule", (7, "match", len)),
    (sj.draft_verify, "target", (7, "warped")),
    (sj.rule, "accepts", (7, [7])),
]
OTHER_ARGUMENTS = {
    sj.draft.Tree.iid: {"chains": 2},
    rewards.Length: {"high": 3},
    sj.load: {"path_or_id": "demo"},
    sj.on_mesh: {"model": None},
    sj.from_params: {"config": None, "params": {}},
    sj.compose: {"drafter": "chain", "rule": "match"},
    sj.DraftVerify: {"drafter": sj.draft.Lookup(), "target": sj.Warped(), "rule": sj.verify.match},
    sj.draft_verify: {"drafter": sj.draft.Lookup(), "rule": sj.verify.match},
    sj.rule: {"lossless": True},
}


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(make, name, value) for make, name, values in WRONG_VALUES for value in values],
    ids=lambda value: None if callable(value) else format_value(value),
)
def test_a_wrong_value_of_an_object_or_function_is_refused(
    models, no_compilation, make, name, value
):
    rest = dict(OTHER_ARGUMENTS.get(make, {}))
    if "model" in rest:
        rest["model"] = models[0]
    if "config" in rest:
        rest["config"] = models[0].config
    if make is sj.method:
        return assert_refused(make, name, value)
    if make is sj.rule:
        return assert_refused(lambda **kw: sj.rule(**kw)(len), name, **rest | {name: value})
    return assert_refused(make, name, **rest | {name: value})


def test_equivalent_values_are_converted(tmp_path):
    three = sj.draft.Chain(3)
    for gamma in ("3", 3.0, np.int64(3), np.float32(3), jnp.int32(3), np.array(3)):
        assert sj.draft.Chain(gamma) == three and type(sj.draft.Chain(gamma).gamma) is int
    for branching in ("4,2", [4, 2], np.array([4, 2]), ("4", 2.0), (n for n in (4, 2))):
        assert sj.draft.Tree(branching) == sj.draft.Tree((4, 2))
        hash(sj.draft.Tree(branching if isinstance(branching, str) else (4, 2)))
    assert sj.draft.Chain(draft_warp="false") == sj.draft.Chain(draft_warp=np.False_)
    assert sj.Sampling("0.5", np.int32(4), jnp.float32(0.5)) == sj.Sampling(0.5, 4, 0.5)
    assert rewards.Lexical("tree") == rewards.Lexical(("tree",))
    assert sj.rule(accepts="iid", lossless=True)(len).accepts == {"iid"}
    assert sj.method("beam") is sj.methods()["beam"]
    for dtype in ("float16", jnp.float16, np.dtype("float16")):
        with pytest.raises(sj.ModelError, match="no such model directory"):
            sj.load(Path(tmp_path / "none"), dtype)


DEFAULTS = {"seed": 3, "batch_size": 2, "max_new_tokens": 6, "stop": ("w90",), "logprobs": False}
EQUIVALENT = [
    {"prompts": tuple(map(tuple, IDS))},
    {"prompts": np.array(IDS)},
    {"prompts": np.array(IDS, np.uint8)},
    {"prompts": jnp.array(IDS)},
    {"prompts": [np.array(row) for row in IDS]},
    {"prompts": ["w5 w6 w7", "w8 w9 w10"]},
    {"prompts": np.array(["w5 w6 w7", "w8 w9 w10"])},
    {"seed": np.int64(3), "batch_size": np.int32(2), "max_new_tokens": jnp.int32(6)},
    {"seed": "3", "batch_size": 2.0, "max_new_tokens": "6", "num_samples": 1.0},
    {"stop": "w90", "logprobs": "false"},
    {"stop": ["w90"], "logprobs": 0, "batch_size": None, "indices": np.arange(2)},
    {"stop": {"w90"}, "options": None},
    {"method": sj.method("autoregressive"), "constraints": [{"lexical": "w1"}] * 2},
    {"method": sj.DraftVerify(sj.draft.NoDraft(), sj.Warped(), sj.verify.match)},
    {"method": None},
    {"options": [], "drafter": "none"},
]


def decode(target, **given):
    out = sj.generate(target, **ROWS | DEFAULTS | {"sampling": sj.Sampling(1.0)} | given)
    return [row.tolist() for row in out.tokens], out.text


@pytest.mark.parametrize("equivalent", EQUIVALENT, ids=lambda equivalent: ",".join(equivalent))
def test_equivalent_arguments_give_the_same_output(models, equivalent):
    assert decode(models[0], **equivalent) == decode(models[0])


def test_prompts_may_be_iterators_or_a_single_prompt(models):
    lazily = ((token for token in row) for row in IDS)
    assert decode(models[0], prompts=lazily) == decode(models[0])
    twice = {"num_samples": 2}  # two rows, as above, so the compiled program is shared
    alone = decode(models[0], prompts=IDS[:1], **twice)
    first = IDS[0]
    for row in (first, tuple(first), np.array(first), jnp.array(first), range(5, 8), iter(first)):
        assert decode(models[0], prompts=row, **twice) == alone
    assert decode(models[0], prompts="w5 w6 w7", **twice) == alone


def test_options_of_a_method_object_are_checked(models, no_compilation):
    target, draft = models
    method = sj.DraftVerify(sj.draft.Chain(stop="before"), sj.Warped(), sj.verify.speculative)
    with pytest.raises(sj.PairError, match="needs a draft model"):
        sj.generate(target, IDS, method=method)
    with pytest.raises(sj.OptionError, match="tau1=2: expected a number from 0 to 1"):
        sj.generate(target, IDS, method=method, draft=draft, options={"tau1": 2})
    with pytest.raises(sj.OptionError, match="unknown option 'gamma'"):
        sj.generate(target, IDS, method=method, draft=draft, options={"gamma": 2})


def test_a_budget_is_cut_to_the_context_length(models, monkeypatch):
    budgets = []

    def start(method, inputs, prompts, budget, *_, **__):
        budgets.extend(budget)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "start", start)
    with pytest.raises(KeyboardInterrupt):
        sj.generate(models[0], IDS, max_new_tokens=1e9)
    assert budgets == [models[0].config.max_position - 3] * 2


def test_stream_refuses_before_it_is_iterated(models):
    with pytest.raises(sj.OptionError, match="batch_size"):
        sj.stream(models[0], IDS, batch_size=0)


def test_format_value_is_short_and_one_line():
    for value in ("a\nb" * 99, 10**9999, ["x" * 999] * 99, np.ones((9, 9)), object(), -(2**999)):
        assert len(format_value(value)) < 200 and "\n" not in format_value(value)
    with pytest.raises(sj.OptionError, match="n=a b: expected a whole number"):
        Check(int).parse("n", "a\nb")


def test_a_method_and_its_parts_exclude_each_other(models):
    target, draft = models
    for part in ({"drafter": "lookup"}, {"rule": "match"}, {"target_dist": "contrastive"}):
        with pytest.raises(sj.OptionError, match="method= has its parts: leave it out"):
            sj.generate(target, IDS, method="mentored", draft=draft, **part)


def test_reward_guided_methods_draw_nothing(models):
    target, _ = models
    with pytest.raises(sj.OptionError, match="reward-guided methods are greedy"):
        given = {"method": "cdlh", "reward": "python", "sampling": sj.Sampling(0.8)}
        sj.generate(target, IDS, **given)
