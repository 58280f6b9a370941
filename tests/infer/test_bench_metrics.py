"""Metrics against their libraries, slow references and values computed by hand."""

import contextlib
import itertools
import json
import shutil
import sqlite3
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from rouge_score import rouge_scorer

import specjax as sj
from infer.bench.commands import main
from infer.bench.metrics import judge as judging
from infer.bench.metrics import mauve as comparing
from infer.bench.metrics.coherence import CLS, MEAN, POOLER, cosine, of_transformers
from infer.bench.metrics.diversity import counts_of
from infer.bench.metrics.execution import query_of, run_query, same_rows
from infer.bench.metrics.gsm8k import answer
from infer.bench.metrics.llama_guard import LlamaGuard
from infer.bench.metrics.passing import as_task, pass_at_k, program_of
from infer.bench.metrics.protocol import Completion
from infer.bench.metrics.settings import Settings
from infer.bench.metrics.table import METRICS, make_metric
from infer.bench.report import tables
from specjax import metrics
from specjax._util.errors import OptionError
from support.judging import judging_with


def figure(metric, *by_prompt):
    """The figure of a metric that has one, for each prompt's completion or completions."""
    (value,) = metric.measure(
        [prompt if isinstance(prompt, list) else [prompt] for prompt in by_prompt]
    )
    return metric.measure([p if isinstance(p, list) else [p] for p in by_prompt])[value][0]


def each(metric, *done):
    """The first column's score of each completion."""
    return [scores[0] for scores in metric.scores(done)]


# --- texts against texts ---------------------------------------------------------------------

PAIRS = [  # completion, references
    ("police kill the gunman", ["police killed the gunman"]),
    ("the gunman police killed", ["police killed the gunman"]),
    ("the cat sat on the mat", ["the cat was on the mat", "a dog slept"]),
    ("a b c d", ["d c b a"]),
    ("a b c d", ["a b c d"]),
    ("", ["a"]),
    ("a", [""]),
    ("one two three", ["four five six"]),
    ("Running runners ran", ["runner runs running"]),
    ("First line\nSecond line", ["Second line\nFirst line"]),
    ("1,000 dollars", ["1 000 dollars"]),
    ("x " * 30, ["x " * 3]),
    ("she said: hello!", ["Hello she said"]),
    ("tic tac toe tic tac", ["tic tac tic tac"]),
    ("a a a b", ["a b b b", "a a b b"]),
    ("the quick brown fox", ["the quick brown fox jumps over the lazy dog"]),
    ("jumps over the lazy dog", ["the quick brown fox jumps over the lazy dog"]),
    ("don't stop", ["do not stop"]),
    ("A.B.C", ["a b c"]),
    ("end", ["the end", "end"]),
]


@pytest.mark.parametrize("stem", [False, True], ids=["words", "stems"])
def test_rouge_is_the_librarys(stem):
    """The best reference counts, as in the library. For ASCII words its ROUGE-L equals ours."""
    theirs = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=stem)
    metric = make_metric("rouge:stem" if stem else "rouge")
    measured = metric.scores([Completion("p", text, (), known) for text, known in PAIRS])
    assert len(PAIRS) == 20
    for (text, known), scores in zip(PAIRS, measured, strict=True):
        all_of_them = [theirs.score(reference, text) for reference in known]
        want = [max(s[key].fmeasure for s in all_of_them) for key in metric.columns]
        assert scores == want
        if not stem:
            assert scores[2] == pytest.approx(metrics.rouge_l(text, known))


def test_a_metric_is_the_mean_of_its_scores_with_the_interval_of_its_prompts():
    done = [[Completion("p", text, (), ["a"]) for text in texts] for texts in ("ab", "aa", "bb")]
    ((value, half_width),) = make_metric("exact").measure(done).values()
    assert value == 0.5 and 0 < half_width < 1


def test_exact_takes_any_reference_and_the_middle():
    metric = make_metric("exact")
    done = [
        Completion("p", " x\n", (), ["x"]),
        Completion("p", "x y", (), ["x  y", "x y"]),
        Completion("p", "z", (), ["y"], {"middle": "z "}),
        Completion("p", "X", (), ["x"]),
        Completion("p", "", (), ["x"]),
    ]
    assert each(metric, *done) == [1, 1, 1, 0, 0]


