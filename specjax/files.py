"""Files that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def aside(path: str | os.PathLike) -> Iterator[Path]:
    """A scratch path beside ``path``; what is written there takes its place when the block ends.

    Where the block raises, ``path`` stays as it was and the scratch file goes.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.chmod(0o644)  # some writers make files that their owner alone can read
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file in UTF-8, never half of it."""
    with aside(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, a line for the head, a rule and one line per row."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def append_line(path: str | os.PathLike, line: str) -> None:
    """Appends a line of UTF-8 in one piece, and returns once it is on disk."""
    with open(path, "ab") as file:
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())
