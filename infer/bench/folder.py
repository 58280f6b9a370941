"""A fresh folder for untrusted code: kept small while the code runs, then removed whole."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
import tempfile
import time

from specjax._util.program import say

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
REMOVAL_S = 2.0  # how long removal is tried again
RETRY_S = 0.01


class Folder:
    """A folder at ``path``, removed when the block ends, whatever is in it.

    No step follows a symbolic link, so nothing outside of the folder is read or changed.
    """

    def __enter__(self) -> Folder:
        self.path = tempfile.mkdtemp()
        self._fd = os.open(self.path, OPEN_FOLDER)
        return self

    def __exit__(self, *_) -> None:
        deadline = time.monotonic() + REMOVAL_S
        while True:
            try:
                os.fchmod(self._fd, 0o700)
                _empty(self._fd)
                os.rmdir(self.path)  # from here on, nothing can be created in it
                break
            except OSError as error:  # a dying process in a namespace may still write
                if time.monotonic() > deadline:
                    say("infer.bench", f"cannot remove {self.path}: {error.strerror}")
                    break
                time.sleep(RETRY_S)
        os.close(self._fd)

    def is_within(self, entries: int, size: int) -> bool:
        """Whether it has at most so many entries and bytes, all in folders that we may read.

        The program may be running, so nothing is changed. Counting stops once a bound is passed.
        """
        # Folders stay open while they are counted: by path, the program could swap one for a link.
        with contextlib.ExitStack() as opened:
            folders: list[int] = []  # descriptors of folders to count; grows while it is read

            def enter(name: str, parent: int) -> None:
                fd = os.open(name, OPEN_FOLDER, dir_fd=parent)
                folders.append(fd)
                opened.callback(os.close, fd)

            enter(".", self._fd)
            for folder in folders:
                for name in os.listdir(folder):
                    try:
                        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        entries -= 1
                        size -= info.st_size
                        if stat.S_ISDIR(info.st_mode):
                            enter(name, folder)
                    except FileNotFoundError:
                        continue  # the program has just deleted it
                    except OSError:
                        return False
                    if min(entries, size) < 0:
                        return False
        return True


def _empty(top: int) -> None:
    """Deletes everything in a folder, at any depth.

    The entries of a folder within are first moved up into ``top``. So neither recursion nor a
    path's length limits the depth.
    """
    new_names = (f"{secrets.token_hex(8)}{number}" for number in itertools.count())
    while names := os.listdir(top):
        for name in names:
            if not _unlock_folder(name, top):
                os.unlink(name, dir_fd=top)
                continue
            inner = os.open(name, OPEN_FOLDER, dir_fd=top)
            try:
                for child in os.listdir(inner):
                    _unlock_folder(child, inner)  # a folder without write access cannot be moved
                    os.rename(child, next(new_names), src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _unlock_folder(name: str, parent: int) -> bool:
    """Whether it is a folder; if so, gives its owner all rights on it."""
    mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    is_folder = stat.S_ISDIR(mode)
    if is_folder and mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=parent)
    return is_folder
