"""What a run says about its speed: tokens over the time of its steps, and nothing else's time."""

import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support.training import logged
from train.config import Optim, Run
from train.data.loader import ValidBatch
from train.engine import loop
from train.engine.checkpoints import Checkpoints
from train.engine.loop import fit

STEP = 0.5  # seconds of each, by the fake clock
FIRST_STEP = 60.0
EVALUATION = 11.0
SAVING = 3.0
ROWS = 2
LENGTH = 4  # tokens of a row


class Clock:
    """A clock that only :meth:`pass_seconds` moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_seconds(self, seconds):
        self.now += seconds


class TimedBatches:
    """Endless batches; a step's time passes when its batch is read."""

    def __init__(self, clock):
        self._clock = clock
        self._seconds = FIRST_STEP

    def __next__(self):
        self._clock.pass_seconds(self._seconds)
        self._seconds = STEP
        return {"tokens": np.ones((ROWS, LENGTH), np.float32)}

    def get_state(self):
        return 0

    def set_state(self, state):
        pass


def squares(params, frozen, batch):
    tokens = batch["tokens"]
    return jnp.sum((params["w"] - tokens) ** 2), jnp.float32(tokens.size)


@pytest.mark.parametrize(
    ("log_every", "eval_every", "checkpoint_every"),
    [(1, 1, 1), (1, 7, 3), (5, 2, 3), (10, 10, 10), (10, 3, 7), (24, 5, 1)],
)
def test_speed_is_of_steps_alone(tmp_path, monkeypatch, log_every, eval_every, checkpoint_every):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    weighted_mean = loop.weighted_mean
    save = Checkpoints.save

    def slow_mean(*args):
        clock.pass_seconds(EVALUATION)
        return weighted_mean(*args)

    def slow_save(*args):
        clock.pass_seconds(SAVING)
        return save(*args)

    monkeypatch.setattr(loop, "weighted_mean", slow_mean)
    monkeypatch.setattr(Checkpoints, "save", slow_save)
    fit(
        squares,
        {"w": jnp.float32(3)},
        optax.sgd(0.05),
        TimedBatches(clock),
        run=Run(
            dir=str(tmp_path),
            log_every=log_every,
            eval_every=eval_every,
            checkpoint_every=checkpoint_every,
        ),
        optim=Optim(total_steps=24, accumulate=1),
        eval_loss=squares,
        valid=[ValidBatch({"tokens": np.ones((ROWS, LENGTH), np.float32)})],
    )
    speeds = [row.get("tokens_per_second") for row in logged(tmp_path) if "loss" in row]
    # The first step compiles. A line of that step alone says no speed.
    known = speeds[1:] if log_every == 1 else speeds
    assert known == pytest.approx([ROWS * LENGTH / STEP] * len(known), rel=0.03)
    assert log_every > 1 or speeds[0] is None
