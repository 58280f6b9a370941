"""The training loop: one jitted, donated step; logging, evaluation, checkpoints, signals.

It knows nothing of language models: the caller passes a loss function, batches and params.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax._util import processes
from train.config import Optim, Run, require_same
from train.data.loader import Loader, ValidBatch
from train.data.packing import stack
from train.engine.checkpoints import Checkpoints
from train.engine.metrics import Metrics, open_trackers, require_trackers, speeds
from train.engine.optim import schedule_warning
from train.engine.placement import Placement
from train.engine.progress import Progress

# loss(params, frozen, batch) -> (summed loss, token count): means are taken over the whole step.
# It may return a third value: by name, pairs (sum, count) of equal shapes. Their ratios are logged.
LossFn = Callable[[dict, Any, dict], tuple]
Extras = dict[str, tuple[jax.Array, jax.Array]]
# In the run's directory:
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
# Steps, or held-out batches, that the device has been sent and has not finished. With two, it never
# waits for the host. With more, a signal would wait for all of them.
MOST_AHEAD = 2


class TrainingError(RuntimeError):
    """The run failed; the last good checkpoint is intact."""


@dataclasses.dataclass
class RunResult:
    """How a run ended: its params, its last step, and the last held-out loss in nats per token.

    ``valid_extras`` are further held-out figures by name.
    """

    params: dict
    step: int
    finished: bool  # all steps, and the evaluation after the last one
    valid_loss: float | None
    valid_extras: dict[str, Any] = dataclasses.field(default_factory=dict)


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
    measure: Callable[[dict, Any], dict[str, Any]] | None = None,
    placement: Placement | None = None,
    operations: float | None = None,
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
      measure: figures by name from (params, frozen), taken with every evaluation.
      placement: over which devices the arrays are split; one device if None. With several
        processes each one calls this, with its own rows in ``loader`` and ``valid``.
      operations: FLOPs that the model needs per token, forward and backward, for the logged MFU.

    Raises:
      TrainingError: the loss or a parameter is no longer finite.
      InputError: there is no checkpoint to resume from, or a ``fixed`` setting differs.
    """
    require_trackers(run)
    checkpoints = Checkpoints(Path(run.dir) / CHECKPOINTS, run.keep)
    log = Path(run.dir) / METRICS
    # A run that was killed before its first checkpoint has a log alone, and starts over.
    resume = resume and not (checkpoints.latest is None and log.exists())
    processes.check_agreement(checkpoint=checkpoints.latest, resume=resume, settings=fixed)

    placement = placement or Placement()
    state, unlogged, must_evaluate = _begin(
        checkpoints, params, optimizer, loader, resume, fixed, placement
    )
    frozen = placement.place_state(frozen)
    metrics = _open_metrics(run, log, state.step)
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
        checkpoints=checkpoints,
        metrics=metrics,
        state=state,
        unlogged=unlogged,
        must_evaluate=must_evaluate,
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
    measure: Callable[[dict, Any], dict[str, Any]] | None

    def run(
        self, params: dict, is_stopped: Callable[[], bool]
    ) -> tuple[float, dict[str, Any]] | None:
        """(held-out loss in nats per token, further figures by name); None if it is stopped."""
        means = weighted_mean(self.loss_fn, params, self.frozen, self.batches, is_stopped)
        if means is None:
            return None
        loss, extras = means
        if self.measure:
            extras = extras | self.measure(params, self.frozen)
        return loss, extras


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
    checkpoints: Checkpoints
    metrics: Metrics
    state: _State
    unlogged: list  # (loss, extras) of the steps since the last log line, on the device
    must_evaluate: bool  # a signal has stopped the evaluation after the last step
    signals: list[int] = dataclasses.field(default_factory=list)  # received since training began
    valid_loss: float | None = None
    valid_extras: dict[str, Any] = dataclasses.field(default_factory=dict)
    log_time: float = 0.0  # when the current logging interval began
    save_time: float = 0.0

    def train(self) -> None:
        """Runs the steps that are left, and saves at the end."""
        total = self.optim.total_steps
        with (
            noted_signals() as self.signals,
            Progress(total, self.state.step, shown=processes.is_main_process()) as progress,
        ):
            if warning := schedule_warning(self.optim):
                progress.note(warning)
            self.log_time = time.perf_counter()
            self.save_time = time.monotonic()
            if self.must_evaluate:
                self._evaluate(progress)
            while self.state.step < total and not self._is_stopped():
                norm, tokens = self._train_step()
                step = self.state.step
                last = step == total
                if step % self.run.log_every == 0 or last:
                    self._log(progress, norm, tokens)
                if self.evaluation.batches and (step % self.run.eval_every == 0 or last):
                    self._evaluate(progress)
                # All processes must ask in every step, because any_process is a collective.
                due = self._save_is_due()
                if step % self.run.checkpoint_every == 0 or due or last:
                    self._save()
                    self.save_time = time.monotonic()
            self._save()

    def _is_stopped(self) -> bool:
        """Whether any process has received a signal. It is a collective: all processes must ask."""
        return processes.any_process(bool(self.signals))

    def result(self) -> RunResult:
        """How the run ended; evaluates if it was resumed after its last step."""
        finished = self.state.step >= self.optim.total_steps and not self.must_evaluate
        if self.evaluation.batches and finished and self.valid_loss is None:
            outcome = self.evaluation.run(self.state.params, lambda: False)
            assert outcome is not None, "nothing stops it"
            self.valid_loss, self.valid_extras = outcome
        return RunResult(
            self.state.params, self.state.step, finished, self.valid_loss, self.valid_extras
        )

    def _train_step(self) -> tuple[jax.Array, int]:
        """Sends one optimizer step to the device, and waits for the step before it.

        Returns (gradient norm, tokens of all processes).
        """
        batches = stack([next(self.loader) for _ in range(self.optim.accumulate)])
        params, opt_state, loss, norm, extras = self.step_fn(
            self.state.params,
            self.state.opt_state,
            self.frozen,
            self.placement.place_rows(batches, 1),
        )
        self.state = _State(params, opt_state, self.state.step + 1)
        self.unlogged.append((loss, extras))
        _wait_for_older([loss for loss, _ in self.unlogged[-MOST_AHEAD:]])
        return norm, batches["tokens"].size * jax.process_count()

    def _log(self, progress: Progress, norm: jax.Array, tokens: int) -> None:
        """One log line: means since the last line, and the gradient norm of the last step."""
        loss, means = _means(self.unlogged)
        _require_finite("the loss", loss, self.state.step, self.checkpoints)
        now = time.perf_counter()
        rate = tokens * len(self.unlogged) / (now - self.log_time)
        self.log_time = now

        figures = {"loss": loss, "grad_norm": float(norm)} | speeds(rate, self.operations)
        self.metrics.write(step=self.state.step, **figures, **means)
        progress.log(self.state.step, loss, rate, figures.get("mfu"))
        self.unlogged = []

    def _evaluate(self, progress: Progress) -> None:
        step = self.state.step
        outcome = self.evaluation.run(self.state.params, self._is_stopped)
        self.must_evaluate = outcome is None
        if outcome is None:
            return
        self.valid_loss, self.valid_extras = outcome
        _require_finite("the held-out loss", self.valid_loss, step, self.checkpoints)
        named = {f"valid_{name}": value for name, value in self.valid_extras.items()}
        self.metrics.write(step=step, valid_loss=self.valid_loss, **named)
        progress.note(f"step {step}: held-out loss {self.valid_loss:.4f} nats per token")
        # The next speed is of training steps alone.
        self.log_time = time.perf_counter()

    def _save_is_due(self) -> bool:
        """Whether ``run.checkpoint_minutes`` have passed, on any of the processes."""
        minutes = self.run.checkpoint_minutes
        if minutes <= 0:
            return False
        return processes.any_process(time.monotonic() - self.save_time > 60 * minutes)

    def _save(self) -> None:
        note = {
            "loader": self.loader.get_state(),
            "fixed": self.fixed,
            "must_evaluate": self.must_evaluate,
        }
        _save_state(self.checkpoints, self.state, self.unlogged, note)


