"""Files that the user holds out: all of them are evaluated, and nothing else is."""

import json

import pytest

from specjax._util.errors import InputError
from support.training import program_tokenizer, random_program
from train.config import DataSection
from train.data.corpus import is_held_out, source_labels
from train.data.encoding import Plain
from train.data.loader import valid_batches
from train.engine.batches import open_corpus


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return program_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def lines(path, texts):
    path.write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    return str(path)


def documents(source):
    return [source.read(i, 0, int(n)).tobytes() for i, n in enumerate(source.lengths)]


@pytest.mark.parametrize("where", ["memory", "shards"])
def test_own_files_are_evaluated_and_nothing_else(tokenizer, tmp_path, capsys, where):
    training = [random_program(i) for i in range(60)]
    assert any(is_held_out(f"train.jsonl#{i}") for i in range(1, 61))
    short = [random_program(i) for i in range(100, 103)]
    long = [random_program(i, 40) for i in range(200, 206)]
    shown = [*training, short[0], long[0].replace("= 1", "= 9", 2)]  # a copy and a near copy
    data = DataSection(
        files=(lines(tmp_path / "train.jsonl", shown),),
        eval=(lines(tmp_path / "short.jsonl", short), lines(tmp_path / "long.jsonl", long)),
        shards="" if where == "memory" else str(tmp_path / "shards"),
    )
    for _ in range(2):  # made, then read back
        corpus = open_corpus(data, tokenizer, Plain(), tmp_path / "cache")
        (source,) = corpus.sources
        assert len(source.lengths) == 60
        counts = {x.name: len(x.documents.lengths) for x in corpus.held_out}
        assert counts == {"short.jsonl": 3, "long.jsonl": 6}
        tokens = [float(x.documents.lengths.sum()) for x in corpus.held_out]
        assert [x.weight for x in corpus.held_out] == tokens
        names = [batch.source for batch in valid_batches(corpus, 64, 2, 6)]
        assert set(names) == {"short.jsonl", "long.jsonl"}
    err = capsys.readouterr().err
    assert "training: 60 documents" in err and "held out: 9 documents" in err
    assert "left out, copies of another document: 1" in err
    assert "left out, near-duplicates of held-out documents: 1" in err
    assert "not evaluated" not in err


@pytest.mark.parametrize("where", ["memory", "shards"])
def test_files_of_one_name_are_told_apart_by_their_folders(tokenizer, tmp_path, where):
    files = {}
    for folder, begin, count in (("train", 0, 9), ("short", 20, 3), ("long", 40, 6)):
        (tmp_path / folder).mkdir()
        texts = [random_program(begin + i) for i in range(count)]
        files[folder] = lines(tmp_path / folder / "test.jsonl", texts)
    data = DataSection(
        files=(files["train"],),
        eval=(files["short"], files["long"]),
        shards="" if where == "memory" else str(tmp_path / "shards"),
    )
    corpus = open_corpus(data, tokenizer, Plain(), tmp_path / "cache")
    counts = {x.name: len(x.documents.lengths) for x in corpus.held_out}
    assert counts == {"short/test.jsonl": 3, "long/test.jsonl": 6}
    assert [x.weight for x in corpus.held_out] == [
        float(x.documents.lengths.sum()) for x in corpus.held_out
    ]


def test_evaluation_files_alone_are_refused(tokenizer, tmp_path):
    own = (lines(tmp_path / "own.jsonl", [random_program(i) for i in range(3)]),)
    data = DataSection(eval=own, shards=str(tmp_path / "shards"))
    with pytest.raises(InputError, match=r"name some text to train on besides data\.eval"):
        open_corpus(data, tokenizer, Plain(), tmp_path)
    assert not (tmp_path / "shards").exists()


def test_names_of_sources_differ(tmp_path):
    files = ["/a/one.txt", "/b/one.txt", "/c/b/one.txt", "/d/stdlib", "/e/two.txt", "/e/two.txt"]
    labels = ["stdlib", "a/one.txt", "/b/one.txt", "c/b/one.txt", "d/stdlib", *["two.txt"] * 2]
    assert source_labels(["stdlib"], files) == labels


def test_shards_of_another_choice_are_refused(tokenizer, tmp_path):
    files = (lines(tmp_path / "train.jsonl", [random_program(i) for i in range(60)]),)
    own = (lines(tmp_path / "own.jsonl", [random_program(i) for i in range(100, 103)]),)
    shards = str(tmp_path / "shards")
    open_corpus(DataSection(files=files, eval=own, shards=shards), tokenizer, Plain(), tmp_path)
    with pytest.raises(InputError, match=r"holds own\.jsonl, and data\.eval names nothing"):
        open_corpus(DataSection(files=files, shards=shards), tokenizer, Plain(), tmp_path)
    data = DataSection(files=(*files, *own), shards=shards)
    with pytest.raises(InputError, match=r"data\.files name train\.jsonl, own\.jsonl"):
        open_corpus(data, tokenizer, Plain(), tmp_path)


def test_weights_count_the_sources_that_are_trained_on(tokenizer, tmp_path):
    files = (
        lines(tmp_path / "a.jsonl", [random_program(i) for i in range(20)]),
        lines(tmp_path / "b.jsonl", [random_program(i) for i in range(30, 50)]),
    )
    own = (lines(tmp_path / "own.jsonl", [random_program(i) for i in range(100, 103)]),)
    data = DataSection(files=files, eval=own, shards=str(tmp_path / "s"), weights=(1.0, 3.0))
    corpus = open_corpus(data, tokenizer, Plain(), tmp_path)
    assert [len(source.lengths) for source in corpus.sources] == [20, 20]
    assert len(corpus.held_out) == 1 and documents(corpus.held_out[0].documents)
