"""One output of several processes: a part of each beside ``--out``, joined when all rows are done.

The processes share nothing but these files. Each appends to a part of its own; whoever finds that
no row is missing puts all of them into ``--out``. So any may die, start late or be started again,
alone or all, in another number, too: what is in any of the files is done.
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

PATIENCE = 10  # seconds to wait for another process that comes or joins; whole jobs take longer


def own_file(out: str, place: Place | None) -> Path:
    """Where a process appends its rows: its part, or ``--out`` itself where it is alone."""
    whole = Path(os.path.realpath(out))
    if place is None:
        return whole
    return whole.with_name(f"{whole.name}.part-{place.index}-of-{place.count}")


def parts_of(out: str) -> dict[Path, int]:
    """All parts beside ``--out``, in the order of their names, and their COUNTs."""
    whole = Path(os.path.realpath(out))
    form = re.compile(re.escape(whole.name) + r"\.part-[0-9]+-of-([0-9]+)")
    beside = sorted(whole.parent.iterdir()) if whole.parent.is_dir() else []
    return {path: int(found[1]) for path in beside if (found := form.fullmatch(path.name))}


@contextlib.contextmanager
def held(out: str, place: Place | None) -> Iterator[None]:
    """Keeps ``--out``, or this process's part of it, from others while the block runs.

    Raises:
      InputError: a job that is alone writes it, processes of another COUNT, or one of this INDEX.
    """
    with contextlib.ExitStack() as ours:
        if place is None:
            ours.enter_context(locked(out, "--out"))
            _refuse_living(parts_of(out))
        else:
            with locked(out, "--out", PATIENCE):
                others = (part for part, count in parts_of(out).items() if count != place.count)
                _refuse_living(others)
                ours.enter_context(locked(own_file(out, place), "INDEX"))
        yield


def _refuse_living(parts: Iterable[Path]) -> None:
    for part in parts:
        with locked(part, "--out"):
            pass  # whoever wrote it is gone


def remove_parts(out: str) -> None:
    """Removes all parts, and of dead processes' locks what is left."""
    for part in parts_of(out):
        part.unlink(missing_ok=True)
        with contextlib.suppress(InputError), locked(part, "--out"):
            pass  # its end takes the lock's file away
