"""How long a run spends on what: steps, evaluations, saving, and compiling."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

STEPS = "steps"
COMPILING = "compiling"  # the whole first step of a process: it compiles the program
EVALUATION = "evaluation"
SAVING = "saving"  # until the device may go on; files are written while it does
ACTIVITIES: tuple[str, ...] = (STEPS, COMPILING, EVALUATION, SAVING)


class Stopwatch:
    """Seconds by activity. Exactly one activity runs at a time; at first it is ``STEPS``.

    Args:
      seconds: of an earlier part of the run.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None):
        self._seconds: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)
        self._seconds.update(seconds or {})
        self._activity = STEPS
        self._since = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds of every activity until now."""
        self._switch(self._activity)
        return dict(self._seconds)

    @contextlib.contextmanager
    def spending(self, activity: str) -> Iterator[None]:
        """The time inside counts for ``activity``."""
        before = self._activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, activity: str) -> None:
        now = time.perf_counter()
        self._seconds[self._activity] += now - self._since
        self._activity = activity
        self._since = now
