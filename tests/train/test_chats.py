"""Conversations become rows: their formats, their templates, and which tokens are trained."""

import dataclasses
import json
import warnings

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from specjax import lm
from specjax._util.errors import InputError, ModelWarning
from specjax.models.hf.delta import Delta
from specjax.text.tokenizer import Tokenizer, template_digest
from support import chats
from train.config import DataSection
from train.data.best_fit import best_fit
from train.data.corpus import load_corpus
from train.data.encoding import Plain
from train.data.loader import make_loader, training_rows
from train.data.packing import ANSWERS, IGNORE
from train.data.reading import Intake
from train.engine.batches import open_corpus
from train.engine.program import with_next_command


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chats.chat_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def texts(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False)


TOOL_CHAT = {
    "messages": [
        {"role": "user", "content": "how warm is it?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "warm", "arguments": '{"in": "C"}'}}],
        },
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "21 degrees"},
    ],
    "tools": [{"name": "warm"}],
}


def records(name):
    return [TOOL_CHAT] if name == "tools" else [chats.conversation(i) for i in range(6)]


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_the_mask_is_that_of_a_reader_token_by_token(tokenizer, name):
    template, header, end = chats.TEMPLATES[name]
    chat = chats.chat_format(tokenizer, template)
    for record in records(name):
        rows = chat.rows(record)
        answers = [m for m in record["messages"] if m["role"] == "assistant"]
        if name == "thinking":
            assert len(rows) == len(answers)  # it rewrites what came before
        else:
            assert len(rows) == 1
        for row in rows:
            read = np.array(chats.read_by_tokens(tokenizer, row.ids, header, end))
            if name == "thinking":  # of a row, the last answer alone
                starts = np.flatnonzero(np.diff(read, prepend=False) & read)
                read[: starts[-1]] = False
            np.testing.assert_array_equal(row.mask, read)
            assert texts(tokenizer, row.ids) == row.text
            assert (row.ids[row.mask] == tokenizer.token_to_id(end)).any()
        trained = "".join(texts(tokenizer, row.ids[row.mask]) for row in rows)
        expected = {
            "thinking": lambda m: f"[think]{m['reasoning_content']}[/think]\n{m['content']}{end}",
            "tools": lambda m: (m["content"] or '[call]warm {"in": "C"}[/call]') + end,
        }.get(name, lambda m: m["content"] + end)
        assert trained == "".join(map(expected, answers))


SAID = st.text(st.sampled_from("ab1 \n\té漢🙂<|>/[]."), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(chats.TEMPLATES)),
    pairs=st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3),
)
def test_what_is_trained_is_what_the_answers_say(tokenizer, name, pairs):
    """Whatever they begin and end with: what is before an answer has the ids of its prompt."""
    template, _, end = chats.TEMPLATES[name]
    record = {"messages": chats.turns(*(text for pair in pairs for text in pair))}
    chat = chats.chat_format(tokenizer, template)
    rows = chat.rows(record)
    trims = name in ("headers", "model turns")
    answers = [(answer.strip() if trims else answer) + end for _, answer in pairs]
    trained = "".join(texts(tokenizer, row.ids[row.mask]) for row in rows)
    assert trained == "".join(answers)
    prompt = Tokenizer(tokenizer, template).encode_chat(record["messages"][:1])
    first = rows[0].mask.argmax()
    assert rows[0].ids[:first].tolist() == prompt


@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_the_mask_is_that_of_generation_marks(tokenizer, name):
    from transformers import PreTrainedTokenizerFast

    template = chats.TEMPLATES[name][0]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    for record in records(name):
        (row,) = chats.chat_format(tokenizer, template).rows(record)
        made = theirs.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        assert row.ids.tolist() == made["input_ids"]
        assert row.mask.tolist() == [bool(x) for x in made["assistant_masks"]]


def test_a_template_that_does_neither_is_refused_by_name(tokenizer):
    with pytest.raises(ValueError, match="the chat template of the tests does not write an answer"):
        chats.chat_format(tokenizer, chats.NEITHER).rows(chats.conversation(0))


def test_what_is_trained_can_be_chosen(tokenizer):
    record = chats.conversation(2)
    by = {}
    for train_on in ("assistant", "last", "all"):
        chat = chats.chat_format(tokenizer, chats.CHATML, train_on=train_on)
        (by[train_on],) = chat.rows(record)
    assert by["all"].mask.all()
    assert texts(tokenizer, by["last"].ids[by["last"].mask]) == (
        record["messages"][-1]["content"] + "<|im_end|>"
    )
    assert by["assistant"].mask.sum() > by["last"].mask.sum()


