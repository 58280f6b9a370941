"""Shards: the same tokens as in memory, after kills, damage and removed duplicates."""

import gzip
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from specjax._util.errors import InputError
from support.training import (
    ROOT,
    TINY_LM,
    logged,
    overrides,
    program_tokenizer,
    random_program,
    save_checkpoint,
    small_tokenizer,
)
from train import tokenizing, tokens
from train.config import DataSection, HeadRunConfig, LMConfig, SDSATConfig, from_dict
from train.data.corpus import is_held_out, load_corpus
from train.data.encoding import Plain
from train.data.in_memory import prepare
from train.data.loader import make_loader, valid_batches
from train.data.near_duplicates import band_keys, compared_tokens
from train.data.reading import Document, Intake, TextPiece, cut, read_piece
from train.data.shards.building import (
    load_documents,
    load_shards,
    make_shards,
    recipe_of,
    source_names,
)
from train.data.shards.files import MANIFEST
from train.data.shards.reading import open_shards
from train.data.tokenizer import train_tokenizer
from train.head.prepare import prepare_setup as prepare_head
from train.lm import __main__ as lm
from train.sdsat import training as sdsat_training


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return program_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of source code, record files of every kind, and files that are no text."""
    home = tmp_path_factory.mktemp("sources")
    (home / "code" / ".git").mkdir(parents=True)
    for number, name in enumerate(("a.java", "b.cpp", "c.rs", "Makefile", "d.py")):
        (home / "code" / name).write_text(random_program(number))
    (home / "code" / ".git" / "config").write_text(random_program(90))
    (home / "code" / "data.csv").write_text(random_program(91))
    (home / "code" / "e.bin").write_bytes(b"\0\1" * 200)
    (home / "code" / "f.txt").write_bytes(b"\xe9" * 300)
    (home / "code" / "g.txt").write_text("short")

    def lines(numbers):
        return "".join(json.dumps({"content": random_program(i)}) + "\n" for i in numbers).encode()

    (home / "lines.jsonl").write_bytes(lines(range(100, 160)) + b"\n" + lines(range(160, 180)))
    (home / "packed.jsonl.gz").write_bytes(gzip.compress(lines(range(200, 220))))
    (home / "packed.jsonl.zst").write_bytes(pyarrow.compress(lines(range(300, 320)), "zstd", True))
    table = pyarrow.table({"content": [random_program(i) for i in range(400, 430)]})
    parquet.write_table(table, home / "rows.parquet", row_group_size=7)
    return home


def data_of(sources, shards, *names, **other):
    names = names or ("code", "lines.jsonl", "packed.jsonl.gz", "packed.jsonl.zst", "rows.parquet")
    files = tuple(str(sources / name) for name in names)
    return DataSection(corpora=(), files=files, shards=str(shards), **other)


@pytest.fixture(scope="module")
def finished_shards(sources, tokenizer, tmp_path_factory):
    """(data config, manifest) of a corpus with every kind of file, several shards of each."""
    data = data_of(sources, tmp_path_factory.mktemp("made") / "shards")
    return data, make_shards(data, recipe_of(data, tokenizer, Plain()), 1, shard_bytes=4000)


def whole(documents):
    """Every document's tokens, as a set: the order may differ."""
    return {bytes(documents.read(i, 0, int(n))) for i, n in enumerate(documents.lengths)}


def files_of(data):
    home = os.path.join(data.shards, "")
    return {
        name: open(home + name, "rb").read() for name in sorted(os.listdir(home)) if "." in name
    }


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lines.jsonl", "rows.parquet", "packed.jsonl.gz"])
def test_pieces_hold_each_document_one_time_under_its_name(sources, name):
    piece = TextPiece(str(sources / name), name)
    pieces = list(cut(piece, 1500))
    assert len(pieces) > 4 or name.endswith("gz")
    parts = [list(read_piece(part, Intake())) for part in pieces]
    assert list(itertools.chain(*parts)) == list(read_piece(piece, Intake()))


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
def test_a_truncated_source_is_an_error_or_counted(sources, tmp_path, kind):
    (path,) = sources.glob(f"*.{kind}")
    (tmp_path / path.name).write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    piece = TextPiece(str(tmp_path / path.name), path.name)
    with pytest.raises(InputError, match=rf"{path.name} is not a readable \.?{kind} file"):
        list(read_piece(piece, Intake()))
    tolerant = Intake(strict=False)
    list(read_piece(piece, tolerant))
    assert tolerant.skipped["damaged"]["count"] == 1


