"""What a run reports: ``metrics.jsonl``, event files, Weights & Biases, and the chip's share."""

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

# Dense bfloat16 operations a second of one device, in units of 1e12, by JAX's name of its kind
# (vendors' data sheets).
TERAFLOPS = {
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5": 459,
    "TPU v6 lite": 918,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
}
# What each option of a run's section needs: a package, and the extra that brings it.
NEEDED = {"tensorboard": ("tensorboardX", "tensorboard"), "wandb": ("wandb", "wandb")}


class Sink(Protocol):
    """Where numbers go beside the file."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Events:
    """TensorBoard's event files; those after step ``done`` of an earlier try are hidden."""

    def __init__(self, run: Run, done: int):
        from tensorboardX import SummaryWriter

        where = str(Path(run.dir) / "events")
        self._writer = SummaryWriter(where, purge_step=done + 1 if done else None)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Files are written by a thread of their own, which this waits for."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project ``run.wandb`` through its own client, which reads its own settings.

    A directory is one run: what is resumed goes on there.
    """

    def __init__(self, run: Run, done: int):
        import wandb

        own = hashlib.sha256(str(Path(run.dir).resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(project=run.wandb, dir=run.dir, id=own, resume="allow")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


def require_sinks(run: Run) -> None:
    """Raises InputError where the config asks for a report that nothing here can write."""
    for option, (package, extra) in NEEDED.items():
        value = getattr(run, option)
        if value and importlib.util.find_spec(package) is None:
            said = json.dumps(value)
            raise InputError(f"run.{option}={said} needs {package}: pip install specjax[{extra}]")


def open_sinks(run: Run, done: int) -> list[Sink]:
    """Those that the config asks for, of a run that has ``done`` so many steps."""
    wanted = ((run.tensorboard, Events), (run.wandb, WeightsAndBiases))
    return [kind(run, done) for asked, kind in wanted if asked]


class Metrics:
    """``metrics.jsonl``: one object per line; a resumed run drops what it will write again.

    Without a path nothing is written.

    Raises:
      InputError: the file of an earlier try cannot be read; it stays as it is.
    """

    def __init__(self, path: Path | None, keep_through: int, sinks: Sequence[Sink] = ()):
        self._path, self._sinks = path, sinks
        if path is not None:
            known = read_metrics(path) if keep_through and path.exists() else ()
            kept = [record for record in known if record["step"] <= keep_through]
            write_text(path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, **record: Any) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for sink in self._sinks:
            sink.write(record["step"], _scalars(record))

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; a last line that a kill has torn is left out.

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
        except ValueError:  # of JSON, or of UTF-8
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise InputError(
                f"{path} line {number} is no record of a run: mend it or take it out, then --resume"
            )
        yield record


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """A record's numbers by name; those of a list as name/1, name/2, …"""
    out = {}
    for name, value in record.items():
        if isinstance(value, list):
            out |= {f"{name}/{i}": x for i, x in enumerate(value, start=1)}
        elif name != "step":
            out[name] = value
    return {name: value for name, value in out.items() if value is not None}


def speeds(tokens_per_second: float, operations_per_token: float | None) -> dict[str, float]:
    """Tokens a second, of one device too, and the model's share of what the chip can do (MFU).

    ``operations_per_token``: those that the model needs, whatever is recomputed; None, or a kind
    of device that the table lacks: no share.
    """
    own = tokens_per_second / jax.device_count()
    figures = {"tokens_per_second": tokens_per_second, "tokens_per_second_per_device": own}
    peak = TERAFLOPS.get(jax.devices()[0].device_kind)
    if peak and operations_per_token:
        figures["mfu"] = own * operations_per_token / (peak * 1e12)
    return figures