ANSWERS = {  # what the dataset's own code reads, else the last number
    "so 5 + 3 = 8\n#### 8": 8,
    "#### 1,234": 1234,
    "#### -7": -7,
    "#### 3.50": 3.5,
    "#### 42.": 42,
    "#### 12 dollars": 12,
    "8 of 9. #### 4\nQuestion: what is 3?": 4,
    "The answer is 18.": 18,
    "It is 18 or 20": 20,
    "He pays $1,000.00 in all": 1000,
    "-3 degrees": -3,
    "half is .5": 0.5,
    "12 \nQ: and now? A: 99": 12,
    "12\n\nProblem: 2 + 2": 12,
    "no number": None,
    "": None,
    "####": None,
    "#### five, so 5": 5,
    "#### 7 #### 9": 7,
    "3 times 4 is 12, and 12 - 2 is 10": 10,
}


def test_gsm8k_reads_what_the_datasets_code_reads():
    assert len(ANSWERS) == 20
    for text, want in ANSWERS.items():
        number = answer(text)
        assert (number is None) == (want is None) and (want is None or float(number) == want), text
    task = {"answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
    texts = ("so 4.0", "#### 5 or 4", "none", "")
    scores = each(make_metric("gsm8k"), *(Completion("q", t, (), (), task) for t in texts))
    assert scores == [1, 0, 0, 0]


def test_diversity_is_simctgs():
    """By hand, as SimCTG counts: each text's last n-gram is left out; sums are over all texts."""
    repeated, short = "a b a b a b c", "d e f"
    # Bigrams of the first text without the last one: ab ba ab ba ab; of the second: de.
    assert counts_of(repeated).tolist() == [[2, 5], [2, 4], [2, 3]]
    assert counts_of(short).tolist() == [[1, 1], [0, 0], [0, 0]]
    figures = make_metric("diversity").measure(
        [[Completion("", repeated)], [Completion("", short)]]
    )
    value, half_width = figures["diversity_words"]
    assert value == pytest.approx(3 / 6 * 2 / 4 * 2 / 3)
    assert half_width is not None
    assert make_metric("diversity").measure([[Completion("", "a")]])["diversity_words"][0] is None


# --- code and queries ------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_all_choices():
    for n in range(1, 9):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            passed = [i < c for i in range(n)]
            choices = list(itertools.combinations(passed, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert 0 < pass_at_k(1000, 3, 100) < 1


def test_pass_at_k_counts_the_seeds_of_a_prompt(monkeypatch):
    ran = []
    monkeypatch.setattr("infer.bench.metrics.passing.choose_guard", lambda unsafe: None)
    monkeypatch.setattr(
        "infer.bench.metrics.passing.passing",
        lambda tasks, programs, guard: ran.extend(programs) or ["good" in p for p in programs],
    )
    task = {"prompt": "def f():\n", "test": "", "entry_point": "f"}
    by_prompt = [
        [Completion("", f"    {text}\n\nprint(1)", (), (), task) for text in texts]
        for texts in (("good", "bad", "bad"), ("bad", "bad", "bad"))
    ]
    figures = make_metric("pass@2", Settings(repeats=3)).measure(by_prompt)
    assert figures["pass_at_2"][0] == pytest.approx((2 / 3 + 0) / 2)
    assert ran[0] == "def f():\n    good\n\n" and len(ran) == 6
    greedy = [prompt[:1] for prompt in by_prompt]
    assert make_metric("pass@2", Settings(repeats=2)).measure(greedy)["pass_at_2"] == (None, None)
    with pytest.raises(OptionError, match="--repeats 3 or more"):
        make_metric("pass@3", Settings(repeats=2))


def test_mbpp_becomes_a_check():
    task = {
        "text": "Write a function to add.",
        "code": "def helper(a):\n  return a\ndef add(a, b):\n  return helper(a) + b",
        "test_list": ["assert set([add(1, 2)]) == {3}", "assert add(0, 0) == 0"],
        "test_setup_code": "import math",
    }
    converted = as_task(task)
    given = {"prompt": "Write!", "test": "def check(f): ...", "entry_point": "f"}
    assert as_task(task | given) == given | {"prompt": ""}
    assert (
        converted["entry_point"] == "add" and as_task({**task, "code": ""})["entry_point"] == "add"
    )
    space = {}
    exec(converted["test"], space)
    space["check"](lambda a, b: a + b)
    with pytest.raises(AssertionError):
        space["check"](lambda a, b: a - b)
    text = "```python\ndef add(a, b):\n    return a + b\n```\nwhich adds"
    assert program_of(Completion("", text, (), (), task)) == "def add(a, b):\n    return a + b\n\n"
    assert program_of(Completion("", "x = 1\n[DONE]\ny", (), (), task)) == "x = 1\n\n"


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    home = tmp_path_factory.mktemp("database")
    (home / "pets").mkdir()
    with contextlib.closing(sqlite3.connect(home / "pets" / "pets.sqlite")) as base, base:
        base.execute("CREATE TABLE pet (id INTEGER, name TEXT, age REAL, owner TEXT)")
        rows = [(1, "Rex", 3, "Ann"), (2, "Tom", 5, "Bob"), (3, "Ada", 3, "Ann"), (4, None, 1, "")]
        base.executemany("INSERT INTO pet VALUES (?, ?, ?, ?)", rows)
    return home


ALL, SORTED = "SELECT name, age FROM pet", "SELECT name FROM pet ORDER BY age, name"
QUERIES = [  # completion, gold query, whether it is right
    ("SELECT name, age FROM pet", ALL, 1),
    ("select age, name from pet;", ALL, 1),  # columns in any order
    ("SELECT name, age FROM pet ORDER BY age DESC", ALL, 1),  # the gold query has no ORDER BY
    ("SELECT name, age FROM pet WHERE id < 4", ALL, 0),
    ("SELECT name FROM pet", ALL, 0),
    ("SELECT name, age, id FROM pet", ALL, 0),
    ("SELECT name, age FROM pet UNION ALL SELECT name, age FROM pet", ALL, 0),
    ("SELECT name, id FROM pet", ALL, 0),
    (" name, age FROM pet", ALL, 1),  # continues the prompt's SELECT
    ("```sql\nSELECT name, age FROM pet\n```", ALL, 1),
    ("SELECT name, age\nFROM pet\n\nQuestion: more", ALL, 1),
    (SORTED, SORTED, 1),
    ("SELECT name FROM pet", SORTED, 0),
    ("SELECT name FROM pet ORDER BY age DESC, name", SORTED, 0),
    ("SELECT count(*) FROM pet", "SELECT 4", 1),
    ("SELECT 4.0", "SELECT count(*) FROM pet", 1),
    ("WITH old AS (SELECT * FROM pet WHERE age > 2) SELECT count(*) FROM old", "SELECT 3", 1),
    ("SELECT * FROM nowhere", ALL, 0),
    ("", ALL, 0),
    ("SELECT name FROM pet WHERE 0", "SELECT id FROM pet WHERE 0", 1),
]


def test_execution_compares_rows(databases):
    metric = make_metric(f"execution:{databases}")
    assert len(QUERIES) == 20
    for text, gold, right in QUERIES:
        task = {"db_id": "pets", "query": gold}
        assert each(metric, Completion("list: SELECT", text, (), (), task)) == [right], text


def test_rows_match_if_columns_have_the_same_values():
    """Both columns contain 1 and 2, so only whole rows can match them."""
    assert same_rows([(1, 2), (2, 1)], [(2, 1), (1, 2)], ordered=False)
    assert same_rows([(1, 2, 3), (2, 1, 3)], [(3, 2, 1), (3, 1, 2)], ordered=True)
    assert not same_rows([(1, 1), (2, 2)], [(1, 2), (2, 1)], ordered=False)
    for language in ("sql", "sqlite", "sqlite3", "SQL", ""):
        assert query_of(Completion("Q", f"```{language}\nSELECT 1\n```")).strip() == "SELECT 1"
    assert query_of(Completion("Q: SELECT", "with x as (select 1) select * from x")).startswith("w")


HARM = [
    "ATTACH DATABASE 'mine.db' AS mine",
    "DELETE FROM pet",
    "INSERT INTO pet VALUES (9, 'x', 1, '')",
    "DROP TABLE pet",
    "CREATE TEMP TABLE mine (x)",
    "PRAGMA query_only = 0",
    "VACUUM INTO 'mine.db'",
    "SELECT load_extension('x')",
    "SELECT randomblob(100000000)",
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
    "SELECT 1; SELECT 2",
    "SELECT '\0'",
]


@pytest.mark.parametrize("query", HARM, ids=range(len(HARM)))
def test_queries_that_are_not_allowed_are_errors(databases, query, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    file = databases / "pets" / "pets.sqlite"
    before = file.read_bytes()
    with pytest.raises(sqlite3.Error):
        run_query(file, query)
    assert file.read_bytes() == before and not list(tmp_path.iterdir())


def test_a_query_has_limited_time(databases, monkeypatch):
    monkeypatch.setattr("infer.bench.metrics.execution.SECONDS", 0.05)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT sum(x) FROM n"
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        run_query(databases / "pets" / "pets.sqlite", endless)


# --- with models -----------------------------------------------------------------------------


def test_mauve_gets_final_states_of_last_tokens(tiny_pair_dirs, monkeypatch):
    """The library gets features of prompt and text; the figure is the mean over seeds."""
    given = []

    def compute_mauve(p_features, q_features):
        given.append((p_features, q_features))
        return types.SimpleNamespace(mauve=float(q_features[0, 0]))

    monkeypatch.setitem(sys.modules, "mauve", types.SimpleNamespace(compute_mauve=compute_mauve))
    metric = make_metric(f"mauve:{tiny_pair_dirs[0]}")
    by_prompt = [
        [Completion(prompt, text, (), [known]) for text in ("return x", "import os")]
        for prompt, known in (("def f(x):\n    ", "pass"), ("x = ", "None"))
    ]
    value, half_width = metric.measure(by_prompt)["mauve"]
    assert len(given) == 2 + 2 * comparing.RESAMPLES
    model = sj.load(tiny_pair_dirs[0])

    # The logits are linear in the final state, so they show whether it is the right one.
    text = "def f(x):\n    pass"
    logits = given[0][0][0] @ np.asarray(model.params["embed"], np.float32).T
    row = np.array([model.tokenizer.encode(text)], np.int32)
    np.testing.assert_allclose(logits, model.net.rescore(row)[0, -1], rtol=1e-3, atol=1e-3)

    def want(text):
        return comparing.feature(model, text)

    np.testing.assert_array_equal(given[0][0], [want(text), want("x = None")])
    np.testing.assert_array_equal(given[0][1][1], want("x = return x"))
    np.testing.assert_array_equal(given[1][1][0], want("def f(x):\n    import os"))
    assert value == np.mean([float(q[0, 0]) for _, q in given[:2]])
    # A resample is the mean over seeds, too.
    resampled = np.reshape([float(q[0, 0]) for _, q in given[2:]], (-1, 2)).mean(axis=1)
    assert half_width == pytest.approx(1.96 * np.std(resampled, ddof=1))


@pytest.mark.slow
@pytest.mark.torch
def test_mauve_is_the_librarys(tmp_path, tiny_pair_dirs):
    """Features and figure equal those of mauve-text, which runs a random GPT-2 in torch."""
    library = pytest.importorskip("mauve")
    torch = pytest.importorskip("torch")
    import transformers

    home = tmp_path / "gpt2-tiny"  # mauve-text recognizes a model by its name
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=500,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(home)
    file = f"{tiny_pair_dirs[0]}/tokenizer.json"
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=file, eos_token="<|endoftext|>"
    ).save_pretrained(home)
    words, drawing = (
        ["def ", "return ", "x", " + ", "self", "\n", "None", "("],
        np.random.default_rng(0),
    )
    human, ours = (
        ["x = " + "".join(drawing.choice(words[a:b], 12)) for _ in range(40)]
        for a, b in ((0, 6), (2, 8))
    )
    by_prompt = [[Completion("x = ", o[4:], (), [h[4:]])] for h, o in zip(human, ours, strict=True)]
    metric = make_metric(f"mauve:{home}")
    value, half_width = metric.measure(by_prompt)["mauve"]
    theirs = library.compute_mauve(p_text=human, q_text=ours, featurize_model_name=str(home))
    assert value == pytest.approx(theirs.mauve, abs=1e-6) and 0 < value < 1 and half_width > 0


@pytest.mark.torch
@pytest.mark.parametrize("pooling", [MEAN, CLS, POOLER])
def test_coherence_pools_and_compares(tmp_path, pooling):
    """Against one unpadded pass per text through transformers."""
    torch = pytest.importorskip("torch")
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(["[PAD]", *"abcdefgh"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]"
    ).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, vocab_size=9, num_hidden_layers=1)
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path)

    def embed_one(text):
        ids = torch.tensor([[vocab[letter] for letter in text]])
        with torch.inference_mode():
            out = model(input_ids=ids)
        states = out.last_hidden_state[0]
        pooled = {MEAN: states.mean(0), CLS: states[0], POOLER: out.pooler_output[0]}
        return pooled[pooling].numpy()

    texts = ["abc", "hgfedcba", "ab"]
    embedded = of_transformers(tmp_path, pooling)(texts)
    np.testing.assert_allclose(embedded, [embed_one(text) for text in texts], atol=1e-5)
    metric = make_metric(f"coherence:{pooling}:{tmp_path}")
    metric.check([])
    done = [Completion("abc", "hgfedcba"), Completion("ab", "ab"), Completion("ab", " ")]
    scores = each(metric, *done)
    assert scores[0] == pytest.approx(cosine(embed_one("abc"), embed_one("hgfedcba")), abs=1e-5)
    assert scores[1] == pytest.approx(1) and scores[2] is None
    if pooling == MEAN:
        assert each(make_metric(f"coherence:{tmp_path}"), *done)[0] == pytest.approx(scores[0])


def test_cosine_by_hand():
    a, b = np.array([3.0, 4.0]), np.array([4.0, 3.0])
    assert cosine(a, b) == pytest.approx(24 / 25) and cosine(a, -2 * a) == pytest.approx(-1)


@pytest.mark.torch
def test_harmless_is_the_classifier_reward(tmp_path, monkeypatch):
    """The score equals the reward `classifier` of that directory, which has its own tests."""
    asked = []

    class Fake:
        def __init__(self, directory):
            asked.append(directory)

        def score(self, sample):
            return 0.5

        def score_many(self, samples):
            return [len(one.prompt) / len(one.text) for one in samples]

    monkeypatch.setattr("infer.bench.metrics.harmless.Classifier", Fake)
    metric = make_metric("harmless:guard")
    metric.check([])
    assert asked == ["guard"] and each(metric, Completion("ab", "abcd")) == [0.5]


def test_llama_guard_is_asked_by_its_template(tiny_pair_dirs, tmp_path, monkeypatch):
    home = tmp_path / "guard"
    shutil.copytree(tiny_pair_dirs[0], home)
    with pytest.raises(OptionError, match="no chat template"):
        LlamaGuard(str(home))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}?"
    (home / "chat_template.jinja").write_text(template)
    asked = []

    def generate(model, prompts, **options):
        asked.extend(model.tokenizer.decode(prompt) for prompt in prompts)
        texts = ["\n\nsafe", "unsafe\nS1", "I think"][: len(prompts)]
        return types.SimpleNamespace(text=texts)

    monkeypatch.setattr("infer.llama_guard.generate", generate)
    metric = make_metric(f"llama-guard:{home}")
    done = [Completion("a", "b"), Completion("c", "d"), Completion("e", "f")]
    too_long = Completion("x" * 9000, "y")
    assert each(metric, *done, too_long) == [1, 0, None, None]
    assert asked == ["<user>a<assistant>b?", "<user>c<assistant>d?", "<user>e<assistant>f?"]


