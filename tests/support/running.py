"""Runs a program in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_main(main: Callable[[list[str]], int], capsys: Any, *argv: Any) -> tuple[int, str, str]:
    """(exit code, standard output, stderr) of a program's ``main`` with these arguments."""
    try:
        code = main(list(map(str, argv)))
    except SystemExit as stop:
        code = stop.code
    written = capsys.readouterr()
    return code, written.out, written.err
