"""train.engine.loop: the best evaluation is kept and ends a run; single bad steps are skipped."""

import functools
import types
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specjax as sj
from specjax._util.errors import InputError
from support.scripted import ids_of, strip_tokenizer
from support.training import logged, repeatable
from train.config import Optim, Run
from train.data.loader import ValidBatch
from train.engine.best import ACCEPTED
from train.engine.checkpoints import Checkpoints
from train.engine.loop import MOST_SKIPPED, Measured, TrainingError, fit
from train.engine.optim import make_optimizer
from train.head import training as head
from train.lm import training as lm
from train.sdsat import training as sdsat

VALID = (ValidBatch({"tokens": np.full((1, 4), 2.0, np.float32)}),)


class Numbers:
    """Endless batches `[1, 4]` of one number; those of ``bad`` are not finite."""

    def __init__(self, bad=(), end=None):
        self._next = 0
        self._bad = bad
        self._end = end

    def __next__(self):
        if self._next == self._end:
            raise KeyboardInterrupt
        value = np.nan if self._next in self._bad else 0.0
        self._next += 1
        return {"tokens": np.full((1, 4), value, np.float32)}

    def get_state(self):
        return self._next

    def set_state(self, state):
        self._next = state


def squares(params, frozen, batch):
    tokens = batch["tokens"]
    loss = jnp.sum((params["w"] - tokens) ** 2)
    return loss, jnp.float32(tokens.size), {"double": (2 * loss, jnp.float32(tokens.size))}


def train(
    directory,
    steps=40,
    resume=False,
    loader=None,
    optimizer=None,
    measure=None,
    recipe=None,
    **section,
):
    """``w`` falls from 5 to 0. Held out it should be 2, so it is best on the way."""
    directory.mkdir(exist_ok=True)
    settings = {"log_every": 4, "checkpoint_every": 7, "eval_every": 2, "keep": 1} | section
    return fit(
        squares,
        {"w": jnp.float32(5)},
        optimizer or optax.sgd(0.02),
        loader or Numbers(),
        run=Run(dir=str(directory), **settings),
        optim=Optim(total_steps=steps, warmup_steps=0),
        eval_loss=squares,
        valid=VALID,
        resume=resume,
        measure=measure,
        recipe=recipe,
    )


def saved_steps(directory):
    return sorted(int(path.name) for path in (directory / "checkpoints").glob("[0-9]*"))


def held_out(directory):
    return {row["step"]: row["valid_loss"] for row in logged(directory) if "valid_loss" in row}


def measured_text(program, tokenizer, written, monkeypatch):
    """The sample that an evaluation of a program logs, if its model writes these tokens."""
    module, of_setup = {
        "lm": (lm, lm._measure),
        "lm, drafts": (lm, lm._measure_drafts),
        "head": (head, head._measure),
        "sdsat": (sdsat, functools.partial(sdsat._measure, data=None)),
    }[program]
    prompts = ([tokenizer.token_to_id("def")],)
    monkeypatch.setattr(module, "held_out_prompts", lambda *_: prompts)
    for name in ("measure_drafts", "measure_decoding"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_: ({}, written))
    monkeypatch.setattr(sj, "from_params", Mock())
    out = types.SimpleNamespace(tokens=[np.array(written)])
    monkeypatch.setattr(sj, "generate", lambda *_, **__: out)
    monkeypatch.setattr(lm, "teachers", lambda _: [Mock(max_position=99)], raising=False)
    section = Mock(decode_tokens=2, decode_length=2, steps=2, held_out_window=2, decode_prompts=1)
    cfg = Mock(head=section, sdsat=section, distill=section)
    cfg.run.sample_tokens = 2
    section.teacher = ()
    shape = Mock(max_position=99)
    setup = Mock(model=shape, target=shape, tokenizer=tokenizer._backend)
    measure = of_setup(cfg, setup, placement=Mock())
    return measure({}, {}).sample


