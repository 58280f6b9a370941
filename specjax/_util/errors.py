"""The errors a user can cause, each one line. Programs print them and exit with 2."""

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

LONGEST = 600  # characters of a message


def one_line(message: object) -> str:
    """A text as one line of valid Unicode, with spaces for line breaks.

    Lone surrogates are written as escapes. A text of more than ``LONGEST`` characters loses
    its middle: a message begins with what is wrong and ends with the way out.
    """
    valid = str(message).encode(errors="backslashreplace").decode()
    text = " ".join(valid.split())
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2 - 2
    return f"{text[:half]} … {text[-half:]}"


class SpecjaxError(ValueError):
    """A mistake in what was asked for: one line that names the value and the way out."""

    def __init__(self, message: object):
        super().__init__(one_line(message))


class ModelError(SpecjaxError):
    """A model directory, configuration or tensor that cannot be used."""


class SplitError(ModelError):
    """A model that so many devices cannot share. It can be whole on each of them."""


class ModelWarning(UserWarning):
    """A model loads, but not in the form that its files have."""


class PairError(SpecjaxError):
    """A drafter, target distribution, rule or model that does not fit the others."""


class OptionError(SpecjaxError):
    """An unknown method or option, or a value out of its range."""


class InputError(SpecjaxError):
    """A file, a config or a path that a program cannot use."""


def system_error(error: OSError) -> str:
    """What the system refused, with the path if the error has one."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.ENOENT and _current_directory_is_gone():
        reason = "the current directory does not exist any more; change to another one"
    # The name may also be the number of a descriptor.
    if isinstance(error.filename, (str, os.PathLike)):
        return f"{error.filename}: {reason}"
    return reason


def _current_directory_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


@contextlib.contextmanager
def errors_as(message: str, error_type: type[SpecjaxError] = ModelError) -> Iterator[None]:
    """Turns what another library raises inside into one line: the message, then the error's text.

    Our own errors and interrupts pass unchanged.
    """
    try:
        yield
    except (SpecjaxError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        text = str(error).strip() or type(error).__name__
        raise error_type(f"{message} ({text})") from None


class _HeldStderr:
    """The process's stderr while blocks of some threads hold back what is written to it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._count = 0  # blocks that run now, in any thread
        self._drop = False  # one of them wants what was written to be dropped
        self._stderr: int | None = None  # a copy of the descriptor while it is replaced
        self._file: IO[bytes] | None = None  # takes what is written; kept for the next block

    def enter(self) -> None:
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
            try:
                self._stderr = os.dup(2)
            except OSError:  # it is closed, so there is nothing to hold back
                return
            self._drop = False
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            os.dup2(self._file.fileno(), 2)

    def leave(self, drop: bool) -> None:
        with self._lock:
            self._count -= 1
            self._drop = self._drop or drop
            if self._count or self._stderr is None or self._file is None:
                return
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            self._stderr = None
            self._file.seek(0)
            written = self._file.read()
            if written:
                self._file.seek(0)
                self._file.truncate()
                if not self._drop:
                    os.write(2, written)


_HELD_STDERR = _HeldStderr()


@contextlib.contextmanager
def silence_stderr() -> Iterator[None]:
    """Drops what is written to the process's stderr, by any thread, until the block ends.

    Libraries in Rust print a report of a panic there. :func:`errors_as` says what matters of it.
    Replacing ``sys.stderr`` would not be enough: they write to the descriptor. Several threads may
    be in such blocks at the same time; the last one to leave gives stderr back.
    """
    _HELD_STDERR.enter()
    try:
        yield
    finally:
        _HELD_STDERR.leave(drop=True)


@contextlib.contextmanager
def silence_failures() -> Iterator[None]:
    """As :func:`silence_stderr` if the block raises; otherwise what was written comes out late.

    For what a server does all the time: other threads' messages must not be lost.
    """
    _HELD_STDERR.enter()
    failed = True
    try:
        yield
        failed = False
    finally:
        _HELD_STDERR.leave(drop=failed)
