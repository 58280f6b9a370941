"""train.engine.loop: what a run keeps when it is killed, or when its params or files are damaged.

The loss has one parameter, so that every case takes a second. Checkpoints do not fall on logging
steps, so that interrupted averages and late NaNs would show.
"""

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from specjax._util.errors import InputError
from support.training import logged, repeatable, small_tokenizer
from train.config import LMConfig, Optim, Run, from_toml
from train.data.loader import ValidBatch
from train.engine import loop
from train.engine.checkpoints import Checkpoints
from train.engine.directory import lock_directory
from train.engine.loop import TrainingError, fit, make_step, weighted_mean
from train.engine.metrics import Metrics, TensorBoard, speeds
from train.engine.optim import make_optimizer
from train.engine.program import run_and_print
from train.engine.signals import noted_signals
from train.lm import prepare as lm


class Stream:
    """Endless batches `[1, 4]` that depend on their number alone; killed before number `end`."""

    def __init__(self, end=None):
        self._next, self._end = 0, end

    def __next__(self):
        if self._next == self._end:
            raise KeyboardInterrupt
        tokens = np.random.default_rng(self._next).normal(size=(1, 4)).astype(np.float32)
        self._next += 1
        return {"tokens": tokens}

    def get_state(self):
        return self._next

    def set_state(self, state):
        self._next = state


def squares(params, frozen, batch):
    tokens = batch["tokens"]
    return jnp.sum((params["w"] - tokens) ** 2), jnp.float32(tokens.size)


def train(
    directory,
    steps=40,
    end=None,
    resume=False,
    rate=0.05,
    save_every=25,
    valid=(),
    optimizer=None,
    loss=squares,
    recipe=None,
    **section,
):
    directory.mkdir(exist_ok=True)
    settings = {"log_every": 10, "checkpoint_every": save_every, "eval_every": 1000} | section
    run = Run(dir=str(directory), **settings)
    return fit(
        loss,
        {"w": jnp.float32(3)},
        optimizer or optax.sgd(rate),
        Stream(end),
        run=run,
        optim=Optim(total_steps=steps),
        eval_loss=loss,
        valid=valid,
        resume=resume,
        recipe=recipe,
    )


def losses(directory):
    return [(row["step"], row["loss"]) for row in logged(directory) if "loss" in row]