ASKED = "what is it?"
ANSWER = "it is so"
FORMS = {
    "messages": {"messages": chats.turns(ASKED, ANSWER)},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": ASKED}]},
            {"role": "assistant", "content": ANSWER},
        ]
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWER}]
    },
    "conversations": {"conversations": chats.turns(ASKED, ANSWER)},
    "completion": {"prompt": ASKED, "completion": ANSWER},
    "lists": {
        "prompt": chats.turns(ASKED),
        "completion": [{"role": "assistant", "content": ANSWER}],
    },
    "instruction": {"instruction": ASKED, "input": "", "output": ANSWER},
}


def test_every_form_is_the_same_conversation(tokenizer, tmp_path):
    chat = chats.chat_format(tokenizer, chats.CHATML, longest=64)
    rows = [chat.rows(record)[0] for record in FORMS.values()]
    assert {row.text for row in rows} == {rows[0].text}
    ids = {"input_ids": rows[0].ids.tolist(), "loss_mask": rows[0].mask.astype(int).tolist()}
    (tokenized,) = chat.rows(ids)
    assert tokenized.text == rows[0].text and tokenized.mask.tolist() == rows[0].mask.tolist()

    lines = [*FORMS.values(), ids, {"text": "a text " * 40}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "b.json").write_text(json.dumps(lines))
    for name in ("a.jsonl", "b.json"):
        intake = Intake(chats=chat)
        read = load_corpus([], [str(tmp_path / name)], intake)
        assert len(read) == 2  # copies of the first
        assert intake.skipped["copies of another document"]["count"] == len(FORMS)


def test_parquet_and_the_datasets_library(tokenizer, tmp_path):
    chat = chats.chat_format(tokenizer, chats.CHATML, longest=128)
    rows = [chats.conversation(i) for i in range(40)]
    (tmp_path / "data").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / "train.parquet")
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = {}
    for name in ("data/train.parquet", "lines.jsonl", f"hf:{tmp_path / 'data'}:train"):
        path = name if name.startswith("hf:") else str(tmp_path / name)
        documents = load_corpus([], [path], Intake(chats=chat))
        read[name] = sorted((d.text, d.ids.tobytes(), d.mask.tobytes()) for d in documents)
    assert len(read["lines.jsonl"]) == 40
    assert len({tuple(x) for x in read.values()}) == 1
    with pytest.raises(InputError, match=r"hf:.*nowhere cannot be read"):
        load_corpus([], [f"hf:{tmp_path}/nowhere"], Intake(chats=chat))


def test_what_cannot_be_used_is_counted(tokenizer, tmp_path):
    bad = [
        {"messages": [{"role": "system", "content": "be kind"}, *chats.turns("a", "b")]},
        {"messages": chats.turns("nobody answers")},
        {"messages": "none"},
        {"neither": 1},
        {"messages": chats.turns("long " * 400, "late")},
    ]
    lines = [*[chats.conversation(i) for i in range(30)], *bad]
    long = {"messages": chats.turns("short", "long " * 400)}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*lines, long])))
    chat = chats.chat_format(tokenizer, chats.MODEL_TURNS, longest=256)
    intake = Intake(chats=chat)
    assert len(load_corpus([], [str(tmp_path / "a.jsonl")], intake)) == 31
    reasons = {}
    for reason, entry in intake.skipped.items():
        reasons[entry["examples"][0].split(":")[0]] = reason
    assert "no system turn" in reasons["a.jsonl#31"]
    assert reasons["a.jsonl#32"] == "no turn is the assistant's"
    assert reasons["a.jsonl#33"].startswith('"messages" must be a list')
    assert reasons["a.jsonl#34"].startswith("a record of no known form")
    assert reasons["a.jsonl#35"] == "answers all beyond data.seq_len"
    assert reasons["a.jsonl#36"] == "cut to data.seq_len"

    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, bad[1:4])))
    with pytest.raises(InputError, match=r"b\.jsonl: no record is good"):
        load_corpus([], [str(tmp_path / "b.jsonl")], Intake(chats=chat))


