"""Shards are used only while their sources are what they were made of."""

import os
import shutil

import pytest

from specjax._util.errors import InputError
from support.training import program_tokenizer, random_program
from train.config import DataSection
from train.data.corpus import load_corpus
from train.data.encoding import Plain
from train.data.in_memory import prepare
from train.data.shards import sources as shard_sources
from train.data.shards.building import load_shards, make_shards, recipe_of
from train.data.shards.files import MANIFEST, SOURCES


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return program_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def data(tmp_path, tokenizer):
    """Finished shards of a folder of twelve files, and of one file."""
    folder = tmp_path / "code"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.py").write_text(random_program(number))
    (tmp_path / "one.txt").write_text(random_program(50))
    files = (str(folder), str(tmp_path / "one.txt"))
    data = DataSection(corpora=(), files=files, shards=str(tmp_path / "shards"))
    load_shards(data, tokenizer, Plain())
    return data


def change_bytes(path):
    """Other content of the same size, at a later time."""
    path.write_bytes(path.read_bytes()[::-1])
    later(path)


def later(path):
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize("change", ["doubled", "same size", "in another file", "new"])
def test_changed_sources_are_refused_by_name(data, tokenizer, tmp_path, change):
    path = tmp_path / "code" / "3.py"
    if change == "doubled":
        path.write_text(path.read_text() * 2)
    elif change == "same size":
        change_bytes(path)
    elif change == "in another file":
        path = tmp_path / "one.txt"
        change_bytes(path)
    else:
        path = tmp_path / "code" / "new.py"
        path.write_text(random_program(99))
    expected = rf"{path.name} (has changed|is new).*train\.tokens.*another directory"
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(InputError, match=expected):
            load_shards(data, tokenizer, Plain())


def test_another_time_alone_is_accepted_and_hashed_one_time(data, tokenizer, tmp_path, monkeypatch):
    hashed = []
    digest = shard_sources.file_digest
    monkeypatch.setattr(shard_sources, "file_digest", lambda p: hashed.append(p) or digest(p))
    later(tmp_path / "code" / "3.py")
    load_shards(data, tokenizer, Plain())
    load_shards(data, tokenizer, Plain())
    assert [path.name for path in hashed] == ["3.py"]


def test_shards_without_their_sources_are_used_and_say_so(data, tokenizer, tmp_path, capsys):
    (tmp_path / "code" / "3.py").unlink()
    load_shards(data, tokenizer, Plain())
    (line,) = capsys.readouterr().err.splitlines()
    assert "1 of 13 source files is not here (such as code/3.py)" in line
    shutil.rmtree(tmp_path / "code")
    (tmp_path / "one.txt").unlink()
    load_shards(data, tokenizer, Plain())
    (line,) = capsys.readouterr().err.splitlines()
    assert "13 of 13 source files are not here" in line


def test_shards_of_before_say_that_nothing_is_known_of_their_sources(data, tokenizer, capsys):
    os.remove(os.path.join(data.shards, SOURCES))
    load_shards(data, tokenizer, Plain())
    (line,) = capsys.readouterr().err.splitlines()
    assert "sources.jsonl is missing" in line


def test_a_source_that_changes_before_tokenizing_goes_on_is_refused(data, tokenizer, tmp_path):
    """The shards that are finished are of the old content."""
    os.remove(os.path.join(data.shards, MANIFEST))
    change_bytes(tmp_path / "code" / "3.py")
    with pytest.raises(InputError, match=r"code/3\.py has changed"):
        make_shards(data, recipe_of(data, tokenizer, Plain()), 1)


def test_a_source_that_changes_while_it_is_tokenized_is_refused(
    data, tokenizer, tmp_path, monkeypatch
):
    shutil.rmtree(data.shards)
    from train.data.shards import building

    def run_tasks(*arguments):
        run(*arguments)
        change_bytes(tmp_path / "one.txt")

    run = building._run_tasks
    monkeypatch.setattr(building, "_run_tasks", run_tasks)
    with pytest.raises(InputError, match=r"one\.txt has changed"):
        load_shards(data, tokenizer, Plain())
    assert not os.path.exists(os.path.join(data.shards, MANIFEST))


def test_cached_tokens_are_of_the_text_and_not_of_its_time(data, tokenizer, tmp_path):
    """In memory every text is read at each start, so that a change without a trace is seen."""

    def tokens():
        return prepare(load_corpus((), data.files), tokenizer, tmp_path / "cache").fingerprint

    first = tokens()
    path = tmp_path / "code" / "3.py"
    time = path.stat().st_mtime_ns
    path.write_text(random_program(77)[: path.stat().st_size])
    os.utime(path, ns=(0, time))
    assert tokens() != first
