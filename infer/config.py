"""``--config FILE.toml``: a program's options by name. The command line overrides them.

Examples: ``max-new-tokens = 64``, ``greedy-only = true``, ``methods = "block,mtad"``. A repeatable
option takes a list, and the command line adds to it.
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
from specjax._util.shipped import ListConfigs, config_path


def add_config(commands: Parser) -> None:
    """Adds ``--config``, which :func:`parse_with_config` reads, and ``--list-configs``."""
    commands.add_argument(
        "--config",
        metavar="FILE.toml",
        help="read options by name from this file, or from a config that comes with specjax; "
        "options of the command line override them",
    )
    commands.add_argument("--list-configs", action=ListConfigs, const="papers")


def parse_with_config(commands: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options of a config file, and then those of the command line.

    A config that cannot be read or names an unknown option ends the program with exit code 2.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    config_only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_only.add_argument("--config")
    path = config_only.parse_known_args(given)[0].config
    if not path:  # an empty one is refused with the others
        return commands.parse_args(given)

    arguments: list[str] = []
    try:
        for name, value in tomllib.loads(read_file(config_path(path)).decode()).items():
            arguments += _arguments(commands, name, value)
    except OSError as error:
        commands.error(f"--config {path}: cannot be read ({error.strerror})")
    except ValueError as error:  # also of TOML and of UTF-8
        commands.error(f"--config {path}: {one_line(error)}")
    return commands.parse_args([*arguments, *given])


def _arguments(commands: Parser, name: str, value: Any) -> list[str]:
    """One setting in the form of the command line.

    Raises:
      ValueError: there is no such option, or the value has the wrong type.
    """
    option = f"--{name.replace('_', '-')}"
    action = commands._option_string_actions.get(option)  # argparse has no public name for it
    if action is None or option in ("--config", "--list-configs"):
        raise ValueError(f"there is no option {name}")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{name} = {value!r}: expected true or false")
        return [option] if value else []

    values = value if isinstance(value, list) else [value]
    # type() and not isinstance(): True is an int, too.
    if not all(type(item) in (str, int, float) for item in values):
        raise ValueError(f"{name} = {value!r}: expected a text, a number or a list of them")
    if isinstance(action, argparse._AppendAction):
        return [f"{option}={item}" for item in values]
    return [f"{option}={','.join(map(str, values))}"]
