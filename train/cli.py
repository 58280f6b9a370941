"""What every training program shares: arguments, exit codes, one-line errors.

Exit codes: 0 finished, or stopped by SIGTERM after saving; 2 bad input; 1 failed with the
last good checkpoint intact.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import specjax
from train.config import from_toml
from train.engine import processes
from train.engine.loop import TrainingError


def run_program(
    name: str,
    doc: str,
    config: type,
    main: Callable[[Any, bool, bool], dict],
    bad_input: tuple[type[Exception], ...],
    argv: Sequence[str] | None = None,
    several: bool = False,
) -> int:
    """Runs ``main(config, resume, dry_run)`` and prints its summary; returns the exit code.

    ``several``: the program can be one of several processes, of which the first one prints.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the config; repeatable",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the summary as one object")
    parser.add_argument("--version", action="version", version=f"specjax {specjax.__version__}")
    if several:
        parser.add_argument(
            "--distributed",
            metavar="HOST:PORT,COUNT,INDEX",
            help="one of COUNT processes that meet at process 0's address; "
            f"{processes.BY_CLUSTER}: as the cluster manager says",
        )
    args = parser.parse_args(argv)
    try:
        if several and args.distributed:
            processes.join(args.distributed)
        summary = main(from_toml(config, args.config, args.set), args.resume, args.dry_run)
    except bad_input as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        print(f"{name}: the device failed: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(
            f"{name}: {error.strerror or error}{place}; the last finished checkpoint is intact: "
            "make room and --resume",
            file=sys.stderr,
        )
        return 1
    if processes.leads():
        _print(summary, args.json)
    return 0


def _print(summary: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    table = Table(show_header=False)
    for key, value in summary.items():
        parts = value if isinstance(value, dict) else {"": value}
        for part, number in parts.items():
            name = f"{key} {part}".strip().replace("_", " ")
            table.add_row(name, f"{number:,}" if type(number) is int else str(number))
    Console().print(table)
