"""Checkpoints through orbax: asynchronous, atomic, the last N kept.

A checkpoint is params, optimizer state, and a JSON note with the step and the loader's position.
If a process is killed, the last finished checkpoint stays intact. A digest tells whether a note
was damaged or changed afterwards.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions, args

from specjax._util.errors import InputError

# How orbax's messages begin if the tree or the shapes differ. Every other error means damage.
_MISMATCH = ("Requested shape", "User-provided restore item")


class Checkpoints:
    """The checkpoints of one run, in ``directory``."""

    def __init__(self, directory: str | Path, keep: int):
        if Path(directory).is_file():
            raise InputError(f"{directory} is a file, expected a directory of checkpoints: move it")
        options = CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = CheckpointManager(Path(directory).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: Any, note: dict[str, Any]) -> None:
        """Starts saving; the device arrays are copied before this returns."""
        # With the step in the digest, a note copied from another checkpoint is refused, too.
        signed = {"note": note, "sha256": _digest(step, note)}
        items = args.Composite(arrays=args.StandardSave(arrays), note=args.JsonSave(signed))
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

    def arrays(self, like: Any) -> Any:
        """The newest checkpoint's arrays, with the shapes and shardings of the tree ``like``.

        Raises:
          InputError: they have other shapes, or are damaged.
        """
        return self._restore("arrays", args.StandardRestore(like))

    def _restore(self, item: str, request: Any) -> Any:
        """One item of the newest checkpoint, restored as orbax's ``request`` says."""
        try:
            return self._manager.restore(self.latest, args=args.Composite(**{item: request}))[item]
        except Exception as error:  # orbax raises bare Exceptions for files it cannot read
            reason = _first_sentence(error)
            if not str(error).startswith(_MISMATCH):
                raise self._damaged(reason) from None
            raise InputError(
                f"checkpoint {self.latest} does not fit this config: {reason}"
            ) from None

    def _damaged(self, reason: str) -> InputError:
        *before, step = sorted(self._manager.all_steps())
        if before:
            way_out = f"goes on from step {before[-1]}"
        else:
            way_out = "starts over: it is the only one"
        path = self._manager.directory / str(step)
        return InputError(
            f"checkpoint {path} is damaged ({reason}): move it away, and --resume {way_out}"
        )

    def close(self) -> None:
        """Waits until every save that was started is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _digest(step: int, note: Any) -> str:
    return hashlib.sha256(json.dumps([step, note], sort_keys=True).encode()).hexdigest()


def _first_sentence(error: Exception) -> str:
    """The first sentence of an error: orbax appends pages of storage details."""
    text = str(error).strip(" '") or type(error).__name__  # a KeyError's text is in quotes
    return text.splitlines()[0].split(". ")[0]
