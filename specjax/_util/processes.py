"""Runs of several processes: joining them, checking that they agree, and who writes.

Every process runs the same program; arrays span the devices of all of them. In a run of one process
every function here returns at once.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Set
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax._util import peers
from specjax._util.errors import InputError
from specjax._util.meeting import Meeting
from specjax._util.program import BAD_INPUT, BY_CLUSTER, FAILED, TERMINATED, Place, say

T = TypeVar("T")
MEETING_SECONDS = 300.0  # that processes wait for each other by default
SILENT_SECONDS = 3.0  # before a waiting process says so
_MESSAGE_BYTES = 512  # of an error that is sent to the other processes


def join(
    where: str,
    name: str,
    way_out: str,
    job: str = "",
    timeout: float = MEETING_SECONDS,
    terminated: str | None = None,
) -> None:
    """Joins the run: ``HOST:PORT,COUNT,INDEX`` with the first process's address, or ``cluster``.

    Call it before anything uses a device. From then on this process ends with one line and exit
    code 1 soon after another one has died.

    Args:
      name: of the program, for its messages.
      way_out: what to do after a process has died, for that line.
      job: what tells this job from others that may use the same port. It is the same in every
        process of the job.
      timeout: seconds to wait for the other processes. Then the process says so and ends.
      terminated: after SIGTERM to one process all say this line, and end at once with exit code
        143. None: they end where :func:`stop_requested` says.

    Raises:
      InputError: another form, an address that cannot be used or is another job's, or processes
        with different numbers of devices.
    """
    try:
        place = None if where == BY_CLUSTER else Place.parse(where)
    except ValueError as error:
        raise _cannot_join(where, error) from None
    if place is not None:
        _check_address(place)

    missing: set[int] = set()
    with _waiting(name, where, timeout, missing):
        if terminated is not None:
            jax.config.update("jax_enable_preemption_service", False)  # it would take the signal
        about = (name, way_out, terminated)
        arguments: tuple[Any, ...] = ()
        if place is not None:
            # From here on, also while JAX connects them, no process waits for one that has died.
            _watch_others(_meet(place, f"{name} {job}".strip(), missing), place.count, *about)
            arguments = (place.address, place.count, place.index)
        try:
            jax.distributed.initialize(*arguments, initialization_timeout=_beyond(timeout))
        except (ValueError, RuntimeError) as error:
            raise _cannot_join(where, error) from None
        _check_device_counts()
        if place is None:
            _watch_others(peers.connect(None), jax.process_count(), *about)


def _watch_others(
    connections: dict[int, socket.socket],
    count: int,
    name: str,
    way_out: str,
    terminated: str | None,
) -> None:
    """Ends this process after another one has died or stopped.

    Args:
      connections: to the other processes, as :func:`peers.watch` takes them.
      count: of all processes.
      name, way_out, terminated: as of :func:`join`.
    """
    stopping = threading.Event()

    def end(index: int) -> None:
        if stopping.is_set():  # it has stopped, as this process is about to
            return
        say(name, f"process {index} of {count} has died; {way_out}")
        os._exit(FAILED)  # the main thread may wait in a collective

    def end_terminated() -> None:
        say(name, terminated)
        os._exit(TERMINATED)

    stop_all = end_terminated
    if count > 1:
        stop_all = peers.watch(connections, end, end_terminated)

    def stop() -> None:
        stopping.set()
        stop_all()

    if terminated is not None:
        _at_sigterm(stop)


def _at_sigterm(act: Callable[[], None]) -> None:
    """Calls ``act`` in a thread once this process gets SIGTERM.

    A handler of Python's would wait for the main thread, which may compile for minutes.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        while receiver.recv(1)[0] != signal.SIGTERM:
            pass
        act()

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def first_host(where: str) -> str | None:
    """The first process's host in ``--distributed``; None: only the cluster manager knows it."""
    return None if where == BY_CLUSTER else Place.parse(where).address.rpartition(":")[0]


def _meet(place: Place, job: str, missing: set[int]) -> dict[int, socket.socket]:
    """Waits for the job's other processes; ``missing`` are those that have not come.

    Returns:
      Connections to the others (:meth:`Meeting.wait`).
    """
    if place.index == 0:
        missing.update(range(1, place.count))
    return Meeting(place, job).wait(missing.discard)


def _cannot_join(where: str, error: Exception) -> InputError:
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    return InputError(
        f"--distributed {where}: expected {Place.FORM}, or "
        f"{BY_CLUSTER} under a cluster manager ({first_line})"
    )


def _check_address(place: Place) -> None:
    """Refuses a host that does not resolve, and a port of the first process that is taken.

    JAX's runtime would abort.
    """
    host, _, port = place.address.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--distributed {place}: no host {host} is known ({reason})") from None
    if place.index > 0:
        return

    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InputError(
                    f"--distributed {place}: port {port} is in use, maybe by another job; "
                    "give all processes another one"
                ) from None
            # The address may be another name of this machine, such as a load balancer's.


