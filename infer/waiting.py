"""A line on stderr that says what a program does while nothing else is shown."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

COMPILES = "compiling (first run only; later starts reuse it)"


class WaitMessage:
    """Tells the user on stderr why no text has come yet, and for how long.

    A terminal always shows it, with a stopwatch, because later runs may compile, too (a new model,
    a longer prompt). Elsewhere only a first run prints a line.

    Args:
      first: nothing was compiled before, so this run compiles.
      text: what to show if it is not the first run.
    """

    def __init__(self, first: bool, text: str = "starting"):
        self._progress: Progress | None = None
        console = Console(stderr=True)
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console, transient=True)
            self._progress.add_task(COMPILES if first else text)
            self._progress.start()
        elif first:
            print(COMPILES, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the message and shows the cursor again. A second call does nothing."""
        if self._progress:
            self._progress.stop()
            self._progress = None