# --- what is in the shards ---------------------------------------------------------------------


def test_shards_hold_the_same_as_memory(finished_shards, tokenizer):
    data, manifest = finished_shards
    shards = load_shards(data, tokenizer, Plain(), make=False)
    intake = Intake(strict=False, shortest=data.min_chars)
    texts = load_corpus(data.corpora, data.files, intake)
    memory = prepare(texts, tokenizer, skipped=intake.skipped)
    assert len(manifest["shards"]) > 12
    assert whole(shards.sources[0]) == whole(memory.sources[0])
    ours = {source.name: whole(source.documents) for source in shards.held_out}
    theirs = {source.name: whole(source.documents) for source in memory.held_out}
    assert ours == theirs and len(ours) > 2
    assert [source.weight for source in shards.held_out] == [
        source.weight for source in memory.held_out
    ]
    ours, theirs = shards.inventory, memory.inventory
    assert (ours.documents, ours.tokens) == (theirs.documents, theirs.tokens)
    assert {k: v["count"] for k, v in ours.left_out.items()} == {
        k: v["count"] for k, v in theirs.left_out.items()
    }
    np.testing.assert_array_equal(shards.counts(400), memory.counts(400))


def test_skipped_files_are_in_the_manifest(finished_shards):
    _, manifest = finished_shards
    names = {reason: entry["examples"] for reason, entry in manifest["skipped"].items()}
    assert names == {
        "hidden": ["code/.git/config"],
        "data": ["code/data.csv"],
        "binary": ["code/e.bin"],
        "not UTF-8": ["code/f.txt"],
        "shorter than 200 characters": ["code/g.txt"],
    }
    assert manifest["sources"][0] | {"sha256": 0} == {"name": "code", "files": 8, "sha256": 0}


def test_one_shard_gives_the_rows_of_memory(sources, tokenizer, tmp_path):
    """With the same order of documents, all rows are equal, held-out ones too."""
    data = data_of(sources, tmp_path / "shards", "lines.jsonl")
    shards = load_shards(data, tokenizer, Plain())
    documents = {d.name: d for d in load_corpus((), data.files)}
    in_order = [documents[f"lines.jsonl#{n}"] for n in range(1, 82) if n != 61]
    memory = prepare(in_order, tokenizer)
    held_out = lambda c: [batch.rows for batch in valid_batches(c, 64, 2)]  # noqa: E731
    for read in (lambda c: make_loader(c, 64, 2, 5), held_out):
        for ours, theirs in itertools.islice(zip(read(shards), read(memory), strict=True), 80):
            for name in theirs:
                np.testing.assert_array_equal(ours[name], theirs[name])
    state = json.loads(json.dumps((loader := make_loader(shards, 64, 2, 5)).get_state()))
    first = next(loader)
    loader.set_state(state)
    np.testing.assert_array_equal(next(loader)["tokens"], first["tokens"])


def test_copies_and_near_copies_of_held_out_text_are_left_out(tokenizer, tmp_path):
    out = random_program(1, 100)
    near = random_program(1, 100).replace("= 1", "= 9", 2)
    other = random_program(2, 100)
    held_out = next(i for i in range(5, 200) if is_held_out(f"x.jsonl#{i}"))
    rows = [random_program(1000 + i) for i in range(held_out)]
    rows[0], rows[1], rows[2], rows[3], rows[held_out - 1] = out, near, other, other, out
    assert near != out
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = data_of(tmp_path, tmp_path / "shards", "x.jsonl")
    shards = load_shards(data, tokenizer, Plain())
    counts = shards.manifest["documents"]
    assert counts == {"train": held_out - 4, "held_out": 1, "duplicates": 2, "near_duplicates": 1}
    assert {
        tokenizer.decode(np.frombuffer(ids, np.uint16)[:-1])
        for ids in whole(shards.held_out[0].documents)
    } == {out}


