"""Rewards: the word rule on device and on text, parsing, failures, names and bad input."""

import json
import math
import random
import re
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import lm, rewards
from specjax.rewards import folding, lexical, parsing
from specjax.text.tokenizer import Tokenizer
from support.letter_models import save_letter_model

DEMO = lm.DEMO / "target"
TEXT = 'def grow(self):\n    trees = ["tree", Trees]\n    return self.growing + _tree.grow_by(x)\n'


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(DEMO)


def sample(text, prompt="", tokens=(), ended=False, **constraints):
    return rewards.Sample(text, prompt, tokens, constraints, ended)


def on_device(reward, tokenizer, token_rows, constraints):
    """The value of each row by the device reward's fold."""
    found = reward.on_device(tokenizer, constraints)
    data = folding.Data(
        {n: jnp.asarray(x) for n, x in found.shared.items()},
        {n: jnp.asarray(x) for n, x in found.own.items()},
    )
    longest = max(map(len, token_rows))
    tokens = np.zeros((len(token_rows), 1, longest), np.int32)
    for row, ids in zip(tokens, token_rows, strict=True):
        row[0, : len(ids)] = ids
    count = jnp.array([[len(ids)] for ids in token_rows])
    carry = folding.start_all(found.fold, data, len(token_rows))
    ends = folding.advance_all(found.fold, data, carry, jnp.asarray(tokens), count)
    return np.asarray(folding.values_of(found.fold, data, ends))[:, 0]


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["tree"], 1),
        (["Grow"], 1),
        (["growing"], 1),
        (["=tree"], 1),
        (["=trees"], 1),
        (["=grow"], 1),
        (["=Grow"], 0),
        (["=growin"], 0),
        (["=_tree"], 1),
        (["=_tre"], 0),
        (["ree"], 0),
        (["=by"], 0),
        (["tree", "=nothing"], 0.5),
        (["=self", "=return", "=yield"], 2 / 3),
    ],
)
def test_words_stand_between_boundaries_in_their_forms(tokenizer, words, share):
    assert rewards.Lexical().score(sample(TEXT, lexical=words)) == pytest.approx(share)
    ids = tokenizer.encode(TEXT, False)
    found = on_device(rewards.Lexical(), tokenizer, [ids], [{"lexical": words}])
    assert found[0] == pytest.approx(share)


@pytest.mark.parametrize(
    ("word", "form"),
    [
        ("tree", "trees"),
        ("box", "boxes"),
        ("carry", "carried"),
        ("play", "played"),
        ("make", "making"),
        ("hop", "hopped"),
        ("rain", "raining"),
        ("fix", "fixed"),
        ("go", "goes"),
    ],
)
def test_inflections(word, form):
    assert form in rewards.inflections(word)


def test_inflections_follow_the_spelling_rules():
    assert "raining" in rewards.inflections("rain") and "rainning" not in rewards.inflections(
        "rain"
    )
    assert rewards.inflections("x1") == ["x1"]


IRREGULAR = "The children ran to the lake, ate and left. Two mice swam. It was colder."


def test_irregular_forms_satisfy_a_word(tokenizer):
    words = ["child", "Run", "eat", "leave", "mouse", "swim", "be", "cold"]
    ids = tokenizer.encode(IRREGULAR, False)
    for word in words:
        assert rewards.Lexical().score(sample(IRREGULAR, lexical=[word])) == 1, word
        assert rewards.Lexical().score(sample(IRREGULAR, lexical=[f"={word}"])) == 0, word
    found = on_device(rewards.Lexical(), tokenizer, [ids] * 2, [{"lexical": words}] * 2)
    np.testing.assert_array_equal(found, 1)
    # No form of another word, and `forbidden` is not inflected.
    assert rewards.Lexical().score(sample(IRREGULAR, lexical=["runner", "kid", "sea"])) == 0
    assert rewards.Forbidden().score(sample(IRREGULAR, forbidden=["run", "eat"])) == 1


