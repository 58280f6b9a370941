"""``--list-methods``: the methods, then the parts that compose."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infer.run.screen import Terminal
from specjax.methods import DRAFTERS, METHODS, RULES, TARGET_DISTS


def list_methods(_: argparse.Namespace) -> int:
    """Prints the tables."""
    console = Terminal()
    methods = [
        (s.name, "yes" if s.lossless else "no", s.summary, _options(s.options), s.paper)
        for s in METHODS.values()
    ]
    _print(console, ("method", "lossless", "what it does", "options", "from"), methods)
    tables = ("--drafter", DRAFTERS), ("--rule", RULES), ("--target-dist", TARGET_DISTS)
    for title, table in tables:
        rows = [(name, part.summary, _options(part.options)) for name, part in table.items()]
        _print(console, (title, "what it is", "options"), rows)
    return 0


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={option.default}" for name, option in options.items())


def _print(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on terminals; elsewhere aligned lines, none wrapped, for grep and the like."""
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