def _open_metrics(run: Run, log: Path, step: int) -> Metrics:
    """The run's log. Of several processes, only the first writes one."""
    leads = processes.is_main_process()
    trackers = open_trackers(run, step) if leads else []
    path = log if leads else None
    return processes.raise_everywhere(lambda: Metrics(path, keep_through=step, trackers=trackers))


def _begin(
    checkpoints: Checkpoints,
    params: dict,
    optimizer: optax.GradientTransformation,
    loader: Loader,
    resume: bool,
    fixed: dict[str, Any] | None,
    placement: Placement,
) -> tuple[_State, list, bool]:
    """The first state, or the newest checkpoint's; its unlogged (loss, extras); must_evaluate.

    The loader is set to match.
    """
    params = placement.place_state(params)
    opt_state = placement.initialize(optimizer.init, params)
    step = 0
    unlogged = []
    must_evaluate = False
    if resume:
        note = checkpoints.note()
        require_same(note["fixed"] or {}, fixed or {})
        arrays = checkpoints.arrays({"params": params, "opt_state": opt_state})
        params = arrays["params"]
        opt_state = arrays["opt_state"]
        step = note["step"]
        unlogged = list(zip(map(np.float32, note["pending"]), note["extras"], strict=True))
        must_evaluate = note.get("must_evaluate", False)  # older checkpoints lack it
        loader.set_state(note["loader"])

    # Copies, because the step donates them, and restored arrays may alias orbax's buffers.
    params, opt_state = jax.tree.map(jnp.copy, (params, opt_state))
    return _State(params, opt_state, step), unlogged, must_evaluate


