"""What is left out of a corpus is counted and shown, in memory and in shards."""

import json
import os

import pytest

from specjax._util.errors import InputError
from support.training import program_tokenizer, random_program
from train.config import DataSection
from train.data import corpus
from train.data.corpus import is_held_out
from train.data.encoding import Plain
from train.data.reading import Intake
from train.engine.batches import open_corpus


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return program_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def lossy_folder(home):
    """A folder with one file for each reason to leave something out, and 40 that stay."""
    folder = home / "code"
    (folder / ".git").mkdir(parents=True)
    names = [f"{i}.py" for i in range(40)]
    for number, name in enumerate(names):
        (folder / name).write_text(random_program(number, 100))
    held_out = next(name for name in names if is_held_out(f"code/{name}"))
    (folder / ".git" / "config").write_text(random_program(90))
    (folder / "records.json").write_text(json.dumps([{"text": random_program(91)}]))
    (folder / "binary").write_bytes(b"\0\1" * 200)
    (folder / "latin.txt").write_bytes(b"\xe9" * 300)
    (folder / "short.txt").write_text("short")
    (folder / "copy.py").write_text((folder / held_out).read_text())
    (folder / "near.py").write_text((folder / held_out).read_text().replace("= 1", "= 9", 2))
    os.mkfifo(folder / "pipe")
    (home / "elsewhere").mkdir()
    (home / "elsewhere" / "more.py").write_text(random_program(92))
    (folder / "linked").symlink_to(home / "elsewhere")
    return folder


LOSSES = {
    "hidden": "code/.git/config",
    "data": "code/records.json",
    "binary": "code/binary",
    "not UTF-8": "code/latin.txt",
    "shorter than 200 characters": "code/short.txt",
    "copies of another document": "",
    "near-duplicates of held-out documents": "",
    "not a file": "code/pipe",
    "links to folders": "code/linked",
}


@pytest.mark.parametrize("where", ["memory", "shards"])
def test_every_loss_is_counted_and_shown(tokenizer, tmp_path, capsys, where):
    files = (str(lossy_folder(tmp_path)),)
    shards = "" if where == "memory" else str(tmp_path / "shards")
    data = DataSection(corpora=(), files=files, shards=shards)
    open_corpus(data, tokenizer, Plain(), tmp_path / "cache")
    lines = capsys.readouterr().err.splitlines()
    shown = {line.split(":")[0]: line for line in lines}
    for reason, example in LOSSES.items():
        line = shown[f"left out, {reason}"]
        assert f": 1{f' (such as {example})' if example else ''}" in line
    assert len([line for line in lines if line.startswith("left out")]) == len(LOSSES)


@pytest.mark.parametrize("where", ["memory", "shards"])
def test_short_lines_are_counted_and_shown(tokenizer, tmp_path, capsys, where):
    rows = [random_program(i) if i % 10 else "short" for i in range(60)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    shards = "" if where == "memory" else str(tmp_path / "shards")
    data = DataSection(corpora=(), files=(str(tmp_path / "x.jsonl"),), shards=shards)
    open_corpus(data, tokenizer, Plain(), tmp_path / "cache")
    assert "left out, shorter than 200 characters: 6 (such as x.jsonl#1" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["memory", "shards"])
def test_what_is_not_evaluated_is_said(tokenizer, tmp_path, capsys, where):
    """One document alone is trained on, and nothing is held out."""
    (tmp_path / "one.txt").write_text(random_program(0, 100))
    assert not is_held_out("one.txt")
    shards = "" if where == "memory" else str(tmp_path / "shards")
    data = DataSection(corpora=(), files=(str(tmp_path / "one.txt"),), shards=shards)
    assert open_corpus(data, tokenizer, Plain(), tmp_path / "cache").held_out in ([], ())
    assert "held out: 0 documents, 0 tokens; nothing is evaluated" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["memory", "shards"])
def test_sources_that_are_not_evaluated_are_named(tokenizer, tmp_path, capsys, where):
    (tmp_path / "one.txt").write_text(random_program(0, 100))
    rows = "".join(json.dumps({"text": random_program(i + 1)}) + "\n" for i in range(60))
    (tmp_path / "x.jsonl").write_text(rows)
    shards = "" if where == "memory" else str(tmp_path / "shards")
    files = (str(tmp_path / "one.txt"), str(tmp_path / "x.jsonl"))
    data = DataSection(corpora=(), files=files, shards=shards)
    open_corpus(data, tokenizer, Plain(), tmp_path / "cache")
    assert "not evaluated, as nothing of it is held out: one.txt" in capsys.readouterr().err


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    folder = lossy_folder(tmp_path)
    (folder / "secret").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"cannot read .*secret: Permission denied"):
        corpus.source_files((), (str(folder),), Intake())
