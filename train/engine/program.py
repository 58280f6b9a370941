"""How a training program starts and ends: config, summary, one-line errors and exit codes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from specjax._util import processes
from specjax._util.program import FAILED, say
from train.config import from_toml
from train.engine.loop import TrainingError


def run_training(
    name: str, config: type, main: Callable[..., dict[str, Any]], args: argparse.Namespace
) -> int:
    """Joins the run's processes and calls ``main(cfg, resume, dry_run)``; returns the exit code.

    Args:
      name: the program's name, for messages.
      config: the config's dataclass.
    """
    if args.distributed:
        processes.join(args.distributed, name)
    cfg = from_toml(config, args.config, args.set)
    return run_and_print(name, lambda: main(cfg, args.resume, args.dry_run), args.json)


def run_and_print(
    name: str, work: Callable[[], dict[str, Any] | None], as_json: bool = False
) -> int:
    """Prints the summary that ``work`` returns, if any; returns the exit code.

    0: finished, or stopped by a signal after saving. 1: failed; the last good checkpoint is
    intact. Errors of bad input are left to :func:`specjax._util.program.run`.
    """
    try:
        summary = work()
    except TrainingError as error:
        failure = str(error)
    except jax.errors.JaxRuntimeError as error:
        failure = f"the device failed: {str(error).splitlines()[0]}"
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        failure = (
            f"{error.strerror or error}{place}; the last finished checkpoint is intact: "
            "make room and --resume"
        )
    else:
        # Of several processes, only the first one prints.
        if summary and processes.is_main_process():
            if as_json:
                print(json.dumps(summary))
            else:
                _print_table(summary)
        return 0
    say(name, failure)
    return FAILED


def _print_table(summary: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for key, value in summary.items():
        parts = value if isinstance(value, dict) else {"": value}
        for part, number in parts.items():
            name = f"{key} {part}".strip().replace("_", " ")
            table.add_row(name, _cell(number))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if type(value) is int:
        return f"{value:,}"
    return str(value)
