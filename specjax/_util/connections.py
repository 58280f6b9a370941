"""Connections from a run's first process to every other one, at a port that the system chooses."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time

CONNECT_SECONDS = 20.0  # until the processes that have not connected are watched by JAX alone
SECRET_BYTES = 16
_INDEX = struct.Struct("<i")


def listen(port: int, backlog: int) -> socket.socket:
    """A server at ``port`` (0: one that the system chooses) of all this machine's addresses."""
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


class Listener:
    """In process 0: where the others connect.

    Attributes:
      port: where it listens.
      secret: what the others say, so that no stranger can connect.
    """

    def __init__(self, backlog: int):
        self._server = listen(0, backlog)
        self.port: int = self._server.getsockname()[1]
        self.secret = secrets.token_bytes(SECRET_BYTES)

    def close(self) -> None:
        """Frees the port; connections stay open."""
        self._server.close()

    def accept(self, count: int) -> dict[int, socket.socket]:
        """The connections of ``count`` processes by index: those that come in time."""
        connections: dict[int, socket.socket] = {}
        deadline = time.monotonic() + CONNECT_SECONDS
        while len(connections) < count and time.monotonic() < deadline:
            self._server.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                connection, _ = self._server.accept()
                connection.settimeout(1.0)
                greeting = connection.recv(SECRET_BYTES + _INDEX.size, socket.MSG_WAITALL)
                if secrets.compare_digest(greeting[:SECRET_BYTES], self.secret):
                    connection.setblocking(True)
                    connections[_INDEX.unpack(greeting[SECRET_BYTES:])[0]] = connection
                else:
                    connection.close()
        return connections


def visit(host: str, port: int, secret: bytes, index: int) -> dict[int, socket.socket]:
    """In process ``index``: its connection to process 0; none if there is no way to it."""
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        connection.sendall(secret + _INDEX.pack(index))
    except OSError:
        return {}
    connection.setblocking(True)
    return {0: connection}
