"""``--list-methods``: the methods, the parts that compose, and presets of their options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infer.run.screen import Terminal
from specjax.registry import DRAFTERS, METHODS, RULES, TARGET_DISTS, Option, presets


def list_methods(_: argparse.Namespace) -> int:
    """Prints the tables."""
    console = Terminal()
    methods = [
        (s.name, "yes" if s.lossless else "no", s.summary, _defaults(s.options), s.paper)
        for s in METHODS.values()
    ]
    _print(console, ("method", "lossless", "what it does", "options", "from"), methods)
    tables = ("--drafter", DRAFTERS), ("--rule", RULES), ("--target-dist", TARGET_DISTS)
    for title, table in tables:
        rows = [(name, part.summary, _defaults(part.options)) for name, part in table.items()]
        _print(console, (title, "what it is", "options"), rows)
    rows = [(setting, part, _values(filled)) for part, setting, filled in presets()]
    _print(console, ("--set", "of", "fills in"), rows)
    return 0


def _defaults(options: Mapping[str, Option]) -> str:
    return _values({name: option.default for name, option in options.items()})


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


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
