"""Checkpoints through orbax: asynchronous, atomic, the last N kept.

A checkpoint is params, optimizer state, and a JSON note with the step and the loader's position.
If a process is killed, the last finished checkpoint stays intact. A digest tells whether a note
was damaged or changed afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions, args
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    LatestN,
    PolicyCheckpointInfo,
    PreservationContext,
    PreservationPolicy,
)

from specjax._util.errors import InputError

# How orbax's messages begin if the tree or the shapes differ. Every other error means damage.
_MISMATCH = ("Requested shape", "User-provided restore item")


class Checkpoints:
    """The checkpoints of one run, in ``directory``.

    Attributes:
      best_step: the step of a checkpoint that is kept besides the ``keep`` newest ones.
    """

    def __init__(self, directory: str | Path, keep: int):
        if os.path.isfile(directory):
            raise InputError(f"{directory} is a file, expected a directory of checkpoints: move it")
        # orbax raises its errors. It also logs pages of tracebacks about them.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._until_closed = contextlib.ExitStack()
        self._until_closed.enter_context(_without_late_results())
        self.best_step: int | None = None
        options = CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), _KeepBest(self)]),
            cleanup_tmp_directories=True,
        )
        with _writing(Path(directory)):
            self._manager = CheckpointManager(Path(directory).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return self._manager.latest_step()

    def has(self, step: int | None) -> bool:
        """Whether there is a finished checkpoint of this step."""
        return step in self._manager.all_steps()

    def save(self, step: int, arrays: Any, note: dict[str, Any]) -> None:
        """Starts saving; the device arrays are copied before this returns.

        Raises:
          OSError: this checkpoint, or the one before, cannot be written.
        """
        # With the step in the digest, a note copied from another checkpoint is refused, too.
        signed = {"note": note, "sha256": _digest(step, note)}
        items = args.Composite(arrays=args.StandardSave(arrays), note=args.JsonSave(signed))
        with _writing(self._manager.directory):
            self._manager.save(step, args=items)

    def note(self) -> dict[str, Any]:
        """The newest checkpoint's note.

        Raises:
          InputError: there is no checkpoint, or the note is not as it was written.
        """
        if self.latest is None:
            raise InputError("--resume: the run has no finished checkpoint; start it without")
        signed = self._restore("note", args.JsonRestore())
        complete = isinstance(signed, dict) and signed.keys() == {"note", "sha256"}
        if not complete or signed["sha256"] != _digest(self.latest, signed["note"]):
            raise self._damaged("its note is not as this version wrote it")
        return signed["note"]

    def arrays(self, like: Any, step: int | None = None) -> Any:
        """A checkpoint's arrays, with the shapes and shardings of the tree ``like``.

        Args:
          step: of the checkpoint; None: the newest one.

        Raises:
          InputError: they have other shapes, or are damaged.
        """
        self.wait()
        return self._restore("arrays", args.StandardRestore(like), step)

    def _restore(self, item: str, request: Any, step: int | None = None) -> Any:
        """One item of a checkpoint, restored as orbax's ``request`` says."""
        if step is None:
            step = self.latest
        try:
            return self._manager.restore(step, args=args.Composite(**{item: request}))[item]
        except Exception as error:  # orbax raises bare Exceptions for files it cannot read
            reason = _first_sentence(error)
            if not str(error).startswith(_MISMATCH):
                raise self._damaged(reason, step) from None
            raise InputError(f"checkpoint {step} does not fit this config: {reason}") from None

    def _damaged(self, reason: str, step: int | None = None) -> InputError:
        if step is None:
            step = self.latest
        before = sorted(other for other in self._manager.all_steps() if other != step)
        if before:
            way_out = f"goes on from step {before[-1]}"
        else:
            way_out = "starts over: it is the only one"
        path = self._manager.directory / str(step)
        return InputError(
            f"checkpoint {path} is damaged ({reason}): move it away, and --resume {way_out}"
        )

    def wait(self) -> None:
        """Waits until every save that was started is on disk.

        Raises:
          OSError: one of them cannot be written.
        """
        with _writing(self._manager.directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """As :meth:`wait`, and ends the threads that write."""
        with self._until_closed, _writing(self._manager.directory):
            self._manager.wait_until_finished()
            self._manager.close()


class _KeepBest(PreservationPolicy):
    """Keeps the checkpoint of ``checkpoints.best_step``, which changes as the run goes on."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        return [checkpoint.step == self._checkpoints.best_step for checkpoint in checkpoints]


@contextlib.contextmanager
def _without_late_results() -> Iterator[None]:
    """Leaves out what TensorStore's threads report if a save fails while the block runs.

    They report to orbax's event loop, which a failed save has closed. Each report would print a
    traceback. The save's own error is raised.
    """
    before = sys.unraisablehook

    def report(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not RuntimeError or str(lost.exc_value) != "Event loop is closed":
            before(lost)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def _writing(directory: Path | Any) -> Iterator[None]:
    """Makes one OSError of what orbax raises if, for example, the disk is full.

    That is an OSError without a path, or a ValueError of TensorStore's.

    Raises:
      OSError: with the system's error number and the directory.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code:
            number = int(code[1])
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(directory)) from None


def _digest(step: int, note: Any) -> str:
    return hashlib.sha256(json.dumps([step, note], sort_keys=True).encode()).hexdigest()


def _first_sentence(error: Exception) -> str:
    """The first sentence of an error: orbax appends pages of storage details."""
    text = str(error).strip(" '") or type(error).__name__  # a KeyError's text is in quotes
    return text.splitlines()[0].split(". ")[0]
