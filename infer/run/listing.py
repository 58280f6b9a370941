"""``--list-methods``: the methods, the parts that compose, and presets of their options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infer.run.screen import Terminal
from specjax._util.program import require_output
from specjax.registry import DRAFTERS, METHODS, RULES, TARGET_DISTS, Option, presets


def list_methods(_: argparse.Namespace) -> int:
    """Prints the tables; returns the exit code."""
    require_output()
    console = Terminal()

    rows = []
    for spec in METHODS.values():
        lossless = "yes" if spec.lossless else "no"
        rows.append((spec.name, lossless, spec.summary, _defaults(spec.options), spec.paper))
    _print(console, ("method", "lossless", "what it does", "options", "from"), rows)

    parts_by_option = {"--drafter": DRAFTERS, "--rule": RULES, "--target-dist": TARGET_DISTS}
    for option, parts in parts_by_option.items():
        rows = [(name, part.summary, _defaults(part.options)) for name, part in parts.items()]
        _print(console, (option, "what it is", "options"), rows)

    rows = [(setting, part, _values(values)) for part, setting, values in presets()]
    _print(console, ("--set", "of", "sets"), rows)
    return 0


def _defaults(options: Mapping[str, Option]) -> str:
    return _values({name: option.default for name, option in options.items()})


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _print(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table on a terminal; elsewhere aligned lines that never wrap, e.g. for grep."""
    if console.is_terminal:
        table = Table(*titles)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return

    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        console.print(Text("  ".join(cells).rstrip()))
    console.print()
