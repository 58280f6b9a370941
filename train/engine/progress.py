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
        self._task = self._bar.add_task("compiling the first step", total=total, completed=done)

    def start_timing(self, step: int) -> None:
        """The time left is that of steps after this one."""
        self._first_step = step
        self._start = time.perf_counter()
        self._bar.reset(self._task, completed=step, description="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def log(
        self, step: int, loss: float | None, rate: float | None, mfu: float | None = None
    ) -> None:
        """One logging interval: mean loss in nats, tokens per second, MFU; None: not known."""
        parts = ["no loss" if loss is None else f"loss {loss:.4f}"]
        if rate:
            parts.append(f"{rate:,.0f} tokens/s")
        if mfu:
            parts.append(f"MFU {mfu:.2f}")
        self._bar.update(self._task, completed=step, description=" · ".join(parts))
        if self._console.is_terminal:
            return
        steps = step - self._first_step
        if steps:
            seconds = (time.perf_counter() - self._start) / steps
            parts.append(f"{seconds * (self._total - step) / 60:.1f} min left")
        self.note(" · ".join([f"step {step}/{self._total}", *parts]))

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False, soft_wrap=True)