def test_without_the_word_list_a_run_says_what_counts(tokenizer, monkeypatch):
    monkeypatch.setattr("specjax.rewards.lexical.knows_irregular_forms", lambda: False)
    lexical._known_inflections.cache_clear()
    with pytest.warns(rewards.RewardWarning, match=r"only regular .*specjax\[words\]") as said:
        rewards.Lexical().check(tokenizer, [{"lexical": ["run"]}])
    assert len(said) == 1
    assert rewards.inflections("run") == rewards.regular_inflections("run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewards.Lexical().check(tokenizer, [{"lexical": ["=run"]}])
        rewards.Forbidden().check(tokenizer, [{"forbidden": ["run"]}])
    lexical._known_inflections.cache_clear()


def test_any_tokenisation_gives_the_same_words(tokenizer):
    """However a text or a prefix is tokenized, the fold gives the value of the text."""
    chooser, spelled = random.Random(3), tokenizer.token_bytes()
    by_bytes = {}
    for i, text in enumerate(spelled):
        by_bytes.setdefault(text, i)
    words = ["tree", "=self", "grow", "=_tree", "=x", "return"]
    rows = []
    for _ in range(24):
        at, ids, text = 0, [], TEXT.encode()
        while at < len(text):
            sizes = [
                n for n in range(1, 9) if text[at : at + n] in by_bytes and at + n <= len(text)
            ]
            size = chooser.choice(sizes)
            ids.append(by_bytes[text[at : at + size]])
            at += size
        rows.append(ids[: chooser.randrange(1, len(ids) + 1)])
    for reward in (rewards.Lexical(), rewards.Forbidden()):
        asked = [{reward.name: words}] * len(rows)
        found = on_device(reward, tokenizer, rows, asked)
        want = [
            reward.score(sample(b"".join(spelled[i] for i in ids).decode(), **asked[0]))
            for ids in rows
        ]
        np.testing.assert_array_equal(found, np.float32(want))
        assert len(set(want)) > 2


def test_token_bytes_are_the_text(tokenizer):
    ids = tokenizer.encode("x = 'äé\t→'\n", False)
    assert b"".join(tokenizer.token_bytes()[i] for i in ids).decode() == "x = 'äé\t→'\n"


def test_length_rises_and_falls():
    reward = rewards.make_reward("length:4-8")
    assert [reward.score(sample("", tokens=range(n))) for n in (0, 2, 4, 8, 16)] == [
        0,
        0.5,
        1,
        1,
        0.5,
    ]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ('{"a": [1, 2.5, null]}', "valid"),
        (" true ", "valid"),
        ('"x"', "valid"),
        ("", "open"),
        ("{", "open"),
        ('{"a', "open"),
        ('{"a"', "open"),
        ('{"a":', "open"),
        ('{"a": 1,', "open"),
        ("[1, ", "open"),
        ("[1, 2", "open"),
        ("tru", "open"),
        ("-", "open"),
        ("[1.", "open"),
        ("1e", "open"),
        ('["a\\', "open"),
        ('["\\u00', "open"),
        ("[nul", "open"),
        ('{"a": [{"b', "open"),
        ('{"a": fal', "open"),
        ('{"x": "y\\"', "open"),
        ("]", "invalid"),
        ("{]", "invalid"),
        ("{1", "invalid"),
        ("[1 2", "invalid"),
        ("tree", "invalid"),
        ('{"a" 1', "invalid"),
        ("{} x", "invalid"),
        ("[,", "invalid"),
        ("{'a'", "invalid"),
        ("NaN", "invalid"),
        ('{"a": -Infinity}', "invalid"),
    ],
)
def test_json_is_valid_open_or_invalid(text, state):
    assert parsing.json_state(text) == state
    value = {"valid": 1, "open": 0.5, "invalid": 0}[state]
    assert rewards.Json().score(sample(text)) == value
    assert rewards.Json().score(sample(text, ended=True)) == (value == 1)


def test_every_prefix_of_json_is_no_error():
    text = json.dumps({"a": [1, -2.5e3, True, None, {"b": 'q"\\é'}], "c": {}}, ensure_ascii=True)
    for end in range(len(text)):
        assert parsing.json_state(text[:end]) in ("open", "valid"), text[:end]


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("\n        return x\n", True),
        ("\n        if x:", True),
        ("\n        y = [1, {2: (", True),
        ('\n        """Half', True),
        ("\n        s = 'it", True),
        ("\n        x = 1\n        y = (x +", True),
        ("\n        return x\n\n    def g(self):\n        pass\n\nclass B:\n    pass\n", True),
        ("\n        return )\n        x\n", False),
        ("\n    x = = 1\n    y\n", False),
        ("\n        x = 1\n          y = 2\n        z", False),
        ("\n        for x in:\n            y\n", False),
    ],
)
def test_python_parses_once_closed(text, fits):
    prompt = "b\n    old line (\n    def f(self, x):"
    assert rewards.Python().score(sample(text, prompt)) == fits


