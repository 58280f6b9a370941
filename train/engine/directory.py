"""A run's directory: its lock, its disk space, and the model that a finished run exports to it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from specjax._util import processes
from specjax._util.errors import InputError
from specjax._util.files import locked, write_text
from specjax.lm import name_beside
from specjax.models import ModelConfig, save_pretrained
from specjax.models.hf.files import read_json
from train.config import Run
from train.engine.loop import CHECKPOINTS, METRICS, RunResult

TOKENIZER_CONFIG = "tokenizer_config.json"
# Small files of a checkpoint that go with the model that is made from it.
TOKENIZER_FILES = (
    *(TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
GENERATION_FILES = ("generation_config.json",)


@contextlib.contextmanager
def lock_directory(run: Run, resume: bool) -> Iterator[Path]:
    """The run's directory, made if it is missing, and locked against other runs.

    All processes of a run share the directory. The first one takes the lock for all.

    Raises:
      InputError: it cannot be made, another process trains in it, or it has a run already and
        ``resume`` is false. A run is never overwritten.
    """
    with contextlib.ExitStack() as stack:
        yield processes.raise_everywhere(lambda: stack.enter_context(_locked(run, resume)))


@contextlib.contextmanager
def _locked(run: Run, resume: bool) -> Iterator[Path]:
    directory = Path(run.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir={run.dir!r}: {error.strerror}") from None
    lock = locked(directory, "run.dir") if processes.is_main_process() else contextlib.nullcontext()
    with lock:
        saved = any(path.name.isdecimal() for path in directory.glob(f"{CHECKPOINTS}/*"))
        if (saved or (directory / METRICS).exists()) and not resume:
            raise InputError(
                f"run.dir={run.dir!r} holds a run: go on with --resume, or choose "
                "another directory with --set run.dir=…"
            )
        yield directory


def require_disk_space(run: Run, state: Any) -> None:
    """Raises InputError if the disk is too small for the checkpoints that a run keeps.

    Args:
      state: a tree of the shapes that each checkpoint holds.
    """
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    # One more than run.keep: the newest is written before the oldest is deleted.
    wanted = (run.keep + 1) * size
    free = shutil.disk_usage(run.dir).free
    if wanted > free:
        raise InputError(
            f"run.dir={run.dir!r} has {free / 1e9:,.1f} GB free, but run.keep={run.keep} "
            f"checkpoints and one more, of {size / 1e9:,.1f} GB each, need {wanted / 1e9:,.1f}: "
            "lower run.keep, or choose another disk"
        )


def small_files(checkpoint: Path | None, tokenizer: str) -> list[Path]:
    """The files that an export takes over: of the checkpoint, and of the tokenizer.

    Args:
      checkpoint: the directory that the run starts from; None: it starts from random weights.
      tokenizer: the tokenizer.json that the config names; empty: the checkpoint's own.
    """
    places = []
    if checkpoint is not None:
        places += [checkpoint / name for name in GENERATION_FILES]
    home = Path(tokenizer).parent if tokenizer else checkpoint
    if home is not None:
        places += [home / name for name in TOKENIZER_FILES]
    return [path for path in places if path.is_file()]


def export(
    run: Run,
    model: ModelConfig,
    params: dict,
    tokenizer: Tokenizer,
    outcome: RunResult,
    card: dict[str, Any],
    copied: Iterable[Path] = (),
) -> dict[str, Any]:
    """Writes ``run.dir/export``, a Hugging Face directory with a card, if the run is finished.

    Args:
      copied: files that the export takes over, as :func:`small_files` finds them.

    Returns:
      As :func:`export_with`.
    """

    def save(home: Path) -> None:
        save_pretrained(home, model, params, tokenizer.to_str(), run.export_dtype)
        for path in copied:
            _take_over(path, home)

    return export_with(save, run, outcome, card)


def _take_over(path: Path, home: Path) -> None:
    """Copies a file into ``home``.

    A tokenizer's config without EOS gets the one that is there, from the model's config.
    """
    place = home / path.name
    if path.name != TOKENIZER_CONFIG:
        shutil.copyfile(path, place)
        return
    named = {name: value for name, value in read_json(path).items() if value is not None}
    write_text(place, json.dumps(read_json(place) | named, indent=2, ensure_ascii=False) + "\n")


def without_local_paths(value: Any, home: Path) -> Any:
    """A value of a card with other people's names for its absolute paths.

    A snapshot in the hub's cache is named by its id. Of another absolute path the last part stays.
    """
    if isinstance(value, dict):
        return {key: without_local_paths(x, home) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_local_paths(x, home) for x in value]
    if not isinstance(value, str) or not os.path.isabs(os.path.expanduser(value)):
        return value
    name = name_beside(value, home)
    return name if not name.startswith((".", "/", "~")) else Path(value).name


def export_with(
    save: Callable[[Path], None], run: Run, outcome: RunResult, card: dict[str, Any]
) -> dict[str, Any]:
    """Calls ``save(run.dir/export)`` and writes a card there, if the run is finished.

    Of several processes, the first one writes and the others wait for it.

    Returns:
      How the run ended. The card holds the same entries, before those of ``card``.
    """
    summary = {"step": outcome.step, "finished": outcome.finished, "run_dir": run.dir}
    if not outcome.finished:
        return summary
    if outcome.best_step is not None:
        summary["best_step"] = outcome.best_step
    if outcome.valid_loss is not None:
        summary["held_out_loss"] = outcome.valid_loss
        summary |= {f"held_out_{name}": value for name, value in outcome.valid_extras.items()}
    home = Path(run.dir) / "export"

    def write() -> None:
        if not processes.is_main_process():
            return
        # The card comes last: an export with a card is complete.
        (home / "card.json").unlink(missing_ok=True)
        save(home)
        published = without_local_paths(summary | card, home)
        write_text(home / "card.json", json.dumps(published, indent=1) + "\n")

    processes.raise_everywhere(write)
    return summary | {"export": str(home)}
