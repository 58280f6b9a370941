"""The training loop: one jitted, donated step; logging, evaluation, checkpoints, signals.

It knows nothing of language models: the caller passes a loss function, batches and params.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax._util import processes
from train.config import Optim, Run, require_same
from train.data.loader import Loader, ValidBatch
from train.data.packing import stack
from train.engine.averages import (
    MOST_AHEAD,
    StepResult,
    from_json,
    mean_of_steps,
    to_json,
    weighted_mean,
)
from train.engine.best import Best, require_measured
from train.engine.checkpoints import Checkpoints
from train.engine.metrics import Metrics, open_trackers, require_trackers, speeds
from train.engine.optim import schedule, schedule_warning
from train.engine.placement import Placement
from train.engine.progress import Progress
from train.engine.signals import StopRequests, noted_signals
from train.engine.stopwatch import COMPILING, EVALUATION, SAVING, STEPS, Stopwatch

# loss(params, frozen, batch) -> (summed loss, token count): means are taken over the whole step.
# It may return a third value: by name, pairs (sum, count) of equal shapes. Their ratios are logged.
# A "loss" among them is logged as the loss, and what is minimized as the objective.
LossFn = Callable[[dict, Any, dict], tuple]
# In the run's directory:
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MOST_SKIPPED = 10  # steps in a row that the optimizer may skip, before the run ends


class TrainingError(RuntimeError):
    """The run failed; the last good checkpoint is intact."""


@dataclasses.dataclass
class RunResult:
    """How a run ended.

    Attributes:
      params: after the last step, or those of the best evaluation.
      step: the last step.
      finished: whether the run had all steps and the evaluation after the last one, or ran out of
        ``run.patience``.
      valid_loss: of the params, held out, in nats per token.
      valid_extras: further held-out figures of the params, by name.
      best_step: the step of the params, if ``run.keep_best`` chose them.
    """

    params: dict
    step: int
    finished: bool
    valid_loss: float | None
    valid_extras: dict[str, Any] = dataclasses.field(default_factory=dict)
    best_step: int | None = None


class Measured(NamedTuple):
    """What an evaluation measures besides the held-out loss.

    Attributes:
      figures: by name.
      sample: a text that the model has written, for the log.
    """

    figures: dict[str, Any]
    sample: str | None = None


class TextCounts(NamedTuple):
    """Tokens of text, to log speed and progress by. What a loss adds to rows does not count.

    Attributes:
      row: tokens of a row.
      epoch: tokens that one epoch trains on.
    """

    row: int
    epoch: int


class _State(NamedTuple):
    params: dict
    opt_state: Any
    step: int


def make_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    weigh: Callable[[dict], dict] | None = None,
    placed: tuple | None = None,
) -> Callable:
    """``step(params, opt_state, frozen, batches) -> (params, opt_state, loss, norm, extras)``.

    Gradients of the micro-batches are summed and divided by the token count of all of them. So
    gradient accumulation does not change the result.

    Args:
      weigh: called first, with all micro-batches of the step; may add entries
        ``[accumulate, ...]``. A loss that is a sum of several means gets their counts from it.
      placed: shardings of the step's results, as :meth:`Placement.step_shardings` gives them.

    The step's arguments and results:
      batches: ``[accumulate, B, T]`` arrays by name.
      loss: the mean per token, in nats.
      norm: the global norm of the gradients, before clipping.
    """

    def step(params, opt_state, frozen, batches):
        if weigh:
            batches = weigh(batches)

        def total(params, batch):
            loss, count, *extras = loss_fn(params, frozen, batch)
            return loss, (count, extras[0] if extras else {})

        def add(sums, batch):
            (loss, aux), grads = jax.value_and_grad(total, has_aux=True)(params, batch)
            return jax.tree.map(jnp.add, sums, (loss, aux, grads)), None

        # Zeros of the shapes that one micro-batch gives: loss, (count, extras), gradients.
        first = jax.tree.map(lambda x: x[0], batches)
        shapes = (*jax.eval_shape(total, params, first), params)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (loss, (count, extras), grads), _ = jax.lax.scan(add, zeros, batches)

        grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss / jnp.maximum(count, 1.0), optax.tree.norm(grads), extras

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=placed)


def fit(
    loss_fn: LossFn,
    params: dict,
    optimizer: optax.GradientTransformation,
    loader: Loader,
    *,
    run: Run,
    optim: Optim,
    eval_loss: LossFn,
    valid: Sequence[ValidBatch] = (),
    frozen: Any = None,
    resume: bool = False,
    fixed: dict[str, Any] | None = None,
    weigh: Callable[[dict], dict] | None = None,
    measure: Callable[[dict, Any], Measured] | None = None,
    placement: Placement | None = None,
    operations: float | None = None,
    counts: TextCounts | None = None,
    recipe: dict[str, Any] | None = None,
) -> RunResult:
    """Trains until ``optim.total_steps``, or until SIGTERM or SIGINT, which save first.

    A signal ends training within about two steps, and an evaluation within about two batches. A
    resumed run makes up for that evaluation.

    Args:
      loss_fn, eval_loss: summed loss and token count of one batch (training, held-out).
      loader: batches of ``optim.batch_size`` rows; its position is part of a checkpoint.
      frozen: arrays that the loss reads and nothing updates, e.g. a teacher's params.
      resume: go on from the newest checkpoint of ``run.dir``. A run that was killed before its
        first checkpoint starts over.
      fixed: settings that a resumed run must not change, by name.
      weigh: see :func:`make_step`.
      measure: is called with (params, frozen) at every evaluation; None if nothing is measured.
      placement: over which devices the arrays are split; one device if None. With several
        processes each one calls this, with its own rows in ``loader`` and ``valid``.
      operations: FLOPs that the model needs per token of text, forward and backward, for the
        logged MFU.
      counts: tokens of text; None: all tokens of the batches, and no epochs in the log.
      recipe: the run's config, for experiment trackers and to tell which evaluations compare.

    Raises:
      TrainingError: the loss or a parameter is no longer finite, or too many steps in a row were
        skipped.
      InputError: there is no checkpoint to resume from, a ``fixed`` setting differs, or
        ``run.keep_best`` names what is not evaluated.
    """
    require_trackers(run)
    require_measured(run, bool(valid), decodes=measure is not None)
    checkpoints = Checkpoints(Path(run.dir) / CHECKPOINTS, run.keep)
    log = Path(run.dir) / METRICS
    # A run that was killed before its first checkpoint has a log alone, and starts over.
    resume = resume and not (checkpoints.latest is None and log.exists())
    processes.check_agreement(checkpoint=checkpoints.latest, resume=resume, settings=fixed)

    placement = placement or Placement()
    begun = _begin(checkpoints, params, optimizer, loader, resume, fixed, placement)
    state = begun.state
    first = Best.first(run.keep_best, len(valid), recipe)
    best = first.resumed(begun.note.get("best"))
    if not checkpoints.has(best.step):  # somebody moved it away
        best = first
    checkpoints.best_step = best.step
    frozen = placement.place_state(frozen)
    # Older checkpoints lack this.
    must_evaluate = begun.note.get("must_evaluate", False)
    metrics = _open_metrics(run, log, state.step, must_evaluate, recipe)
    placed = placement.step_shardings(state.params, state.opt_state)
    training = _Training(
        run=run,
        optim=optim,
        step_fn=make_step(loss_fn, optimizer, weigh, placed),
        loader=loader,
        frozen=frozen,
        fixed=fixed,
        evaluation=_Evaluation(
            _placed_evaluation(eval_loss, placement),
            list(valid),
            frozen,
            measure,
        ),
        placement=placement,
        operations=operations,
        counts=counts,
        checkpoints=checkpoints,
        metrics=metrics,
        state=state,
        unlogged=begun.unlogged,
        must_evaluate=must_evaluate,
        # Older checkpoints lack this, too.
        skipped=begun.note.get("skipped", 0),
        watch=Stopwatch(begun.note.get("seconds")),
        best=best,
    )
    with closing(checkpoints), closing(metrics):
        training.train()
        return training.result()


def _placed_evaluation(loss_fn: LossFn, placement: Placement) -> Callable:
    """The jitted loss of a held-out batch whose rows are on the host, or are a function's result.

    The rows of all held-out batches are never on the devices at the same time.
    """
    jitted = jax.jit(loss_fn, out_shardings=placement.replicated)

    def evaluate(params, frozen, rows):
        rows = rows() if callable(rows) else rows
        return jitted(params, frozen, placement.place_rows(rows, 0))

    return evaluate


class _Evaluation(NamedTuple):
    """The held-out batches, and what is measured on them."""

    loss_fn: Callable
    batches: list[ValidBatch]
    frozen: Any
    measure: Callable[[dict, Any], Measured] | None

    def run(self, params: dict, is_stopped: Callable[[], bool]) -> tuple[float, Measured] | None:
        """(held-out loss in nats per token, what else was measured); None if it is stopped."""
        means = weighted_mean(self.loss_fn, params, self.frozen, self.batches, is_stopped)
        if means is None:
            return None
        loss, extras = means
        if not self.measure:
            return loss, Measured(extras)
        figures, sample = self.measure(params, self.frozen)
        return loss, Measured(extras | figures, sample)


@dataclasses.dataclass
class _Training:
    """The state of :func:`fit` and the parts of its loop."""

    run: Run
    optim: Optim
    step_fn: Callable
    loader: Loader
    frozen: Any
    fixed: dict[str, Any] | None
    evaluation: _Evaluation
    placement: Placement
    operations: float | None
    counts: TextCounts | None
    checkpoints: Checkpoints
    metrics: Metrics
    state: _State
    unlogged: list[StepResult]  # of the steps since the last log line, on the device
    must_evaluate: bool  # a signal has stopped the evaluation after the last step
    skipped: int  # steps of the run whose gradients were not finite
    watch: Stopwatch
    best: Best
    requests: StopRequests = dataclasses.field(default_factory=StopRequests)
    valid_loss: float | None = None
    valid_extras: dict[str, Any] = dataclasses.field(default_factory=dict)
    save_time: float = 0.0
    unchecked: list[StepResult] = dataclasses.field(default_factory=list)  # maybe skipped
    skipped_in_row: int = 0
    # Of the current log line: steps after the process's first one, and when they began.
    timed_steps: int = 0
    timed_from: float = 0.0
    is_first_step: bool = True

    def train(self) -> None:
        """Runs the steps that are left, and saves at the end."""
        total = self.optim.total_steps
        with (
            Progress(total, self.state.step, shown=processes.is_main_process()) as progress,
            noted_signals(progress.note) as self.requests,
        ):
            if warning := schedule_warning(self.optim):
                progress.note(warning)
            with self.watch.spending(COMPILING):
                self._learning_rates()  # so that its first call is no time of a step
            self.save_time = time.monotonic()
            self.timed_from = self.watch.seconds()[STEPS]
            if self.must_evaluate:
                self._evaluate(progress)
            while not self._is_complete() and not self.requests.is_stopped():
                tokens = self._train_step(progress)
                step = self.state.step
                last = step == total
                if step % self.run.log_every == 0 or last:
                    self._log(progress, tokens)
                is_best = False
                if self.evaluation.batches and (step % self.run.eval_every == 0 or last):
                    is_best = self._evaluate(progress)
                # All processes must ask in every step, because any_process is a collective.
                due = self._save_is_due()
                if step % self.run.checkpoint_every == 0 or due or is_best or last:
                    self._save()
                    self.save_time = time.monotonic()
            self._save()
            with self.watch.spending(SAVING):
                self.checkpoints.wait()

    def _is_complete(self) -> bool:
        """Whether no step is left, or no evaluation of a long row was better."""
        return self.state.step >= self.optim.total_steps or self.best.is_out_of_patience(self.run)

    def result(self) -> RunResult:
        """How the run ended; evaluates if it was resumed after its last step."""
        finished = self._is_complete() and not self.must_evaluate
        if finished and self.best.step is not None:
            return RunResult(
                self._best_params(),
                self.state.step,
                finished,
                self.best.valid_loss,
                self.best.valid_extras,
                self.best.step,
            )
        if self.evaluation.batches and finished and self.valid_loss is None:
            outcome = self.evaluation.run(self.state.params, lambda: False)
            assert outcome is not None, "nothing stops it"
            self.valid_loss = outcome[0]
            self.valid_extras = outcome[1].figures
        return RunResult(
            self.state.params, self.state.step, finished, self.valid_loss, self.valid_extras
        )

    def _best_params(self) -> dict:
        """The params of the best evaluation, from its checkpoint."""
        if self.best.step == self.state.step:
            return self.state.params
        arrays = {"params": self.state.params, "opt_state": self.state.opt_state}
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
        )
        # A device may not have room for the last and the best state.
        del arrays
        self.state = self.state._replace(params={}, opt_state=None)
        return self.checkpoints.arrays(shapes, self.best.step)["params"]

    def _train_step(self, progress: Progress) -> int:
        """Sends one optimizer step to the device, and waits for the step before it.

        Returns the step's tokens of text, of all processes.
        """
        if not self.is_first_step:
            tokens = self._send_step()
            self._count_skipped(MOST_AHEAD - 1)
            self.timed_steps += 1
            return tokens
        # The first step compiles the program, so it tells nothing of the others' time.
        with self.watch.spending(COMPILING):
            tokens = self._send_step()
            self._count_skipped(0)
        self.is_first_step = False
        progress.start_timing(self.state.step)
        return tokens

    def _send_step(self) -> int:
        batches = stack([next(self.loader) for _ in range(self.optim.accumulate)])
        params, opt_state, loss, norm, extras = self.step_fn(
            self.state.params,
            self.state.opt_state,
            self.frozen,
            self.placement.place_rows(batches, 1),
        )
        self.state = _State(params, opt_state, self.state.step + 1)
        result = StepResult(loss, norm, extras)
        self.unlogged.append(result)
        self.unchecked.append(result)
        *rows, length = batches["tokens"].shape
        return math.prod(rows) * (self.counts.row if self.counts else length) * jax.process_count()

    def _count_skipped(self, ahead: int) -> None:
        """Waits for all steps but the ``ahead`` newest, and counts those that were skipped."""
        while len(self.unchecked) > ahead:
            is_skipped = self.unchecked.pop(0).is_skipped
            self.skipped += is_skipped
            self.skipped_in_row = self.skipped_in_row + 1 if is_skipped else 0
            if self.skipped_in_row == MOST_SKIPPED:
                step = self.state.step - len(self.unchecked)
                way_out = _way_out(self.checkpoints)
                raise TrainingError(
                    f"the gradients of {MOST_SKIPPED} steps in a row, up to step {step}, are not "
                    f"finite; {way_out}"
                )

    def _log(self, progress: Progress, tokens: int) -> None:
        """One log line: means since the last line, and the gradient norm of the last step."""
        self._count_skipped(0)
        step = self.state.step
        figures = self._figures_of_steps()
        seconds = self.watch.seconds()
        rate = None
        if self.timed_steps:
            rate = tokens * self.timed_steps / max(seconds[STEPS] - self.timed_from, 1e-9)
            figures |= speeds(rate, self.operations)
        self.timed_steps = 0
        self.timed_from = seconds[STEPS]

        figures |= self._learning_rates() | {"tokens": tokens * step, "seconds": seconds}
        if self.counts:
            figures["epoch"] = tokens * step / max(1, self.counts.epoch)
        self.metrics.write(step=step, **figures)
        progress.log(step, figures.get("loss"), rate, figures.get("mfu"))
        self.unlogged = []

    def _figures_of_steps(self) -> dict[str, Any]:
        """Figures of the steps since the last log line. Without a ``loss`` if all were skipped."""
        figures: dict[str, Any] = {}
        skipped = sum(result.is_skipped for result in self.unlogged)
        if skipped:
            figures["skipped_steps"] = skipped
        means = mean_of_steps(self.unlogged)
        if means is None:
            return figures
        objective, extras = means
        _require_finite("the loss", objective, self.state.step, self.checkpoints)
        norm = float(self.unlogged[-1].norm)
        figures["loss"] = objective
        figures["grad_norm"] = norm if math.isfinite(norm) else None
        if "loss" in extras:
            figures["objective"] = objective
        return figures | extras

    def _learning_rates(self) -> dict[str, float]:
        """The rates of the last step. The optimizer does not count the steps it has skipped."""
        count = max(0, self.state.step - 1 - self.skipped)
        rates = {"learning_rate": self.optim.learning_rate}
        if self.optim.optimizer == "muon":
            rates["muon_learning_rate"] = self.optim.muon_learning_rate
        return {name: float(schedule(self.optim, peak)(count)) for name, peak in rates.items()}

    def _evaluate(self, progress: Progress) -> bool:
        """Evaluates and logs; returns whether the params must be saved as the best ones."""
        self._count_skipped(0)  # what the device still computes is no time of the evaluation
        step = self.state.step
        before = self.watch.seconds()[EVALUATION]
        with self.watch.spending(EVALUATION):
            outcome = self.evaluation.run(self.state.params, self.requests.is_stopped)
        self.must_evaluate = outcome is None
        if outcome is None:
            return False
        self.valid_loss, (self.valid_extras, sample) = outcome
        _require_finite("the held-out loss", self.valid_loss, step, self.checkpoints)

        record = {f"valid_{name}": value for name, value in self.valid_extras.items()}
        record["valid_seconds"] = self.watch.seconds()[EVALUATION] - before
        if sample is not None:
            record["sample"] = sample
        self.metrics.write(step=step, valid_loss=self.valid_loss, **record)
        progress.note(f"step {step}: held-out loss {self.valid_loss:.4f} nats per token")
        if sample is not None:
            progress.note(f"step {step}: sample {sample!r}")
        is_best = self.best.update(step, self.valid_loss, self.valid_extras)
        if self.best.is_out_of_patience(self.run):
            progress.note(
                f"step {step}: ends, {self.best.worse} evaluations after the best one of step "
                f"{self.best.step} (run.patience)"
            )
        return is_best

    def _save_is_due(self) -> bool:
        """Whether ``run.checkpoint_minutes`` have passed, on any of the processes."""
        minutes = self.run.checkpoint_minutes
        if minutes <= 0:
            return False
        return processes.any_process(time.monotonic() - self.save_time > 60 * minutes)

    def _save(self) -> None:
        self._count_skipped(0)  # what the device still computes is no time of saving
        note = {
            "loader": self.loader.get_state(),
            "fixed": self.fixed,
            "must_evaluate": self.must_evaluate,
            "skipped": self.skipped,
            "seconds": self.watch.seconds(),
            "best": dataclasses.asdict(self.best),
        }
        self.checkpoints.best_step = self.best.step
        with self.watch.spending(SAVING):
            _save_state(self.checkpoints, self.state, self.unlogged, note)


def _open_metrics(
    run: Run, log: Path, step: int, must_evaluate: bool, recipe: dict[str, Any] | None
) -> Metrics:
    """The run's log. Of several processes, only the first writes one."""
    leads = processes.is_main_process()
    trackers = open_trackers(run, step, recipe) if leads else []
    path = log if leads else None
    return processes.raise_everywhere(lambda: Metrics(path, step, trackers, must_evaluate))


