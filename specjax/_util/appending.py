"""Files of lines that one process appends to: whose they are, and whether somebody changes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from specjax._util.errors import SpecjaxError
from specjax._util.files import append_line


def may_begin(line: bytes, *begins: str) -> bool:
    """Whether a line begins with one of ``begins``, or was cut off in it."""
    return any(begin.encode().startswith(line[: len(begin.encode())]) for begin in begins)


class AppendedFile:
    """A file that this process appends to, and that nobody else changes meanwhile.

    Args:
      path: the file. It need not be there.
      name: what errors call it, such as ``--out FILE``.
      lines: what its lines are called, such as rows.
      error: the kind of error that is raised.
    """

    def __init__(self, path: Path, name: str, lines: str, error: type[SpecjaxError]):
        self.path = path
        self._name = name
        self._lines = lines
        self._error = error
        self._seen = self._identity()

    def append(self, line: str) -> None:
        """Writes a line and returns once it is on disk.

        Raises:
          SpecjaxError: as :meth:`check_unchanged`.
        """
        self.check_unchanged()
        with self._writing():
            append_line(self.path, line)
            self._seen = self._identity()

    def check_unchanged(self) -> None:
        """Checks that nobody else has changed the file since the last line.

        Raises:
          SpecjaxError: somebody has, or the file cannot be read or written.
        """
        with self._writing():
            is_unchanged = self._identity() == self._seen
        if not is_unchanged:
            raise self._error(
                f"{self._name}: was changed while this job wrote it; the same command decodes the "
                f"{self._lines} that are missing now"
            )

    def _identity(self) -> tuple[int, int, int] | None:
        """What changes if another file takes its place, or anything is written to it or cut off."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino, status.st_size

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(
                f"{self._name}: cannot be written ({error.strerror}); its {self._lines} stay, and "
                "the same command goes on"
            ) from None
