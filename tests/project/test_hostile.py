"""Whatever a file or option contains, the answer is a result or a one-line error.

Each input of :mod:`support.hostile` must be refused. A random input must be refused, or work. The
fuzzing is seeded and bounded; the slow suite tries more examples.
"""

import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax as sj
from infer.prompts import PromptEncoder, read_prompts
from infer.run import commands
from specjax._util.errors import LONGEST, SpecjaxError, one_line
from specjax._util.files import json_line
from specjax.models import from_hf, load_pretrained, num_params
from specjax.models.config import ROPE_KINDS
from specjax.models.hf import config as hf_config
from specjax.models.hf.files import read_weight_map
from specjax.models.hf.layout import INDEX, WEIGHTS
from specjax.models.layers import rope_frequencies
from specjax.registry import METHODS, method
from support import hostile
from train.config import LMConfig, SDSATConfig, from_toml

SECONDS = 60  # more than this is a hang, even on a slow machine


@pytest.fixture(scope="module", autouse=True)
def saved(tiny_pair_dirs):
    hostile.Models.saved = Path(tiny_pair_dirs[0])


@contextlib.contextmanager
def in_time():
    """Fails a block that takes too long. Kills the process if no signal reaches the code."""

    def late(*_):
        raise TimeoutError(f"not done after {SECONDS} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        faulthandler.cancel_dump_traceback_later()


def is_one_line(text: str) -> bool:
    text.encode()
    return len(text.splitlines()) == 1 and len(text) <= LONGEST


def refusal(case, home: Path) -> str | None:
    """What is wrong with the answer to a case; None if it is a one-line SpecjaxError."""
    home.mkdir()
    try:
        with in_time():
            case(home)
    except SpecjaxError as error:
        return None if is_one_line(str(error)) else f"not one line: {error!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"raised {type(error).__name__}: {error}"[:300]
    return "was accepted"


@pytest.mark.parametrize("group", hostile.QUICK, ids=lambda group: group.__name__)
def test_hostile_values_are_refused(group, tmp_path):
    cases = dict(group())
    found = {name: refusal(case, tmp_path / str(i)) for i, (name, case) in enumerate(cases.items())}
    assert len(found) > 50 and {name: why for name, why in found.items() if why} == {}


def each(*groups):
    cases = [(name, case) for group in groups for name, case in group()]
    return pytest.mark.parametrize("case", [c for _, c in cases], ids=[ascii(n) for n, _ in cases])


@each(*hostile.WHOLE)
def test_a_hostile_file_is_refused(case, tmp_path, capfd):
    assert refusal(case, tmp_path / "home") is None
    assert "panicked" not in capfd.readouterr().err  # nor may Rust print a panic


@pytest.mark.torch
@pytest.mark.parametrize("group", hostile.TORCH, ids=lambda group: group.__name__)
def test_hostile_files_for_torch_are_refused(group, tmp_path):
    pytest.importorskip("torch")
    found = {name: refusal(case, tmp_path / str(i)) for i, (name, case) in enumerate(group())}
    assert {name: why for name, why in found.items() if why} == {}


def test_a_fifo_ends_a_program_with_one_line(tmp_path):
    """Runs a whole process, to check its exit code too."""
    os.mkfifo(tmp_path / "in.jsonl")
    argv = ["infer.run", "--target", hostile.Models.saved, "--prompts", tmp_path / "in.jsonl"]
    argv = [sys.executable, "-W", "ignore", "-m", *argv]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert "empty" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_pipe_with_a_writer_is_read(tmp_path, model):
    os.mkfifo(tmp_path / "in.jsonl")
    # Opening a FIFO to write blocks until a reader comes, and what is written stays while it does.
    reader = os.open(tmp_path / "in.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    try:
        (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
        prompts, bad = read_prompts(str(tmp_path / "in.jsonl"), PromptEncoder(model))
    finally:
        os.close(reader)
    assert [prompt.text for prompt in prompts] == ["a"] and bad == []


# --- fuzzing ----------------------------------------------------------------------------------

more = pytest.mark.parametrize("examples", [100, pytest.param(500, marks=pytest.mark.slow)])
KEPT_SIZES = 64  # sizes are at most this, or far too large: those between only cost memory
numbers = st.one_of(
    st.integers(-2, KEPT_SIZES),
    st.integers(2**31, 2**70).map(lambda n: n * (-1) ** n),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-320, 1e300, 10**400]),
)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def tried(examples, strategy, check, *shown):
    """Runs a check on the examples ``shown``, and on random ones, the same in every run."""
    bounds = settings(max_examples=examples, derandomize=True, database=None)

    def one(drawn):
        with in_time():
            check(drawn)

    for value in shown:
        one(value)
    bounds(given(strategy)(one))()


def refuses(read, *arguments):
    """The result of ``read``; None if it raises a SpecjaxError, which must be one line."""
    try:
        return read(*arguments)
    except SpecjaxError as error:
        assert is_one_line(str(error)), error
        return None


@st.composite
def configs(draw):
    """A config with some values replaced by valid or invalid ones."""
    family = draw(st.sampled_from(sorted(hostile.BASES)))
    known = [*hf_config.KEYS, *hostile.BASES[family], "eos_token_id", "pad_token_id"]
    ropes = st.dictionaries(
        st.sampled_from(sorted(hf_config.ROPE)), st.sampled_from(ROPE_KINDS) | values, max_size=5
    )
    changes = st.dictionaries(st.sampled_from(known), values, max_size=3)
    rope = draw(st.sampled_from([{}, {"rope_scaling": draw(ropes)}]))
    return hostile.BASES[family] | rope | draw(changes)


def is_fit(config) -> None:
    """Checks that an accepted config gives finite logits, and is equal when read back."""
    cfg = refuses(from_hf, config)
    if cfg is None:
        return
    assert num_params(cfg) > 0
    for rope in filter(None, (cfg.rope, cfg.local_rope)):
        frequencies, factor = rope_frequencies(rope, cfg.rotary_dim or cfg.head_dim)
        assert np.isfinite(frequencies).all() and math.isfinite(factor)
    assert all(0 <= i < cfg.vocab_size for i in cfg.eos_ids)
    assert all(slides is None or slides > 0 for slides in cfg.windows)


@more
def test_a_config_is_refused_or_fit_for_use(examples):
    tried(examples, configs(), is_fit)


def mutated(text: bytes):
    """A file with a stretch of it replaced."""
    ends = st.integers(0, len(text))
    stuff = st.binary(max_size=8) | st.sampled_from([b"[" * 5000, b"9" * 5000, b'"', b"{", b"}"])
    return st.builds(lambda a, b, s: text[: min(a, b)] + s + text[max(a, b) :], ends, ends, stuff)


@more
def test_any_bytes_are_a_config_or_refused(examples, tmp_path):
    text = json.dumps(hostile.BASES["llama"]).encode()

    def read(content):
        refuses(hostile.read_changed, tmp_path, content)

    tried(examples, mutated(text) | st.binary(), read, *hostile.TEXTS.values())


@more
def test_an_index_names_files_of_its_directory_or_is_refused(examples, tmp_path):
    names = st.text(max_size=8) | st.sampled_from(["../a", "/a", ".", "a.safetensors"])
    maps = values | st.dictionaries(st.text(max_size=8), names | values, max_size=3)

    def read(held):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": held}))
        for name in (refuses(read_weight_map, tmp_path / INDEX) or {}).values():
            assert (tmp_path / name).parent == tmp_path

    tried(examples, maps, read, *hostile.MAPS.values())


@more
def test_a_header_is_read_or_refused(examples, saved, tmp_path):
    directory = hostile.Models.copy(tmp_path)
    whole = (directory / WEIGHTS).read_bytes()
    shapes = st.lists(st.integers(-1, 2**66) | numbers, max_size=3)
    entries = st.builds(
        hostile.entry, shapes | values, shapes | values, st.sampled_from(["F32", "BF16", "X", 5])
    )
    name = st.sampled_from([hostile.EMBED, "model.norm.weight"]) | st.text(max_size=8)
    headers = st.dictionaries(name, entries | values, max_size=3).map(
        lambda header: hostile.safetensors(header, b"\0" * 64)
    )

    def read(content):
        (directory / WEIGHTS).write_bytes(content)
        refuses(load_pretrained, directory)

    head = whole[:4000]
    changed = mutated(head).map(lambda start: start + whole[len(head) :])
    tried(examples, headers | changed, read, *hostile.HEADERS.values())


@pytest.fixture(scope="module")
def model(saved):
    return sj.load(hostile.Models.saved)


LINES = (
    *(text.replace(b"\n", b"") for text in hostile.TEXTS.values()),
    b'{"prompt": "a", "id": "\\ud800"}',
    b'{"prompt": "a", "id": true}',
    b'{"prompt": "a", "id": [1]}',
    b'{"prompt": "a", "id": "x\\ny\\u2028z\\u0085"}',
    b'{"prompt": "\\udfff"}',
    b'{"prompt": ["a"]}',
    b'{"turns": [5]}',
    b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"prompt": "a", "turn": 2}',
    b'{"prompt": "a", "first_tokens": "x"}',
    b'{"prefix": "a"}',
)