def test_resuming_between_two_log_lines_averages_the_same_steps(tmp_path):
    train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", end=28)
    train(tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_killed_before_the_first_checkpoint_resume_starts_over(tmp_path):
    train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", end=12)
    train(tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_a_step_is_compiled_once_also_after_a_resume(tmp_path, monkeypatch, optimizer):
    """Counters that lie on no device would make the second step another program."""
    steps = []

    def noted_step(*args):
        steps.append(make_step(*args))
        return steps[-1]

    monkeypatch.setattr("train.engine.loop.make_step", noted_step)
    train(tmp_path, 4, optimizer=make_optimizer(Optim(optimizer)))
    train(tmp_path, 8, optimizer=make_optimizer(Optim(optimizer)), resume=True)
    assert [step._cache_size() for step in steps] == [1, 1]


def test_the_held_out_loss_weighs_sources_and_names_each(tmp_path):
    """Three batches of one source and one of another count 1 : 9, and so do their ratios."""

    def evaluate(params, frozen, batch):
        tokens = batch["tokens"]
        return tokens.sum(), jnp.float32(tokens.size), {"share": (tokens.sum(), 2.0 * tokens.size)}

    def batch(value, source, weight):
        return ValidBatch({"tokens": jnp.full((1, 4), value)}, source, weight)

    batches = [batch(2.0, "few", 1.0)] * 3 + [batch(6.0, "many", 9.0)]
    loss, figures = weighted_mean(evaluate, {}, None, batches)
    assert loss == pytest.approx(0.1 * 2 + 0.9 * 6)
    assert figures["share"] == pytest.approx(loss / 2)
    assert figures["loss_by_source"] == {"few": 2, "many": 6}
    loss, figures = weighted_mean(evaluate, {}, None, batches[:3])
    assert loss == 2 and set(figures) == {"share"}


def test_a_held_out_loss_that_is_not_finite_ends_the_run(tmp_path):
    valid = [ValidBatch({"tokens": np.full((1, 4), np.inf, np.float32)})]
    with pytest.raises(TrainingError, match="the held-out loss is inf near step 10"):
        train(tmp_path, steps=20, valid=valid, eval_every=10)


def test_ruined_params_are_never_saved(tmp_path):
    """SGD at this rate overflows between the last log line and the next checkpoint."""
    train(tmp_path, steps=20, save_every=10)
    with pytest.raises(TrainingError, match="checkpoint of step 20 is intact"):
        train(tmp_path, steps=40, rate=1e30, save_every=3, resume=True)
    kept = train(tmp_path, steps=25, resume=True)
    assert np.isfinite(kept.params["w"])


def test_an_update_that_ruins_the_step_of_a_checkpoint_is_not_saved(tmp_path):
    """The loss of that step is still finite, because it uses the params before the update."""
    with pytest.raises(TrainingError, match="no checkpoint was saved yet"):
        train(tmp_path, rate=1e38, save_every=1)
    assert Checkpoints(tmp_path / "checkpoints", 2).latest is None


def test_resuming_after_the_last_step_still_reports_the_held_out_loss(tmp_path):
    valid = [ValidBatch(next(Stream()))]
    first = train(tmp_path, steps=10, valid=valid)
    again = train(tmp_path, steps=10, valid=valid, resume=True)
    assert again.finished and again.valid_loss == first.valid_loss


def slow_squares(params, frozen, batch):
    """As ``squares``, after 20 ms or so of work that the compiler cannot leave out."""
    start = jnp.full((256, 256), jax.lax.stop_gradient(params["w"]))
    busy = jax.lax.fori_loop(0, 40, lambda _, a: jnp.tanh(a @ a), start)
    loss, count = squares(params, frozen, batch)
    return loss + 0 * busy[0, 0], count


@pytest.mark.parametrize("part", ["steps", "evaluation"])
def test_at_most_two_steps_or_batches_are_in_flight(tmp_path, monkeypatch, part):
    """A signal waits for all that was sent to the device."""
    unfinished = []

    def watched(function, place):
        """The function, which counts the earlier losses that are not there yet."""
        results = []

        def call(*args):
            unfinished.append(sum(not x.is_ready() for x in results))
            out = function(*args)
            results.append(out[place])
            return out

        return call

    if part == "steps":
        make_step = loop.make_step
        monkeypatch.setattr(loop, "make_step", lambda *args: watched(make_step(*args), 2))
        train(tmp_path, steps=12, loss=slow_squares, log_every=100)
    else:
        weighted_mean = loop.weighted_mean
        monkeypatch.setattr(
            loop,
            "weighted_mean",
            lambda evaluate, *args: weighted_mean(watched(evaluate, 0), *args),
        )
        train(tmp_path, steps=1, loss=slow_squares, valid=[ValidBatch(next(Stream()))] * 12)
    assert len(unfinished) == 12 and max(unfinished) <= 1


def test_a_signal_stops_an_evaluation_and_the_resumed_run_makes_up_for_it(tmp_path, monkeypatch):
    valid = [ValidBatch(next(Stream()))] * 4
    train(tmp_path / "whole", steps=20, valid=valid, eval_every=10)
    weighted_mean = loop.weighted_mean

    def interrupted(evaluate, *args):
        """The evaluation, with a signal after its second batch."""
        batches = []

        def call(*args):
            batches.append(evaluate(*args))
            if len(batches) == 2:
                signal.raise_signal(signal.SIGTERM)
            return batches[-1]

        means = weighted_mean(call, *args)
        assert means is None and len(batches) == 2
        return means

    for number in (1, 2):  # after step 10, and again when it is made up for
        with monkeypatch.context() as patched:
            patched.setattr(loop, "weighted_mean", interrupted)
            resume = number > 1
            cut = train(tmp_path / "cut", steps=20, valid=valid, eval_every=10, resume=resume)
        assert (cut.step, cut.finished) == (10, False)
    # Killed after the evaluation, and before the next checkpoint.
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", steps=20, valid=valid, eval_every=10, resume=True, end=12)
    train(tmp_path / "cut", steps=20, valid=valid, eval_every=10, resume=True)
    assert repeatable(tmp_path / "cut") == repeatable(tmp_path / "whole")


def test_a_signal_in_the_last_evaluation_leaves_the_run_unfinished(tmp_path, monkeypatch):
    valid = [ValidBatch(next(Stream()))]
    with monkeypatch.context() as patched:
        patched.setattr(loop, "weighted_mean", lambda *args: None)
        assert not train(tmp_path, steps=10, valid=valid).finished
    assert train(tmp_path, steps=10, valid=valid, resume=True).finished
    assert [row["step"] for row in logged(tmp_path) if "valid_loss" in row] == [10]


@pytest.mark.parametrize("limit", [0, 5000])
def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path, capfd, limit):
    """A limit on the size of files, from the first file on or in the arrays, is as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    arrays = {"w": np.random.default_rng(0).normal(size=100_000)}

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with contextlib.closing(checkpoints):
                checkpoints.save(1, arrays, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert run_and_print("train.lm", work) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        f"train.lm: File too large ({tmp_path / 'checkpoints'}); the last finished checkpoint is "
        "intact: make room and --resume"
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room and --resume"),
        (OSError(errno.EROFS, "Read-only file system"), "make it writable, or choose another"),
        (PermissionError(errno.EACCES, "Permission denied"), "make it writable, or choose another"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "another process of the run"),
        (OSError(errno.EIO, "Input/output error"), "intact: mend that and --resume"),
    ],
)
def test_an_error_of_the_system_names_its_own_way_out(capfd, error, says):
    def work():
        raise error

    assert run_and_print("train.lm", work) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert says in line and ("make room" in line) == (error.errno == errno.ENOSPC)


UNINTERRUPTIBLE = """
import hashlib
from train.engine.signals import noted_signals

with noted_signals(lambda text: print(text, flush=True)):
    print("ready", flush=True)
    # As a compilation, it gives Python no chance to handle a signal.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_a_second_interrupt_ends_at_once():
    process = subprocess.Popen(
        [sys.executable, "-c", UNINTERRUPTIBLE], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()


def test_the_first_interrupt_says_what_a_second_one_does():
    told = []
    with noted_signals(told.append) as requests:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert requests.is_stopped() and requests.received == [signal.SIGTERM, signal.SIGINT]
    assert told == ["stops after this step, and saves; Ctrl-C again ends at once"]
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run with checkpoints 10 and 20, logged up to step 20."""
    home = tmp_path_factory.mktemp("begun")
    train(home, steps=20, save_every=10)
    return home


def resumed_in_one_line(begun, home, damage):
    """The error line of --resume on a damaged copy of the run, whose files must not change."""
    shutil.copytree(begun, home)
    damage(home)
    before = files(home)
    with pytest.raises(InputError) as caught:
        train(home, resume=True)
    assert files(home) == before
    (line,) = str(caught.value).splitlines()
    return line


def files(home):
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


def changed(**changes):
    """A function that changes a note's text but keeps its digest."""

    def change(text):
        sealed = json.loads(text)
        note = {**sealed["note"], **changes}
        note = {name: value for name, value in note.items() if value is not ...}
        return json.dumps(sealed | {"note": note})

    return change


NOTES = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "step = 20",
    "no text": lambda text: "\udcff\udcfe",
    "a list": lambda text: "[20]",
    "null": lambda text: "null",
    "an object": lambda text: "{}",
    "only inside": lambda text: json.dumps(json.loads(text)["note"]),
    "without digest": lambda text: json.dumps({"note": json.loads(text)["note"]}),
    "NaN": changed(step=float("nan")),
    "text for a number": changed(step="20"),
    "another step": changed(step=10),
    "no step": changed(step=...),
    "no loader": changed(loader=...),
    "another position": changed(loader=3),
    "no losses": changed(pending=...),
    "more losses": changed(pending=[1.0, 2.0]),
    "other settings": changed(fixed={"run.seed": 1}),
}


@pytest.mark.parametrize("name", NOTES)
def test_a_damaged_note_is_one_line(begun, tmp_path, name):
    def damage(home):
        file = home / "checkpoints/20/note/metadata"
        file.write_bytes(NOTES[name](file.read_text()).encode(errors="surrogateescape"))

    line = resumed_in_one_line(begun, tmp_path / "run", damage)
    assert re.search(r"checkpoints/20 is damaged \(.+\): move it away, and --resume goes on", line)


def in_place(path, make):
    """Replaces the file at ``path`` with something else, such as a directory."""

    def damage(home):
        there = home / path
        shutil.rmtree(there) if there.is_dir() else there.unlink()
        make(there)

    return damage


def cut(home):
    for path in (home / "checkpoints/20/arrays").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:5])