# --- a judge ---------------------------------------------------------------------------------


def judge_at(url, name="judge", key="secret"):
    return make_metric(name, Settings(judge_url=url, judge_model="m", judge_key=key))


def test_a_judge_rates():
    answers = {"good": "Fine. [[9]]", "poor": "[[7]] no, [[2.5]]", "odd": "[[11]]", "mute": None}

    def answer_to(prompt):
        return 200, next((text for word, text in answers.items() if word in prompt), ""), {}

    with judging_with(answer_to) as (url, asked):
        metric = judge_at(url)
        metric.check([])
        done = [Completion("{why}?", text) for text in answers]
        assert each(metric, *done) == [9, 2.5, None, None]
        path, prompt, key = asked[1]
        assert (path, key) == ("/v1/chat/completions", "Bearer secret") and "{why}?" in prompt


def test_a_pair_is_compared_in_both_orders():
    def answer_to(prompt):
        first = prompt.split("[Answer A]\n")[1].startswith
        if "tie" in prompt:
            return 200, "[[C]]", {}
        if "first" in prompt:
            return 200, "[[A]]", {}
        return 200, "[[A]]" if first("best") else "[[B]]", {}

    with judging_with(answer_to) as (url, asked):
        metric = judge_at(url, "judge:pair")
        done = [
            Completion("q", text, (), [known])
            for text, known in (("best", "x"), ("x", "best"), ("tie", "y"), ("first", "z"))
        ]
        assert each(metric, *done) == [1, 0, 0.5, 0.5]
        assert len(asked) == 8