@more
def test_a_line_is_a_prompt_or_bad_and_a_row_one_line(examples, model, tmp_path):
    keys = st.sampled_from(["prompt", "id", "task_id", "prefix", "suffix", "turns", "messages"])
    entries = st.dictionaries(keys, values | st.text(st.characters(), max_size=5), max_size=3)
    odd = st.text(st.sampled_from("a\u2028\u2029\x85\x0b\x1c\r\n\ud800"), max_size=4)
    rows = st.builds(lambda e, i: e | {"prompt": "a", "id": i}, entries, odd | values)
    lines = st.binary(max_size=40) | (entries | rows).map(lambda e: json.dumps(e).encode())
    path = tmp_path / "in.jsonl"

    def read(line):
        path.write_bytes(line.replace(b"\n", b"").replace(b"\r", b"") + b'\n{"prompt": "b"}\n')
        good, bad = read_prompts(str(path), PromptEncoder(model))
        assert good[-1].text == "b" and len(good) + len(bad) <= 2
        assert all(is_one_line(one_line(line.reason)) for line in bad)
        for prompt in good:
            row = {"id": prompt.id, "prompt": prompt.text} | prompt.entry
            written = json_line(row)
            assert len(written.splitlines()) == 1 and written.encode()
            assert repr(json.loads(written)) == repr(row)  # repr, because NaN != NaN

    tried(examples, lines, read, *LINES)