def test_regex_and_functions():
    assert rewards.make_reward("regex:ret.rn").score(sample("return"))
    assert not rewards.make_reward("regex:^x").score(sample("return"))
    assert rewards.make_reward("builtins:len").score(sample("four")) == 4
    two = rewards.combine(lambda text, prompt: len(prompt) - len(text)).parts[0]
    assert two.score(sample("abc", "abcde")) == 2


def test_several_rewards_are_summed_or_multiplied():
    for product, want in ((False, 5.0), (True, 6.0)):
        both = rewards.combine([lambda text: 2.0, lambda text: 3.0], product)
        scorer = rewards.RewardScorer(both, None, frozenset())
        (scores,) = scorer.scores([sample("")])
        assert both.value(scores) == want
        assert both.value([0.0, -math.inf]) == -math.inf
    fold = folding.Together((Number(0.0), Number(math.nan)), True)
    assert fold.value((None, None), (None, None), (0, 0)) == -math.inf
    bounds = rewards.combine(["lexical:a", "length:3"]).bounds
    assert bounds == (0, 2)


class Number:
    def __init__(self, number):
        self.number = number

    def value(self, shared, own, carry):
        return self.number


def test_a_failing_reward_is_said_once_and_scores_minus_infinity():
    def fails(text):
        raise KeyError("gone")

    scorer = rewards.RewardScorer(
        rewards.combine([fails, lambda text: math.nan]), None, frozenset()
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for text in ("one text", "another"):
            assert scorer.scores([sample(text)]) == [(-math.inf, -math.inf)]
    assert len(said) == 2
    first, second = (str(w.message) for w in said)
    assert "fails raised KeyError" in first and "'one text'" in first
    assert "returned NaN" in second


def test_samples_are_scored_together_and_alone_where_that_fails():
    asked = []

    class Together(rewards.Regex):
        def score_many(self, samples):
            asked.append(len(samples))
            return [1.0 / (len(sample.text) - 3) for sample in samples]

        def score(self, sample):
            return self.score_many([sample])[0]

    scorer = rewards.RewardScorer(
        rewards.combine([Together(re.compile("")), len]), None, frozenset()
    )
    assert scorer.scores([sample("ab"), sample("a")]) == [(-1.0, 2.0), (-0.5, 1.0)]
    with pytest.warns(rewards.RewardWarning, match="ZeroDivisionError.*'abc'"):
        found = scorer.scores([sample("ab"), sample("abc")])
    assert found == [(-1.0, 2.0), (-math.inf, 3.0)]
    assert asked == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lexica", "unknown reward"),
        ("length:", "LOW-HIGH"),
        ("length:9-3", "LOW-HIGH"),
        ("length:0", "LOW-HIGH"),
        ("regex:(", "not a pattern"),
        ("regex", "expected a pattern"),
        ("json:x", "takes no argument"),
        ("classifier", "expected a directory"),
        ("classifier:/no/such", "no model directory"),
        ("nosuchmodule:f", "cannot be imported"),
        ("math:nothing", "has no function"),
        ("math:pi", "has no function"),
    ],
)
def test_unknown_and_malformed_rewards(name, says):
    with pytest.raises(sj.OptionError, match=re.escape(says)):
        rewards.make_reward(name)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no words"),
        ([" "], "is empty"),
        (["="], "is empty"),
        (["x" * 40], "at most 32"),
        (["\ud800"], "cannot encode"),
    ],
)
def test_words_that_cannot_be_looked_for(tokenizer, words, says):
    with pytest.raises(sj.OptionError, match=says):
        rewards.Lexical().check(tokenizer, [{"lexical": words}])


def test_thresholds_must_lie_within_the_reward():
    both = rewards.combine(["lexical:a", "length:3"])
    for good in (0, 1.5, 2):
        both.check_threshold(good)
    for bad in (-0.1, 2.1):
        with pytest.raises(sj.OptionError, match="between 0 and 2"):
            both.check_threshold(bad)
    rewards.combine([len]).check_threshold(100)


