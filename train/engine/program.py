"""How a training program starts and ends: config, summary, one-line errors and exit codes."""

from __future__ import annotations

import argparse
import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from specjax._util import processes
from specjax._util.program import FAILED, require_output, say
from specjax.text.tokenizer import read_chat_settings
from train.config import DataSection, from_toml
from train.engine.loop import TrainingError

# In the errors of a device whose collective lacks a process.
PEER_GONE = re.compile("gloo|connection|heartbeat|coordination|barrier|peer", re.IGNORECASE)
START_AGAIN = "start all of them again with --resume"
OTHERS_GONE = f"another process of the run has gone; {START_AGAIN}"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SELF_DRAFTING = "self"  # in place of a target: the export drafts for itself
NEXT = "next"  # of a summary: the command to run next
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


def run_training(
    name: str, config: type, main: Callable[..., dict[str, Any]], args: argparse.Namespace
) -> int:
    """Joins the run's processes and calls ``main(cfg, resume, dry_run)``; returns the exit code.

    Args:
      name: the program's name, for messages.
      config: the config's dataclass.
    """
    if args.dry_run:
        require_output()
    if args.distributed:
        directory = [setting for setting in args.set if setting.startswith("run.dir=")]
        job = " ".join([str(args.config), *directory])
        processes.join(args.distributed, name, START_AGAIN, job)
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
        if processes.is_several() and PEER_GONE.search(str(error)):
            failure += f"; {OTHERS_GONE}"
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        failure = (
            f"{error.strerror or error}{place}; the last finished checkpoint is intact: "
            f"{_way_out(error)}"
        )
    else:
        # Of several processes, only the first one prints.
        if summary and processes.is_main_process():
            print_summary(summary, as_json)
        return 0
    say(name, failure)
    return FAILED


def _way_out(error: OSError) -> str:
    """What to do about what the system refused."""
    if error.errno in NO_ROOM:
        return "make room and --resume"
    if error.errno in NOT_WRITABLE:
        return "make it writable, or choose another run.dir, and --resume"
    if isinstance(error, (ConnectionError, TimeoutError)):
        return OTHERS_GONE
    return "mend that and --resume"


def with_next_command(
    summary: dict[str, Any], data: DataSection, target: str, home: Path | None
) -> dict[str, Any]:
    """The summary of a run with ``next``: the command that measures what it has exported.

    It reads the corpus's conversations if the target has the template that they were trained with.

    Args:
      target: the model that the export drafts for, or :data:`SELF_DRAFTING`. Empty: none.
      home: the directory with the target's chat template; None: no conversation was trained on.
    """
    if not target or "export" not in summary:
        return summary
    export = summary["export"]
    if target == SELF_DRAFTING:
        words = f"--target {export} --methods sdsat"
    else:
        words = f"--target {target} --draft {export} --methods speculative"
    files = [file for file in (*data.eval, *data.files) if file.endswith((".jsonl", ".json"))]
    if files and home and not data.chat_template and read_chat_settings(home)[0]:
        words += f" --prompts {files[0]} --chat"
    return summary | {NEXT: f"python -m infer.bench {words}"}


def print_summary(summary: dict[str, Any], as_json: bool) -> None:
    """Prints the figures of a run on stdout: as one JSON object, or as a table."""
    if as_json:
        print(json.dumps(summary))
        return
    _print_table({name: value for name, value in summary.items() if name != NEXT})
    if NEXT in summary:
        print(f"next: {summary[NEXT]}")  # in one line, to be copied


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