def settings_of(cls):
    """Every ``section.key`` of a training config."""
    return [
        f"{section.name}.{key.name}"
        for section in dataclasses.fields(cls)
        for key in dataclasses.fields(section.default)
    ]


@more
def test_a_setting_is_refused_or_in_its_range(examples, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("")
    names = [(cls, name) for cls in (LMConfig, SDSATConfig) for name in settings_of(cls)]
    texts = values.map(lambda value: json.dumps(value)) | st.text(max_size=12)

    def read(drawn):
        (cls, name), text = drawn
        cfg = refuses(from_toml, cls, path, [f"{name}={text}"])
        section, key = name.split(".")
        value = getattr(getattr(cfg, section), key) if cfg else 0
        if type(value) in (int, float):
            assert 0 <= value <= 1e30

    shown = [((LMConfig, names[0][1]), "9" * 5000), ((LMConfig, names[0][1]), "[" * 9000)]
    tried(examples, st.tuples(st.sampled_from(names), texts), read, *shown)


@more
def test_an_option_is_refused_or_resolved(examples):
    names = [(name, option) for name in METHODS for option in METHODS[name].options]
    texts = st.text(max_size=12) | numbers.map(str) | st.sampled_from(["1,1", "nan", "1e999"])

    def read(drawn):
        (name, option), text = drawn
        resolved = refuses(method(name).resolve, {option: text})
        assert resolved is None or resolved[option] == resolved[option]

    tried(examples, st.tuples(st.sampled_from(names), texts), read)


@more
def test_any_message_is_one_line(examples):
    def read(text):
        assert is_one_line(str(SpecjaxError(f"x{text}")))

    shown = ("a\nb", "a\u2028b\x85c\x0bd", "\ud800", "x" * 10**6)
    tried(examples, st.text(st.characters()), read, *shown)


def test_any_arguments_end_in_one_line(capsys):
    for argv in (["--method", "a\nb"], ["--mesh", "x\u2028y"], ["--no\nsuch", "flag"]):
        with pytest.raises(SystemExit) as stop:
            sys.exit(commands.main(argv))
        assert stop.value.code == 2 and is_one_line(capsys.readouterr().err.strip("\n"))
