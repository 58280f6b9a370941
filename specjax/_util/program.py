"""What the ``main`` of every program shares: arguments, one-line errors, exit codes.

It imports no JAX, so ``--help`` and wrong arguments are answered at once; what a program does
lies in a module that :func:`run` imports when the arguments are good.
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

from specjax._util.errors import SpecjaxError, one_line

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


@dataclasses.dataclass(frozen=True)
class Place:
    """One of ``count`` processes of a program; ``address`` is where they meet, the first one's."""

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
        found = re.fullmatch(r"([^\s,]+:[0-9]{1,5}),([0-9]{1,6}),([0-9]{1,6})", text)
        if not found or int(found[3]) >= int(found[2]):
            raise ValueError("no such form, or INDEX is not below COUNT")
        return cls(found[1], int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.address},{self.count},{self.index}"


class Parser(argparse.ArgumentParser):
    """argparse with ``--version``, whose errors are one line that names the way out.

    ``name`` is what follows ``python -m``, ``doc`` the program's docstring.
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
    """Tells a user something on stderr, in one line; ``name`` is the program's."""
    print(f"{name}: {one_line(message)}", file=sys.stderr, flush=True)


def run(name: str, work: str, args: argparse.Namespace) -> int:
    """Calls ``work``, a ``module:function`` of the arguments; returns the exit code.

    What the user asked wrongly is one line and 2, an interrupt 130.
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
    """Runs a program's ``main`` as this process: for ``__main__`` modules alone."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        # Until :func:`run` has imported the work: extensions crash where their import raises.
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
    """Ends an interrupted process at once, all of whose blocks are left.

    XLA may still compile or compute in threads of its own, and crashes where an interpreter ends
    beneath them.
    """
    os._exit(INTERRUPTED)


def _drop_output() -> None:
    """The reader is gone, e.g. ``| head``: nothing is left to say, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Repeats an interrupt that fell into a callback which cannot raise, as XLA's of the garbage
    collector; it would be lost, and the program go on."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return

    def soon() -> None:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    _thread.start_new_thread(soon, ())
