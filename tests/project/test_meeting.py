"""Processes of one job meet at a port; those of another job stay outside."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from specjax._util import connections, meeting, peers, processes
from specjax._util.errors import InputError
from specjax._util.meeting import Meeting
from specjax._util.program import Place


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture
def port():
    return free_port()


def begin(port, index, job="one", count=2, grace=0.3):
    """A process's wait, in a thread; returns the thread, and lists for its error and its result."""
    errors, results = [], []

    def wait():
        try:
            results.append(Meeting(Place(f"localhost:{port}", count, index), job, grace).wait())
        except InputError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, errors, results


def end(*begun):
    """The error of each, or None."""
    for thread, *_ in begun:
        thread.join(300)
        assert not thread.is_alive()
    return [errors[0] if errors else None for _, errors, _ in begun]


def connections_of(begun):
    """The connections that a wait returned."""
    assert end(begun) == [None]
    (connections,) = begun[2]
    return connections


def test_the_processes_of_a_job_meet_in_any_order(port):
    late = [begin(port, index, count=3) for index in (2, 1)]
    assert all(thread.is_alive() for thread, *_ in late)
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


def test_processes_that_have_met_are_connected_to_the_first_one(port):
    waits = [begin(port, index, count=3) for index in (0, 2, 1)]
    first, second, third = (connections_of(waits[place]) for place in (0, 2, 1))
    assert set(first) == {1, 2} and set(second) == set(third) == {0}
    for index, others in ((1, second), (2, third)):
        peers._tell(others, index)
        assert peers._received(first[index]) == index
        others[0].close()
        assert peers._received(first[index]) is None


def test_a_process_that_dies_right_after_all_have_met_is_noticed(port):
    first = begin(port, 0)
    while not socket_answers(port):
        pass
    with socket.create_connection(("localhost", port)) as killed:
        killed.sendall(b'specjax {"job": "one", "count": 2, "index": 1}\n')
        assert b'"all": 2' in killed.recv(4096)
    connections = connections_of(first)
    assert set(connections) == {1} and peers._received(connections[1]) is None


@pytest.mark.parametrize("dies", [True, False])
def test_a_first_process_that_cannot_be_reached_any_more(port, dies, monkeypatch):
    """It has died, which is noticed; or it lives, and there is no way to its other port."""
    is_decided = threading.Event()

    def visit(*about):
        assert is_decided.wait(60)
        return connections.visit(*about)

    monkeypatch.setattr(meeting, "visit", visit)
    told = f'specjax {{"all": 2, "port": {free_port()}, "secret": "{"00" * 16}"}}\n'
    with socket.create_server(("localhost", port)) as server:
        other = begin(port, 1)
        guest, _ = server.accept()
        guest.recv(4096)
        guest.sendall(told.encode())
        if dies:
            guest.shutdown(socket.SHUT_WR)
            is_decided.set()
            kept = connections_of(other)
            assert set(kept) == {0} and peers._received(kept[0]) is None
        else:
            is_decided.set()
            assert guest.recv(1) == b"-"
            assert connections_of(other) == {}
        guest.close()


JOINS = """
import os, signal, sys, jax
from specjax._util import processes
port, index = sys.argv[1:]
if index == "{killed}":
    jax.distributed.initialize = lambda *a, **options: os.kill(os.getpid(), signal.SIGKILL)
processes.join(f"localhost:{{port}},2,{{index}}", "test", "start again", terminated="ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_dies_while_jax_connects_all_ends_the_other_one(port, killed):
    """Its meeting is over, so the other one does not wait for the meeting's 300 seconds."""
    command = [sys.executable, "-c", JOINS.format(killed=killed), str(port)]
    both = [
        subprocess.Popen([*command, str(index)], stderr=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    said = [process.communicate(timeout=100)[1] for process in both]
    expected = [1, 1]
    expected[killed] = -signal.SIGKILL
    assert [process.returncode for process in both] == expected
    assert said[1 - killed] == f"test: process {killed} of 2 has died; start again\n"


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
