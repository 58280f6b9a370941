"""train.states: hidden states stored ahead, and train.head on them."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax._util.errors import InputError
from specjax._util.program import INTERRUPTED
from specjax.models import init_params, load_pretrained
from support.checkpoints import edit_weights, same
from support.training import (
    ROOT,
    head_arguments,
    logged,
    random_program,
    repeatable,
    save_checkpoint,
    small_tokenizer,
)
from train.config import HeadRunConfig, from_toml
from train.data.loader import training_rows
from train.data.packing import ANSWERS, stack
from train.head import storing
from train.head.__main__ import main as train_head
from train.head.losses import AUX, HIDDEN, HeadObjective, head_loss
from train.head.prepare import prepare_setup
from train.head.states import HeadLoader, open_states
from train.states import main as train_states

ROWS = 24  # of the run: 6 steps of 4
# Several shards, and no decoding, which needs the whole target.
SMALL = ("head.decode_prompts=0", "head.layers=[0, 1]")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target of two layers."""
    home = tmp_path_factory.mktemp("target")
    return save_checkpoint(home, small_tokenizer(home), num_layers=2)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(storing, "SHARD_BYTES", 2 * 4 * 48 * (3 * 16 * 4 + 16))


def settings(target, states, run="run", *more):
    """Arguments of both programs."""
    return head_arguments(target, states.parent / run, *SMALL, f"head.states={states}", *more)


@pytest.fixture(scope="module")
def stored(target, tmp_path_factory):
    """A directory of states that nothing interrupted."""
    home = tmp_path_factory.mktemp("stored") / "states"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storing, "SHARD_BYTES", 2 * 4 * 48 * (3 * 16 * 4 + 16))
        assert train_states(settings(target, home)) == 0
    return home


def contents(home):
    return {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()}


def loaded(target, home, *more):
    """(config, setup, stored states) of a run."""
    path, *arguments = settings(target, home, "run", *more)
    cfg = from_toml(HeadRunConfig, path, arguments[1::2])
    setup = prepare_setup(cfg, None)
    return cfg, setup, open_states(cfg, setup)


def test_gradients_are_those_of_states_computed_on_the_way(target, stored):
    """Bit for bit in float32, with and without the target's layers."""
    cfg, setup, states = loaded(target, stored)
    rows = training_rows(setup.data, cfg.data.seq_len, cfg.run.seed)
    params = init_params(setup.head, jax.random.key(1))
    loss = head_loss(setup.target, setup.head, HeadObjective(cfg.head.steps))

    gradients = jax.jit(jax.value_and_grad(lambda *arguments: loss(*arguments)[0]))

    _, whole = load_pretrained(target)
    _, tables = load_pretrained(target, only_tables=True)
    assert "layers" not in tables
    for first in (0, 20):
        numbers = range(first, first + 4)
        batch = stack([rows[number] for number in numbers])
        with_states = stack([states.training_row(rows[number], number) for number in numbers])
        assert with_states[AUX].shape == (4, 48, 2, 16) and with_states[HIDDEN].any()
        on_the_way = gradients(params, whole, batch)
        ahead = gradients(params, tables, with_states)
        assert same(on_the_way, ahead) and ahead[0] > 0


@pytest.mark.slow
def test_a_run_on_stored_states_gives_the_same_weights(target, stored, tmp_path):
    plain = head_arguments(target, tmp_path / "plain", *SMALL)
    assert train_head(plain) == 0
    assert train_head(settings(target, stored, tmp_path / "ahead")) == 0
    weights = [load_file(tmp_path / run / "export/model.safetensors") for run in ("plain", "ahead")]
    jax.tree.map(np.testing.assert_array_equal, *weights)
    assert repeatable(tmp_path / "plain") == repeatable(tmp_path / "ahead")
    assert any("valid_loss" in record for record in logged(tmp_path / "ahead"))


def test_killed_and_started_again_makes_the_same_files(target, stored, tmp_path, monkeypatch):
    home = tmp_path / "states"
    save = storing.save_tensors
    written = []

    def killed(path, tensors):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        save(path, tensors)

    monkeypatch.setattr(storing, "save_tensors", killed)
    assert train_states(settings(target, home)) == INTERRUPTED
    assert not (home / "manifest.json").exists() and len(list(home.glob("*.safetensors"))) == 2
    # What a kill amid a write leaves behind, and a shard that was cut.
    (home / ".training-00002.safetensors.1.tmp").write_bytes(b"half")
    written[1].write_bytes(written[1].read_bytes()[:-9])
    monkeypatch.setattr(storing, "save_tensors", save)
    assert train_states(settings(target, home)) == 0
    assert contents(home) == contents(stored) and len(contents(home)) >= 4 + 2
    # A finished directory is left as it is.
    before = {path: path.stat().st_mtime_ns for path in home.glob("*.*")}
    assert train_states(settings(target, home)) == 0
    assert {path: path.stat().st_mtime_ns for path in home.glob("*.*")} == before


def test_a_longer_run_reads_the_rows_again_in_another_order(target, stored):
    cfg, setup, states = loaded(target, stored)
    rows = training_rows(setup.data, cfg.data.seq_len, cfg.run.seed)

    def epoch(number):
        numbers = range(number * ROWS, (number + 1) * ROWS)
        return [states.training_row(rows[i], i)["tokens"].tobytes() for i in numbers]

    first, second, third = map(epoch, range(3))
    assert first != second != third != first
    assert sorted(first) == sorted(second) == sorted(third)