def blank_arrays(home):
    for path in (home / "checkpoints/20/arrays/d").iterdir():
        path.write_bytes(b"")


CHECKPOINTS_DAMAGED = {
    "no note file": in_place("checkpoints/20/note/metadata", lambda path: None),
    "a directory for the note": in_place("checkpoints/20/note/metadata", os.mkdir),
    "no note": in_place("checkpoints/20/note", lambda path: None),
    "another's note": in_place(
        "checkpoints/20/note",
        lambda path: shutil.copytree(path.parents[1] / "10/note", path),
    ),
    "no arrays": in_place("checkpoints/20/arrays", lambda path: None),
    "arrays cut": cut,
    "arrays empty": blank_arrays,
    "nothing in it": in_place("checkpoints/20", os.mkdir),
}


@pytest.mark.parametrize("name", CHECKPOINTS_DAMAGED)
def test_a_damaged_checkpoint_is_one_line_and_the_one_before_can_be_used(begun, tmp_path, name):
    home = tmp_path / "run"
    line = resumed_in_one_line(begun, home, CHECKPOINTS_DAMAGED[name])
    assert "checkpoints/20 is damaged" in line and "--resume goes on from step 10" in line
    (home / "checkpoints/20").rename(tmp_path / "away")
    train(home, steps=20, save_every=10, resume=True)
    assert losses(home) == losses(begun)


