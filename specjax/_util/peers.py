"""Ends a process soon after another one of its run has died.

JAX's runtime notices a dead process after 100 s without its heartbeats, and then aborts the others
with a stack trace. Until then they wait in a collective. Here process 0 holds a connection to every
other process. The system closes a dead process's connections at once, so the others know, say so in
one line, and end.

A machine that loses its power or its network closes nothing: JAX's heartbeats remain for that.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax._util.connections import SECRET_BYTES, Listener, visit

_INDEX = struct.Struct("<i")
# In place of the index of a dead process: the sender ends in order, or all shall stop.
_ENDED = -1
_STOPPED = -2
STOP_SECONDS = 2.0  # that process 0 waits for the others to stop
_ADDRESS_BYTES = 256


def watch(
    connections: dict[int, socket.socket],
    lost: Callable[[int], None],
    stopped: Callable[[], None],
) -> Callable[[], None]:
    """Calls ``lost(index)`` in a thread once process ``index`` has died.

    Every process of the run calls this.

    Args:
      connections: to the others, by index: from process 0 to all, and back.
      stopped: is called in a thread once another process has stopped the run.

    Returns:
      What stops the run: it calls ``stopped`` in all processes, here last of all.
    """
    atexit.register(_end, connections)
    arguments = (connections, lost, stopped)
    threading.Thread(target=_watch, args=arguments, name="peers", daemon=True).start()
    return functools.partial(_stop, connections, stopped)


def _end(connections: dict[int, socket.socket]) -> None:
    """Ends JAX's runtime, which waits for the others, and says so.

    Until then the others obey a stop of this process and notice its death. They would wait for it
    otherwise, until JAX aborts them.
    """
    jax.distributed.shutdown()
    _tell(connections, _ENDED)


def _stop(connections: dict[int, socket.socket], stopped: Callable[[], None]) -> None:
    """Stops the others, and then this process."""
    _tell(connections, _STOPPED)
    if 0 not in connections:
        _wait_until_closed(connections)
    stopped()


def _wait_until_closed(connections: dict[int, socket.socket]) -> None:
    """In process 0: waits for the others to end, for at most ``STOP_SECONDS``.

    If process 0 ended first, JAX's runtime would abort the others with a stack trace.
    """
    deadline = time.monotonic() + STOP_SECONDS
    with selectors.DefaultSelector() as selector:
        for index, connection in connections.items():
            selector.register(connection, selectors.EVENT_READ, index)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if _received(connections[key.data]) is None:
                    selector.unregister(connections[key.data])


def connect(host: str | None) -> dict[int, socket.socket]:
    """New connections by the other process's index: from process 0 to all, and back.

    Every process of the run calls this, after it has joined JAX's runtime. One that cannot connect
    within ``CONNECT_SECONDS`` is missing.

    Args:
      host: process 0's address, or None for the name that its machine gives itself.
    """
    count = jax.process_count() - 1
    if jax.process_index() == 0:
        with contextlib.closing(Listener(count)) as listener:
            _share(listener.port, socket.getfqdn(), listener.secret)
            return listener.accept(count)
    port, name, secret = _share(0, "", bytes(SECRET_BYTES))
    return visit(host or name, port, secret, jax.process_index())


def _share(port: int, host: str, secret: bytes) -> tuple[int, str, bytes]:
    """Process 0's port, host name and secret, in every process."""
    name = host.encode()[:_ADDRESS_BYTES].ljust(_ADDRESS_BYTES, b"\0")
    packed = np.frombuffer(struct.pack("<i", port) + secret + name, np.uint8)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(packed), np.uint8).tobytes()
    secret_end = 4 + SECRET_BYTES
    name = shared[secret_end:].rstrip(b"\0").decode(errors="replace")
    return struct.unpack("<i", shared[:4])[0], name, shared[4:secret_end]


def _watch(
    connections: dict[int, socket.socket],
    lost: Callable[[int], None],
    stopped: Callable[[], None],
) -> None:
    """Waits for a connection that closes without a word, or for process 0's word of one."""
    with selectors.DefaultSelector() as selector:
        for index, connection in connections.items():
            selector.register(connection, selectors.EVENT_READ, index)
        while selector.get_map():
            for key, _ in selector.select():
                connection = connections[key.data]
                word = _received(connection)
                if word == _ENDED:
                    selector.unregister(connection)
                    continue
                if word == _STOPPED:
                    _stop(connections, stopped)
                    return
                gone = key.data if word is None else word
                _tell(connections, gone)
                lost(gone)
                return


def _received(connection: socket.socket) -> int | None:
    """The number that a process sent, or None if its connection has closed."""
    try:
        message = connection.recv(_INDEX.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return _INDEX.unpack(message)[0] if len(message) == _INDEX.size else None


def _tell(connections: dict[int, socket.socket], number: int) -> None:
    """Sends a number to all connected processes that still run."""
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(_INDEX.pack(number))
