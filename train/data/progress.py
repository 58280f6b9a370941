"""Progress in bytes, on stderr: a rich bar on a terminal, elsewhere a line every 30 seconds."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

_LINE_SECONDS = 30.0  # between lines


class ByteProgress:
    """Shows how many of `total` bytes are done, the speed, and the time left."""

    def __init__(self, title: str, total: int, done: int):
        self._title = title
        self._total = total
        self._done = done
        self._done_at_start = done
        self._start = time.perf_counter()
        self._last_line = self._start
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, completed=done)

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, count: int) -> None:
        """Adds ``count`` finished bytes."""
        self._done += count
        self._bar.update(self._task, completed=self._done)
        now = time.perf_counter()
        if not self._console.is_terminal and now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            rate = (self._done - self._done_at_start) / (now - self._start)
            left = max(0, self._total - self._done) / rate / 60
            text = f"{self._title}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
            self._console.print(
                f"{text} · {rate / 1e6:.1f} MB/s · {left:.0f} min left",
                highlight=False,
                soft_wrap=True,
            )