def test_a_run_whose_only_checkpoint_is_damaged_starts_over(begun, tmp_path):
    home = tmp_path / "run"

    def damage(home):
        shutil.rmtree(home / "checkpoints/10")
        shutil.rmtree(home / "checkpoints/20/note")

    line = resumed_in_one_line(begun, home, damage)
    assert "starts over: it is the only one" in line
    (home / "checkpoints/20").rename(tmp_path / "away")
    train(home, steps=20, save_every=10, resume=True)
    assert losses(home) == losses(begun)


def test_a_file_in_the_place_of_the_checkpoints_is_named(begun, tmp_path):
    damage = in_place("checkpoints", lambda path: path.touch())
    assert "checkpoints is a file" in resumed_in_one_line(begun, tmp_path / "run", damage)


METRICS_DAMAGED = {
    "a line cut": (b'{"step": 1, "lo\n', "line 1 is not a record"),
    "no object": (b"[1]\n", "line 1 is not a record"),
    "no step": (b'{"step": 1}\n{"loss": 1}\n', "line 2 is not a record"),
    "NaN for a step": (b'{"step": NaN}\n', "line 1 is not a record"),
    "no text": (b'{"step": 1, "a": "\xff"}\n', "line 1 is not a record"),
    "zeros": (b"\0" * 64 + b"\n", "line 1 is not a record"),
}


@pytest.mark.parametrize("name", METRICS_DAMAGED)
def test_damaged_metrics_are_one_line(begun, tmp_path, name):
    data, says = METRICS_DAMAGED[name]
    damage = in_place("metrics.jsonl", lambda path: path.write_bytes(data))
    line = resumed_in_one_line(begun, tmp_path / "run", damage)
    assert f"metrics.jsonl {says}" in line and "--resume" in line


def test_a_directory_in_the_place_of_the_metrics_is_one_line(begun, tmp_path):
    line = resumed_in_one_line(begun, tmp_path / "run", in_place("metrics.jsonl", os.mkdir))
    assert "metrics.jsonl: cannot be read (Is a directory); move it away" in line


@pytest.mark.parametrize("torn", [b'{"step": 21, "lo', b'{"step": 20}', b"\xff", b""])
def test_an_incomplete_last_line_is_dropped(begun, tmp_path, torn):
    home = tmp_path / "run"
    shutil.copytree(begun, home)
    with (home / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    train(home, steps=20, resume=True)
    assert losses(home) == losses(begun)


def test_a_checkpoint_of_other_shapes_is_not_called_damaged(begun, tmp_path):
    home = tmp_path / "run"
    shutil.copytree(begun, home)
    with pytest.raises(InputError, match="checkpoint 20 does not fit this config"):
        Checkpoints(home / "checkpoints", 2).arrays({"params": {"w": jnp.ones(3)}})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.warmup_steps=-3", "from 0 to"),
        ("model.num_kv_heads=-1", "from 0 to"),
        ("run.eval_batches=-1", "from 0 to"),
        ("optim.beta2=1.0", "below 1"),
        ("optim.learning_rate=inf", "a number above 0"),
        ("optim.learning_rate=nan", "a number above 0"),
    ],
)
def test_values_out_of_range_are_named(override, says):
    with pytest.raises(InputError, match=says):
        from_toml(LMConfig, "configs/tiny.toml", [override])


