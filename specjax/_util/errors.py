"""The errors a user can cause, each one line. Programs print them and exit with 2."""

import contextlib
import os
from collections.abc import Iterator

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


class PairError(SpecjaxError):
    """A drafter, target distribution, rule or model that does not fit the others."""


class OptionError(SpecjaxError):
    """An unknown method or option, or a value out of its range."""


class InputError(SpecjaxError):
    """A file, a config or a path that a program cannot use."""


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


@contextlib.contextmanager
def silence_stderr() -> Iterator[None]:
    """Drops what is written to the process's stderr.

    Libraries in Rust print a report of a panic there. :func:`errors_as` says what matters of it.
    Replacing ``sys.stderr`` would not be enough: they write to the descriptor.
    """
    stderr = os.dup(2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)
