"""A run's directory: whose it is, and the model that a finished run leaves in it."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from specjax._util import processes
from specjax._util.errors import InputError
from specjax._util.files import locked, write_text
from specjax.models import ModelConfig, save_pretrained
from train.config import Run
from train.engine.loop import CHECKPOINTS, METRICS, RunResult


@contextlib.contextmanager
def own_directory(run: Run, resume: bool) -> Iterator[Path]:
    """The run's directory, made where it is missing; no other run's while the block lasts.

    The processes of one run share it: the first one speaks for all.

    Raises:
      InputError: it cannot be made, another process trains in it, or it holds a run: that is only
        gone on with, never overwritten.
    """
    with contextlib.ExitStack() as held:
        yield processes.raise_everywhere(lambda: held.enter_context(_owned(run, resume)))


@contextlib.contextmanager
def _owned(run: Run, resume: bool) -> Iterator[Path]:
    directory = Path(run.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir={run.dir!r}: {error.strerror}") from None
    with locked(directory, "run.dir") if processes.leads() else contextlib.nullcontext():
        saved = any(path.name.isdecimal() for path in directory.glob(f"{CHECKPOINTS}/*"))
        if (saved or (directory / METRICS).exists()) and not resume:
            raise InputError(
                f"run.dir={run.dir!r} holds a run: go on with --resume, or choose "
                "another directory with --set run.dir=…"
            )
        yield directory


def require_room(run: Run, state: Any) -> None:
    """Raises InputError where the disk does not hold the checkpoints that a run keeps.

    ``state``: the shapes of what each holds. The newest is written before the oldest goes.
    """
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    wanted, free = (run.keep + 1) * size, shutil.disk_usage(run.dir).free
    if wanted > free:
        raise InputError(
            f"run.dir={run.dir!r} has {free / 1e9:,.1f} GB free, but run.keep={run.keep} "
            f"checkpoints and one more, of {size / 1e9:,.1f} GB each, take {wanted / 1e9:,.1f}: "
            "lower run.keep, or choose another disk"
        )


def export(
    run: Run,
    model: ModelConfig,
    params: dict,
    tokenizer: Tokenizer,
    outcome: RunResult,
    card: dict[str, Any],
    copied: Iterable[Path] = (),
) -> dict[str, Any]:
    """Writes ``run.dir/export``, a Hugging Face directory with a card, once a run is done.

    ``copied`` are small files that belong to it as they are. Returns as :func:`export_as`.
    """

    def save(home: Path) -> None:
        save_pretrained(home, model, params, tokenizer.to_str(), run.export_dtype)
        for path in copied:
            shutil.copyfile(path, home / path.name)

    return export_as(run, save, outcome, card)


def export_as(
    run: Run, save: Callable[[Path], None], outcome: RunResult, card: dict[str, Any]
) -> dict[str, Any]:
    """Writes what ``save`` makes of ``run.dir/export``, and a card, once a run is done.

    Of several processes the first one writes; the others wait for it. Returns how the run ended,
    which stands in the card too, before what is given for it.
    """
    ended = {"step": outcome.step, "finished": outcome.finished, "run_dir": run.dir}
    if not outcome.finished:
        return ended
    home = Path(run.dir) / "export"
    if outcome.valid_loss is not None:
        ended["held_out_loss"] = outcome.valid_loss
        ended |= {f"held_out_{name}": value for name, value in outcome.valid_extras.items()}

    def write() -> None:
        save(home)
        # Last: what has a card is whole.
        write_text(home / "card.json", json.dumps(ended | card, indent=1) + "\n")

    processes.raise_everywhere(write if processes.leads() else lambda: None)
    return ended | {"export": str(home)}