def _save_state(
    checkpoints: Checkpoints, state: _State, unlogged: list, note: dict[str, Any]
) -> None:
    """Saves a state unless its step is saved already.

    The losses that are not logged yet are saved, too: a resumed run averages the same steps.

    Raises:
      TrainingError: a loss or a parameter is not finite; nothing is saved.
    """
    if state.step == (checkpoints.latest or 0):
        return
    unlogged = jax.device_get(unlogged)
    pending = [float(loss) for loss, _ in unlogged]
    extras = [jax.tree.map(lambda x: np.asarray(x).tolist(), extras) for _, extras in unlogged]

    # A step's loss belongs to the params before its update. Only the params themselves show that
    # the update ruined them.
    size = float(optax.tree.norm(state.params))
    _require_finite("the loss", sum(pending), state.step, checkpoints)
    _require_finite("the norm of the params", size, state.step, checkpoints)

    arrays = {"params": state.params, "opt_state": state.opt_state}
    note |= {"step": state.step, "pending": pending, "extras": extras}
    checkpoints.save(state.step, arrays, note)


def _means(unlogged: Sequence[tuple[Any, Extras]]) -> tuple[float, dict[str, Any]]:
    """(mean loss, with equal weight of steps; means of the extras, with equal weight of tokens)."""
    unlogged = jax.device_get(list(unlogged))
    mean = float(np.mean([loss for loss, _ in unlogged]))
    return mean, _ratios([extras for _, extras in unlogged])


def _ratios(extras: Sequence[Extras]) -> dict[str, Any]:
    """Sums over counts, by name, as JSON takes them; 0 / 0 is null."""
    ratios = {}
    for name in extras[0] if extras else ():
        sums = sum(np.asarray(pairs[name][0], np.float64) for pairs in extras)
        counts = sum(np.asarray(pairs[name][1], np.float64) for pairs in extras)
        ratio = np.where(counts > 0, sums / np.where(counts > 0, counts, 1), np.nan)
        ratios[name] = np.where(np.isnan(ratio), None, ratio).tolist()
    return ratios


def _require_finite(name: str, value: float, step: int, checkpoints: Checkpoints) -> None:
    if math.isfinite(value):
        return
    checkpoints.close()  # waits for a checkpoint that is still being written
    good = checkpoints.latest
    if good is None:
        way_out = "no checkpoint was saved yet: lower the learning rate and start again"
    else:
        way_out = f"the checkpoint of step {good} is intact: lower the learning rate and --resume"
    raise TrainingError(f"{name} is {value} near step {step}; {way_out}")


def _wait_for_older(results: Sequence) -> None:
    """Waits until at most ``MOST_AHEAD`` results are still to be computed."""
    if len(results) >= MOST_AHEAD:
        jax.block_until_ready(results[-MOST_AHEAD])


def weighted_mean(
    evaluate: Callable,
    params: dict,
    frozen: Any,
    batches: Sequence[ValidBatch],
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[float, dict[str, Any]] | None:
    """(held-out loss in nats per token, further figures by name).

    None if ``is_stopped``, which is asked before every batch, is true once.

    Each source counts by its weight, whatever number of its tokens was evaluated. With several
    sources, ``loss_by_source`` has the loss of each.
    """
    results = []
    for batch in batches:
        if is_stopped():
            return None
        results.append(evaluate(params, frozen, batch.rows))
        _wait_for_older(results)
    results = jax.device_get(results)
    tokens = _sum_by_source(batches, [count for _, count, *_ in results])
    nats = _sum_by_source(batches, [loss for loss, *_ in results])

    factors = [
        batch.weight / max(1.0, tokens[batch.source]) if len(tokens) > 1 else 1.0
        for batch in batches
    ]
    weighted = [
        jax.tree.map(lambda x, factor=factor: factor * np.asarray(x, np.float64), result)
        for factor, result in zip(factors, results, strict=True)
    ]
    total = sum(count for _, count, *_ in weighted)
    loss = sum(loss for loss, *_ in weighted) / (total if total else 1.0)
    figures = _ratios([extras for _, _, *rest in weighted for extras in rest])
    if len(tokens) > 1:
        figures["loss_by_source"] = {
            name: float(nats[name] / max(1.0, count)) for name, count in tokens.items()
        }
    return float(loss), figures


def _sum_by_source(batches: Sequence[ValidBatch], values: Sequence[Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for batch, value in zip(batches, values, strict=True):
        sums[batch.source] = sums.get(batch.source, 0.0) + float(value)
    return sums


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """A list that collects SIGTERM and SIGINT, so that the loop can save before it ends."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda got, _: received.append(got)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