@pytest.mark.parametrize(
    ("before", "now", "steps", "says"),
    [
        (24, 24, 9, None),
        (24, 40, 6, None),
        (None, 24, 6, None),
        (24, 40, 7, "28 rows of 24 stored ones, now they are those of 40 stored ones"),
        (40, 24, 7, "28 rows of 40 stored ones, now they are those of 24 stored ones"),
        (24, None, 7, "28 rows of 24 stored ones, now they are those of the corpus"),
    ],
)
def test_a_resumed_run_may_need_other_rows_than_it_has_read(before, now, steps, says):
    """Up to the last row that was stored, the rows are the corpus's."""
    loader = HeadLoader(Counter(), 4, before)
    for _ in range(steps):
        next(loader)
    state = json.loads(json.dumps(loader.get_state()))
    resumed = HeadLoader(Counter(), 4, now)
    if says:
        with pytest.raises(InputError, match=says):
            resumed.set_state(state)
    else:
        resumed.set_state(state)
        assert next(resumed) == next(loader)
        assert resumed.get_state()["read"] == 4 * (steps + 1)
        resumed.set_state({"next": 7})  # an older checkpoint's


class Counter:
    """A loader whose batches are their numbers."""

    def __init__(self):
        self._next = 0

    def __next__(self):
        self._next += 1
        return self._next

    def get_state(self):
        return self._next

    def set_state(self, state):
        self._next = state


def test_conversations_are_stored_as_well(target, tmp_path):
    """Their rows say which tokens are answers, which only a layout of rows reads."""
    chats = [{"prompt": "a = 1\n", "completion": random_program(i, 1)} for i in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    home = tmp_path / "states"
    files = f"data.files={json.dumps([str(tmp_path / 'chats.jsonl')])}"
    more = (files, "data.seq_len=96", f"data.chat_template={ROOT / 'configs' / 'plain.jinja'}")
    assert train_states(settings(target, home, "run", *more)) == 0
    cfg, setup, states = loaded(target, home, *more)
    rows = training_rows(setup.data, cfg.data.seq_len, cfg.run.seed)
    assert rows[0][ANSWERS].any()
    for number in range(states.rows):
        stored = states.training_row(rows[number], number)
        np.testing.assert_array_equal(stored["labels"], rows[number]["labels"])


def test_the_size_is_said_before(target, tmp_path, capsys):
    home = tmp_path / "states"
    assert train_states([*settings(target, home), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not home.exists()
    assert (plan["rows"], plan["held_out_rows"]) == (ROWS, 4)
    assert plan["megabytes"] == round((ROWS + 4) * 48 * (3 * 16 * 4 + 16) / 1e6, 1)
    assert train_states([*settings(target, home), "--rows=5"]) == 0
    error = capsys.readouterr().err
    assert "8 training and 4 held-out rows in 2 shards, 0.00 GB" in error
    size = sum(path.stat().st_size for path in home.glob("*.safetensors"))
    assert size == pytest.approx(12 * 48 * (3 * 16 * 4 + 16), rel=0.1)


def test_a_disk_that_is_too_small_is_refused_before_it_begins(
    target, tmp_path, capsys, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert train_states(settings(target, tmp_path / "states")) == 2
    assert "GB free, and the states need" in capsys.readouterr().err
    assert not list((tmp_path / "states").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data.seq_len=32", "data.seq_len=48, now it is 32"),
        ("run.seed=1", "run.seed=0, now it is 1"),
        ("head.layers=[0]", "head.layers=[0, 1], now it is [0]"),
        ("model.compute_dtype=bfloat16", "model.compute_dtype=float32, now it is bfloat16"),
        ('data.files=["train"]', "another corpus, tokenizer or layout"),
        ("head.states=./none", "has no manifest.json: python -m train.states"),
    ],
)
def test_states_of_other_settings_are_refused_by_name(
    target, stored, tmp_path, capsys, setting, says
):
    assert train_head([*settings(target, stored, tmp_path / "bad", setting), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_states_of_other_weights_and_missing_shards_are_refused(target, stored, tmp_path, capsys):
    home = shutil.copytree(stored, tmp_path / "states")
    other = shutil.copytree(target, tmp_path / "other")

    def nudge(tensors):
        for name in tensors:
            if "up_proj" in name:
                tensors[name] += 1e-3

    edit_weights(other, nudge)
    argv = [*settings(other, home), "--dry-run"]
    assert train_head(argv) == 2
    assert "another target, or its weights have changed" in capsys.readouterr().err
    (home / "training-00001.safetensors").unlink()
    assert train_head([*settings(target, home), "--dry-run"]) == 2
    assert "training-00001.safetensors is missing" in capsys.readouterr().err


def test_rows_that_differ_from_the_corpus_are_refused(target, stored):
    cfg, setup, states = loaded(target, stored)
    row = training_rows(setup.data, cfg.data.seq_len, cfg.run.seed)[3]
    with pytest.raises(ValueError, match="row 2 has other tokens than the corpus"):
        states.training_row(row, 2)


@pytest.mark.slow
def test_bfloat16_states_are_stored_as_such(target, tmp_path):
    home = tmp_path / "states"
    argv = settings(target, home, "run", "model.compute_dtype=bfloat16", "optim.total_steps=1")
    assert train_states(argv) == 0
    assert load_file(home / "training-00000.safetensors")[AUX].dtype.name == "bfloat16"
    assert train_head(argv) == 0
