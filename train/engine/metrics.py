"""What a run reports: ``metrics.jsonl``, TensorBoard, Weights & Biases, tokens a second and MFU."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from specjax._util.errors import InputError
from specjax._util.files import write_text
from train.config import Run

# Peak dense bfloat16 teraFLOP/s of one device, by JAX's name of its kind (vendors' data sheets).
TERAFLOPS = {
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5": 459,
    "TPU v6 lite": 918,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
}
# Per option of a run's section: the package that it needs, and the extra that installs it.
REQUIREMENTS = {"tensorboard": ("tensorboardX", "tensorboard"), "wandb": ("wandb", "wandb")}


class Tracker(Protocol):
    """An experiment tracker that gets the same numbers as the file."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard's event files; events after step ``done`` of an earlier try are hidden.

    ``recipe``, the run's config, is shown as a text.
    """

    def __init__(self, run: Run, done: int, recipe: dict[str, Any] | None = None):
        from tensorboardX import SummaryWriter

        directory = str(Path(run.dir) / "events")
        # Also of a try that was killed before its first checkpoint.
        self._writer = SummaryWriter(directory, purge_step=done + 1)
        if recipe is not None:
            # Indented by four spaces, Markdown shows it as it is.
            lines = json.dumps(recipe, indent=1).splitlines()
            self._writer.add_text("config", "\n".join(f"    {line}" for line in lines), done)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Waits for the thread that writes the files."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project ``run.wandb``, through the client and its own settings.

    Each run directory is one run there, so a resumed run goes on in the same place. ``recipe`` is
    the run's config there.
    """

    def __init__(self, run: Run, recipe: dict[str, Any] | None):
        import wandb

        run_id = hashlib.sha256(str(Path(run.dir).resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=run.wandb,
            dir=run.dir,
            id=run_id,
            resume="allow",
            config=recipe,
            allow_val_change=True,  # a resumed run may have another number of steps
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


def require_trackers(run: Run) -> None:
    """Raises InputError if the config asks for a tracker whose package is not installed."""
    for option, (package, extra) in REQUIREMENTS.items():
        value = getattr(run, option)
        if value and importlib.util.find_spec(package) is None:
            raise InputError(
                f'run.{option}={json.dumps(value)} needs {package}: pip install "specjax[{extra}]"'
            )


def open_trackers(run: Run, done: int, recipe: dict[str, Any] | None) -> list[Tracker]:
    """The trackers that the config asks for; ``done`` steps of the run are finished.

    Args:
      recipe: the run's config, for the trackers; None: they get none.
    """
    trackers: list[Tracker] = []
    if run.tensorboard:
        trackers.append(TensorBoard(run, done, recipe))
    if run.wandb:
        trackers.append(WeightsAndBiases(run, recipe))
    return trackers


class Metrics:
    """``metrics.jsonl``: one JSON object per line, and the same numbers for the trackers.

    Args:
      path: the file; None: nothing is written.
      keep_through: a resumed run keeps the records up to this step and writes later ones again.
      evaluates_again: whether it also writes the held-out record of that step again.

    Raises:
      InputError: the file of an earlier try cannot be read; it stays as it is.
    """

    def __init__(
        self,
        path: Path | None,
        keep_through: int,
        trackers: Sequence[Tracker] = (),
        evaluates_again: bool = False,
    ):
        self._path = path
        self._trackers = trackers
        if path is None:
            return
        kept = []
        if keep_through and path.exists():
            kept = [record for record in read_metrics(path) if record["step"] <= keep_through]
        if evaluates_again:
            kept = [x for x in kept if x["step"] < keep_through or "valid_loss" not in x]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, **record: Any) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for tracker in self._trackers:
            tracker.write(record["step"], _scalars(record))

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; an incomplete last line of a killed run is left out.

    Raises:
      InputError: the file, or a line of it, cannot be read.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); move it away") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:  # not JSON, or not UTF-8
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise InputError(
                f"{path} line {number} is not a record of a run: mend or delete it, then --resume"
            )
        yield record


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """A record's numbers by name; those of a list as name/1, name/2, …, of a dict as name/key.

    Texts are left out.
    """
    scalars = {}
    for name, value in record.items():
        if isinstance(value, list):
            scalars |= {f"{name}/{i}": x for i, x in enumerate(value, start=1)}
        elif isinstance(value, dict):
            scalars |= {f"{name}/{key}": x for key, x in value.items()}
        elif name != "step":
            scalars[name] = value
    return {name: value for name, value in scalars.items() if isinstance(value, (int, float))}


def speeds(tokens_per_second: float, operations_per_token: float | None) -> dict[str, float]:
    """Tokens a second, in all and per device, and the model FLOPs utilization (MFU).

    Args:
      tokens_per_second: tokens of text, whatever a loss adds to them.
      operations_per_token: FLOPs that the model needs, without recomputation. None: no MFU.

    ``mfu`` is missing for a kind of device whose peak is not in :data:`TERAFLOPS`.
    """
    per_device = tokens_per_second / jax.device_count()
    figures = {
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_device": per_device,
    }
    peak = TERAFLOPS.get(jax.devices()[0].device_kind)
    if peak and operations_per_token:
        figures["mfu"] = per_device * operations_per_token / (peak * 1e12)
    return figures