def test_sequences_longer_than_the_context_are_refused(tmp_path):
    cfg = from_toml(LMConfig, "configs/tiny.toml", ["data.seq_len=512"])
    with pytest.raises(InputError, match=r"data.seq_len=512 .* \(256\)"):
        lm.build_model(cfg, small_tokenizer(tmp_path))


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match=r"run.dir=.*File exists"),
        lock_directory(Run(dir=str(tmp_path / "file")), resume=False),
    ):
        raise AssertionError


def test_a_directory_is_locked_by_one_run(tmp_path):
    run = Run(dir=str(tmp_path))
    with (
        lock_directory(run, resume=False),
        pytest.raises(InputError, match=f"run.dir {tmp_path} is being written by process"),
        lock_directory(run, resume=True),
    ):
        raise AssertionError
    with lock_directory(run, resume=False):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert not list(tmp_path.iterdir())


def test_checkpoints_without_metrics_count_as_a_run(tmp_path):
    train(tmp_path, steps=10)
    (tmp_path / "metrics.jsonl").unlink()
    with (
        pytest.raises(InputError, match="holds a run"),
        lock_directory(Run(dir=str(tmp_path)), resume=False),
    ):
        raise AssertionError


def test_a_run_reports_to_weights_and_biases_and_resumes_there(tmp_path, monkeypatch):
    """wandb is replaced by a client that records its arguments."""
    told = []
    client = SimpleNamespace(
        log=lambda scalars, step: told.append((step, scalars)), finish=lambda: told.append("end")
    )
    module = SimpleNamespace(init=lambda **options: told.append(options) or client, __spec__=True)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for steps in (10, 20):
        train(
            tmp_path, steps=steps, resume=steps > 10, wandb="own", recipe={"optim": {"beta1": 0.9}}
        )
    first, (step, scalars), *_, end = told[: len(told) // 2]
    assert first["config"] == {"optim": {"beta1": 0.9}} and first["allow_val_change"]
    assert first["project"] == "own" and first["resume"] == "allow" and first in told[3:]
    assert step == 10 and {"loss", "grad_norm", "tokens_per_second"} <= scalars.keys()
    assert end == "end" == told[-1] and told[-2][0] == 20


def test_a_missing_client_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r'run.wandb="own" needs wandb: pip install "specjax'):
        train(tmp_path, wandb="own")


def test_mfu_is_the_mean_over_all_devices(monkeypatch):
    kind = SimpleNamespace(device_kind="TPU v5 lite")
    monkeypatch.setattr("jax.devices", lambda: [kind] * 4)
    monkeypatch.setattr("jax.device_count", lambda: 4)
    figures = speeds(400.0, 197e10)
    assert figures["tokens_per_second_per_device"] == 100 and figures["mfu"] == 1
    assert "mfu" not in speeds(400.0, None)


@pytest.mark.parametrize(("minutes", "saved"), [(0.0, [8]), (1e-9, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_checkpoints_by_time_are_added_to_those_by_steps(tmp_path, minutes, saved):
    train(tmp_path, steps=8, save_every=1000, checkpoint_minutes=minutes, keep=9)
    there = (tmp_path / "checkpoints").glob("[0-9]*")
    assert sorted(int(path.name) for path in there) == saved


@pytest.mark.parametrize("done", [0, 3])
def test_event_files_hide_the_events_of_an_earlier_try(tmp_path, done):
    TensorBoard(Run(dir=str(tmp_path)), done).close()
    (file,) = (tmp_path / "events").iterdir()
    content = file.read_bytes()
    starts = []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + size])
        content = content[16 + size :]
        if event.HasField("session_log"):
            starts.append((event.session_log.status, event.step))
    assert starts == [(SessionLog.START, done + 1)]


def test_event_files_hold_each_item_of_a_list(tmp_path):
    events = TensorBoard(Run(dir=str(tmp_path)), 0)
    metrics = Metrics(tmp_path / "metrics.jsonl", 0, [events])
    metrics.write(step=1, loss=2.5, adaptive_accuracy=[0.5, None, 0.25])
    metrics.close()
    (file,) = (tmp_path / "events").iterdir()
    events_text = file.read_bytes()
    assert b"loss" in events_text and b"adaptive_accuracy/3" in events_text
    assert b"adaptive_accuracy/2" not in events_text and b"step" not in events_text
