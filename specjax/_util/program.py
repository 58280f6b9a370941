"""What the ``main`` of every program shares: arguments, one-line errors, exit codes.

It imports no JAX, so that ``--help`` and wrong arguments are answered at once. What a program does
is in a module that :func:`run` imports once the arguments are good.
"""

from __future__ import annotations

import _thread
import argparse
import dataclasses
import importlib.metadata
import os
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from specjax._util.errors import OptionError, SpecjaxError, one_line

# Exit codes.
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Place:
    """One of ``count`` processes of a program; ``address`` is the first one's."""

    FORM = "HOST:PORT,COUNT,INDEX"

    address: str
    count: int
    index: int

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place that ``HOST:PORT,COUNT,INDEX`` names.

        Raises:
          ValueError: another form, or an INDEX that is not below COUNT.
        """
        match = re.fullmatch(r"([^\s,]+:[0-9]{1,5}),([0-9]{1,6}),([0-9]{1,6})", text)
        if not match:
            raise ValueError(f"not of the form {cls.FORM}")
        place = cls(match[1], int(match[2]), int(match[3]))
        if place.index >= place.count:
            raise ValueError(f"INDEX {place.index} is not below COUNT {place.count}")
        return place

    def __str__(self) -> str:
        return f"{self.address},{self.count},{self.index}"


class Parser(argparse.ArgumentParser):
    """An argument parser with ``--version``, whose errors are one line that names the way out.

    ``name`` is what follows ``python -m``, and ``doc`` is the program's docstring.
    """

    def __init__(self, name: str, doc: str):
        super().__init__(
            prog=f"python -m {name}",
            description=doc,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # From the installed metadata: importing the library would import JAX.
        version = f"specjax {importlib.metadata.version('specjax')}"
        self.add_argument("--version", action="version", version=version)

    def error(self, message: str) -> NoReturn:
        say(self.prog, f"{message}; see --help")
        raise SystemExit(BAD_INPUT)


def say(name: str, message: object) -> None:
    """Prints one line on stderr; ``name`` is the program's."""
    print(f"{name}: {one_line(message)}", file=sys.stderr, flush=True)


def require_output() -> None:
    """Raises OptionError if standard output is closed, before anything is computed for it."""
    if sys.stdout is None:
        raise OptionError("standard output is closed: nothing could be shown")


def print_line(line: str) -> None:
    """Prints a line of results at once.

    Raises:
      OptionError: standard output cannot be written, e.g. because a disk is full.
      BrokenPipeError: its reader has gone.
    """
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()  # the interpreter would try again at its end
        raise OptionError(f"standard output cannot be written ({error.strerror})") from None


def run(name: str, work: str, args: argparse.Namespace) -> int:
    """Calls ``work``, a ``module:function`` that gets the arguments; returns its exit code.

    A mistake of the user is one line and exit code 2. An interrupt is exit code 130.
    """
    try:
        function = pkgutil.resolve_name(work)
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return function(args)
    except SpecjaxError as error:
        say(name, error)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 0


def start(main: Callable[[], int]) -> NoReturn:
    """Runs a program's ``main`` and ends the process; for ``__main__`` modules."""
    # Until `run` has imported the work, an interrupt ends the process at once: extensions crash if
    # their import raises. A shell's background job ignores interrupts and goes on doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    sys.unraisablehook = _interrupt_again
    try:
        try:
            code = main()
        except SystemExit as stop:  # argparse's
            code = stop.code
        print(end="", flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        code = 0
    if code == INTERRUPTED:
        _leave()
    raise SystemExit(code)


def _leave(*_: object) -> NoReturn:
    """Ends an interrupted process at once, without the interpreter's own end.

    Threads of XLA may still compile or compute. They crash if the interpreter ends first.
    """
    os._exit(INTERRUPTED)


def _drop_output() -> None:
    """Drops all further output: its reader, such as ``| head``, has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Repeats an interrupt that came in a callback which cannot raise.

    XLA's callback of the garbage collector is one. The interrupt would be lost, and the program
    would go on.
    """
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return

    def interrupt_soon() -> None:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    _thread.start_new_thread(interrupt_soon, ())