def test_a_judge_that_does_not_answer_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(judging, "PAUSES", (0.0,))
    answers = iter([(500, "", {}), (500, "", {}), (401, "", {}), (200, "[[5]]", {}), (404, "", {})])
    with judging_with(lambda prompt: next(answers)) as (url, asked):
        metric = judge_at(url)
        for status, times in ((500, 2), (401, 1)):
            with pytest.raises(OptionError, match=rf"does not answer \(HTTP {status}") as refused:
                metric.check([])
            assert "secret" not in str(refused.value) + repr(Settings(judge_key="secret"))
            assert len(asked) == times
            asked.clear()
        monkeypatch.setattr(judging, "CONCURRENCY", 1)
        assert each(metric, Completion("a", "b"), Completion("c", "d")) == [5, None]
        assert "1 of 2 are not judged: --judge-url" in capsys.readouterr().err
    with pytest.raises(OptionError, match="does not answer"):
        metric.check([])  # nothing listens there any more


def test_a_judges_key_is_sent_nowhere_else():
    with (
        judging_with(lambda prompt: (200, "[[5]]", {})) as (other, theirs),
        judging_with(lambda prompt: (302, "", {"Location": f"{other}/chat/completions"})) as (
            url,
            _,
        ),
    ):
        with pytest.raises(OptionError, match="HTTP 302"):
            judge_at(url).check([])
        assert not theirs


