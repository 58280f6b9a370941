"""Checkpoints through orbax: asynchronous, atomic, the last N kept.

A checkpoint is params, optimiser state, and a JSON note with the step and the loader's
position. A process killed at any moment leaves the last finished one intact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions, args

from specjax.errors import InputError


class Checkpoints:
    """The checkpoints of one run, in ``directory``."""

    def __init__(self, directory: str | Path, keep: int):
        options = CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = CheckpointManager(Path(directory).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: Any, note: dict[str, Any]) -> None:
        """Starts saving; the device arrays are copied before this returns."""
        parts = args.Composite(arrays=args.StandardSave(arrays), note=args.JsonSave(note))
        self._manager.save(step, args=parts)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """The newest checkpoint as ``(arrays, note)``, shaped ``like`` the given tree.

        Raises:
          InputError: no checkpoint is there, its arrays have another shape, or it is damaged.
        """
        step = self.latest
        if step is None:
            raise InputError("--resume: the run has no finished checkpoint; start it without")
        parts = args.Composite(arrays=args.StandardRestore(like), note=args.JsonRestore())
        try:
            kept = self._manager.restore(step, args=parts)
        except Exception as error:  # orbax raises bare Exceptions for files it cannot read
            if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
                unfit = f"checkpoint {step} does not fit this config: {_first(error)}"
                raise InputError(unfit) from None
            path = self._manager.directory / str(step)
            raise InputError(
                f"checkpoint {path} is damaged ({_first(error)}): move it away, and --resume goes "
                "on from the one before"
            ) from None
        return kept["arrays"], kept["note"]

    def close(self) -> None:
        """Returns when everything that was started is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _first(error: Exception) -> str:
    """The first sentence of an error: orbax appends pages of storage details."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
