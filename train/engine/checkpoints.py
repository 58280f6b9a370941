"""Checkpoints through orbax: asynchronous, atomic, the last N kept.

A checkpoint is params, optimizer state, and a JSON note with the step and the loader's
position. A process killed at any moment leaves the last finished one intact; a note that was
damaged or changed afterwards is told by its digest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions, args

from specjax._util.errors import InputError

# How orbax begins where the tree or the shapes are others; all else is damage.
_UNFIT = ("Requested shape", "User-provided restore item")


class Checkpoints:
    """The checkpoints of one run, in ``directory``."""

    def __init__(self, directory: str | Path, keep: int):
        if Path(directory).is_file():
            raise InputError(f"{directory} is a file where a run keeps its checkpoints: move it")
        options = CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = CheckpointManager(Path(directory).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: Any, note: dict[str, Any]) -> None:
        """Starts saving; the device arrays are copied before this returns."""
        sealed = {"note": note, "sha256": _digest(step, note)}
        parts = args.Composite(arrays=args.StandardSave(arrays), note=args.JsonSave(sealed))
        self._manager.save(step, args=parts)

    def note(self) -> dict[str, Any]:
        """The newest checkpoint's note.

        Raises:
          InputError: no checkpoint is there, or the note is not as it was written.
        """
        if self.latest is None:
            raise InputError("--resume: the run has no finished checkpoint; start it without")
        sealed = self._restore("note", args.JsonRestore())
        whole = isinstance(sealed, dict) and sealed.keys() == {"note", "sha256"}
        if not whole or sealed["sha256"] != _digest(self.latest, sealed["note"]):
            raise self._damaged("its note is not as this version wrote it")
        return sealed["note"]

    def arrays(self, like: Any) -> Any:
        """The newest checkpoint's arrays, shaped ``like`` the given tree.

        Raises:
          InputError: they have another shape, or are damaged.
        """
        return self._restore("arrays", args.StandardRestore(like))

    def _restore(self, part: str, how: Any) -> Any:
        try:
            return self._manager.restore(self.latest, args=args.Composite(**{part: how}))[part]
        except Exception as error:  # orbax raises bare Exceptions for files it cannot read
            if not str(error).startswith(_UNFIT):
                raise self._damaged(_first(error)) from None
            unfit = f"checkpoint {self.latest} does not fit this config: {_first(error)}"
            raise InputError(unfit) from None

    def _damaged(self, reason: str) -> InputError:
        *before, step = sorted(self._manager.all_steps())
        way_out = f"goes on from step {before[-1]}" if before else "starts over: it is the only one"
        path = self._manager.directory / str(step)
        return InputError(
            f"checkpoint {path} is damaged ({reason}): move it away, and --resume {way_out}"
        )

    def close(self) -> None:
        """Returns when everything that was started is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _digest(step: int, note: Any) -> str:
    return hashlib.sha256(json.dumps([step, note], sort_keys=True).encode()).hexdigest()


def _first(error: Exception) -> str:
    """The first sentence of an error: orbax appends pages of storage details."""
    text = str(error).strip(" '") or type(error).__name__  # a KeyError's stands in quotes
    return text.splitlines()[0].split(". ")[0]