@contextlib.contextmanager
def _waiting(name: str, where: str, timeout: float, missing: Set[int]) -> Iterator[None]:
    """Says for whom the process waits, and ends it after ``timeout`` seconds.

    ``missing`` are the processes that have not come, in the first one; the others know of none.

    JAX's runtime says nothing while it waits, and aborts in the end. Nothing has been written yet,
    so the process may end at once.
    """
    met = threading.Event()

    def watch() -> None:
        if met.wait(min(SILENT_SECONDS, timeout)):
            return
        whom = "the other processes"
        if missing:
            whom = f"process {', '.join(map(str, sorted(missing)))}"
        say(name, f"waiting for {whom} of --distributed {where}")
        if not met.wait(max(0.0, timeout - SILENT_SECONDS)):
            say(
                name,
                f"--distributed {where}: not all processes came within {timeout:g} seconds; start "
                "every one, with the same address and COUNT",
            )
            os._exit(BAD_INPUT)

    watcher = threading.Thread(target=watch, daemon=True, name="meeting")
    watcher.start()
    try:
        yield
    finally:
        met.set()
        watcher.join()


def _beyond(timeout: float) -> int:
    """A later end for JAX's own wait: it would abort the process without a message."""
    return int(timeout) + 60


def _check_device_counts() -> None:
    """Raises InputError if processes have different numbers of devices: no mesh is even then."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        each = ", ".join(str(counts[index]) for index in sorted(counts))
        raise InputError(
            f"the processes have {each} devices, in their order: give every process as many"
        )


def stop_requested(call: int) -> bool:
    """Whether a process of the run has got SIGTERM; all processes get the same answer.

    JAX's preemption service takes the signal and names one call at which all processes stop.

    Args:
      call: the number of this question. Every process must ask equally often.
    """
    return has_preemption_service() and multihost_utils.reached_preemption_sync_point(call)


def has_preemption_service() -> bool:
    """Whether this run has several processes that JAX's preemption service connects."""
    several = jax.process_count() > 1 and jax.distributed.is_initialized()
    return several and bool(jax.config.values["jax_enable_preemption_service"])


def is_main_process() -> bool:
    """Whether this is process 0, which writes metrics, exports and summaries.

    Checkpoints are written by all processes.
    """
    return jax.process_index() == 0


def is_several() -> bool:
    """Whether the run has several processes."""
    return jax.process_count() > 1


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is true in any process; every process gets the same answer."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def broadcast_from_main(value: np.ndarray) -> np.ndarray:
    """The value that process 0 has, in every process."""
    if jax.process_count() == 1:
        return value
    return multihost_utils.broadcast_one_to_all(value)


def raise_everywhere(work: Callable[[], T]) -> T:
    """``work()``; if it fails in one process, every process raises.

    Without this the others would wait for the failed one until their connection times out.

    Raises:
      InputError: which other process failed, and why. A process that failed itself raises its own
        error.
    """
    if jax.process_count() == 1:
        return work()
    error = None
    result = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    # Every process takes part in both gathers, also one that failed: else the others would hang.
    message = str(error or "").encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    failed = multihost_utils.process_allgather(np.asarray(error is not None))
    messages = multihost_utils.process_allgather(np.frombuffer(message, np.uint8))
    if error is not None:
        raise error
    for index in np.flatnonzero(failed):
        text = bytes(messages[index]).rstrip(b"\0").decode(errors="replace")
        raise InputError(f"process {index} failed: {text}")
    return cast(T, result)


def main_process_first(work: Callable[[], T]) -> T:
    """``work()`` in process 0 and then in the others, which find what it has written.

    Raises:
      InputError: as :func:`raise_everywhere`.
    """
    is_main = is_main_process()
    main_result = raise_everywhere(lambda: work() if is_main else None)
    other_result = raise_everywhere(lambda: None if is_main else work())
    return cast(T, main_result if is_main else other_result)


def check_agreement(**facts: Any) -> None:
    """Checks that every process has the same value under each name.

    Raises:
      InputError: names the first fact that differs, and the processes that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(json.dumps(fact, default=vars).encode()) for fact in facts.values()]
    ours = np.stack([np.frombuffer(digest.digest(), np.uint8) for digest in digests])
    everyones = multihost_utils.process_allgather(ours)  # [processes, facts, bytes]
    for number, name in enumerate(facts):
        differs = (everyones[:, number] != everyones[0, number]).any(axis=1)
        others = np.flatnonzero(differs)
        if len(others):
            raise InputError(
                f"processes disagree on {name}: {', '.join(map(str, others))} against process 0; "
                "start every one with the same arguments, config, files and package versions"
            )
