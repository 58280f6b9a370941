"""The corpus, its tokenizer and the data loader: exact, deterministic, resumable."""

import collections
import dataclasses
import itertools
import json
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from specjax._util.errors import InputError
from train.data import corpus
from train.data.corpus import is_held_out, load_corpus, permissive_distributions
from train.data.in_memory import TokenStream, prepare
from train.data.loader import make_loader, valid_batches
from train.data.near_duplicates import NEAR_DUPLICATE
from train.data.packing import IGNORE, JoinedRows, pack_row
from train.data.reading import UNKNOWN_RECORD, Document, Intake
from train.data.tokenizer import EOS_ID, SPECIAL_TOKENS, load_tokenizer, train_tokenizer

SEQ_LEN, BATCH = 16, 2


@pytest.fixture(scope="module")
def documents():
    """60 small programs, a few of them held out by their names."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 10**6, (60, 5))
    texts = [
        "".join(f"def f{n}(x):\n    return x * {n}\n" for n in numbers[i, : 1 + i % 5])
        for i in range(60)
    ]
    return [Document(f"d/{i}.py", text) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def tokenizer(documents, tmp_path_factory):
    return train_tokenizer(documents, 300, tmp_path_factory.mktemp("tok") / "tokenizer.json")


@pytest.fixture(scope="module")
def prepared(documents, tokenizer):
    return prepare(documents, tokenizer)


def take(loader, count):
    return [next(loader) for _ in range(count)]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


# --- corpus ------------------------------------------------------------------------------------


def test_stdlib_is_sorted_and_leaves_out_tests_and_tables():
    names = [name for name, _ in corpus.stdlib_files()]
    assert names == sorted(names) and "stdlib/json/decoder.py" in names
    assert not [n for n in names if "/test" in n.removeprefix("stdlib/unittest")]
    assert not [n for n in names if n.startswith(("stdlib/encodings/", "stdlib/lib2to3/"))]


def test_licenses():
    assert "numpy" in permissive_distributions() and "specjax" not in permissive_distributions()
    accepted = ("MIT", "BSD-3-Clause AND Zlib", "MIT OR GPL-3.0", "PSF-2.0", "ISC License (ISCL)")
    refused = ("", "UNKNOWN", "MPL-2.0", "MPL-2.0 AND MIT", "GPL-3.0-only", "Proprietary", "LGPL")
    assert [l for l in accepted if not corpus._is_permissive(l)] == []
    assert [l for l in refused if corpus._is_permissive(l)] == []


def test_files_folders_and_normalization(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_bytes(b"x\t= 1\r\n" * 60)
    (tmp_path / "sub" / "short.txt").write_text("too short")
    (tmp_path / "sub" / "latin.txt").write_bytes(b"\xe9" * 300)
    (tmp_path / "b.jsonl").write_text(json.dumps({"content": "y = 2\n" * 60}) + "\n\n")
    read = load_corpus([], [str(tmp_path / "sub"), str(tmp_path / "b.jsonl")])
    assert [d.name for d in read] == ["b.jsonl#1", "sub/a.py"]
    assert read[1].text == "x\t= 1\n" * 60


def test_of_two_equal_texts_the_held_out_one_stays(tmp_path):
    held_out = next(f"{i}.py" for i in range(1000) if is_held_out(f"{i}.py"))
    for name in ("!first.py", held_out):
        (tmp_path / name).write_text("z = 3\n" * 60)
    assert not is_held_out("!first.py")
    read = load_corpus([], [str(tmp_path / "!first.py"), str(tmp_path / held_out)])
    assert [d.name for d in read] == [held_out]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"text": \n', r"bad\.jsonl line 2 is not JSON"),
        ("\n\n[1]\n", r"no record is good; 1 of them: a record of no .*bad\.jsonl#3: \[1\]"),
        ('{"text": 5}\n', r"no record is good; 1 of them: a record of no .*bad\.jsonl#1"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        load_corpus([], [str(tmp_path / "bad.jsonl")])


def test_bad_sources_are_named(tmp_path):
    with pytest.raises(
        InputError, match="unknown corpus 'wiki': expected one of installed, specjax, stdl"
    ):
        load_corpus(["wiki"])
    with pytest.raises(InputError, match=r"cannot read .*none\.txt: No such file"):
        load_corpus([], [str(tmp_path / "none.txt")])
    (tmp_path / "s.txt").write_text("short")
    with pytest.raises(InputError, match="corpus is empty"):
        load_corpus([], [str(tmp_path / "s.txt")])


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"specjax\[parquet\]"):
        load_corpus([], [str(tmp_path / "a.parquet")])


def test_parquet(tmp_path):
    def load(name, columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / name)
        return load_corpus([], [str(tmp_path / name)])

    read = load("a.parquet", {"content": ["a = 1\n" * 60, "b = 2\n" * 60]})
    assert [d.name for d in read] == ["a.parquet#1", "a.parquet#2"]
    with pytest.raises(InputError, match=r"b\.parquet has no column text, content, .* body"):
        load("b.parquet", {"body": ["x"]})
    with pytest.raises(
        InputError, match=r"c\.parquet: no record is good; 2 .*c\.parquet#2: .*null"
    ):
        load("c.parquet", {"text": pyarrow.array([None, None], pyarrow.string())})
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"d\.parquet is not a readable parquet file"):
        load_corpus([], [str(tmp_path / "d.parquet")])


# --- tokenizer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n\n\treturn x  # café\n",
        "a\r\n  b\r\nc\rd \n \n  ",
        "👩‍👩‍👧 e\u0301 \u00a0\u3000 中文12345 ١٢٣",
        "null\0byte \x0b\x0c\x1b \ufffd\ufeff",
        " <|endoftext|> <|fim_eot|>",
        "  leading and trailing  ",
        "",
    ],
)
def test_round_trip_is_exact(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokens_suit_code(documents, tmp_path):
    text = "class A:\n\n    def g(self):\n        return self.x_y + 12345\n" * 50
    tokens = train_tokenizer([Document("t.py", text)], 400, tmp_path / "t.json")
    pieces = [tokens.decode([i]) for i in tokens.encode(text[:64]).ids]
    assert "\n\n    " in pieces and "\n        " in pieces and " return" not in pieces
    assert [p for p in pieces if p.isdigit()] == ["123", "45"]


def test_tokenizer_is_deterministic_and_read_back(documents, tokenizer, tmp_path):
    path = tmp_path / "new" / "tokenizer.json"
    again = train_tokenizer(documents, 300, path)
    assert again.to_str() == tokenizer.to_str() == load_tokenizer(path).to_str()
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == list(range(5))
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]
    seen = [d for d in documents if not is_held_out(d.name)]
    assert train_tokenizer(seen, 300, path).to_str() == tokenizer.to_str()


def test_tokenizer_errors(documents, tmp_path):
    with pytest.raises(InputError, match="vocab_size 260 is too small: at least 261"):
        train_tokenizer(documents, 260, tmp_path / "t.json")
    with pytest.raises(InputError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot read the tokenizer .*bad\.json"):
        load_tokenizer(tmp_path / "bad.json")


# --- streams and rows --------------------------------------------------------------------------


def test_held_out_documents_are_not_trained_on(documents, tokenizer, prepared):
    held_out = [d.text for d in documents if is_held_out(d.name)]
    trained = [d.text for d in documents if not is_held_out(d.name)]
    assert held_out and trained
    for stream, offsets, texts in (
        (prepared.train, prepared.train_offsets, trained),
        (prepared.valid, prepared.valid_offsets, held_out),
    ):
        parts = [stream[a:b] for a, b in itertools.pairwise(offsets)]
        assert [tokenizer.decode(part[:-1]) for part in parts] == texts
        assert all(part[-1] == EOS_ID and EOS_ID not in part[:-1] for part in parts)
    assert prepared.train.dtype == np.uint16


def test_special_tokens_in_a_source_are_text(tokenizer):
    done = prepare([Document("d/0.py", "x <|endoftext|> y")], tokenizer)
    assert np.flatnonzero(done.train == EOS_ID).tolist() == [len(done.train) - 1]


def test_nothing_left_to_train_on(tokenizer):
    held_out = next(f"{i}" for i in range(1000) if is_held_out(f"{i}"))
    with pytest.raises(InputError, match="none of the corpus's 1 documents is left"):
        prepare([Document(held_out, "x")], tokenizer)


def test_the_cache_is_used_and_replaced_if_damaged(documents, tokenizer, prepared, tmp_path):
    def load():
        return prepare(documents, tokenizer, tmp_path)

    np.testing.assert_array_equal(load().train, prepared.train)
    (file,) = tmp_path.iterdir()
    arrays = dict(np.load(file))
    np.savez(file, **{**arrays, "valid": arrays["valid"][::-1]})
    np.testing.assert_array_equal(load().valid, prepared.valid[::-1])
    file.write_bytes(file.read_bytes()[:100])
    np.testing.assert_array_equal(load().valid, prepared.valid)
    prepare(documents[1:], tokenizer, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_row_by_hand():
    # Documents [1 2 0], [3 4 5 6 0], [7 0] in the order 1, 0, 2, cut every four tokens.
    stream = np.array([1, 2, 0, 3, 4, 5, 6, 0, 7, 0], np.uint16)
    documents = TokenStream(stream, np.array([0, 3, 8, 10]))
    joined = JoinedRows.of(documents.lengths, np.array([1, 0, 2]), 4)
    assert len(joined) == 3
    pieces = [*map(joined.pieces, range(3)), []]
    rows = [pack_row(documents, pieces_of_row, 4) for pieces_of_row in pieces]
    by_key = {key: [row[key].tolist() for row in rows] for key in rows[0]}
    no = IGNORE
    assert by_key == {
        "tokens": [[3, 4, 5, 6], [0, 1, 2, 0], [7, 0, 0, 0], [0, 0, 0, 0]],
        "labels": [[4, 5, 6, 0], [no, 2, 0, no], [0, no, no, no], [no] * 4],
        "segments": [[1, 1, 1, 1], [1, 2, 2, 2], [1, 1, 0, 0], [0] * 4],
        "positions": [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 0, 0], [0] * 4],
    }
    assert all(row[key].dtype == np.int32 for row in rows for key in row)


def test_an_epoch_holds_each_token_one_time_and_epochs_differ(prepared):
    rows_per_epoch = -(-len(prepared.train) // SEQ_LEN)
    loader = make_loader(prepared, SEQ_LEN, 1, seed=3)
    epochs = [take(loader, rows_per_epoch) for _ in range(2)]
    streams = []
    for epoch in epochs:
        batch = {key: np.concatenate([b[key][0] for b in epoch]) for key in epoch[0]}
        real = batch["segments"] > 0
        streams.append(batch["tokens"][real])
        ends = batch["tokens"] == EOS_ID
        assert (batch["labels"][ends | ~real] == IGNORE).all()
        # A label is the next token of the epoch, across row ends too.
        np.testing.assert_array_equal(
            batch["labels"][:-1][~ends[:-1]], batch["tokens"][1:][~ends[:-1]]
        )
    for stream in streams:
        np.testing.assert_array_equal(np.sort(stream), np.sort(prepared.train))
    assert not np.array_equal(*streams)


# --- loader ------------------------------------------------------------------------------------


def test_a_restored_loader_resumes_where_it_was(prepared):
    def new():
        return make_loader(prepared, SEQ_LEN, BATCH, seed=1)

    loader = new()
    take(loader, 40)  # into the second epoch
    state = json.loads(json.dumps(loader.get_state()))
    following = take(loader, 40)
    restored = new()
    restored.set_state(state)
    assert_same(take(restored, 40), following)
    other = make_loader(prepared, SEQ_LEN, BATCH, seed=2)
    assert not np.array_equal(next(other)["tokens"], next(new())["tokens"])


def test_two_processes_share_the_rows_without_overlap(prepared):
    whole = take(make_loader(prepared, SEQ_LEN, 2 * BATCH, seed=1), 20)
    halves = [
        take(make_loader(prepared, SEQ_LEN, BATCH, 1, process_index=i, process_count=2), 20)
        for i in range(2)
    ]
    for step, batch in enumerate(whole):
        for index in range(2):
            assert_same([halves[index][step]], [{k: v[index::2] for k, v in batch.items()}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len is 0: expected at least 1"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"seed": -1}, "seed is -1: expected 0 or more"),
        ({"process_index": 2, "process_count": 2}, "process_index is 2: expected 0 to 1"),
        ({"seq_len": 1 << 19, "process_count": 2}, "has 1 rows .* fewer than the 2 processes"),
    ],
)
def test_loader_refuses_bad_sizes(prepared, options, message):
    with pytest.raises(InputError, match=message):
        make_loader(prepared, **{"seq_len": 8, "batch_size": 2, "seed": 0, **options})


def test_valid_batches_cover_the_held_out_tokens(prepared):
    batches = [batch.rows for batch in valid_batches(prepared, SEQ_LEN, BATCH)]
    again = [batch.rows for batch in valid_batches(prepared, SEQ_LEN, BATCH)]
    assert_same(batches, again)
    assert {batch["tokens"].shape for batch in batches} == {(BATCH, SEQ_LEN)}
    tokens = np.concatenate([batch["tokens"][batch["segments"] > 0] for batch in batches])
    np.testing.assert_array_equal(tokens, prepared.valid)
    assert len(valid_batches(prepared, SEQ_LEN, BATCH, limit=2)) == 2
    nothing = dataclasses.replace(prepared, valid_ends=np.zeros_like(prepared.valid_ends))
    assert valid_batches(nothing, SEQ_LEN, BATCH) == []


def corpus_of(tokenizer, **counts):
    """A corpus with this many documents of each source; all of its words are held out."""
    documents = []
    for source, count in counts.items():
        numbers = (i for i in range(10**6) if is_held_out(f"{source}/{i}"))
        names = [f"{source}/{next(numbers)}" for _ in range(count)]
        names += [f"{source}/t{i}" for i in range(4 * count) if not is_held_out(f"{source}/t{i}")]
        for name in names:
            words = np.random.default_rng(len(documents)).integers(0, 10**9, 40)
            documents.append(Document(name, " ".join(map(str, words)), source))
    return prepare(documents, tokenizer)


def test_each_source_is_evaluated_by_its_weight(tokenizer):
    """The last documents count as the first ones do, and a small source is not left out."""
    data = corpus_of(tokenizer, large=40, small=4)
    batches = valid_batches(data, SEQ_LEN, BATCH, limit=12)
    counts = collections.Counter(batch.source for batch in batches)
    assert len(batches) == 12 and counts["small"] in (1, 2)
    shares = {source.name: source.weight for source in data.held_out}
    assert 8 < shares["large"] / shares["small"] < 12
    assert {batch.weight for batch in batches} == set(shares.values())

    few = valid_batches(data, SEQ_LEN, BATCH, limit=1)
    assert [batch.source for batch in few] == ["large", "small"]
    large = next(source.documents for source in data.held_out if source.name == "large")
    owners = []
    for batch in batches:
        if batch.source == "large":
            for row in batch.rows["tokens"]:
                stream = large.tokens
                places = np.lib.stride_tricks.sliding_window_view(stream, SEQ_LEN)
                (place,) = np.flatnonzero((places == row).all(axis=1))
                owners.append(
                    int(np.searchsorted(large.offsets - large.offsets[0], place, "right"))
                )
    assert owners == sorted(owners) and owners[0] <= 3 and owners[-1] >= 38
    assert np.diff(owners).max() <= 4


def test_a_near_copy_of_a_held_out_text_is_left_out(tokenizer):
    held_out = next(f"x{i}" for i in range(1000) if is_held_out(f"x{i}"))
    words, *others = (
        " ".join(map(str, np.random.default_rng(i).integers(0, 10**9, 200))) for i in range(4)
    )
    documents = [Document(name, text) for name, text in zip("abc", others, strict=True)]
    documents += [Document(held_out, words), Document("copy", words.replace("1", "2", 1))]
    data = prepare(documents, tokenizer)
    assert data.inventory.documents == (3, 1)
    assert data.inventory.left_out[NEAR_DUPLICATE] == {"count": 1, "examples": ["copy"]}


def test_what_is_left_out_is_counted(tmp_path, tokenizer):
    lines = [json.dumps({"text": "word " * (10 if i % 4 else 60) + str(i)}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, lines[0]]))
    intake = Intake()
    read = load_corpus([], [str(tmp_path / "a.jsonl")], intake)
    assert len(read) == 10
    counts = {reason: entry["count"] for reason, entry in intake.skipped.items()}
    assert counts == {"shorter than 200 characters": 30, corpus.COPY: 1}
    report = prepare(read, tokenizer, skipped=intake.skipped).inventory.lines()
    assert "left out, shorter than 200 characters: 30 (such as a.jsonl#2" in report[2]
    assert len(load_corpus([], [str(tmp_path / "a.jsonl")], Intake(shortest=0))) == 40


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("form", ["array", "lines", "one"])
def test_a_json_file_is_read_as_records(tmp_path, form, start):
    records = [{"text": f"{i} " * 150} for i in range(3)]
    forms = {
        "array": (json.dumps(records, indent=1), 3),
        "lines": ("\n".join(map(json.dumps, records)), 3),
        "one": (json.dumps(records[0], indent=1), 1),
    }
    content, count = forms[form]
    (tmp_path / "a.json").write_text(start + content)
    read = load_corpus([], [str(tmp_path / "a.json")])
    assert [d.text for d in read] == [record["text"] for record in records[:count]]
    (tmp_path / "b.json").write_text(json.dumps([records[0], 5]))
    intake = Intake()
    assert len(load_corpus([], [str(tmp_path / "b.json")], intake)) == 1
    assert intake.skipped[UNKNOWN_RECORD]["examples"] == ["b.json#2: 5"]
    (tmp_path / "c.json").write_text("[5]")
    with pytest.raises(InputError, match=r"c\.json: no record is good; 1 of them: .*#1: 5"):
        load_corpus([], [str(tmp_path / "c.json")])
