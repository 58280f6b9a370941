"""SIGTERM and Ctrl-C: all processes of a run stop at one step, and a second Ctrl-C ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from specjax._util import processes
from specjax._util.program import INTERRUPTED

BYTES = 64  # signal numbers that are read at once


class StopRequests:
    """Whether a signal has asked the run to save and end.

    Several processes agree through JAX's preemption service. A process that gets SIGTERM tells the
    others, and the service names one call at which all of them stop. So no step waits for a
    message. Without the service, each call gathers the processes' answers.

    Attributes:
      received: numbers of the signals that this process has got.
    """

    def __init__(self, by_service: bool = False):
        self.received: list[int] = []
        self._by_service = by_service
        self._calls = 0
        self._stopped = False

    def is_stopped(self) -> bool:
        """Whether the run stops here. All processes must ask equally often."""
        if not self._by_service:
            return processes.any_process(bool(self.received))
        # True at one call alone.
        self._calls += 1
        if processes.stop_requested(self._calls):
            self._stopped = True
        return self._stopped


@contextlib.contextmanager
def noted_signals(say: Callable[[str], None] = lambda text: None) -> Iterator[StopRequests]:
    """Notes SIGTERM and SIGINT while the block runs, so that the loop can save before it ends.

    Args:
      say: is called with a line for the user at the first SIGINT.
    """
    by_service = processes.has_preemption_service()
    requests = StopRequests(by_service)

    def note(number: int, _: object) -> None:
        requests.received.append(number)
        if number != signal.SIGINT or requests.received.count(number) > 1:
            return
        say("stops after this step, and saves; Ctrl-C again ends at once")
        if by_service:
            os.kill(os.getpid(), signal.SIGTERM)  # the signal that the service knows

    # The service has a handler of its own for SIGTERM, which ours would replace.
    numbers = [signal.SIGINT] if by_service else [signal.SIGINT, signal.SIGTERM]
    before = [signal.signal(number, note) for number in numbers]
    try:
        with _second_interrupt_ends():
            yield requests
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _second_interrupt_ends() -> Iterator[None]:
    """Ends the process at the second SIGINT, also while its main thread compiles or waits.

    Python's handlers would run only after that. Its wakeup socket gets a byte at once.
    """
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    before = signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        count = 0
        while numbers := readable.recv(BYTES):
            count += numbers.count(signal.SIGINT)
            if count > 1:
                # Without the interpreter's own end: threads of XLA may still compute.
                os._exit(INTERRUPTED)

    watcher = threading.Thread(target=watch, daemon=True, name="second interrupt")
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writable.close()  # ends the watcher
        watcher.join()
        readable.close()
