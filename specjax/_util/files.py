"""Files: plain ones are read; written ones are whole or not there, one process at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from specjax._util.errors import InputError, foreign

try:
    import fcntl
except ImportError:  # Windows: there it is the user's to keep two writers apart
    fcntl = None

MOST_BYTES = 1 << 32  # of a file that is read at once
BREAKS = re.compile("[\x85\u2028\u2029\ud800-\udfff]")  # JSON allows them; lines and UTF-8 do not


def open_file(path: str | os.PathLike, pipes: bool = False) -> BinaryIO:
    """A plain file, open to be read. Nothing is waited for, as a FIFO or a device could ask.

    ``pipes``: a pipe is taken, too, for as long as someone writes to it.

    Raises:
      OSError: it cannot be opened, or is something else.
    """
    try:
        file = open(path, "rb", opener=_open)  # noqa: SIM115
    except ValueError:  # such as NUL in a name
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path)) from None
    mode = os.fstat(file.fileno()).st_mode
    if pipes and stat.S_ISFIFO(mode):
        os.set_blocking(file.fileno(), True)
    elif not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def check_file(path: str | os.PathLike) -> None:
    """Raises OSError where :func:`open_file` does."""
    open_file(path).close()


def check_entries(directory: str | os.PathLike) -> None:
    """Raises OSError where a directory holds what is neither plain file nor directory.

    For libraries that open what they find: a FIFO would hang them.
    """
    for entry in os.scandir(directory):
        if not entry.is_dir():
            check_file(entry.path)


def read_file(path: str | os.PathLike, pipes: bool = False, most: int = MOST_BYTES) -> bytes:
    """All of a plain file, of ``most`` bytes; as :func:`open_file`."""
    with open_file(path, pipes) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
        return file.read()


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
      ValueError: it is none; the message says why, in a few words.
    """
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("not JSON of a reasonable depth") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except ValueError:  # Python's bound
        raise ValueError("not JSON of reasonable integers") from None


def require_arrow(path: str | os.PathLike, needed: bool = True) -> None:
    """Raises InputError where a file needs pyarrow, which is an extra, and it is missing."""
    try:
        if needed:
            import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise InputError(f'reading {path} needs pyarrow: pip install "specjax[parquet]"') from None


def open_parquet(path: str | os.PathLike) -> Any:
    """A ``pyarrow.parquet.ParquetFile`` that reads as a stream: a row group may have gigabytes.

    Raises:
      InputError: pyarrow is not there, or the file is none of its format.
      OSError: it cannot be opened.
    """
    require_arrow(path)
    import pyarrow.parquet

    with foreign(f"{path} is not a readable parquet file", InputError):
        check_file(path)
        return pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)


def json_line(value: Any) -> str:
    """JSON that is one line, of valid Unicode, to whoever reads it."""
    text = json.dumps(value, ensure_ascii=False)
    return BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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


@contextlib.contextmanager
def locked(path: str | os.PathLike, option: str, patience: float = 0) -> Iterator[None]:
    """Keeps a file or a directory from others that ask the same, while the block runs.

    The lock is the kernel's, on a hidden file beside the file or inside the directory that says
    who has it. It ends with the process, however that ends: what a killed one leaves of it hinders
    nobody. It holds between hosts on NFS too, unless that is mounted with ``nolock``; where a file
    system has no locks nothing is kept. ``option`` is what the user gave the path by, ``patience``
    how many seconds another one is waited for.

    Raises:
      InputError: another one has it: who, and since when; or the hidden file cannot be made.
    """
    if fcntl is None:
        yield
        return
    home = Path(os.path.realpath(path))
    lock = home / ".lock" if home.is_dir() else home.with_name(f".{home.name}.lock")
    try:
        file, ours = _open_locked(lock, time.monotonic() + patience)
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror})") from None
    with file:
        if not ours:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise InputError(
                f"{option} {path} is being written by {holder}: wait, or give another {option}"
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {platform.node()} since {since}\n")
        file.flush()
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # before it is let go: then it may be another's


def _open_locked(lock: Path, deadline: float) -> tuple[IO[str], bool]:
    """The lock's file, and whether this process has the lock now; ``deadline`` is monotonic."""
    while True:
        file = lock.open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return file, False
            file.close()
            time.sleep(0.02)
            continue
        except OSError:
            return file, True  # there are no locks here
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            return file, True
        file.close()  # whoever had it has just removed it
