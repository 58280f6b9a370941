"""What the ``main`` of every program shares: arguments, one-line errors, exit codes.

It imports no JAX, so that ``--help`` and wrong arguments are answered at once. What a program does
is in a module that :func:`run` imports once the arguments are good.
"""

from __future__ import annotations

import _thread
import argparse
import dataclasses
import importlib.metadata
import io
import logging
import os
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from specjax._util.errors import (
    InputError,
    SpecjaxError,
    one_line,
    system_error,
)

COMMAND = "specjax"  # starts every program, as `specjax run` (specjax/__main__.py)
# Exit codes.
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
TERMINATED = 143  # by SIGTERM, as a shell reports it
BY_CLUSTER = "cluster"  # SLURM, Open MPI, Kubernetes and TPU pods tell each process its place


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

    An argument without a ``type`` of its own is a :func:`name_or_path`. ``name`` is what follows
    ``python -m``, and ``doc`` is the program's docstring. The help names the program as it was
    called: ``specjax run``, or ``python -m infer.run``.
    """

    def __init__(self, name: str, doc: str):
        module = f"python -m {name}"
        called = sys.argv[0] if sys.argv[0].startswith(f"{COMMAND} ") else module
        super().__init__(
            prog=called,
            description=doc.replace(module, called),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # From the installed metadata: importing the library would import JAX.
        version = f"specjax {importlib.metadata.version('specjax')}"
        self.register("type", None, name_or_path)
        self.add_argument("--version", action="version", version=version)

    def error(self, message: str) -> NoReturn:
        say(self.prog, f"{message}; see --help")
        raise SystemExit(BAD_INPUT)


def name_or_path(text: str) -> str:
    """The argparse type of names and paths: not empty, and without NUL.

    An empty one is a mistake, such as a variable of the shell that is not set. It must not count
    as not given.
    """
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a value, or leave the option out")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!a}: expected a text without NUL")
    return text


def any_text(text: str) -> str:
    """An argparse type: valid Unicode, maybe empty.

    The system passes arguments as bytes, so one can hold what is not UTF-8. Under a locale of
    ASCII, Python decodes no letter of UTF-8; they are decoded here.
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"{text!a}: expected text in UTF-8") from None


def say(name: str, message: object) -> None:
    """Prints one line on stderr; ``name`` is the program's."""
    print(f"{name}: {one_line(message)}", file=sys.stderr, flush=True)


def run(name: str, work: str, args: argparse.Namespace) -> int:
    """Calls ``work``, a ``module:function`` that gets the arguments; returns its exit code.

    A mistake of the user is one line and exit code 2. What the system refuses, such as to write on
    a full disk, is one line and exit code 1. An interrupt is exit code 130. A reader that closes
    the pipe (``| head``) has what it wanted: that is exit code 0.
    """
    _report_missing_devices_in_one_line(name)
    try:
        function = pkgutil.resolve_name(work)
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = function(args)
        print(end="", flush=True)  # a full disk behind stdout shows here
        return code
    except SpecjaxError as error:
        say(name, error)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 0
    except UnicodeEncodeError as error:  # a path with letters that the locale does not have
        say(name, f"{error.object!a}: not in the encoding {error.encoding}; set LC_ALL=C.UTF-8")
        return BAD_INPUT
    except OSError as error:
        return _fail(name, system_error(error))
    except MemoryError:
        return _fail(name, "out of memory: ask for less at a time")


def _report_missing_devices_in_one_line(name: str) -> None:
    """Makes one line of JAX's traceback about a plugin whose driver or device is missing.

    Such a process decodes on the CPU, as with CUDA's plugin and no driver.
    """

    def shorten(record: logging.LogRecord) -> bool:
        if record.exc_info and "plugin configuration error" in record.getMessage():
            say(name, f"JAX uses no GPU or TPU here: {record.exc_info[1]}")
            return False
        return True

    logging.getLogger("jax._src.xla_bridge").addFilter(shorten)


def require_output(instead: str = "") -> None:
    """Refuses a closed standard output, for a program that prints its result and nothing else.

    ``instead`` is the option that names a file for the result, if there is one.

    Raises:
      InputError: it is closed, so the result would be lost.
    """
    if sys.stdout is None:
        way_out = f"open it, or give {instead}" if instead else "open it"
        raise InputError(f"standard output is closed, so the result would be lost: {way_out}")


def module_command(module: str) -> list[str]:
    """The command that runs a module of ours as a program, as ``python -m`` does.

    Unlike ``python -m`` it does not search the working directory, where a file ``train.py`` or
    ``infer.py`` would be imported in place of our package.
    """
    root = str(Path(__file__).parents[2])
    code = (
        f"import runpy, sys; sys.path.append({root!r}); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", code]


def start(main: Callable[[], int]) -> NoReturn:
    """Runs a program's ``main`` and ends the process; for ``__main__`` modules."""
    _open_standard_streams()
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
    except OSError as error:  # of --help; what a program prints is written before it returns
        code = _fail("help", system_error(error))
    if code == INTERRUPTED:
        _leave()
    raise SystemExit(code)


def _leave(*_: object) -> NoReturn:
    """Ends an interrupted process at once, without the interpreter's own end.

    Threads of XLA may still compile or compute. They crash if the interpreter ends first.
    """
    os._exit(INTERRUPTED)


def _open_standard_streams() -> None:
    """Makes stderr and the numbers 0 to 2 safe to use, and stdout able to print any text.

    A caller may close descriptors (``2>&-``). The next file that is opened would get the number,
    and messages of libraries would be written into it. Messages of Python would go to stdout.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    # Under some locales, stdout cannot write every letter; stderr escapes them, and so shall it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Drops all further output: its reader, such as ``| head``, has gone, or its disk is full."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(name: str, message: str) -> int:
    """Says why a program failed; returns its exit code."""
    try:
        print(end="", flush=True)
    except OSError as error:  # Python would try again at its end, and print a traceback
        _drop_output()
        message = f"standard output: {system_error(error)}"
    say(name, message)
    return FAILED


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
