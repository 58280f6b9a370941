"""Readers of datasets, on small examples in the form in which each is published."""

import gzip
import json
import sqlite3
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

import specjax as sj
from infer.bench.sandbox import run_task
from infer.datasets.files import read_rows
from infer.datasets.readers import SQL
from infer.datasets.table import DATASETS, Source, read_dataset
from infer.prompts import PromptEncoder, read_prompts
from specjax._util.errors import OptionError

SAMPLES = Path(__file__).parents[1] / "samples"
FILES = {
    name: next(SAMPLES.glob(f"{name}.json*"), SAMPLES / "spider" / "dev.json") for name in DATASETS
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_reads_alike_in_every_format(name, tmp_path):
    entries, rows = read_dataset(name, str(FILES[name])), list(read_rows(str(FILES[name])))
    assert entries and all(isinstance(e.get("prompt", e.get("prefix")), str) for e in entries)
    assert all(isinstance(text, str) for e in entries for text in e.get("references", ()))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    columns = {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(k for r in rows for k in r)
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    if name == "spider":
        (tmp_path / "tables.json").write_text((SAMPLES / "spider" / "tables.json").read_text())
        for entry in entries:
            entry["database"] = str(tmp_path / "database/pets/pets.sqlite")
    for file in ("rows.parquet", "rows.json", "rows.jsonl", "rows.jsonl.gz"):
        again = read_dataset(name, str(tmp_path / file))
        # Parquet fills missing fields with None.
        shown = [{k: v for k, v in e.items() if v not in (None, [])} for e in again]
        assert shown == [{k: v for k, v in e.items() if v not in (None, [])} for e in entries], file


def test_prompts_are_those_of_the_papers():
    def prompts(name):
        return [entry["prompt"] for entry in read_dataset(name, str(FILES[name]))]

    assert (
        prompts("gsm8k")[0].startswith("Question: Mina") and prompts("gsm8k")[0][-8:] == "\nAnswer:"
    )
    assert len(prompts("wikitext")) == 3  # headings and empty rows are no prompts
    assert prompts("chatalpaca")[1] == "Add 5 and 8.\nThe sum is 13.\nAnd twice that?\n"
    assert prompts("hh-rlhf")[0].endswith("\n\nHuman: My ball fell into it.\n\nAssistant:")
    assert prompts("spider")[1].endswith(
        "Schema:\nTable owner, columns = [*,owner_id,name]\nTable pet, columns = "
        "[*,pet_id,owner_id,name,age]\nForeign_keys = [pet.owner_id = owner.owner_id]\n"
        "Question: What are the names of pets older than 3?\nSQL:"
    )
    assert prompts("commongen")[0].endswith("Words: boat, lake, row\nSentence:")
    both = [
        read_dataset("commongen", str(SAMPLES / f"commongen{kind}.jsonl"))[0]
        for kind in ("", "-original")
    ]
    assert both[0] == both[1] and len(both[0]["references"]) == 2


def test_mbpp_is_judged_as_humaneval_is():
    for file in ("mbpp.jsonl", "mbpp-sanitized.json"):
        for entry in read_dataset("mbpp", str(SAMPLES / file)):
            assert run_task(entry, entry["code"], None).passed
            assert not run_task(entry, f"def {entry['entry_point']}(*_): pass", None).passed


def test_samples_are_disjoint_and_fixed():
    path = str(FILES["commongen"])
    first, rest = Source("commongen", 1, 3).read(path), Source("commongen", 3, 3, skip=1).read(path)
    assert first == Source("commongen", 1, 3).read(path)
    words = [tuple(entry["concepts"]) for entry in [*first, *rest]]
    assert len(set(words)) == 4
    with pytest.raises(OptionError, match="4 prompts, too few for a sample of 4 and another of 1"):
        Source("commongen", 4, 3, skip=1).read(path)


def test_examples_of_spider_are_sql():
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE boat (boat_ID, name, berth, length)")
    database.execute("CREATE TABLE trip (trip_ID, boat_ID, day)")
    for line in SQL.splitlines():
        if line.startswith("SQL: "):
            database.execute(line.removeprefix("SQL: "))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "gsm8k",
            b'{"question": "q"}\n',
            "row 1 lacks the column answer of gsm8k; its columns are question",
        ),
        ("mbpp", b"[1]", "expected a list of objects"),
        ("mbpp", b"[", "not JSON"),
        ("gsm8k", b"x\n", "line 1: not JSON"),
        ("gsm8k", b"", "has no rows of --dataset gsm8k"),
        ("hh-rlhf", b'{"chosen": 3}\n', "other values than hh-rlhf's"),
        ("gsm8k", b"PAR1 and no more", "not a readable parquet file"),
        ("gsm8k", b"\x1f\x8b and no more", "cannot be read"),
        ("spider", b'{"db_id": "a", "question": "", "query": ""}\n', "tables.json: cannot be read"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, name, content, says):
    file = tmp_path / "rows"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        read_dataset(name, str(file))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_wikitext_keeps_its_first_tokens_and_second_turns_follow_an_answer(tiny_pair_dirs):
    target = sj.load(tiny_pair_dirs[0])
    encoder = PromptEncoder(target, new_tokens=6)
    prompts, bad = read_prompts(str(FILES["wikitext"]), encoder, source=Source("wikitext"))
    assert len(prompts) == 2 and not bad  # the short paragraph has no continuation
    for prompt in prompts:
        whole = target.tokenizer.encode(
            read_dataset("wikitext", str(FILES["wikitext"]))[prompt.index]["prompt"]
        )
        assert prompt.tokens == whole[:32]
        assert prompt.entry["references"] == [target.tokenizer.decode(whole[32:38])]
    path = str(FILES["mt-bench"])
    first, second = read_prompts(path, encoder, source=Source("mt-bench"), most=2)[0]
    answer = sj.generate(target, [first.tokens], max_new_tokens=6).text[0]
    assert (
        second.text
        == f"\n\nHuman: {first.text}\n\nAssistant: {answer}\n\nHuman: Rewrite it without the "
        "letter e.\n\nAssistant:"
    )


def test_a_damaged_gzip_file_is_one_error(tmp_path):
    data = bytearray(gzip.compress(b'{"prompt": "def f(x):"}\n' * 50))
    data[10] ^= 255  # zlib finds it, and not gzip's own checks
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(OptionError, match="cannot be read"):
        list(read_rows(str(path)))
