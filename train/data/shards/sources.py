"""What the files were that shards are made of, and whether they still are.

sources.jsonl in the directory of the shards has a line for each file: the number of its source, its
name, size, time and SHA-256. At each start sizes and times are compared. Where a time differs, the
hash decides. So a copy of a corpus is accepted, and a changed file is not.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specjax._util.errors import InputError
from specjax._util.files import aside
from train.data.hub import hub_revision, is_on_hub
from train.data.progress import ByteProgress
from train.data.reading import TextPiece, unreadable
from train.data.shards.files import SOURCES, DamagedError, file_digest


class SourceFile(NamedTuple):
    """A file when it was tokenized.

    Attributes:
      source: the number of its source.
      name: the same on every machine.
      size: in bytes.
      time: when it was last changed, in nanoseconds.
      sha256: of its bytes; of a data set of the hub its commit. Empty if it is not known: a pipe
        can be read only once.
    """

    source: int
    name: str
    size: int
    time: int
    sha256: str


def record_sources(home: Path, sources: Sequence[Sequence[TextPiece]]) -> None:
    """Writes sources.jsonl: every file is read once, to hash it.

    Raises:
      InputError: a file cannot be read.
    """
    files = list(_numbered(sources))
    total = sum(_size(piece) for _, piece in files)
    with (
        ByteProgress("hashing the sources", total, 0) as progress,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,  # hashing frees the lock
    ):
        noted = []
        for file in pool.map(lambda item: _describe(*item), files):
            progress.add(file.size)
            noted.append(file)
    _write(home, noted)


def check_sources(
    home: Path, sources: Sequence[Sequence[TextPiece]], added: Sequence[bool]
) -> str | None:
    """Checks the files against sources.jsonl; new times of equal files are noted there.

    Files that are not here are accepted: shards may travel without their text.

    Args:
      sources: the files of each source as they are now.
      added: for each source, whether a file that is new there is an error.

    Returns:
      A line about what could not be checked; None if all of it was.

    Raises:
      InputError: names a file that has changed, or that is new.
      DamagedError: sources.jsonl is not as it was written.
    """
    path = home / SOURCES
    if not path.exists():
        return f"{path} is missing: whether the sources have changed is not known"
    noted = list(_read(path))
    here = {(number, piece.name): piece for number, piece in _numbered(sources)}
    absent = []
    checked = []
    for file in noted:
        piece = here.pop((file.source, file.name), None)
        now = None if piece is None else _compare(home, file, piece)
        if now is None:
            absent.append(file.name)
        checked.append(now or file)
    for (number, _), piece in here.items():
        if added[number] and (is_on_hub(piece.path) or os.path.exists(piece.path)):
            raise _refusal(home, piece, "is new")
    if checked != noted:
        _write(home, checked)
    if not absent:
        return None
    verb = "is" if len(absent) == 1 else "are"
    return (
        f"data.shards={str(home)!r}: {len(absent)} of {len(noted)} source files {verb} not here "
        f"(such as {absent[0]}): the shards are used as they are"
    )


def _compare(home: Path, file: SourceFile, piece: TextPiece) -> SourceFile | None:
    """The file as it is now; None if it is not here. Raises InputError if its content differs."""
    if is_on_hub(piece.path):
        return _compare_revision(home, file, piece)
    try:
        status = os.stat(piece.path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(piece.path, error) from None
    if not file.sha256:  # a pipe
        return file
    if status.st_size == file.size and status.st_mtime_ns == file.time:
        return file
    if status.st_size != file.size or _describe(file.source, piece).sha256 != file.sha256:
        raise _refusal(home, piece, "has changed since it was tokenized")
    return file._replace(time=status.st_mtime_ns)


def _compare_revision(home: Path, file: SourceFile, piece: TextPiece) -> SourceFile | None:
    """As :func:`_compare`, of a data set of the hub."""
    if not file.sha256:  # the hub did not say it when the data set was tokenized
        return file
    now = hub_revision(piece.path)
    if not now:
        return None
    if now != file.sha256:
        raise _refusal(home, piece, "has changed since it was tokenized")
    return file


def _refusal(home: Path, piece: TextPiece, what: str) -> InputError:
    return InputError(
        f"data.shards={str(home)!r}: {piece.name} {what}; put it back, or remove the directory "
        "and run train.tokens again, or name another directory"
    )


def _numbered(sources: Sequence[Sequence[TextPiece]]) -> Iterator[tuple[int, TextPiece]]:
    """(number of the source, file) of all files."""
    for number, pieces in enumerate(sources):
        for piece in pieces:
            yield number, piece


def _size(piece: TextPiece) -> int:
    return 0 if is_on_hub(piece.path) else _status(piece).st_size


def _describe(number: int, piece: TextPiece) -> SourceFile:
    if is_on_hub(piece.path):
        return SourceFile(number, piece.name, 0, 0, hub_revision(piece.path))
    status = _status(piece)
    digest = ""
    if stat.S_ISREG(status.st_mode):
        try:
            digest = file_digest(Path(piece.path))
        except OSError as error:
            raise unreadable(piece.path, error) from None
    return SourceFile(number, piece.name, status.st_size, status.st_mtime_ns, digest)


def _status(piece: TextPiece) -> os.stat_result:
    try:
        return os.stat(piece.path)
    except OSError as error:
        raise unreadable(piece.path, error) from None


def _write(home: Path, files: Iterable[SourceFile]) -> None:
    with aside(home / SOURCES) as scratch, scratch.open("w", encoding="utf-8") as out:
        for file in files:
            out.write(json.dumps(file) + "\n")


def _read(path: Path) -> Iterator[SourceFile]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield SourceFile(*json.loads(line))
            except (ValueError, TypeError):
                raise DamagedError(path, "a line is not as it was written") from None
