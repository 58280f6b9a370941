"""Checkpoints through orbax: asynchronous, atomic, the last N kept.

A checkpoint is params, optimiser state, and a JSON note with the step and the loader's
position. A process killed at any moment leaves the last finished one intact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from train.errors import InputError


class Checkpoints:
    """The checkpoints of one run, in ``directory``."""

    def __init__(self, directory: str | Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: Any, note: dict[str, Any]) -> None:
        """Starts saving; the device arrays are copied before this returns."""
        if step == self.latest:
            return
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), note=ocp.args.JsonSave(note)
        )
        self._manager.save(step, args=args)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """The newest checkpoint as ``(arrays, note)``, shaped ``like`` the given tree.

        Raises:
          InputError: no checkpoint is there, or its arrays have another shape.
        """
        step = self.latest
        if step is None:
            raise InputError("--resume: the run has no finished checkpoint; start it without")
        args = ocp.args.Composite(
            arrays=ocp.args.StandardRestore(like), note=ocp.args.JsonRestore()
        )
        try:
            found = self._manager.restore(step, args=args)
        except ValueError as error:
            first = str(error).strip().splitlines()[0]
            raise InputError(f"checkpoint {step} does not fit this config: {first}") from None
        return found["arrays"], found["note"]

    def close(self) -> None:
        """Returns when everything that was started is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