@pytest.mark.parametrize("program", ["lm", "lm, drafts", "head", "sdsat"])
def test_a_logged_sample_keeps_its_first_space(program, monkeypatch):
    """It continues a prompt, and decoders of SentencePiece's kind strip a text's first space."""
    tokenizer = strip_tokenizer("def", "▁f", "(x):")
    written = ids_of(tokenizer, "▁f", "(x):")
    assert measured_text(program, tokenizer, written, monkeypatch) == " f(x):"


def test_the_best_checkpoint_is_kept_and_returned(tmp_path):
    last = train(tmp_path / "last")
    best = train(tmp_path / "best", keep_best="loss")
    losses = held_out(tmp_path / "best")
    step = min(losses, key=losses.get)
    assert 2 < step < 40 and losses[step] < losses[40] / 10
    assert (best.step, best.best_step, best.valid_loss) == (40, step, losses[step])
    assert (float(best.params["w"]) - 2) ** 2 == pytest.approx(losses[step], rel=1e-5)
    assert last.best_step is None and last.valid_loss == losses[40]
    assert saved_steps(tmp_path / "best") == [step, 40] and saved_steps(tmp_path / "last") == [40]


@pytest.mark.parametrize("end", [9, 23, 30, 37])
def test_a_killed_run_keeps_the_same_best_checkpoint(tmp_path, end):
    whole = train(tmp_path / "whole", keep_best="loss")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", keep_best="loss", loader=Numbers(end=end))
    cut = train(tmp_path / "cut", keep_best="loss", resume=True)
    assert (cut.best_step, cut.valid_loss) == (whole.best_step, whole.valid_loss)
    assert cut.params == whole.params
    assert repeatable(tmp_path / "cut") == repeatable(tmp_path / "whole")


def test_accepted_length_chooses_the_best_checkpoint(tmp_path):
    """The longest is where ``w`` is near 3.5, before the held-out loss is best."""

    def measure(params, frozen):
        return Measured({ACCEPTED: 9 - abs(float(params["w"]) - 3.5)}, "a text")

    best = train(tmp_path, keep_best="accepted", measure=measure)
    assert float(best.params["w"]) == pytest.approx(3.5, abs=0.2)
    assert best.valid_extras[ACCEPTED] == pytest.approx(9, abs=0.2)
    samples = [row["sample"] for row in logged(tmp_path) if "valid_loss" in row]
    assert samples == ["a text"] * 20


def test_patience_ends_a_run_which_more_patience_continues(tmp_path, capfd):
    ended = train(tmp_path, keep_best="loss", patience=3)
    assert ended.finished and ended.step == ended.best_step + 2 * 3
    assert "3 evaluations after the best one of step" in capfd.readouterr().err
    again = train(tmp_path, keep_best="loss", patience=3, resume=True)
    assert (again.finished, again.step, again.params) == (True, ended.step, ended.params)
    longer = train(tmp_path, keep_best="loss", patience=5, resume=True)
    assert (longer.step, longer.best_step) == (ended.step + 4, ended.best_step)


def test_a_best_checkpoint_that_was_moved_away_is_none(tmp_path):
    train(tmp_path, steps=30, keep_best="loss")
    (best, _) = saved_steps(tmp_path)
    (tmp_path / "checkpoints" / str(best)).rename(tmp_path / "away")
    assert train(tmp_path, keep_best="loss", resume=True).best_step > best


def test_another_choice_of_the_best_starts_anew(tmp_path):
    begun = train(tmp_path, steps=30, keep_best="loss")
    assert train(tmp_path, steps=30, resume=True).best_step is None
    last = train(tmp_path, steps=34, resume=True)
    assert last.best_step is None and begun.best_step < 30


