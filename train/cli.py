"""The arguments that the training programs share. This file imports no JAX."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from specjax._util.errors import system_error
from specjax._util.program import Parser, Place, any_text, name_or_path
from specjax._util.shipped import ListConfigs


def new_file(text: str) -> Path:
    """An argparse type: a file to write. What cannot be one is refused before any work is done.

    A file that is there is replaced; a device or a directory is not.
    """
    path = Path(name_or_path(text))
    try:
        if os.path.lexists(path) and not path.is_file():
            raise argparse.ArgumentTypeError(f"{text!a} is no file: give another name")
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise argparse.ArgumentTypeError(system_error(error)) from None
    return path


def config_parser(name: str, doc: str) -> Parser:
    """A parser for a config file and its overrides; ``name`` is what follows ``python -m``."""
    parser = Parser(name, doc)
    text = "a config file, or the name of one that comes with specjax"
    parser.add_argument("config", metavar="CONFIG.toml", help=text)
    parser.add_argument("--list-configs", action=ListConfigs)
    parser.add_argument(
        "--set",
        action="append",
        type=any_text,
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the config; repeatable",
    )
    return parser


def run_parser(name: str, doc: str) -> Parser:
    """:func:`config_parser` with the options of a program that trains a model."""
    parser = config_parser(name, doc)
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument(
        "--distributed",
        metavar=Place.FORM,
        help="run as process INDEX of COUNT; HOST:PORT is the address of process 0. "
        "cluster: take all three from the cluster manager",
    )
    return parser