class _Begun(NamedTuple):
    """The state that training goes on from; the ``note`` of its checkpoint, empty without one."""

    state: _State
    unlogged: list[StepResult]
    note: dict[str, Any]


def _begin(
    checkpoints: Checkpoints,
    params: dict,
    optimizer: optax.GradientTransformation,
    loader: Loader,
    resume: bool,
    fixed: dict[str, Any] | None,
    placement: Placement,
) -> _Begun:
    """The first state, or the newest checkpoint's. The loader is set to match."""
    params = placement.place_state(params)
    opt_state = placement.initialize(optimizer.init, params)
    step = 0
    unlogged: list[StepResult] = []
    note: dict[str, Any] = {}
    if resume:
        note = checkpoints.note()
        require_same(note["fixed"] or {}, fixed or {})
        arrays = checkpoints.arrays({"params": params, "opt_state": opt_state})
        params = arrays["params"]
        opt_state = arrays["opt_state"]
        step = note["step"]
        unlogged = from_json(note)
        loader.set_state(note["loader"])

    # Copies, because the step donates them, and restored arrays may alias orbax's buffers.
    params, opt_state = jax.tree.map(jnp.copy, (params, opt_state))
    return _Begun(_State(params, opt_state, step), unlogged, note)


def _save_state(
    checkpoints: Checkpoints, state: _State, unlogged: list[StepResult], note: dict[str, Any]
) -> None:
    """Saves a state unless its step is saved already.

    The losses that are not logged yet are saved, too: a resumed run averages the same steps.

    Raises:
      TrainingError: a loss or a parameter is not finite; nothing is saved.
    """
    if state.step == (checkpoints.latest or 0):
        return
    results = to_json(unlogged)
    # A step's loss belongs to the params before its update. Only the params themselves show that
    # the update ruined them.
    size = float(optax.tree.norm(state.params))
    losses = [loss for loss in results["pending"] if loss is not None]
    _require_finite("the loss", sum(losses), state.step, checkpoints)
    _require_finite("the norm of the params", size, state.step, checkpoints)

    arrays = {"params": state.params, "opt_state": state.opt_state}
    checkpoints.save(state.step, arrays, note | results | {"step": state.step})


def _require_finite(name: str, value: float, step: int, checkpoints: Checkpoints) -> None:
    if not math.isfinite(value):
        raise TrainingError(f"{name} is {value} near step {step}; {_way_out(checkpoints)}")


def _way_out(checkpoints: Checkpoints) -> str:
    """What to do about a run that has diverged."""
    checkpoints.close()  # waits for a checkpoint that is still being written
    good = checkpoints.latest
    if good is None:
        return "no checkpoint was saved yet: lower the learning rate and start again"
    return f"the checkpoint of step {good} is intact: lower the learning rate and --resume"
