"""One output file of several processes: each appends to its own part beside ``--out``.

The processes share nothing but these files. Whichever process finds that no row is missing joins
all parts into ``--out``. A row in any of the files is done. So a process may die, start late, or
be started again; the number of processes may change, too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from specjax._util.errors import InputError
from specjax._util.files import locked
from specjax._util.program import Place

# Seconds to wait for the lock of --out. Other processes hold it only while they start or join.
LOCK_SECONDS = 10


def file_to_append(out: str, place: Place | None) -> Path:
    """The file that a process appends to: its part, or ``--out`` if it is the only process."""
    whole = Path(os.path.realpath(out))
    if place is None:
        return whole
    return whole.with_name(f"{whole.name}.part-{place.index}-of-{place.count}")


def part_files(out: str) -> dict[Path, int]:
    """All parts beside ``--out``, sorted by name, and the COUNT that each was written with."""
    whole = Path(os.path.realpath(out))
    if not whole.parent.is_dir():
        return {}
    pattern = re.compile(re.escape(whole.name) + r"\.part-[0-9]+-of-([0-9]+)")
    counts = {}
    for path in sorted(whole.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            counts[path] = int(match[1])
    return counts


@contextlib.contextmanager
def locked_output(out: str, place: Place | None) -> Iterator[None]:
    """Locks ``--out``, or this process's part of it, while the block runs.

    Raises:
      InputError: another job writes the file: a job without ``--distributed``, one with another
        COUNT, or a process with the same INDEX.
    """
    with contextlib.ExitStack() as stack:
        if place is None:
            stack.enter_context(locked(out, "--out"))
            _check_not_written(part_files(out))
        else:
            # Locked only while this process starts, because the others lock --out, too.
            with locked(out, "--out", LOCK_SECONDS):
                others = [part for part, count in part_files(out).items() if count != place.count]
                _check_not_written(others)
                stack.enter_context(locked(file_to_append(out, place), "INDEX"))
        yield


def _check_not_written(parts: Iterable[Path]) -> None:
    """Raises InputError if a running process has one of the parts locked."""
    for part in parts:
        with locked(part, "--out"):
            pass


def remove_parts(out: str) -> None:
    """Removes all parts, and the lock files that killed processes left."""
    for part in part_files(out):
        part.unlink(missing_ok=True)
        with contextlib.suppress(InputError), locked(part, "--out"):
            pass  # releasing the lock removes its file
