"""The errors a user can cause, each one line. Programs print them and exit with 2."""

import contextlib
import os
from collections.abc import Iterator

LONGEST = 600  # characters of a message


def one_line(message: object) -> str:
    """A text in one line that any stream takes: spaces for line breaks, half pairs spelled out.

    Of a very long one the middle is left out: a message begins with what and ends with the way out.
    """
    text = " ".join(str(message).encode(errors="backslashreplace").decode().split())
    half = LONGEST // 2 - 2
    return text if len(text) <= LONGEST else f"{text[:half]} … {text[-half:]}"


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
def foreign(what: str, kind: type[SpecjaxError] = ModelError) -> Iterator[None]:
    """Whatever another library raises inside, as one line: ``what``, and its text folded."""
    try:
        yield
    except (SpecjaxError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise kind(f"{what} ({str(error).strip() or type(error).__name__})") from None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drops what goes to the descriptor of stderr: reports, and the story that Rust tells of a
    panic. What matters of it, :func:`foreign` says."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
