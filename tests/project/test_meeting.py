"""Processes of one job meet at a port; those of another job stay outside."""

import hashlib
import os
import signal
import socket
import threading
import time

import pytest

from specjax._util import peers, processes
from specjax._util.errors import InputError
from specjax._util.meeting import Meeting
from specjax._util.program import Place


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def begin(port, index, job="one", count=2, grace=0.3):
    """A process's wait, in a thread; returns the thread and a list for its error."""
    errors = []

    def wait():
        try:
            Meeting(Place(f"localhost:{port}", count, index), job, grace).wait()
        except InputError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, errors


def end(*begun):
    """The error of each, or None."""
    for thread, _ in begun:
        thread.join(20)
        assert not thread.is_alive()
    return [errors[0] if errors else None for _, errors in begun]


def test_the_processes_of_a_job_meet_in_any_order(port):
    late = [begin(port, index, count=3) for index in (2, 1)]
    assert all(thread.is_alive() for thread, _ in late)
    assert end(begin(port, 0, count=3), *late) == [None] * 3
    assert end(begin(port, 1), begin(port, 0)) == [None] * 2  # the port is free again


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        ({"job": "two"}, "another job meets there (one)"),
        ({"count": 4}, "the job there has COUNT 3"),
        ({"index": 2}, "there is a process 2 already"),
    ],
)
def test_a_process_that_does_not_belong_there_is_refused(port, stranger, reason):
    first, other = begin(port, 0, count=3), begin(port, 2, count=3)
    while not socket_answers(port):
        pass
    other[0].join(0.5)
    (error,) = end(begin(port, **({"index": 1, "count": 3} | stranger)))
    assert reason in error and "another port" in error
    assert end(begin(port, 1, count=3), first, other) == [None] * 3


def socket_answers(port):
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_process_that_left_may_come_again(port):
    first = begin(port, 0, count=3)
    while not socket_answers(port):
        pass
    with socket.create_connection(("localhost", port)) as killed:
        killed.sendall(b'specjax {"job": "one", "count": 3, "index": 1}\n')
    assert end(first, begin(port, 1, count=3), begin(port, 2, count=3)) == [None] * 3


def test_a_port_where_nobody_meets_is_refused(port):
    """Such as that of a run that has begun, or of another program."""
    with socket.create_server(("localhost", port)) as server:

        def answer():
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=answer, daemon=True).start()
        (error,) = end(begin(port, 1))
        assert "the job runs already, or another program is there" in error


def test_sigterm_is_acted_on_while_the_main_thread_computes():
    before = signal.getsignal(signal.SIGTERM)
    acted = []
    try:
        processes._at_sigterm(lambda: acted.append(time.monotonic()))
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while not acted:
            # Long and without a look at signals, as a compilation is.
            hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)
            ended = time.monotonic()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
    assert acted[0] < ended


@pytest.mark.parametrize("stopping", [0, 1, 2])
def test_whichever_process_stops_process_0_ends_last(stopping):
    """Of three processes, which are threads here."""
    ends = []
    pairs = {index: socket.socketpair() for index in (1, 2)}
    connections = {0: {index: first for index, (first, _) in pairs.items()}}
    connections |= {index: {0: other} for index, (_, other) in pairs.items()}

    def stopped(index):
        ends.append(index)
        for connection in connections[index].values():
            connection.close()  # as the end of a process does

    def lost(index):
        pytest.fail(f"process {index} is not lost, but has stopped")

    watching = []
    for index in {0, 1, 2} - {stopping}:
        arguments = (connections[index], lost, lambda index=index: stopped(index))
        watching.append(threading.Thread(target=peers._watch, args=arguments, daemon=True))
        watching[-1].start()
    peers._stop(connections[stopping], lambda: stopped(stopping))
    for thread in watching:
        thread.join(10)
    assert sorted(ends) == [0, 1, 2] and ends[-1] == 0


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_that_stops_or_dies_while_all_end_is_noticed(monkeypatch, killed):
    """It leaves while JAX's runtime waits for the others, who would wait for it."""
    ours, theirs = socket.socketpair()
    noticed = threading.Event()
    lost = []

    def stopped():
        noticed.set()

    def died(index):
        lost.append(index)
        noticed.set()

    watching = threading.Thread(target=peers._watch, args=({1: ours}, died, stopped), daemon=True)
    watching.start()

    def leave():
        if not killed:
            peers._tell({0: theirs}, peers._STOPPED)
        theirs.close()
        assert noticed.wait(10)

    monkeypatch.setattr(peers.jax.distributed, "shutdown", leave)
    peers._end({0: theirs})
    watching.join(10)
    assert lost == [1] * killed