def corpora(tokenizer, tmp_path, count=120, **options):
    """The same conversations in memory and in shards."""
    rows = [chats.conversation(i) for i in range(count)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chat = chats.chat_format(tokenizer, chats.CHATML, longest=128, **options)
    for shards in ("", str(tmp_path / "shards")):
        data = DataSection(files=(str(tmp_path / "chats.jsonl"),), shards=shards)
        yield open_corpus(data, tokenizer, Plain(), tmp_path / "cache", chats=chat)


def test_shards_hold_the_masks_of_memory(tokenizer, tmp_path, capsys):
    held = []
    for corpus in [*corpora(tokenizer, tmp_path), *corpora(tokenizer, tmp_path)]:
        assert corpus.apart and corpus.inventory.conversations
        found = []
        for source in (*corpus.sources, *[x.documents for x in corpus.held_out]):
            for i, length in enumerate(source.lengths.tolist()):
                ids = source.read(i, 0, length).astype(np.int64)
                found.append((ids.tobytes(), source.trained(i, 0, length).tobytes()))
        held.append(sorted(found))
    assert held[0] == held[1] == held[2] == held[3]
    assert "conversations among them: " in capsys.readouterr().err


@pytest.mark.parametrize("place", ["memory", "shards"])
def test_rows_hold_whole_conversations_and_are_full(tokenizer, tmp_path, place):
    corpus = dict(zip(("memory", "shards"), corpora(tokenizer, tmp_path, 400), strict=True))[place]
    (source,) = corpus.sources
    rows = training_rows(corpus, 256, seed=1)
    seen = []
    count = 0
    while len(seen) < len(source.lengths):
        row = rows[count]
        count += 1
        for segment in range(1, row["segments"].max() + 1):
            places = np.flatnonzero(row["segments"] == segment)
            np.testing.assert_array_equal(row["positions"][places], np.arange(len(places)))
            seen.append(row["tokens"][places].tobytes())
            next_is_trained = np.append(row[ANSWERS][places][1:], 0)
            expected = np.where(next_is_trained, np.append(row["tokens"][places][1:], 0), IGNORE)
            np.testing.assert_array_equal(row["labels"][places], expected)
    whole = [
        source.read(i, 0, n).astype(np.int32).tobytes()
        for i, n in enumerate(source.lengths.tolist())
    ]
    assert sorted(seen) == sorted(whole)
    used = source.lengths.sum() / (256 * count)
    assert used >= 0.95
    batch = next(make_loader(corpus, 256, 2, seed=1))
    assert set(batch) == {"tokens", "labels", "segments", "positions"}


def test_best_fit_is_nearly_full_for_any_mix_of_lengths():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.8, 5000), 8, 2048).astype(np.int64)
    row_of = best_fit(lengths, 2048)
    filled = np.bincount(row_of, lengths)
    assert filled.max() <= 2048
    assert filled.sum() / (2048 * len(filled)) >= 0.95


def test_what_is_trained_of_token_ids_can_be_chosen_too(tokenizer):
    record = {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 1, 0, 0, 1, 1]}
    expected = {"assistant": [0, 1, 0, 0, 1, 1], "last": [0, 0, 0, 0, 1, 1], "all": [1] * 6}
    for train_on, mask in expected.items():
        (row,) = chats.chat_format(tokenizer, chats.CHATML, train_on=train_on).rows(record)
        assert row.mask.astype(int).tolist() == mask


def test_adapters_of_another_template_warn(tokenizer):
    made = Delta("base", "print", (1,), 1, (), template_digest(chats.HEADERS))
    with pytest.warns(ModelWarning, match="was tuned with another chat template"):
        lm._warn_of_template("it", made, Tokenizer(tokenizer, chats.CHATML))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm._warn_of_template("it", made, Tokenizer(tokenizer, chats.HEADERS))


def test_a_finished_run_names_the_next_command(tmp_path):
    data = DataSection(files=("runs/answers.jsonl",))
    summary = {"export": "runs/a/export"}
    (tmp_path / "chat_template.jinja").write_text(chats.CHATML)
    bench = "python -m infer.bench --target smollm2 --draft runs/a/export --methods speculative"
    made = with_next_command(summary, data, "smollm2", tmp_path)
    assert made["next"] == f"{bench} --prompts runs/answers.jsonl --chat"
    assert "next" not in with_next_command({"step": 3}, data, "smollm2", tmp_path)

    # Texts alone, a target without a template, and a template of the config's own.
    own = dataclasses.replace(data, chat_template="own.jinja")
    for other, home in ((data, None), (data, tmp_path / "none"), (own, tmp_path)):
        assert with_next_command(summary, other, "smollm2", home)["next"] == bench
