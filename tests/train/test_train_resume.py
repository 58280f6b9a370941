"""train.engine.loop: what a run keeps when it is killed, ruined or damaged at an awkward moment.

A loss of one parameter, so that every case takes a second; its checkpoints do not fall on
logging steps, which is where interrupted averages and late NaNs show.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.errors import InputError
from support.training import logged
from train.config import LMConfig, Optim, Run, from_toml
from train.engine.checkpoints import Checkpoints
from train.engine.directory import make_directory
from train.engine.loop import Metrics, TrainingError, event_writer, fit
from train.lm import training as lm


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


def train(directory, steps=40, end=None, resume=False, rate=0.05, save_every=25, valid=()):
    directory.mkdir(exist_ok=True)
    run = Run(dir=str(directory), log_every=10, checkpoint_every=save_every, eval_every=1000)
    return fit(
        squares,
        {"w": jnp.float32(3)},
        optax.sgd(rate),
        Stream(end),
        run=run,
        optim=Optim(total_steps=steps),
        eval_loss=squares,
        valid=valid,
        resume=resume,
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


def test_ruined_params_are_never_saved(tmp_path):
    """SGD at this rate overflows after the last log line before a checkpoint is due."""
    train(tmp_path, steps=20, save_every=10)
    with pytest.raises(TrainingError, match="checkpoint of step 20 is intact"):
        train(tmp_path, steps=40, rate=1e30, save_every=3, resume=True)
    kept = train(tmp_path, steps=25, resume=True)
    assert np.isfinite(kept.params["w"])


def test_an_update_that_ruins_the_step_of_a_checkpoint_is_not_saved(tmp_path):
    """The loss of that step is finite still: it is of the params before the update."""
    with pytest.raises(TrainingError, match="no checkpoint was saved yet"):
        train(tmp_path, rate=1e38, save_every=1)
    assert Checkpoints(tmp_path / "checkpoints", 2).latest is None


def test_resuming_after_the_last_step_still_reports_the_held_out_loss(tmp_path):
    valid = [next(Stream())]
    first = train(tmp_path, steps=10, valid=valid)
    again = train(tmp_path, steps=10, valid=valid, resume=True)
    assert again.finished and again.valid_loss == first.valid_loss


@pytest.mark.parametrize("part", ["arrays", "note"])
def test_a_damaged_checkpoint_is_one_line(tmp_path, part):
    train(tmp_path, steps=25)
    for path in (tmp_path / "checkpoints" / "25" / part).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(InputError, match="25 is damaged") as caught:
        train(tmp_path, resume=True)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.warmup_steps=-3", "0 or more"),
        ("model.num_kv_heads=-1", "0 or more"),
        ("run.eval_batches=-1", "0 or more"),
        ("optim.beta2=1.0", "below 1"),
        ("optim.learning_rate=inf", "finite"),
        ("optim.learning_rate=nan", "finite"),
    ],
)
def test_values_out_of_range_are_named(override, says):
    with pytest.raises(InputError, match=says):
        from_toml(LMConfig, "configs/tiny.toml", [override])


def test_sequences_longer_than_the_context_are_refused():
    cfg = from_toml(LMConfig, "configs/tiny.toml", ["data.seq_len=512"])
    with pytest.raises(InputError, match=r"data.seq_len=512 .* \(256\)"):
        lm.build_model(cfg, 400)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run.dir=.*File exists"):
        make_directory(tmp_path / "file")


def test_event_files_hold_every_place_of_a_list(tmp_path):
    events = event_writer(tmp_path / "events", 0)
    metrics = Metrics(tmp_path / "metrics.jsonl", 0, events)
    metrics.write(step=1, loss=2.5, adaptive_accuracy=[0.5, None, 0.25])
    metrics.close()
    (file,) = (tmp_path / "events").iterdir()
    events_text = file.read_bytes()
    assert b"loss" in events_text and b"adaptive_accuracy/3" in events_text
    assert b"adaptive_accuracy/2" not in events_text and b"step" not in events_text
