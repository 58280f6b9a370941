"""``--config FILE.toml``: a program's options under their own names; what is given besides wins.

``max-new-tokens = 64``, ``greedy-only = true``, ``methods = "block,mtad"``; of an option that is
repeatable a list, to which the command line adds.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from typing import Any

from specjax._util.errors import one_line
from specjax._util.files import read_file
from specjax._util.program import Parser


def add_config(commands: Parser) -> None:
    """``--config``, for :func:`parse_with_config`."""
    said = "options by name; those of the command line win"
    commands.add_argument("--config", metavar="FILE.toml", help=said)


def parse_with_config(commands: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, those of a config before those of the command line.

    A config that cannot be read or names what is no option ends the program, as wrong arguments do.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    path = first.parse_known_args(given)[0].config
    if path is None:
        return commands.parse_args(given)
    try:
        settings = tomllib.loads(read_file(path).decode())
        words = [word for name, value in settings.items() for word in _words(commands, name, value)]
    except OSError as error:
        commands.error(f"--config {path}: cannot be read ({error.strerror})")
    except ValueError as error:  # TOML's and Unicode's, too
        commands.error(f"--config {path}: {one_line(error)}")
    return commands.parse_args([*words, *given])


def _words(commands: Parser, name: str, value: Any) -> list[str]:
    """One setting as the command line would spell it."""
    flag = f"--{name.replace('_', '-')}"
    action = commands._option_string_actions.get(flag)  # argparse has no public name for it
    if action is None or flag == "--config":
        raise ValueError(f"there is no option {name}")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{name} = {value!r}: expected true or false")
        return [flag] if value else []
    values = value if isinstance(value, list) else [value]
    if not all(type(one) in (str, int, float) for one in values):
        raise ValueError(f"{name} = {value!r}: expected a text, a number or a list of them")
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={one}" for one in values]
    return [f"{flag}={','.join(map(str, values))}"]
