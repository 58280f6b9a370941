"""Progress of a run: a rich bar on a terminal, plain lines elsewhere; all on stderr."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Shows loss, tokens per second and the time left; nothing unless ``shown``."""

    def __init__(self, total: int, done: int, shown: bool = True):
        self._console = Console(stderr=True, quiet=not shown)
        self._total = total
        self._first_step = done
        self._start = time.perf_counter()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = RichProgress(
            *columns,
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def log(self, step: int, loss: float, rate: float, mfu: float | None = None) -> None:
        """One logging interval: mean loss in nats, tokens per second, MFU."""
        text = f"loss {loss:.4f} · {rate:,.0f} tokens/s"
        if mfu:
            text += f" · MFU {mfu:.2f}"
        self._bar.update(self._task, completed=step, description=text)
        if not self._console.is_terminal:
            steps = max(1, step - self._first_step)
            seconds = (time.perf_counter() - self._start) / steps
            left = seconds * (self._total - step) / 60
            self.note(f"step {step}/{self._total} · {text} · {left:.1f} min left")

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False, soft_wrap=True)
