"""A fresh folder for code that nobody has read: kept small while it runs, then removed whole."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
import tempfile
import time

from specjax._util.program import say

READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
PATIENCE_S = 2.0


class Folder:
    """``path``; removed when the block ends, whatever is in it. No step follows a link."""

    def __enter__(self) -> Folder:
        self.path = tempfile.mkdtemp()
        self._place = os.open(self.path, READ)
        return self

    def __exit__(self, *_) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                os.fchmod(self._place, 0o700)
                _empty(self._place)
                os.rmdir(self.path)  # nothing can be made in it from here on
                break
            except OSError as error:  # what is dying in a namespace may still write
                if time.monotonic() > deadline:
                    say("infer.bench", f"cannot remove {self.path}: {error.strerror}")
                    break
                time.sleep(0.01)
        os.close(self._place)

    def is_within(self, entries: int, size: int) -> bool:
        """Whether it holds at most so many entries and bytes, all of them in folders we may read.

        Its program may be running, so nothing is changed, and no more is looked at than that.
        """
        with contextlib.ExitStack() as opened:
            waiting: list[int] = []

            def enter(name: str, within: int) -> None:
                waiting.append(os.open(name, READ, dir_fd=within))
                opened.callback(os.close, waiting[-1])

            enter(".", self._place)
            for place in waiting:
                for name in os.listdir(place):
                    try:
                        found = os.stat(name, dir_fd=place, follow_symlinks=False)
                        entries, size = entries - 1, size - found.st_size
                        if stat.S_ISDIR(found.st_mode):
                            enter(name, place)
                    except FileNotFoundError:
                        continue
                    except OSError:
                        return False
                    if min(entries, size) < 0:
                        return False
        return True


def _empty(top: int) -> None:
    """Deletes all that a folder holds; folders within hand theirs up, so no depth is too deep."""
    fresh = (f"{secrets.token_hex(8)}{number}" for number in itertools.count())
    while names := os.listdir(top):
        for name in names:
            if not _is_opened(name, top):
                os.unlink(name, dir_fd=top)
                continue
            inner = os.open(name, READ, dir_fd=top)
            try:
                for child in os.listdir(inner):
                    _is_opened(child, inner)  # a folder that cannot be written cannot be moved
                    os.rename(child, next(fresh), src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _is_opened(name: str, place: int) -> bool:
    """Whether it is a folder, which its owner can then read and write."""
    mode = os.stat(name, dir_fd=place, follow_symlinks=False).st_mode
    if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=place)
    return stat.S_ISDIR(mode)