def test_shared_bands_follow_the_curve():
    """Of 200 pairs with J = 0.8, a share of 1 − (1 − J^8)^16 has a common band; of others, none."""
    rng = np.random.default_rng(0)
    shared, separate = 1600, 200  # J = shared / (shared + 2 · separate), less border shingles
    pairs = [
        [np.concatenate([common, rng.integers(0, 60000, separate)]) for _ in range(2)]
        for common in rng.integers(0, 60000, (200, shared))
    ]
    left, right = (band_keys([pair[i].astype(np.uint16) for pair in pairs]) for i in range(2))
    assert (left == right).any(axis=1).mean() == pytest.approx(0.947, abs=0.055)
    assert not (left == np.roll(right, 1, axis=0)).any()
    short = band_keys(
        [np.array([5], np.uint16), np.array([5], np.uint16), np.array([5, 6], np.uint16)]
    )
    assert (short[0] == short[1]).all() and not (short[0] == short[2]).any()


@pytest.mark.parametrize("length", [3, 10, 30])
def test_short_texts_with_one_shingle_in_common_are_no_near_duplicates(length):
    """All end alike. Of pairs with J = 1 / (2 · length − 1) hardly any has a common band."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 60000, (400, length)).astype(np.uint16)
    texts[:, -1] = 7
    keys = band_keys(list(texts))
    assert np.mean((keys[:200] == keys[200:]).any(axis=1)) <= 0.01
    assert (band_keys([texts[0]]) == keys[0]).all(), "the other documents do not matter"


def test_short_answers_are_told_apart_by_their_questions():
    """A long beginning that all share does not make them alike, and long answers stand alone."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 60000, 300)
    mask = np.arange(317) >= 315
    asked = []
    for _ in range(100):
        ids = np.concatenate([shared, rng.integers(0, 60000, 15), [1, 2]])
        asked.append(compared_tokens(ids.astype(np.uint16), mask))
    keys = band_keys(asked)
    assert (keys[:50] == keys[50:]).any(axis=1).mean() <= 0.02
    assert all(len(ids) == 34 and ids[-2:].tolist() == [1, 2] for ids in asked)
    ids = np.arange(60)
    np.testing.assert_array_equal(compared_tokens(ids, ids >= 20), ids[20:])


def test_rows_come_from_each_source_by_its_weight(sources, tokenizer, tmp_path):
    data = data_of(sources, tmp_path / "s", "lines.jsonl", "rows.parquet", weights=(3.0, 1.0))
    shards = load_shards(data, tokenizer, Plain())
    lines = b"".join(sorted(whole(shards.sources[0])))
    seen = [batch["tokens"][0] for batch in itertools.islice(make_loader(shards, 8, 1, 0), 100)]
    from_lines = sum(row.astype(np.uint16).tobytes() in lines for row in seen)
    # 75 are expected; a row that spans two documents is found in neither.
    assert 50 < from_lines <= 75
    one, two = (make_loader(shards, 8, 1, 0, process_index=i, process_count=2) for i in range(2))
    for even, odd in zip(seen[:20:2], seen[1:20:2], strict=True):
        np.testing.assert_array_equal(next(one)["tokens"][0], even)
        np.testing.assert_array_equal(next(two)["tokens"][0], odd)


# --- what goes wrong ---------------------------------------------------------------------------


def copied(finished_shards, home):
    data, _ = finished_shards
    shutil.copytree(data.shards, home)
    return DataSection(corpora=(), files=data.files, shards=str(home))


@pytest.mark.parametrize("name", ["00003.array_record", "index.npz", "manifest.json"])
def test_a_truncated_file_is_named_and_made_again(finished_shards, tokenizer, tmp_path, name):
    data = copied(finished_shards, tmp_path / "shards")
    before, path = files_of(data), tmp_path / "shards" / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(InputError, match=rf"{name} is damaged .* train\.tokens makes it anew"):
        load_shards(data, tokenizer, Plain(), make=False)
    make_shards(data, recipe_of(data, tokenizer, Plain()), 1, shard_bytes=4000)
    assert files_of(data) == before


