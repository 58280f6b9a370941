"""Worker processes that make shards. They end with the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from specjax._util.errors import InputError, SpecjaxError


def run_in_processes(
    work: Callable[..., None],
    arguments: Sequence[tuple],
    count: int,
    report: Callable[[int], None],
) -> None:
    """Calls `work(*arguments[i], report)` for every i, spread over `count` processes.

    Raises:
      InputError: the error of a worker, or that one was killed; all others are ended.
    """
    # Reversed, because arguments are taken from the end: shards are made in their order.
    waiting = list(reversed(arguments))
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            pipe, process = _start_worker(work)
            workers[pipe] = process
        _distribute(waiting, list(workers), report)
    except (EOFError, ConnectionError):
        raise InputError(
            "a process that tokenizes was killed, perhaps for want of memory: the same command "
            "goes on, with fewer --processes if it happens again"
        ) from None
    finally:
        for process in workers.values():
            process.terminate()
            process.join()


def _start_worker(work: Callable[..., None]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # after a fork, any lock may be taken
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_worker, args=(work, theirs), daemon=True)
    process.start()
    # Our copy of the child's end: while it is open, the pipe would not report the child's death.
    theirs.close()
    return ours, process


def _distribute(
    waiting: list[tuple], pipes: Sequence[Connection], report: Callable[[int], None]
) -> None:
    """Sends the arguments to idle workers until all are done; takes them from the list's end.

    A worker answers with an int for its progress, None when it is done, a text when it fails.
    """
    idle = list(pipes)
    while waiting or len(idle) < len(pipes):
        while waiting and idle:
            idle.pop().send(waiting.pop())
        for pipe in wait([pipe for pipe in pipes if pipe not in idle]):
            answer = pipe.recv()
            if isinstance(answer, str):
                raise InputError(answer)
            if answer is None:
                idle.append(pipe)
            else:
                report(answer)


def _run_worker(work: Callable[..., None], pipe: Connection) -> None:
    """One process: does the work that it is sent, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process handles it and ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process for each core
    try:
        while True:
            work(*pipe.recv(), pipe.send)
            pipe.send(None)
    except SpecjaxError as error:
        with contextlib.suppress(OSError):
            pipe.send(str(error))
    except (EOFError, OSError):
        return  # the first process is gone
