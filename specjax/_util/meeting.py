"""Processes of one job meet at their port before JAX's runtime starts there.

JAX's runtime knows no jobs. Whoever connects to its port takes part, or ends the run if it has the
number of a process that runs. So the first process listens at the port itself until all others of
its job have come. Only then does each of them call JAX, and nobody else does.

A message is one line: ``specjax`` and a JSON object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from specjax._util.connections import CONNECT_SECONDS, Listener, listen, visit
from specjax._util.errors import InputError
from specjax._util.program import Place

_GREETING = b"specjax "
_LONGEST = 4096  # bytes of a message
_PAUSE = 0.1  # seconds between two tries to connect
_SECONDS = 5.0  # for a message; a stranger may send nothing
# The last word of a process that has come: whether it could connect to the first one's new port.
_CONNECTED = b"+"
_NO_WAY = b"-"


@dataclasses.dataclass
class Meeting:
    """A meeting of one job's processes.

    Attributes:
      place: of this process.
      job: the job's name, the same in every process.
      grace: seconds for which the port may belong to somebody else, such as an earlier run of the
        job that is about to end.
    """

    place: Place
    job: str
    grace: float = 10.0

    def wait(self, came: Callable[[int], None] = lambda index: None) -> dict[int, socket.socket]:
        """Waits until all processes of the job are there.

        Args:
          came: in the first process, is given the index of each process that comes.

        Returns:
          Connections by the other process's index: from the first process to all, and back. That
          of a process that has died by now is closed on its side. One that has no way to the first
          process's new port is missing.

        Raises:
          InputError: in another process than the first: the port is another job's, the job runs
            already, or a process with this index has come.
        """
        if self.place.count == 1:
            return {}
        if self.place.index == 0:
            return self._receive(came)
        return self._visit()

    def _receive(self, came: Callable[[int], None]) -> dict[int, socket.socket]:
        """In the first process: lets the processes of the job in, and refuses others."""
        guests: dict[int, socket.socket] = {}
        port = int(self.place.address.rpartition(":")[2])
        with contextlib.ExitStack() as stack, listen(port, self.place.count) as server:
            while len(guests) < self.place.count - 1:
                guest, _ = server.accept()
                stack.callback(guest.close)
                guest.settimeout(_SECONDS)
                message = _receive(guest)
                if message is None:
                    guest.close()
                    continue
                guest.settimeout(None)  # with a timeout, MSG_DONTWAIT would wait
                guests = {index: other for index, other in guests.items() if _is_there(other)}
                problem = self._problem(message, guests)
                if problem:
                    _send(guest, {"refused": problem})
                    guest.close()
                    continue
                index = int(message["index"])
                guests[index] = guest
                came(index)
            return self._let_in(guests)

    def _let_in(self, guests: dict[int, socket.socket]) -> dict[int, socket.socket]:
        """Tells the guests that all are there; returns their new connections, as :meth:`wait`."""
        with contextlib.closing(Listener(len(guests))) as listener:
            told = {"all": self.place.count, "port": listener.port, "secret": listener.secret.hex()}
            for guest in guests.values():
                _send(guest, told)
            connected = 0
            died = {}
            for index, guest in guests.items():
                word = _last_word(guest)
                connected += word == _CONNECTED
                if not word:
                    died[index] = guest.dup()  # the guest itself is closed below
            return listener.accept(connected) | died

    def _problem(self, message: dict[str, Any], guests: dict[int, socket.socket]) -> str | None:
        """Why a process may not come in; None: it may."""
        if message.get("job") != self.job:
            return f"another job meets there ({self.job})"
        if message.get("count") != self.place.count:
            return f"the job there has COUNT {self.place.count}"
        index = message.get("index")
        if index not in range(1, self.place.count) or index in guests:
            return f"there is a process {index} already"
        return None

    def _visit(self) -> dict[int, socket.socket]:
        """In another process: waits for the first one, and for its word that all are there."""
        host, _, port = self.place.address.rpartition(":")
        about = {"job": self.job, "count": self.place.count, "index": self.place.index}
        strange_since = None
        while True:
            try:
                connection = socket.create_connection((host, int(port)), timeout=_SECONDS)
            except OSError:
                strange_since = None
                time.sleep(_PAUSE)
                continue
            with connection:
                _send(connection, about)
                # Only the first process of a job is silent until all have come.
                connection.settimeout(None)
                answer = _receive(connection)
                if answer is not None and "all" in answer:
                    return self._come_in(connection, answer)
            if answer is not None:
                raise self._refused(answer.get("refused", "no reason"))
            strange_since = strange_since or time.monotonic()
            if time.monotonic() - strange_since > self.grace:
                raise self._refused("the job runs already, or another program is there")
            time.sleep(_PAUSE)

    def _come_in(self, connection: socket.socket, told: dict[str, Any]) -> dict[int, socket.socket]:
        """In another process: its new connection to the first one, as :meth:`wait`."""
        host = self.place.address.rpartition(":")[0]
        new = visit(host, told["port"], bytes.fromhex(told["secret"]), self.place.index)
        if not new and not _is_there(connection):
            return {0: connection.dup()}  # the first process has died
        with contextlib.suppress(OSError):
            connection.sendall(_CONNECTED if new else _NO_WAY)
        return new

    def _refused(self, reason: str) -> InputError:
        return InputError(
            f"--distributed {self.place}: {reason}; give every process of this job another port"
        )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message; who has gone gets none."""
    with contextlib.suppress(OSError):
        connection.sendall(_GREETING + json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """The message that the other side sends; None: it sends something else, or has gone."""
    received = b""
    try:
        while not received.endswith(b"\n") and len(received) < _LONGEST:
            part = connection.recv(1)
            received += part
            if not part or not (received.startswith(_GREETING) or _GREETING.startswith(received)):
                return None
        message = json.loads(received.removeprefix(_GREETING))
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _last_word(guest: socket.socket) -> bytes:
    """What a guest says before it closes its connection: nothing if it has died.

    The others close first: the port is then free for JAX at once.
    """
    guest.settimeout(CONNECT_SECONDS + _SECONDS)
    word = b""
    with contextlib.suppress(OSError):
        while part := guest.recv(1):
            word += part
    return word


def _is_there(connection: socket.socket) -> bool:
    """Whether the other side, which sends nothing now, still has the connection."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
