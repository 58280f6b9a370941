"""The arguments that the training programs share. This file imports no JAX."""

from __future__ import annotations

from specjax._util.program import Parser, Place, any_text


def config_parser(name: str, doc: str) -> Parser:
    """A parser for a config file and its overrides; ``name`` is what follows ``python -m``."""
    parser = Parser(name, doc)
    parser.add_argument("config", metavar="CONFIG.toml")
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