def test_other_tokenizers_files_and_writers_are_refused(
    finished_shards, tokenizer, sources, tmp_path
):
    data = copied(finished_shards, tmp_path / "shards")
    other = train_tokenizer([Document("b", random_program(5, 200))], 280, tmp_path / "t.json")
    with pytest.raises(InputError, match="was made with another tokenizer than now"):
        make_shards(data, recipe_of(data, other, Plain()))
    fewer = data_of(sources, data.shards, "code")
    with pytest.raises(InputError, match=r"holds code, lines\.jsonl, .* name the same"):
        make_shards(fewer, recipe_of(fewer, tokenizer, Plain()))
    os.remove(os.path.join(data.shards, MANIFEST))
    with pytest.raises(InputError, match="made with other files than now"):
        make_shards(fewer, recipe_of(fewer, tokenizer, Plain()), 1, shard_bytes=4000)
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        open_shards(data.shards, recipe_of(data, tokenizer, Plain()), source_names(data))


def test_bad_weights_are_named(tmp_path):
    for weights, message in (([0], "data.weights=0"), (1, "expected a list of numbers")):
        with pytest.raises(InputError, match=message):
            from_dict(LMConfig, {"data": {"weights": weights}})
    with pytest.raises(InputError, match=r"data\.weights needs data\.shards"):
        load_documents(DataSection(weights=(1.0,)), Intake())
    with pytest.raises(InputError, match="2 numbers for 1 sources"):
        source_names(DataSection(files=("x",), weights=(1.0, 2.0), shards="s"))


def test_a_full_disk_is_one_line_and_leaves_no_partial_file(sources, tokenizer, tmp_path):
    data = data_of(sources, tmp_path / "shards", "lines.jsonl")
    work = (recipe_of(data, tokenizer, Plain()), 0, [TextPiece(data.files[0], "lines.jsonl")], len)
    script = (
        "import pickle, resource, sys\n"
        "from train.data.shards.writing import make_shard\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "try: make_shard(*pickle.load(sys.stdin.buffer))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    os.makedirs(os.path.join(data.shards, "parts"))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=pickle.dumps(work), cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"InputError data.shards="), done.stdout
    assert b"cannot be written" in done.stdout and b"File too large" in done.stdout
    assert os.listdir(data.shards) == ["parts"] and os.listdir(data.shards + "/parts") == []


# --- what is cut off ---------------------------------------------------------------------------


