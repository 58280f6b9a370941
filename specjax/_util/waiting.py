"""What a program is doing while nothing else is shown: a line on stderr.

On a terminal it has a stopwatch, the program that is compiled, a bar of the layers that are loaded,
and the tokens that are prefilled.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import jax.monitoring
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from specjax._util.steps import LOADING, PREFILL

COMPILES = "compiling (first run only; later starts reuse it)"
# JAX's own events: a program was traced and lowered, and then it was compiled.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
LARGE = 0.1  # seconds of lowering; smaller programs compile before anybody could read their names


class WaitMessage:
    """Tells the user on stderr what a program does, and for how long.

    A terminal always shows it, because later runs may compile, too (a new model, a longer prompt).
    Elsewhere only a first run prints a line.

    Args:
      first: nothing was compiled before, so this run compiles.
      text: what to show if it is not the first run.
    """

    def __init__(self, first: bool, text: str = "starting"):
        self._progress: Progress | None = None
        self._text = COMPILES if first else text
        self._shown = self._text
        console = Console(stderr=True)
        if console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                _Counted(BarColumn(bar_width=20)),
                _Counted(MofNCompleteColumn()),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._progress.add_task(self._text, total=None)
            self._progress.start()
            jax.monitoring.register_scalar_listener(self._on_step)
            jax.monitoring.register_event_duration_secs_listener(self._on_compilation)
        elif first:
            print(COMPILES, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the message and shows the cursor again. A second call does nothing."""
        if self._progress:
            jax.monitoring.unregister_scalar_listener(self._on_step)
            jax.monitoring.unregister_event_duration_listener(self._on_compilation)
            self._progress.stop()
            self._progress = None

    def count(self, done: float, total: float | None) -> None:
        """Shows a bar of the parts that are done."""
        self._update(completed=done, total=total)

    def _on_step(self, event: str, value: float, **kwargs: Any) -> None:
        """Shows how many layers are loaded, or how many tokens are being prefilled."""
        if event == LOADING:
            self.count(value, kwargs["total"])
        elif event == PREFILL:
            total = kwargs["total"]
            self._shown = self._text if value == total else f"prefilling {total:,} tokens"
            self._update(description=self._shown)

    def _on_compilation(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        """Shows which program is being compiled, over what was shown."""
        if event == LOWERED and duration_secs >= LARGE:
            name = str(kwargs.get("fun_name", "")).removeprefix("jit(").rstrip(")")
            self._update(description=f"compiling {name}")
        elif event == COMPILED:
            self._update(description=self._shown)

    def _update(self, **fields: Any) -> None:
        progress = self._progress  # another thread may close the message meanwhile
        if progress is not None:
            progress.update(self._task, **fields)


class _Counted(ProgressColumn):
    """A column that is empty while nothing is counted."""

    def __init__(self, column: ProgressColumn):
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return self._column(task) if task.total else Text()


def waiting(text: str) -> contextlib.AbstractContextManager:
    """A message for the time of a block; only terminals show it."""
    return contextlib.closing(WaitMessage(False, text))
