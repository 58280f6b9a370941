"""The training loop: one jitted, donated step; logging, evaluation, checkpoints, signals.

It knows nothing of language models: a loss function, batches and params come in.
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
from train.data.packing import Batch, Loader, stack
from train.engine.checkpoints import Checkpoints
from train.engine.metrics import Metrics, open_sinks, require_sinks, speeds
from train.engine.placement import Placement
from train.engine.progress import Progress

# loss(params, frozen, batch) -> (summed loss, token count): means are taken over the whole step.
# A third value, a dict of (sum, count) pairs of equal shapes, is logged as means by its names.
LossFn = Callable[[dict, Any, dict], tuple]
Extras = dict[str, tuple[jax.Array, jax.Array]]
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"  # in the run's directory


class TrainingError(RuntimeError):
    """The run failed; the last good checkpoint is intact."""


@dataclasses.dataclass
class RunResult:
    """How a run ended: its params, the steps done, and the last held-out loss in nats."""

    params: dict
    step: int
    finished: bool
    valid_loss: float | None
    valid_extras: dict[str, Any] = dataclasses.field(default_factory=dict)


def make_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    weigh: Callable[[dict], dict] | None = None,
    placed: tuple | None = None,
) -> Callable:
    """``step(params, opt_state, frozen, batches) -> (params, opt_state, loss, norm, extras)``.

    ``batches`` are ``[accumulate, B, T]``; gradients add up over the micro-batches and are
    divided by the token count of all of them, so accumulation does not change the result.
    ``weigh`` sees the whole step's batches first and may add entries ``[accumulate, ...]``:
    that is how a loss of several means learns their counts. ``norm`` is of the gradients.
    ``placed`` are shardings of what comes out, as :meth:`Placement.of_step` gives them.
    """

    def step(params, opt_state, frozen, batches):
        batches = weigh(batches) if weigh else batches

        def total(params, batch):
            loss, count, *extras = loss_fn(params, frozen, batch)
            return loss, (count, extras[0] if extras else {})

        def add(carry, batch):
            (loss, aux), grads = jax.value_and_grad(total, has_aux=True)(params, batch)
            return jax.tree.map(jnp.add, carry, (loss, aux, grads)), None

        first = jax.tree.map(lambda x: x[0], batches)
        shapes = (*jax.eval_shape(total, params, first), params)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (loss, (count, extras), grads), _ = jax.lax.scan(add, zero, batches)
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
    valid: Sequence[Batch] = (),
    frozen: Any = None,
    resume: bool = False,
    fixed: dict[str, Any] | None = None,
    weigh: Callable[[dict], dict] | None = None,
    measure: Callable[[dict, Any], dict[str, Any]] | None = None,
    placement: Placement | None = None,
    operations: float | None = None,
) -> RunResult:
    """Trains until ``optim.total_steps``, or until SIGTERM or SIGINT, which save first.

    Args:
      loss_fn, eval_loss: summed loss and token count of one batch (training, held-out).
      loader: batches of ``optim.batch_size`` rows; its position is part of a checkpoint.
      frozen: arrays that the loss reads and nothing updates, e.g. a teacher's params.
      resume: go on from the newest checkpoint of ``run.dir``; a run that was killed before
        its first one starts over.
      fixed: settings that a resumed run must not change, by name.
      weigh: see :func:`make_step`.
      measure: figures by name from (params, frozen), taken with every evaluation.
      placement: over which devices the arrays are split; one device when None. With several
        processes every one calls this; ``loader`` and ``valid`` hold its own rows.
      operations: that the model needs per token, forward and backward; for the MFU in the log.
    Raises:
      TrainingError: the loss is no longer finite.
      InputError: resuming without a checkpoint, or with another ``fixed`` setting.
    """
    require_sinks(run)
    checkpoints = Checkpoints(Path(run.dir) / CHECKPOINTS, run.keep)
    log = Path(run.dir) / METRICS
    resume = resume and not (checkpoints.latest is None and log.exists())
    processes.agree(checkpoint=checkpoints.latest, resume=resume, settings=fixed)
    placement = placement or Placement()
    state, unlogged = _begin(checkpoints, params, optimizer, loader, resume, fixed, placement)
    frozen = placement.state(frozen)
    writes = processes.leads()
    sinks = open_sinks(run, state.step) if writes else []
    own = log if writes else None
    metrics = processes.raise_everywhere(lambda: Metrics(own, keep_through=state.step, sinks=sinks))
    placed = placement.of_step(state.params, state.opt_state)
    train_step = make_step(loss_fn, optimizer, weigh, placed)
    evaluate = jax.jit(eval_loss, out_shardings=placement.replicated)
    valid = [placement.rows(batch, 0) for batch in valid]
    valid_loss, valid_extras = None, {}

    def save():
        _save(checkpoints, state, unlogged, {"loader": loader.get_state(), "fixed": fixed})

    def hold_out(params):
        loss, extras = mean_loss(evaluate, params, frozen, valid)
        return loss, extras | (measure(params, frozen) if measure else {})

    with (
        closing(checkpoints),
        closing(metrics),
        noted_signals() as signals,
        Progress(optim.total_steps, state.step, shown=writes) as progress,
    ):
        since, saved = time.perf_counter(), time.monotonic()
        while state.step < optim.total_steps and not processes.any_of(bool(signals)):
            batches = stack([next(loader) for _ in range(optim.accumulate)])
            params, opt_state, loss, norm, extras = train_step(
                state.params, state.opt_state, frozen, placement.rows(batches, 1)
            )
            state = _State(params, opt_state, state.step + 1)
            unlogged.append((loss, extras))
            last = state.step == optim.total_steps
            if state.step % run.log_every == 0 or last:
                mean, means = _means(unlogged)  # the loop's host sync
                _require_finite("the loss", mean, state.step, checkpoints)
                seconds, since = time.perf_counter() - since, time.perf_counter()
                tokens = batches["tokens"].size * jax.process_count()
                rate = tokens * len(unlogged) / seconds
                figures = {"loss": mean, "grad_norm": float(norm)} | speeds(rate, operations)
                metrics.write(step=state.step, **figures, **means)
                progress.log(state.step, mean, rate, figures.get("mfu"))
                unlogged = []
            if valid and (state.step % run.eval_every == 0 or last):
                valid_loss, valid_extras = hold_out(params)
                named = {f"valid_{name}": value for name, value in valid_extras.items()}
                metrics.write(step=state.step, valid_loss=valid_loss, **named)
                progress.note(f"step {state.step}: held-out loss {valid_loss:.4f} nats per token")
                since = time.perf_counter()
            due = run.checkpoint_minutes > 0 and processes.any_of(
                time.monotonic() - saved > 60 * run.checkpoint_minutes
            )
            if state.step % run.checkpoint_every == 0 or due or last:
                save()
                saved = time.monotonic()
        save()
    finished = state.step >= optim.total_steps
    if valid and finished and valid_loss is None:  # resumed after its last step
        valid_loss, valid_extras = hold_out(state.params)
    return RunResult(state.params, state.step, finished, valid_loss, valid_extras)


class _State(NamedTuple):
    params: dict
    opt_state: Any
    step: int


def _begin(checkpoints, params, optimizer, loader, resume, fixed, placement) -> tuple[_State, list]:
    """The first state, or the newest checkpoint's, and its (loss, extras) not logged yet.

    The loader is set to match.
    """
    params = placement.state(params)
    state, unlogged = _State(params, placement.made(optimizer.init, params), 0), []
    if resume:
        note = checkpoints.note()
        require_same(note["fixed"] or {}, fixed or {})
        arrays = checkpoints.arrays({"params": params, "opt_state": state.opt_state})
        state = _State(arrays["params"], arrays["opt_state"], note["step"])
        unlogged = list(zip(map(np.float32, note["pending"]), note["extras"], strict=True))
        loader.set_state(note["loader"])
    # Restored arrays may alias orbax's buffers: donation needs our own.
    return _State(*jax.tree.map(jnp.copy, state[:2]), state.step), unlogged


def _save(checkpoints: Checkpoints, state: _State, unlogged: list, note: dict[str, Any]) -> None:
    """Saves a new state, and the losses not logged yet: a resumed run averages the same steps.

    Raises:
      TrainingError: a loss or a parameter is not finite; nothing is saved.
    """
    if state.step == (checkpoints.latest or 0):
        return
    unlogged = jax.device_get(unlogged)
    pending = [float(loss) for loss, _ in unlogged]
    extras = [jax.tree.map(lambda x: np.asarray(x).tolist(), extras) for _, extras in unlogged]
    # A loss is of the params before their update: only the params show that it ruined them.
    size = float(optax.tree.norm(state.params))
    _require_finite("the loss", sum(pending), state.step, checkpoints)
    _require_finite("the norm of the params", size, state.step, checkpoints)
    arrays = {"params": state.params, "opt_state": state.opt_state}
    note |= {"step": state.step, "pending": pending, "extras": extras}
    checkpoints.save(state.step, arrays, note)


def _means(unlogged: Sequence[tuple[Any, Extras]]) -> tuple[float, dict[str, Any]]:
    """The mean of the losses, and of the extras; the latter weigh every token alike."""
    unlogged = jax.device_get(list(unlogged))
    mean = float(np.mean([loss for loss, _ in unlogged]))
    return mean, _ratios([extras for _, extras in unlogged])


def _ratios(extras: Sequence[Extras]) -> dict[str, Any]:
    """Sums over counts, by name; null in the place of 0 / 0."""
    out = {}
    for name in extras[0] if extras else ():
        sums, counts = (sum(np.asarray(e[name][i], np.float64) for e in extras) for i in (0, 1))
        ratio = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        out[name] = np.where(np.isnan(ratio), None, ratio).tolist()
    return out


def _require_finite(what: str, value: float, step: int, checkpoints: Checkpoints) -> None:
    if math.isfinite(value):
        return
    checkpoints.close()  # the newest may still be on its way to the disk
    good = checkpoints.latest
    way_out = (
        "no checkpoint was saved yet: lower the learning rate and start again"
        if good is None
        else f"the checkpoint of step {good} is intact: lower the learning rate and --resume"
    )
    raise TrainingError(f"{what} is {value} near step {step}; {way_out}")


def mean_loss(
    evaluate: Callable, params: dict, frozen: Any, batches: Sequence[Batch]
) -> tuple[float, dict[str, Any]]:
    """Loss per token over ``batches``, in nats, and the means of the extras."""
    sums = jax.device_get([evaluate(params, frozen, batch) for batch in batches])
    loss = float(sum(nats for nats, *_ in sums) / max(1.0, sum(count for _, count, *_ in sums)))
    return loss, _ratios([extras for _, _, *rest in sums for extras in rest])


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """A list that gets every SIGTERM and SIGINT, so that the loop can save before it ends."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda got, _: received.append(got)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