def test_figures_of_other_prompts_are_not_compared(tmp_path):
    """The first evaluation of a resumed run with fewer prompts is the best one so far."""
    figures = iter([9, 8, 7, 6])

    def run(steps, prompts, **section):
        recipe = {"sdsat": {"decode_prompts": prompts}, "run": {"seed": 0}}
        return train(
            tmp_path,
            steps,
            measure=lambda *_: Measured({ACCEPTED: next(figures)}),
            recipe=recipe,
            keep_best="accepted",
            **section,
        )

    assert run(2, 16).best_step == 2
    assert run(4, 16, resume=True).best_step == 2
    assert run(6, 4, resume=True).best_step == 6


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"patience": 2}, "run.patience=2 has no effect without run.keep_best"),
        ({"keep_best": "accepted"}, 'run.keep_best="accepted" needs evaluations that decode'),
    ],
)
def test_what_is_not_evaluated_cannot_be_best(tmp_path, section, says):
    with pytest.raises(InputError, match=says):
        train(tmp_path, **section)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_a_bad_step_is_skipped(tmp_path, optimizer):
    """The other steps give the params that they give without it, with the same learning rates."""
    made = make_optimizer(Optim(optimizer, total_steps=40))
    whole = train(tmp_path / "whole", steps=16, optimizer=made)
    bad = train(tmp_path / "bad", steps=18, optimizer=made, loader=Numbers(bad=(5, 17)))
    assert bad.params == whole.params and bad.finished
    rows = [row for row in logged(tmp_path / "bad") if "learning_rate" in row]
    assert [row.get("skipped_steps") for row in rows] == [None, 1, None, None, 1]
    assert all(np.isfinite(row["loss"]) and np.isfinite(row["double"]) for row in rows)
    assert rows[-1]["grad_norm"] is None


def test_a_log_line_of_skipped_steps_alone_has_no_loss(tmp_path):
    made = make_optimizer(Optim(total_steps=8))
    train(tmp_path, steps=8, optimizer=made, loader=Numbers(bad=(3,)), log_every=1)
    rows = [row for row in logged(tmp_path) if "learning_rate" in row]
    assert [("loss" in row, row.get("skipped_steps")) for row in rows][2:5] == [
        (True, None),
        (False, 1),
        (True, None),
    ]


def test_skipped_steps_before_a_checkpoint_stay_skipped_after_a_resume(tmp_path):
    made = make_optimizer(Optim(total_steps=40))
    section = {"optimizer": made, "steps": 12, "log_every": 10}
    train(tmp_path / "whole", loader=Numbers(bad=(6,)), **section)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", loader=Numbers(bad=(6,), end=9), **section)
    train(tmp_path / "cut", loader=Numbers(bad=(6,)), resume=True, **section)
    assert repeatable(tmp_path / "cut") == repeatable(tmp_path / "whole")


def test_ten_bad_steps_in_a_row_end_the_run_in_one_line(tmp_path):
    made = make_optimizer(Optim(total_steps=40))
    nine = range(20, 20 + MOST_SKIPPED - 1)
    assert train(tmp_path / "nine", optimizer=made, loader=Numbers(bad=nine)).finished
    ten = range(20, 20 + MOST_SKIPPED)
    with pytest.raises(TrainingError) as caught:
        train(tmp_path / "ten", optimizer=made, loader=Numbers(bad=ten))
    assert str(caught.value) == (
        "the gradients of 10 steps in a row, up to step 30, are not finite; the checkpoint of "
        "step 28 is intact: lower the learning rate and --resume"
    )
    Checkpoints(tmp_path / "ten" / "checkpoints", 1).close()


def test_a_log_line_says_how_far_the_run_is(tmp_path):
    train(tmp_path, steps=8)
    first, second = (row for row in logged(tmp_path) if "learning_rate" in row)
    assert (first["tokens"], second["tokens"]) == (16, 32)
    assert first["learning_rate"] == pytest.approx(3e-3)
    assert second["learning_rate"] < first["learning_rate"]
    assert set(second["seconds"]) == {"steps", "compiling", "evaluation", "saving"}
    assert all(second["seconds"][name] >= first["seconds"][name] for name in first["seconds"])
