"""Serve completions over HTTP, by OpenAI's protocol, with any method; / is a page to try it.

  python -m infer.serve                                the embedded pair, http://127.0.0.1:8000
  python -m infer.serve --target DIR --draft DIR --batch-size 16
  python -m infer.serve --method specinfer --set branching=4,2,2 --port 9000

After SIGTERM the server accepts no more connections, answers all open requests, and exits with 0.
Exit codes: 0 ended, 1 the system failed, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
from argparse import _ArgumentGroup
from collections.abc import Sequence

from infer import cli
from infer.serve.log import FORMATS
from infer.serve.tools.families import FAMILIES
from specjax._util.program import Parser, run

KEY_VARIABLE = "SPECJAX_API_KEY"
REQUIRED = ("fastapi", "uvicorn", "prometheus_client")  # packages of the extra ``serve``


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code. Wrong arguments exit at once, with 2."""
    commands = parser()
    args = commands.parse_args(argv)
    _check_mesh(args, commands)
    for name in REQUIRED:
        if importlib.util.find_spec(name) is None:
            commands.error(f'{name} is not installed: pip install "specjax[serve]"')
    return run("infer.serve", "infer.serve.server:serve", args)


def _check_mesh(args: argparse.Namespace, commands: Parser) -> None:
    """Refuses processes that do not share one model: separate servers need no common run."""
    if args.distributed is None:
        return
    mesh = args.mesh or {"data": 1, "model": 1}
    count = 1 if args.distributed == cli.BY_CLUSTER else args.distributed.count
    if mesh["data"] > 1 or mesh["model"] == 1 or mesh["model"] % count:
        commands.error(
            f"--distributed {args.distributed} is for one model that spans the processes: give "
            "--mesh model=N with a multiple of COUNT, and no data"
        )


def parser() -> Parser:
    """The command line of ``infer.serve``."""
    out = Parser("infer.serve", __doc__)
    cli.add_models(out)
    _add_decoding(out.add_argument_group("decoding"))
    cli.add_distributed(
        cli.add_devices(out),
        "run as process INDEX of COUNT that serve one model, with --mesh model=N over all their "
        "devices and process 0 reachable at HOST:PORT. Process 0 answers requests. cluster: take "
        "all three from the cluster manager",
    )
    _add_address(out.add_argument_group("address"))
    _add_limits(out.add_argument_group("limits"))
    _add_log(out.add_argument_group("log"))
    return out


def _add_decoding(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--method",
        metavar="NAME",
        help="method of requests that name none (default: speculative with a draft, else "
        "autoregressive)",
    )
    group.add_argument(
        "--set",
        type=cli.setting,
        metavar="OPTION=VALUE",
        help="set an option of that method; repeatable",
        **cli.REPEATABLE,
    )
    group.add_argument(
        "--methods",
        type=cli.some_text,
        metavar="NAMES",
        help="methods that requests may name, separated by commas, with only such options as "
        "compile nothing new (default: all, with any options; --methods none: the default alone)",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=sorted(FAMILIES),
        help="how the model writes calls of tools (default: as its chat template says)",
    )
    group.add_argument(
        "--batch-size",
        type=cli.whole(1, cli.MAX_ROWS),
        default=8,
        metavar="B",
        help="batch slots of each method: completions decoded at the same time (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--warm-up",
        action="store_true",
        help="compile the default method's programs for all lengths before the first request; "
        "otherwise they compile when a request is the first of its length",
    )
    cli.add_prefixes(group)
    cli.add_generation_config(group)


def _add_address(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        type=cli.some_text,
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, which other machines cannot reach)",
    )
    group.add_argument(
        "--port",
        type=cli.whole(0, 65535),
        default=8000,
        metavar="N",
        help="port to listen on; 0 picks a free one (default: %(default)s)",
    )
    group.add_argument(
        "--allowed-host",
        type=cli.some_text,
        metavar="NAME",
        help="name by which clients may reach the server, beside localhost and addresses; "
        "repeatable. Without --api-key all other names are refused, because a page of another "
        "site can make its own name lead here",
        **cli.REPEATABLE,
    )
    group.add_argument(
        "--proxy-headers",
        action="store_true",
        help="a proxy on this machine names the clients: take their addresses from the header "
        "X-Forwarded-For of requests from 127.0.0.1",
    )
    group.add_argument(
        "--api-key",
        type=cli.some_text,
        metavar="KEY",
        help="bearer token that clients must send; repeatable, then each key is a client of its "
        f"own. Safer in the environment variable {KEY_VARIABLE}, because other users can see "
        "arguments",
        **cli.REPEATABLE,
    )
    group.add_argument(
        "--name",
        type=cli.some_text,
        help="the model's name for clients (default: the last part of --target)",
    )


def _add_log(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--log-format",
        choices=FORMATS,
        default=FORMATS[0],
        help="text: errors only; json: one object a line, and a line for each completion and each "
        "answer (default: %(default)s)",
    )


def _add_limits(group: _ArgumentGroup) -> None:
    for name, default, text in (
        ("--max-prompt", 4096, "tokens of a prompt, within the model's context"),
        ("--max-output", 1024, "new tokens of a completion, within the model's context"),
        (
            "--queue",
            512,
            "completions that may wait for a batch slot, at most half of the free ones for one "
            "client; more are answered 429",
        ),
        (
            "--max-connections",
            1024,
            "open connections; a new one takes the place of the one that has sent no whole request "
            "for the longest time",
        ),
        (
            "--max-methods",
            4,
            "methods that decode at the same time; the same method with other options counts again",
        ),
        ("--max-body", 2**20, "bytes of a request's body"),
        ("--drain", 300, "seconds after SIGTERM to finish open requests"),
    ):
        text += " (default: %(default)s)"
        group.add_argument(name, type=cli.whole(1), default=default, metavar="N", help=text)
    # The former name of --max-methods.
    group.add_argument(
        "--flights",
        dest="max_methods",
        type=cli.whole(1),
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
