"""Progress over bytes: a rich bar on a terminal, a line now and then elsewhere; on stderr."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

_EVERY = 30.0  # seconds between lines


class Bytes:
    """Shows how many of `total` bytes are done, how fast, and the time left."""

    def __init__(self, what: str, total: int, done: int):
        self._what, self._total, self._done, self._began_at = what, total, done, done
        self._start = self._said = time.perf_counter()
        self._console = console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
        )
        self._task = self._bar.add_task(what, total=total, completed=done)

    def __enter__(self) -> Bytes:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        self._done += count
        self._bar.update(self._task, completed=self._done)
        now = time.perf_counter()
        if not self._console.is_terminal and now - self._said >= _EVERY:
            self._said = now
            rate = (self._done - self._began_at) / (now - self._start)
            left = max(0, self._total - self._done) / rate / 60
            text = f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
            self._console.print(
                f"{text} · {rate / 1e6:.1f} MB/s · {left:.0f} min left",
                highlight=False,
                soft_wrap=True,
            )