def test_arrays_of_like_jobs_have_one_shape(tokenizer):
    shapes = []
    for words in (["a"], ["tree", "grow", "=self"]):
        own = rewards.Lexical().on_device(tokenizer, [{"lexical": words}]).own
        shapes.append({n: x.shape for n, x in own.items()})
    few, more = shapes
    assert few["wanted"] == more["wanted"]
    assert all(a[1] % 16 == 0 for a in (few["final"], more["final"]))


@pytest.mark.torch
@pytest.mark.parametrize("labels", [1, 2, 3])
def test_classifier_is_the_sigmoid_of_the_last_class(tmp_path, tiny_pair_dirs, labels):
    torch = pytest.importorskip("torch")
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=labels,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.score.weight.data *= 20
    model.save_pretrained(tmp_path)
    file = str(Path(tiny_pair_dirs[0]) / "tokenizer.json")
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    tokens.save_pretrained(tmp_path)

    reward = rewards.make_reward(f"classifier:{tmp_path}")
    with torch.inference_mode():
        logits = model(**tokens("def f(x):\n    return x", return_tensors="pt")).logits[0].double()
    odds = torch.cat([logits, torch.zeros(1)]) if labels == 1 else logits.roll(1)
    want = float(torch.softmax(odds, 0)[0])
    found = reward.score(sample("\n    return x", "def f(x):"))
    assert found == pytest.approx(want, abs=1e-6) and 0.001 < found < 0.999


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A classifier of letters that reads 12 tokens and takes pairs: [CLS] a [SEP] b [SEP]."""
    pytest.importorskip("torch")
    return letter_classifier(tmp_path_factory.mktemp("pairs"), "BertForSequenceClassification", 0)


def letter_classifier(home, kind, pad, template=True):
    """Tokenizer and reward of a tiny ``kind`` with a token per letter."""
    import transformers

    save_letter_model(home, kind, pad, template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    return rewards.make_reward(f"classifier:{home}"), tokenizer


@pytest.mark.torch
def test_classifier_reads_the_tokenizers_own_pair(pairs):
    reward, tokenizer = pairs
    found = reward.encode(sample("de", "abc"))
    assert found == tokenizer("abc", "de")
    assert found["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("prompt", "text", "read"),
    [
        ("abcdefghijkl", "xyz", ("ghijkl", "xyz")),
        ("abcdefghijkl", "rstuvwxyz", ("", "rstuvwxyz")),
        ("abc", "opqrstuvwxyz", ("", "rstuvwxyz")),
    ],
    ids=["a long prompt", "no place for a prompt", "a long completion"],
)
def test_classifier_cuts_the_left_of_the_prompt(pairs, prompt, text, read):
    """Of 12 tokens 3 are special. Up to 9 of a completion are kept; a longer one keeps its end."""
    reward, tokenizer = pairs
    assert reward.encode(sample(text, prompt)) == tokenizer(*read)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "pad"),
    [
        ("BertForSequenceClassification", 0),
        ("LlamaForSequenceClassification", 0),
        ("LlamaForSequenceClassification", None),
    ],
    ids=["pairs", "one text", "one text, no padding"],
)
def test_classifier_in_a_batch_is_the_classifier_alone(tmp_path, kind, pad):
    """Texts of any lengths run in batches of 32, or one by one without a padding token."""
    pytest.importorskip("torch")
    reward, _ = letter_classifier(tmp_path, kind, pad, template=kind.startswith("Bert"))
    samples = [sample("xyz"[: i % 3 + 1], "abcdefghijkl"[: i % 11]) for i in range(40)]
    alone = [reward.score(one) for one in samples]
    np.testing.assert_allclose(reward.score_many(samples), alone, rtol=0, atol=1e-5)
    assert np.ptp(alone) > 0.01
    if not kind.startswith("Bert"):
        cut = reward.encode(sample("xyz", "abcdefghijkl"))["input_ids"]
        assert reward._loaded[0].decode(cut).replace(" ", "") == "defghijklxyz"


@pytest.mark.torch
def test_a_directory_without_weights_is_no_classifier(tmp_path, tokenizer):
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(sj.OptionError, match="cannot be loaded"):
        rewards.make_reward(f"classifier:{tmp_path}").check(tokenizer, [{}])
