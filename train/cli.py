"""The arguments that the training programs share; it imports no JAX."""

from __future__ import annotations

from specjax._util.program import Parser, Place


def config_parser(name: str, doc: str) -> Parser:
    """A parser of a config file and its overrides; ``name`` is what follows ``python -m``."""
    parser = Parser(name, doc)
    parser.add_argument("config", metavar="CONFIG.toml")
    said = "override a key of the config; repeatable"
    shape = "SECTION.KEY=VALUE"
    parser.add_argument("--set", action="append", default=[], metavar=shape, help=said)
    return parser


def run_parser(name: str, doc: str) -> Parser:
    """:func:`config_parser` of a program that makes one run."""
    parser = config_parser(name, doc)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the summary as one object")
    parser.add_argument(
        "--distributed",
        metavar=Place.FORM,
        help="one of COUNT processes that meet at process 0's address; "
        "cluster: as the cluster manager says",
    )
    return parser
