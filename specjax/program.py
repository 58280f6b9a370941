"""What the ``main`` of every program shares: arguments, one-line errors, exit codes.

It imports no JAX, so ``--help`` and wrong arguments are answered at once; what a program does
lies in a module that :func:`run` imports when the arguments are good.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pkgutil
import sys
from typing import NoReturn

from specjax.errors import SpecjaxError, one_line

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


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
        return pkgutil.resolve_name(work)(args)
    except SpecjaxError as error:
        say(name, error)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader is gone, e.g. `| head`: nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