def killed(command, when):
    """Starts it and kills it once ``when()``; returns whether it was still running."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while process.poll() is None and not when():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    _, stderr = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), stderr.decode()
    return process.returncode != 0


def finished(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.sweep
def test_killed_anywhere_shards_and_losses_are_the_same(tokenizer, tmp_path):
    """Kills tokenizing twice, and once a run that trains on the shards."""
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    for number, name in enumerate("xyz"):
        seeds = range(1000 * number, 1000 * number + 300)
        lines = [json.dumps({"content": random_program(seed, 100)}) for seed in seeds]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def settings(run):
        files = [str(tmp_path / f"{name}.jsonl") for name in "xyz"]
        data = {"corpora": [], "files": files, "shards": str(run / "shards")}
        words = [f"data.{name}={json.dumps(value)}" for name, value in data.items()]
        words += [f"tokenizer.path={tmp_path / 'tokenizer.json'}", f"run.dir={run / 'lm'}"]
        return [TINY_LM, *overrides(*words, "optim.total_steps=20", "data.seq_len=256")]

    def tokenize(run):
        return [sys.executable, "-m", "train.tokens", *settings(run)]

    def lm(run, *more):
        return [sys.executable, "-m", "train.lm", *settings(run), *more]

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finished(tokenize(whole))
    finished(lm(whole))
    assert killed(tokenize(broken), lambda: any((broken / "shards").glob(".*.tmp")))
    assert killed(tokenize(broken), lambda: any((broken / "shards" / "parts").glob("*.npz")))
    assert not (broken / "shards" / "manifest.json").exists()
    assert killed(lm(broken), (broken / "lm/checkpoints/10").exists)  # tokenizes the rest
    finished(lm(broken, "--resume"))

    def losses(run):
        return [(row["step"], row["loss"]) for row in logged(run / "lm") if "loss" in row]

    assert losses(broken) == losses(whole) and len(losses(whole)) == 20
    for path in (whole / "shards").rglob("*"):
        same = broken / "shards" / path.relative_to(whole / "shards")
        assert path.is_dir() or same.read_bytes() == path.read_bytes(), path


# --- the programs ------------------------------------------------------------------------------


def test_the_program_reports_what_it_made_and_what_is_missing(sources, tokenizer, tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    files = json.dumps([str(sources / "code"), str(sources / "lines.jsonl")])
    sets = ["data.corpora=[]", f"data.files={files}"]
    assert tokens.main([TINY_LM, *overrides(*sets)]) == 2
    assert "data.shards is empty" in capsys.readouterr().err
    sets.append(f"data.shards={tmp_path / 'shards'}")
    assert tokens.main([TINY_LM, *overrides(*sets)]) == 2
    assert "data.shards needs tokenizer.path" in capsys.readouterr().err
    sets.append(f"tokenizer.path={tmp_path / 'tokenizer.json'}")
    assert tokens.main([TINY_LM, *overrides(*sets), "--processes", "1"]) == 0
    stdout = capsys.readouterr().out
    assert "2 shards" in stdout and "left out, data: 1 (such as code/data.csv)" in stdout
    assert lm.main([TINY_LM, *overrides(*sets), "--dry-run", "--json"]) == 0
    plan, manifest = json.loads(capsys.readouterr().out), tmp_path / "shards" / MANIFEST
    assert plan["train_tokens"] == json.loads(manifest.read_text())["tokens"]["train"]


@pytest.mark.parametrize(
    ("values", "cls"),
    [
        ({}, LMConfig),
        ({"model": {"hidden_size": 64}}, LMConfig),
        ({"model": {"init_from": "x"}, "tokenizer": {}}, LMConfig),
        ({"model": {"init_from": "x", "train": "lora"}}, SDSATConfig),
        ({"model": {"model_name_or_path": "x", "lora_r": 4}}, SDSATConfig),
        ({"model": {"init_from": "x"}, "head": {}}, HeadRunConfig),
        ({"model": {"init_from": "x", "unknown": 4}}, LMConfig),
        ({"model": {"init_from": "x", "remat": True}}, None),
    ],
)
def test_a_config_tells_its_program(values, cls):
    if cls:
        assert tokenizing.kind_of(values) is cls
    else:
        with pytest.raises(InputError, match=r"suits several programs: add a section"):
            tokenizing.kind_of(values)


@pytest.mark.parametrize(
    ("program", "cls", "read"),
    [
        ("sdsat", SDSATConfig, lambda cfg: sdsat_training.read(cfg, None)[1]),
        ("head", HeadRunConfig, lambda cfg: prepare_head(cfg, None).data),
    ],
)
def test_fine_tuning_programs_read_their_shards(sources, tmp_path, program, cls, read):
    """Shards hold the same documents as memory does, with the checkpoint's BOS and EOS."""
    home = tmp_path / "start"
    home.mkdir()
    start = save_checkpoint(home, small_tokenizer(home))
    files, shards = [str(sources / "lines.jsonl")], str(tmp_path / "shards")
    data = {"corpora": [], "files": files, "seq_len": 32}
    section = {"fim_rate": 0.0} if program == "sdsat" else {"layers": [0]}
    section |= {"decode_tokens": 8}
    values = {"model": {"init_from": str(start)}, program: section, "data": data}
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        read(from_dict(cls, values | {"data": data | {"shards": shards}}))
    config = tmp_path / "c.toml"
    config.write_text("")
    sets = [f"{s}.{k}={json.dumps(v)}" for s, keys in values.items() for k, v in keys.items()]
    assert tokens.main([str(config), *overrides(*sets, f"data.shards={shards}")]) == 0
    there = read(from_dict(cls, values | {"data": data | {"shards": shards}}))
    assert whole(there.sources[0]) == whole(read(from_dict(cls, values)).sources[0])