def test_a_judge_that_takes_too_long_is_one_line(monkeypatch):
    class Odd:
        def open(self, request, timeout):
            raise TimeoutError("timed out")

    endpoint = judging.Endpoint("http://127.0.0.1:9/v1", "m", None)
    monkeypatch.setattr(endpoint, "_opener", Odd())
    with pytest.raises(OptionError, match=r"does not answer \(timed out"):
        endpoint.ask("x")


# --- from the command line -------------------------------------------------------------------

LINE = {"prompt": "def f(x):\n", "reference": "    return x"}
BAD = {
    "unknown": (["blue"], "--metric blue: choose rouge, exact"),
    "argument": (["exact:1"], "exact takes no argument"),
    "none": (["mauve"], "expected mauve:DIR"),
    "stem": (["rouge:root"], "expected rouge or rouge:stem"),
    "k": (["pass@0"], "expected pass@K"),
    "seeds": (["pass@9"], "--repeats 9 or more"),
    "databases": (["execution:/none"], "/none is no directory"),
    "encoder": (["coherence:/none"], "/none is no directory"),
    "classifier": (["harmless:/none"], "no model directory"),
    "features": (["llama-guard:/none/none"], "/none/none"),
    "judge": (["judge"], "--judge-url URL"),
    "url": (["judge", "--judge-url", "ftp://x", "--judge-model", "m"], "expected http://"),
    "silent": (["judge", "--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "m"], "answer"),
    "gsm8k": (["gsm8k"], "prompt 1 has no number"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_measured_is_one_line(name, tiny_pair_dirs, tmp_path, capsys):
    argv, says = BAD[name]
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(LINE) + "\n")
    models = ["--target", tiny_pair_dirs[0], "--prompts", str(file), "--methods", "autoregressive"]
    assert main([*models, "--metric", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and len(err.strip().splitlines()) == 1


MISSING = {"rouge": "rouge_score", "mauve:x": "mauve", "coherence:{home}": "torch"}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_extra_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, MISSING[name], None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(OptionError, match=rf"needs {MISSING[name]}: pip install \"specjax\[") as no:
        make_metric(name.format(home=tmp_path))
    assert "\n" not in str(no.value)


def test_a_metrics_columns_are_in_the_report_once():
    figures = {"exact_match": 0.5, "rouge1": 0.25, "pm": {"rouge1": 0.125}}
    row = {"method": "m", "batch_size": 1} | figures
    asked = {"exact_match": "exact match", "rouge1": "ROUGE-1"}
    ((heads, (cells,)),) = tables(
        {"rows": [row], "metrics": asked, "cost": [], "peers": [], "v": {}}
    )
    assert dict(zip(heads, cells, strict=True)) == {
        "batch": "1",
        "exact match": "0.500",
        "ROUGE-1": "0.250 ± 0.125",
    }


def test_the_page_of_metrics_lists_all_of_them():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name in METRICS:
        assert f"| `{name}" in page, name
