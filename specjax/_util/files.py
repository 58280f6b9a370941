"""Files: only plain ones are read, writes are atomic, and one process writes at a time."""

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

from specjax._util.errors import InputError, errors_as

try:
    import fcntl
except ImportError:  # Windows: there the user must keep two writers apart
    fcntl = None

CACHE_VARIABLE = "SPECJAX_CACHE_DIR"  # names the directory of compiled programs
MOST_BYTES = 1 << 32  # of a file that is read at once
# JSON allows these characters. They would break a line, or are not valid UTF-8.
_UNSAFE_CHARACTERS = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
_LOCK_POLL_SECONDS = 0.02


def expand_user(path: str | os.PathLike) -> Path:
    """The path with ``~`` or ``~user`` replaced by that user's home.

    It stays as it is if there is no such user. ``Path.expanduser`` would raise RuntimeError.
    """
    return Path(os.path.expanduser(path))


def user_cache() -> Path | None:
    """The user's cache directory, which may not exist yet; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if base.startswith("~") else Path(base)


def program_cache(name: str) -> Path | None:
    """The directory ``name`` beside the compiled programs, which may not exist yet.

    It is in ``SPECJAX_CACHE_DIR``, or in the user's cache directory. None: the variable is empty,
    which turns all of it off, or the user has no home.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen) / name
    cache = user_cache()
    if chosen == "" or cache is None:
        return None
    return cache / "specjax" / name


def open_file(path: str | os.PathLike, pipes: bool = False) -> BinaryIO:
    """Opens a plain file for reading.

    It never waits, as a FIFO or a device could make it. With ``pipes``, a pipe is accepted, too,
    and reading it waits for its writer.

    Raises:
      OSError: it cannot be opened, or it is not a plain file.
    """
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
    except UnicodeEncodeError as error:
        reason = f"the name is not in the encoding {error.encoding}; set LC_ALL=C.UTF-8"
        raise OSError(errno.EINVAL, reason, str(path)) from None
    except ValueError:  # such as NUL in a name
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path)) from None
    mode = os.fstat(file.fileno()).st_mode
    if pipes and stat.S_ISFIFO(mode):
        os.set_blocking(file.fileno(), True)
    elif not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def check_file(path: str | os.PathLike) -> None:
    """Checks that :func:`open_file` can open it.

    Raises:
      OSError: it cannot.
    """
    open_file(path).close()


def check_entries(directory: str | os.PathLike) -> None:
    """Checks that a directory holds only plain files and directories.

    For libraries that open whatever is there: a FIFO would hang them.

    Raises:
      OSError: something else is there, or a file cannot be opened.
    """
    for entry in os.scandir(directory):
        if not entry.is_dir():
            check_file(entry.path)


def read_file(path: str | os.PathLike, pipes: bool = False, most: int = MOST_BYTES) -> bytes:
    """The bytes of a plain file.

    Raises:
      OSError: as :func:`open_file`, or it has more than ``most`` bytes.
    """
    with open_file(path, pipes) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
        return file.read()


def parse_json(text: bytes | bytearray) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
      ValueError: it is not valid; the message says why in a few words.
    """
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("not JSON of a reasonable depth") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except ValueError:  # Python refuses integers of thousands of digits
        raise ValueError("not JSON of reasonable integers") from None


def require_arrow(path: str | os.PathLike, needed: bool = True) -> None:
    """Checks that pyarrow, which is an extra, is installed if a file needs it.

    Raises:
      InputError: it is missing; the message says how to install it.
    """
    if not needed:
        return
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise InputError(f'reading {path} needs pyarrow: pip install "specjax[parquet]"') from None


def open_parquet(path: str | os.PathLike) -> Any:
    """A ``pyarrow.parquet.ParquetFile`` that reads as a stream: a row group may have gigabytes.

    Raises:
      InputError: pyarrow is missing, or the file cannot be read as parquet.
    """
    require_arrow(path)
    import pyarrow.parquet

    with errors_as(f"{path} is not a readable parquet file", InputError):
        check_file(path)
        return pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)


def json_line(value: Any) -> str:
    """A value as JSON on one line, whatever a reader counts as a line break; valid Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    return _UNSAFE_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


@contextlib.contextmanager
def aside(path: str | os.PathLike) -> Iterator[Path]:
    """An atomic write: a scratch path in the same directory, which replaces ``path`` at the end.

    If the block raises, ``path`` stays as it was and the scratch file is removed.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.chmod(0o644)  # some writers make files that only their owner can read
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file in UTF-8, atomically."""
    with aside(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, one line per row below its head."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def append_line(path: str | os.PathLike, line: str) -> None:
    """Appends a line of UTF-8 in one write, and returns once it is on disk."""
    with open(path, "ab") as file:
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def complete_bytes(data: bytes) -> int:
    """The number of bytes up to the end of the last complete line."""
    return data.rfind(b"\n") + 1


def cut_incomplete_line(path: Path) -> None:
    """Cuts off a last line without its end, which a killed process may have left."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        data = file.read()
        complete = complete_bytes(data)
        if complete < len(data):
            file.truncate(complete)
            os.fsync(file.fileno())


# Not the filelock package: it leaves its lock files behind, and where a file system has no flock it
# falls back to a file that a killed process leaves locked. We would still have to write down who
# holds the lock.
@contextlib.contextmanager
def locked(path: str | os.PathLike, option: str, wait_seconds: float = 0) -> Iterator[None]:
    """Keeps other processes from writing a file or a directory while the block runs.

    The lock is the kernel's. It is on a hidden file beside the file, or inside the directory, which
    says who holds it. The kernel frees the lock of a killed process. The hidden file stays then,
    and does no harm. The lock holds between hosts on NFS, too, unless that is mounted with
    ``nolock``. On a file system without locks nothing is locked.

    ``option`` is the option by which the user gave the path. If another process holds the lock,
    this one waits up to ``wait_seconds`` for it.

    Raises:
      InputError: another process holds it (the message says which, and since when), or the hidden
        file cannot be made.
    """
    if fcntl is None:
        yield
        return
    try:
        target = Path(os.path.realpath(path))  # the current directory may have been deleted
        is_directory = os.path.isdir(target)
        hidden = target / ".lock" if is_directory else target.with_name(f".{target.name}.lock")
        file, is_ours = _open_locked(hidden, time.monotonic() + wait_seconds)
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror})") from None
    with file:
        if not is_ours:
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
            # Removed while it is still locked: after that it may be another process's.
            hidden.unlink(missing_ok=True)


def _open_locked(path: Path, deadline: float) -> tuple[IO[str], bool]:
    """The lock's file, and whether this process holds the lock; ``deadline`` is monotonic time."""
    assert fcntl is not None, "locked returns before on a system without it"
    while True:
        file = path.open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return file, False
            file.close()
            time.sleep(_LOCK_POLL_SECONDS)
            continue
        except OSError:
            return file, True  # the file system has no locks
        # Its holder may have removed the file between our open and our lock. Then this lock is on
        # a file without a name, which nobody else can find.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file, True
        file.close()
